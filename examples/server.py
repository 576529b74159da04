"""Translates over HTTP: the routes of LibreTranslate, and those of OpenAI under /v1.

    python examples/server.py --run runs/quickstart

docs/serving.md describes requests, limits and errors. Needs the extra `serve`.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import re
import socket
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import flaxformer_mt as fmt
from flaxformer_mt import runtime
from flaxformer_mt.errors import UserError

BATCH_CHARACTERS = 20_000
"""Requests are taken from the queue up to this size together: none waits for many others."""

DISCARDED_BYTES = 2**27
"""Of a body that is refused. It is read first, because many clients send it completely before they
read the answer."""


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
    """For the body of a request."""


class Translation(NamedTuple):
    """A translation of a text, with its number of tokens."""

    text: str
    num_tokens: int


class Job(NamedTuple):
    """The lines of one request, which wait to be translated."""

    lines: list[str]
    num_translations: int
    """Of each line."""
    done: "asyncio.Future[list[list[Translation]]]"

    @property
    def characters(self) -> int:
        """The size of the job in a batch."""
        return sum(max(1, len(line)) for line in self.lines)


class Served:
    """A model, and the requests that wait for it.

    While the translator is busy, requests wait in a queue; those that are there when it has
    finished are translated together. Their translations do not depend on each other.
    """

    def __init__(self, run: fmt.Run, languages: str | None = None) -> None:
        """Loads the best checkpoint; `languages` are such as "en-de", by default those of the run.

        Raises:
          UserError: the run cannot be read, or `languages` have another form.
        """
        data = run.config.data
        given = (languages or f"{data.source_language}-{data.target_language}").split("-")
        if len(given) != 2 or not all(given):
            raise UserError(f"--languages {languages}: write source and target, such as en-de")
        self.source, self.target = given
        self.name = run.folder.resolve().name
        self.created = int(run.folder.stat().st_mtime)
        self.translator = run.translator()
        decode = self.translator.decode
        most = decode.mbr_samples or (decode.n_best if decode.sampling else decode.beam_size)
        self.most_translations = most
        """How many different translations of a text a search can find."""
        self.queue: asyncio.Queue[Job] = asyncio.Queue()

    async def translate(self, texts: Sequence[str], count: int = 1) -> list[list[Translation]]:
        """Returns `count` translations of each text, fewer if there are not so many.

        The lines of a text are translated by themselves, as by `flaxformer-mt translate`.
        """
        # A search for another number of translations is another program, to be compiled.
        found_count = 1 if count == 1 else self.most_translations
        lines_of = [re.split("\r?\n", text) for text in texts]
        done = asyncio.get_running_loop().create_future()
        self.queue.put_nowait(Job([*itertools.chain(*lines_of)], found_count, done))
        found = iter(await done)
        return [joined(list(itertools.islice(found, len(lines))))[:count] for lines in lines_of]

    async def work(self, thread: ThreadPoolExecutor) -> None:
        """Translates what is in the queue, forever."""
        while True:
            jobs = [await self.queue.get()]
            while not self.queue.empty() and sum(job.characters for job in jobs) < BATCH_CHARACTERS:
                jobs.append(self.queue.get_nowait())
            loop = asyncio.get_running_loop()
            results = await loop.run_in_executor(thread, self._translate_jobs, jobs)
            for job, result in zip(jobs, results, strict=True):
                if job.done.done():
                    continue
                if isinstance(result, Exception):
                    job.done.set_exception(result)
                else:
                    job.done.set_result(result)

    def _translate_jobs(self, jobs: Sequence[Job]) -> list[list[list[Translation]] | Exception]:
        """Returns the translations of each job's lines, or why there are none."""
        results: dict[int, list[list[Translation]] | Exception] = {}
        for count in {job.num_translations for job in jobs}:
            indices = [index for index, job in enumerate(jobs) if job.num_translations == count]
            lines = [line for index in indices for line in jobs[index].lines]
            try:
                found = iter(self._translate_lines(lines, count))
                for index in indices:
                    results[index] = list(itertools.islice(found, len(jobs[index].lines)))
            except Exception as error:
                if len(jobs) == 1:
                    return [error]
                # The others of the batch are not to blame.
                for index in indices:
                    (results[index],) = self._translate_jobs([jobs[index]])
        return [results[index] for index in range(len(jobs))]

    def _translate_lines(self, lines: Sequence[str], count: int) -> list[list[Translation]]:
        found = self.translator.translate_n_best(lines, count, scores=count > 1)
        return [[Translation(each.text, len(each.tokens)) for each in n_best] for n_best in found]

    def count_source_tokens(self, texts: Iterable[str]) -> int:
        """Returns the number of tokens of texts, without end tokens."""
        return sum(map(len, self.translator.tokenizers.source.encode(list(texts))))


def joined(lines: Sequence[Sequence[Translation]]) -> list[Translation]:
    """Joins the best translations of a text's lines, the second best ones, and so on."""
    ranks = range(max(map(len, lines)))
    texts = [[n_best[min(rank, len(n_best) - 1)] for n_best in lines] for rank in ranks]
    return [
        Translation("\n".join(line.text for line in text), sum(line.num_tokens for line in text))
        for text in texts
    ]


class Server:
    """The routes, and the requests that are in work."""

    def __init__(self, models: Sequence[Served], limits: Limits) -> None:
        self.models = {model.name: model for model in models}
        if len(self.models) < len(models):
            raise UserError("--run: the folders of two runs have the same name, which is the model")
        self.limits = limits
        self.num_requests = 0

    def app(self) -> Starlette:
        """Returns the ASGI application."""
        handlers: dict[Any, Any] = {
            HTTPException: describe_refusal,
            UserError: describe_user_error,
            Exception: describe_failure,
        }
        routes = [
            Route("/translate", self.translate, methods=["POST"]),
            Route("/languages", self.languages),
            Route("/health", self.health),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name}", self.show_model),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self.lifespan)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Translates while the application runs, with all models in one thread."""
        with ThreadPoolExecutor(1) as thread:
            tasks = [asyncio.create_task(model.work(thread)) for model in self.models.values()]
            yield
            for task in tasks:
                task.cancel()

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
            values = await self.read(request, allow_form=True)
            if values.get("format", "text") != "text":
                raise HTTPException(400, 'format: only "text" is supported, not HTML')
            source, target = (text_of(values, name) for name in ("source", "target"))
            model = self.model_of_pair(source, target)
            texts = texts_of(values, "q")
            count = 1 + number_of(values, "alternatives", 0, 0, model.most_translations - 1)
            self.require_length(texts)
            found = await model.translate(texts, count)
        single = isinstance(values["q"], str)
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
            values = await self.read(request)
            return await self.answer(values, texts_of(values, "prompt"), "text_completion")

    async def chat(self, request: Request) -> JSONResponse:
        """Translates the last message of the user; other messages have no effect."""
        async with self.admitted(request):
            values = await self.read(request)
            return await self.answer(values, [last_message(values)], "chat.completion")

    async def answer(self, values: Any, texts: Sequence[str], kind: str) -> JSONResponse:
        """Translates texts and returns an object of OpenAI's API."""
        if values.get("stream"):
            raise HTTPException(400, "stream: only false is supported")
        model = self.model_named(text_of(values, "model"))
        count = number_of(values, "n", 1, 1, model.most_translations)
        self.require_length(texts)
        found = await model.translate(texts, count)
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

    async def read(self, request: Request, allow_form: bool = False) -> dict[str, Any]:
        """Returns the fields of a request's body, or raises what is wrong with it."""
        body = await self.read_body(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HTTPException(415, "Content-Encoding must be identity: send it uncompressed")
        if kind == "application/json":
            return parse_json(body)
        if kind == "application/x-www-form-urlencoded" and allow_form:
            return parse_form(body)
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

    def model_of_pair(self, source: str, target: str) -> Served:
        """Returns the first model of these languages; of any source language for "auto"."""
        for model in self.models.values():
            if source in (model.source, "auto") and target == model.target:
                return model
        pairs = ", ".join(f"{each.source} to {each.target}" for each in self.models.values())
        raise HTTPException(400, f"{source} to {target} is not supported; there is {pairs}")

    def model_named(self, name: str) -> Served:
        """Returns the model of this name."""
        if name not in self.models:
            known = ", ".join(self.models)
            raise HTTPException(404, f"there is no model {name[:100]!r}; there is {known}")
        return self.models[name]


def described(model: Served) -> dict[str, Any]:
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


def parse_json(body: bytes) -> dict[str, Any]:
    """Returns a JSON object."""
    try:
        values = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else error
        raise HTTPException(400, f"the body is not valid JSON: {reason}") from None
    if not isinstance(values, dict):
        raise HTTPException(400, f"the body must be a JSON object, not {type_name(values)}")
    return values


def parse_form(body: bytes) -> dict[str, Any]:
    """Returns the fields of a form; one that is repeated is a list."""
    try:
        fields = urllib.parse.parse_qs(body.decode(), keep_blank_values=True, errors="strict")
    except ValueError as error:
        raise HTTPException(400, f"the body is not a valid form: {error}") from None
    values: dict[str, Any] = {
        name: given if len(given) > 1 else given[0] for name, given in fields.items()
    }
    if re.fullmatch("[0-9]{1,9}", str(values.get("alternatives"))):
        values["alternatives"] = int(values["alternatives"])
    return values


def texts_of(values: dict[str, Any], name: str) -> list[str]:
    """Returns a field that is a text or a list of texts."""
    given = values.get(name)
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise HTTPException(400, f"{name} must be a string or a list of strings")
    for text in texts:
        require_unicode(text, name)
    return texts


def text_of(values: dict[str, Any], name: str) -> str:
    """Returns a field that is a text."""
    given = values.get(name)
    if not isinstance(given, str):
        problem = f", not {type_name(given)}" if name in values else ", and is missing"
        raise HTTPException(400, f"{name} must be a string{problem}")
    return require_unicode(given, name)


def require_unicode(text: str, name: str) -> str:
    """Returns a text without half a surrogate pair, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise HTTPException(400, f"{name} has a character that is not valid Unicode") from None
    return text


def number_of(values: dict[str, Any], name: str, default: int, lowest: int, highest: int) -> int:
    """Returns a field that is an integer, or its default."""
    given = values.get(name)
    if given is None:
        return default
    if not isinstance(given, int) or isinstance(given, bool):
        raise HTTPException(400, f"{name} must be an integer, not {type_name(given)}")
    if not lowest <= given <= highest:
        raise HTTPException(400, f"{name} must be from {lowest} to {highest} with this model")
    return given


def last_message(values: dict[str, Any]) -> str:
    """Returns the text of the user's last message, whose content may be a list of parts."""
    messages = values.get("messages")
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise HTTPException(400, "messages must be a list of objects")
    contents = [each.get("content") for each in messages if each.get("role") == "user"]
    if not contents:
        raise HTTPException(400, 'messages must have one with the role "user"')
    parts = contents[-1]
    if isinstance(parts, str):
        return require_unicode(parts, "content")
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
    ):
        raise HTTPException(400, "content must be a string or a list of parts with a text")
    return require_unicode("".join(part["text"] for part in parts), "content")


def type_name(value: Any) -> str:
    """Returns the type of a value as JSON calls it."""
    names = {bool: "a boolean", dict: "an object", list: "a list", str: "a string"}
    return "null" if value is None else names.get(type(value), "a number")


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


def main() -> None:
    """Loads the models and serves until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="append", required=True, help="run folder; repeatable")
    parser.add_argument(
        "--languages",
        action="append",
        default=[],
        metavar="en-de",
        help="source and target of each --run, in the same order; default: those of the run",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address; 0.0.0.0 = every network")
    parser.add_argument("--port", type=int, default=5000, help="0 = any free one")
    limits = {
        "--max-body": ("body_bytes", "bytes of a request"),
        "--max-characters": ("characters", "of all texts of a request"),
        "--max-requests": ("requests", "in work at the same time; further ones get status 503"),
        "--max-connections": ("connections", "that are open at the same time"),
        "--read-timeout": ("read_seconds", "seconds in which the body of a request must arrive"),
    }
    for option, (name, meaning) in limits.items():
        default = getattr(Limits, name)
        parser.add_argument(
            option, dest=name, type=type(default), default=default, metavar="N", help=meaning
        )
    options = parser.parse_args()
    values = {name: getattr(options, name) for name, _ in limits.values()}
    if options.languages and len(options.languages) != len(options.run):
        parser.error("--languages: give it once for each --run, or not at all")
    if min(values.values()) <= 0:
        parser.error("limits must be above 0")

    runtime.configure()  # As the commands do.
    try:
        pairs = itertools.zip_longest(options.run, options.languages)
        models = [Served(fmt.Run(Path(folder)), languages) for folder, languages in pairs]
        server = Server(models, Limits(**values))
        for model in models:
            model.translator.translate("a")  # Compiles the programs for short sentences.
        serve(server, options.host, options.port)
    except (UserError, OSError) as error:
        parser.exit(1, f"server.py: error: {error}\n")


def http_server(server: Server) -> uvicorn.Server:
    """Returns the server of Uvicorn, to run with a socket."""
    return uvicorn.Server(
        uvicorn.Config(
            server.app(),
            http="h11",
            ws="none",
            log_level="warning",
            access_log=False,
            limit_concurrency=server.limits.connections,
            timeout_graceful_shutdown=30,
        )
    )


def serve(server: Server, host: str, port: int) -> None:
    """Listens at an address, prints it, and serves."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=512) as listening:
        address, number = listening.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        print(f"translating at http://{shown}:{number}; Ctrl-C ends", flush=True)
        with contextlib.suppress(KeyboardInterrupt):  # When everything is answered.
            http_server(server).run(sockets=[listening])


if __name__ == "__main__":
    main()
