"""The routes of LibreTranslate, those of OpenAI under /v1, and a page to type into.

docs/serving.md describes requests, limits and errors. Needs the extra `serve`.
"""

import asyncio
import contextlib
import dataclasses
import re
import signal
import socket
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import checked, parse_json
from flaxformer_mt.serving.batching import ServedModel, Translation

DISCARDED_BYTES = 2**27
"""Of a body that is refused. It is read first, because many clients send it completely before they
read the answer."""

PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request may have, and how many there may be."""

    body_bytes: int = 2**20
    characters: int = 5000
    """Of all texts of a request; an empty text counts as one."""
    requests: int = 64
    """That are read, wait or are translated at the same time."""
    connections: int = 1000
    read_seconds: float = 30
    """For whatever a client has to do: to send a header or a body, or to read an answer."""


Texts: TypeAlias = str | Annotated[list[str], msgspec.Meta(min_length=1)]


@dataclasses.dataclass(frozen=True)
class TranslationRequest:
    """What is read of a request of LibreTranslate's API."""

    q: Texts
    source: str
    target: str
    alternatives: int | None = None
    format: str = "text"


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a message."""

    text: str


@dataclasses.dataclass(frozen=True)
class Message:
    """A message of a chat; that of the user has a text, or parts."""

    role: str
    content: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """What is read of a request of OpenAI's API, to which others add the texts."""

    model: str
    n: int | None = None
    stream: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRequest(CompletionRequest):
    """The texts as prompts."""

    prompt: Texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest(CompletionRequest):
    """The text as the last message of a chat."""

    messages: list[Message]


class Server:
    """The routes, and the requests that are in work."""

    def __init__(
        self, models: Sequence[ServedModel], limits: Limits, cors_origins: Sequence[str] = ()
    ) -> None:
        self.models = {model.name: model for model in models}
        if len(self.models) < len(models):
            raise UserError("--run: the folders of two runs have the same name, which is the model")
        self.limits = limits
        self.cors_origins = cors_origins
        self.num_requests = 0

    def app(self) -> Starlette:
        """Returns the ASGI application."""
        handlers: dict[Any, Any] = {
            HTTPException: describe_refusal,
            UserError: describe_user_error,
            Exception: describe_failure,
        }
        routes = [
            Route("/", self.page),
            Route("/translate", self.translate, methods=["POST"]),
            Route("/languages", self.languages),
            Route("/health", self.health),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name}", self.show_model),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        shared = Middleware(
            CORSMiddleware,
            allow_origins=self.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
        return Starlette(
            routes=routes,
            middleware=[shared] if self.cors_origins else [],
            exception_handlers=handlers,
            lifespan=self.lifespan,
        )

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Translates while the application runs, with all models in one thread."""
        with ThreadPoolExecutor(1) as thread:
            tasks = [asyncio.create_task(model.work(thread)) for model in self.models.values()]
            yield
            for task in tasks:
                task.cancel()

    async def page(self, request: Request) -> HTMLResponse:
        """Shows the page to type into."""
        return HTMLResponse(PAGE, headers={"Content-Security-Policy": _PAGE_POLICY})

    async def health(self, request: Request) -> JSONResponse:
        """Says that requests are answered."""
        return JSONResponse({"status": "ok"})

    async def languages(self, request: Request) -> JSONResponse:
        """Lists the languages; those that are only translated into have no targets."""
        targets: dict[str, list[str]] = {}
        for model in self.models.values():
            targets.setdefault(model.source, []).append(model.target)
            targets.setdefault(model.target, [])
        return JSONResponse(
            [{"code": code, "name": code, "targets": into} for code, into in targets.items()]
        )

    async def translate(self, request: Request) -> JSONResponse:
        """Translates a text, or a list of texts, as LibreTranslate does."""
        async with self.admitted(request):
            asked: TranslationRequest = await self.read(request, TranslationRequest, True)
            if asked.format != "text":
                raise UserError('format: only "text" is supported, not HTML')
            model, texts = self.model_of_pair(asked.source, asked.target), listed(asked.q)
            most, given = model.most_translations - 1, asked.alternatives or 0
            count = 1 + require_number("alternatives", given, 0, most)
            self.require_length(texts)
            found = await self.translated(request, model, texts, count)
        single = isinstance(asked.q, str)
        answer: dict[str, Any] = {"translatedText": unlisted([t[0].text for t in found], single)}
        if count > 1:
            others = [[each.text for each in t[1:]] for t in found]
            answer["alternatives"] = unlisted(others, single)
        return JSONResponse(answer)

    async def list_models(self, request: Request) -> JSONResponse:
        """Lists the models, by the names of their run folders."""
        data = [described(model) for model in self.models.values()]
        return JSONResponse({"object": "list", "data": data})

    async def show_model(self, request: Request) -> JSONResponse:
        """Describes a model."""
        return JSONResponse(described(self.model_named(request.path_params["name"])))

    async def complete(self, request: Request) -> JSONResponse:
        """Translates a prompt, or a list of prompts."""
        async with self.admitted(request):
            asked: PromptRequest = await self.read(request, PromptRequest)
            return await self.answer(request, asked, listed(asked.prompt), "text_completion")

    async def chat(self, request: Request) -> JSONResponse:
        """Translates the last message of the user; other messages have no effect."""
        async with self.admitted(request):
            asked: ChatRequest = await self.read(request, ChatRequest)
            texts = [last_message(asked.messages)]
            return await self.answer(request, asked, texts, "chat.completion")

    async def answer(
        self, request: Request, asked: CompletionRequest, texts: Sequence[str], kind: str
    ) -> JSONResponse:
        """Translates texts and returns an object of OpenAI's API."""
        if asked.stream:
            raise UserError("stream: only false is supported")
        model = self.model_named(asked.model)
        given = 1 if asked.n is None else asked.n
        count = require_number("n", given, 1, model.most_translations)
        self.require_length(texts)
        found = await self.translated(request, model, texts, count)
        prompt_tokens = model.count_source_tokens(texts)
        translations = [each for n_best in found for each in n_best]
        completion_tokens = sum(each.num_tokens for each in translations)
        choices: list[dict[str, Any]] = [
            {"index": index, **content(each.text, kind), "finish_reason": "stop"}
            for index, each in enumerate(translations)
        ]
        return JSONResponse(
            {
                "id": f"translation-{time.time_ns():x}",
                "object": kind,
                "created": int(time.time()),
                "model": model.name,
                "choices": choices,
                "usage": {
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": completion_tokens,
                    "total_tokens": prompt_tokens + completion_tokens,
                },
            }
        )

    async def translated(
        self, request: Request, model: ServedModel, texts: Sequence[str], count: int
    ) -> list[list[Translation]]:
        """Returns `count` translations of each text, unless the client goes meanwhile."""
        gone = asyncio.create_task(disconnected(request))
        try:
            return await model.translate(texts, count, gone)
        except ConnectionError as error:
            raise HTTPException(400, str(error)) from None  # Nobody reads it.
        finally:
            gone.cancel()

    @contextlib.asynccontextmanager
    async def admitted(self, request: Request) -> AsyncIterator[None]:
        """Counts a request while it is in work; one too many is refused."""
        if self.num_requests >= self.limits.requests:
            await self.read_body(request)
            raise HTTPException(
                503,
                f"{self.limits.requests} requests are in work already (--max-requests): try again",
                headers={"Retry-After": "1"},
            )
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    async def read(self, request: Request, kind: Any, allow_form: bool = False) -> Any:
        """Returns a request's body as a kind of request, or raises what is wrong with it."""
        body = await self.read_body(request)
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HTTPException(415, "Content-Encoding must be identity: send it uncompressed")
        if media == "application/json":
            return parse_json(body, "the body", kind)
        if media == "application/x-www-form-urlencoded" and allow_form:
            return checked(parse_form(body), "the body is", kind)
        form = " or application/x-www-form-urlencoded" * allow_form
        raise HTTPException(415, f"Content-Type must be application/json{form}")

    async def read_body(self, request: Request) -> bytes:
        """Returns the body; of one that is too large, the rest is discarded and 413 is raised."""
        limit, body, size = self.limits.body_bytes, bytearray(), 0
        try:
            async with asyncio.timeout(self.limits.read_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size <= limit:
                        body += part
                    elif size > DISCARDED_BYTES:
                        break
        except TimeoutError:
            seconds = self.limits.read_seconds
            raise HTTPException(408, f"the body took longer than {seconds:g} seconds") from None
        except ClientDisconnect:
            raise HTTPException(400, "the body is incomplete") from None
        if size > limit:
            raise HTTPException(413, f"the body has more than {limit:,} bytes (--max-body)")
        return bytes(body)

    def require_length(self, texts: Iterable[str]) -> None:
        """Refuses texts that are too long together."""
        length = sum(max(1, len(text)) for text in texts)
        if length > self.limits.characters:
            raise HTTPException(
                413,
                f"the text has {length:,} characters, and may have {self.limits.characters:,} "
                "(--max-characters): send it in parts",
            )

    def model_of_pair(self, source: str, target: str) -> ServedModel:
        """Returns the first model of these languages; of any source language for "auto"."""
        for model in self.models.values():
            if source in (model.source, "auto") and target == model.target:
                return model
        pairs = ", ".join(f"{each.source} to {each.target}" for each in self.models.values())
        raise HTTPException(400, f"{source} to {target} is not supported; there is {pairs}")

    def model_named(self, name: str) -> ServedModel:
        """Returns the model of this name."""
        if name not in self.models:
            known = ", ".join(self.models)
            raise HTTPException(404, f"there is no model {name[:100]!r}; there is {known}")
        return self.models[name]


async def disconnected(request: Request) -> None:
    """Ends when the client of a request has gone, whose body is read already."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def described(model: ServedModel) -> dict[str, Any]:
    """Returns a model as an object of OpenAI's API."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "flaxformer_mt",
    }


def unlisted(values: list[Any], single: bool) -> Any:
    """Returns the only value if the request had no list."""
    return values[0] if single else values


def content(text: str, kind: str) -> dict[str, Any]:
    """Returns the text of a choice in OpenAI's form."""
    if kind == "text_completion":
        return {"text": text, "logprobs": None}
    return {"message": {"role": "assistant", "content": text}}


def parse_form(body: bytes) -> dict[str, Any]:
    """Returns the fields of a form; one that is repeated is a list."""
    try:
        fields = urllib.parse.parse_qs(body.decode(), keep_blank_values=True, errors="strict")
    except ValueError as error:
        raise UserError(f"the body is not a valid form: {error}") from None
    values: dict[str, Any] = {
        name: given if len(given) > 1 else given[0] for name, given in fields.items()
    }
    if re.fullmatch("[0-9]{1,9}", str(values.get("alternatives"))):
        values["alternatives"] = int(values["alternatives"])
    return values


def listed(texts: Texts) -> list[str]:
    """Returns a text as a list of one."""
    return [texts] if isinstance(texts, str) else texts


def require_number(name: str, given: int, lowest: int, highest: int) -> int:
    """Returns a number of translations, if the model can find as many."""
    if not lowest <= given <= highest:
        raise UserError(f"{name} must be from {lowest} to {highest} with this model")
    return given


def last_message(messages: Sequence[Message]) -> str:
    """Returns the text of the user's last message, whose content may be a list of parts."""
    contents = [each.content for each in messages if each.role == "user"]
    if not contents:
        raise UserError('messages must have one with the role "user"')
    content: str | list[Part] = checked(
        contents[-1], "the content of a message is", str | list[Part]
    )
    return content if isinstance(content, str) else "".join(part.text for part in content)


def error_response(request: Request, status: int, message: str) -> JSONResponse:
    """Returns an error in the form of LibreTranslate's API or, under /v1, of OpenAI's."""
    if not request.url.path.startswith("/v1"):
        return JSONResponse({"error": message}, status)
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status)


async def describe_refusal(request: Request, error: HTTPException) -> JSONResponse:
    """Answers a request that is refused, or whose route or method does not exist."""
    detail = error.detail
    if detail == HTTPStatus(error.status_code).phrase:  # Of Starlette's own errors.
        detail = f"{request.method} {request.url.path}: {detail}"
    response = error_response(request, error.status_code, detail)
    response.headers.update(error.headers or {})
    return response


async def describe_user_error(request: Request, error: UserError) -> JSONResponse:
    """Answers a request that the model cannot fulfil."""
    return error_response(request, 400, str(error))


async def describe_failure(request: Request, error: Exception) -> JSONResponse:
    """Answers a request at which the server fails; Uvicorn logs why."""
    return error_response(request, 500, "the server failed; its log has the reason")


class TimedConnection(H11Protocol):
    """A connection that is closed if its client keeps it waiting.

    Uvicorn limits the time between two requests, up to the first byte of the next one. This class
    limits the time until a request has its whole header, and until an answer is read.
    """

    read_seconds = Limits.read_seconds

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer = self.loop.call_soon(lambda: None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for the first request."""
        super().connection_made(transport)
        self._wait_for_client()

    def on_response_complete(self) -> None:
        """Begins to wait for the next request, and for the client to read what it was sent."""
        super().on_response_complete()
        self._wait_for_client()

    def pause_writing(self) -> None:
        """Begins to wait for the client to read a part of an answer."""
        super().pause_writing()
        self._wait_for_client()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no longer."""
        super().connection_lost(exc)
        self._timer.cancel()

    def _wait_for_client(self) -> None:
        self._timer.cancel()
        self._timer = self.loop.call_later(self.read_seconds, self._close_unless_in_work)

    def _close_unless_in_work(self) -> None:
        is_in_work = self.cycle is not None and not self.cycle.response_complete
        if not is_in_work or self.flow.write_paused:
            self.transport.abort()


def connection_class(limits: Limits) -> type[TimedConnection]:
    """Returns the class of connections with a time limit."""
    return type("Connection", (TimedConnection,), {"read_seconds": limits.read_seconds})


def http_server(server: Server) -> uvicorn.Server:
    """Returns the server of Uvicorn, to run with a socket."""
    limits = server.limits
    return uvicorn.Server(
        uvicorn.Config(
            server.app(),
            http=connection_class(limits),
            ws="none",
            log_level="warning",
            access_log=False,
            limit_concurrency=limits.connections,
        )
    )


def serve(server: Server, host: str, port: int) -> None:
    """Listens at an address, prints it, and serves until SIGINT or SIGTERM.

    Then no further request is accepted, and those that are in work are answered.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        listening = socket.create_server((host, port), family=family, backlog=512)
        stack.enter_context(listening)
        # Uvicorn raises a signal again when everything is answered.
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
        stack.callback(signal.signal, signal.SIGTERM, previous)
        address, number = listening.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        print(f"translating at http://{shown}:{number}; Ctrl-C ends", flush=True)
        http_server(server).run(sockets=[listening])
