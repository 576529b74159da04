"""`flaxformer-mt serve`: what it answers, what it refuses, and under load."""

import concurrent.futures
import contextlib
import http.client as client_library
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

import flaxformer_mt as fmt
from flaxformer_mt.cli import main
from flaxformer_mt.decoding.translator import Hypothesis
from flaxformer_mt.errors import UserError
from flaxformer_mt.serving import batching, http

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
PAIR = {"source": "en", "target": "de"}


class Client:
    """Sends each request over a connection of its own."""

    def __init__(self, port):
        self.port = port

    def send(self, method, path, body=None, kind=JSON, headers=()):
        """Returns status, JSON and headers of an answer."""
        connection = client_library.HTTPConnection("127.0.0.1", self.port, timeout=300)
        if isinstance(body, dict):
            body = json.dumps(body).encode()
        given = {"Content-Type": kind} if body is not None else {}
        with contextlib.closing(connection):
            connection.request(method, path, body, {**given, **dict(headers)})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read()), answer.headers

    def post(self, path, body, **options):
        status, values, _ = self.send("POST", path, body, **options)
        return status, values

    def get(self, path):
        status, values, _ = self.send("GET", path)
        return status, values

    def connection(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=300)

    def raw(self, sent):
        """Sends bytes and no more, and returns what comes back."""
        with self.connection() as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(4096), b""))


@contextlib.contextmanager
def serving(models, cors_origins=(), **limits):
    """Serves in a thread of this process."""
    served = http.http_server(http.Server(models, http.Limits(**limits), cors_origins))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=served.run, args=([listening],))
        thread.start()
        try:
            # Connections wait until it is started.
            yield Client(listening.getsockname()[1])
        finally:
            served.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def translator(trained_run):
    return fmt.Translator.from_run(trained_run)


@pytest.fixture(scope="module")
def client(trained_run):
    with serving([batching.ServedModel(fmt.Run(trained_run))], body_bytes=10_000) as client:
        yield client


class Recorded:
    """A translator in capital letters, which waits where it is told to."""

    def __init__(self):
        self.calls = []
        self.may_continue = threading.Event()
        self.may_continue.set()
        self.repeated = 1

    def translate_n_best(self, lines, count, scores):
        self.calls.append(list(lines))
        assert self.may_continue.wait(600)
        if "bad" in lines:
            raise UserError("bad cannot be translated")
        if "worse" in lines:
            raise RuntimeError("worse")
        texts = [line.upper() * (self.repeated if line == "long" else 1) for line in lines]
        return [[Hypothesis(text)] * count for text in texts]


@pytest.fixture
def recorded(trained_run):
    """A model that is not searched, to see which requests are translated together."""
    model = batching.ServedModel(fmt.Run(trained_run))
    model.translator, model.translator.decode = Recorded(), model.translator.decode
    return model


def test_it_answers_as_libretranslate_does(client, translator):
    one, two = "seven kilometers", "two birds"
    expected = dict(zip([one, two], translator.translate([one, two]), strict=True))
    assert client.post("/translate", {"q": one, **PAIR}) == (200, {"translatedText": expected[one]})
    listed = {"q": [two, "", f"{one}\r\n\n{two}"], "source": "auto", "target": "de"}
    status, answer = client.post("/translate", listed)
    lines = f"{expected[one]}\n\n{expected[two]}"
    assert (status, answer) == (200, {"translatedText": [expected[two], "", lines]})
    form = "q=seven+kilometers&source=en&target=de&alternatives=2&format=text"
    status, answer = client.post("/translate", form, kind=f"{FORM}; charset=utf-8")
    best, *others = [each.text for each in translator.translate_n_best(one, 4)][:3]
    assert (status, answer) == (200, {"translatedText": best, "alternatives": others})
    assert len(others) == 2
    english = {"code": "en", "name": "en", "targets": ["de"]}
    german = {"code": "de", "name": "de", "targets": []}
    assert client.get("/languages") == (200, [english, german])
    assert client.get("/health") == (200, {"status": "ok"})


def test_there_is_a_page_to_type_into_that_loads_nothing_else(client):
    head, _, page = client.raw(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").partition(
        b"\r\n\r\n"
    )
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-type: text/html" in head
    assert b"content-security-policy: default-src 'none'; " in head
    assert b"<textarea" in page
    assert not re.search(rb"//|src=|import", page)


def test_it_answers_as_openai_does(client, translator, trained_run):
    name, text = trained_run.name, "seven kilometers"
    status, models = client.get("/v1/models")
    assert (status, [each["id"] for each in models["data"]]) == (200, [name])
    assert client.get(f"/v1/models/{name}") == (200, models["data"][0])

    messages = [
        {"role": "system", "content": "You translate."},
        {"role": "user", "content": [{"type": "text", "text": text}]},
    ]
    asked = {"model": name, "messages": messages, "temperature": 0.2, "stream": False}
    status, answer = client.post("/v1/chat/completions", asked)
    (choice,) = answer["choices"]
    (hypothesis,) = translator.translate_n_best(text, 1)
    message = {"role": "assistant", "content": hypothesis.text}
    assert (status, answer["object"], answer["model"]) == (200, "chat.completion", name)
    assert choice == {"index": 0, "message": message, "finish_reason": "stop"}
    (source,) = translator.tokenizers.source.encode([text])
    assert answer["usage"] == {
        "prompt_tokens": len(source),
        "completion_tokens": len(hypothesis.tokens),
        "total_tokens": len(source) + len(hypothesis.tokens),
    }

    status, answer = client.post(
        "/v1/completions", {"model": name, "prompt": [text, "two birds"], "n": 2}
    )
    lists = translator.translate_n_best([text, "two birds"], 2)
    expected = [each.text for n_best in lists for each in n_best]
    assert (status, answer["object"]) == (200, "text_completion")
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [*enumerate(expected)]


REFUSED = {
    "no JSON": (400, "/translate", b'{"q": ', "the body is damaged: not JSON: "),
    "a list": (400, "/translate", b"[]", "expected an object, got a list"),
    "no text": (400, "/translate", PAIR, "there is no field q"),
    "a surrogate": (400, "/translate", {**PAIR, "q": "\ud800"}, "not valid Unicode"),
    "languages": (
        400,
        "/translate",
        {"q": "a", "source": "de", "target": "en"},
        "de to en is not supported; there is en to de",
    ),
    "alternatives": (
        400,
        "/translate",
        {**PAIR, "q": "a", "alternatives": 10**9},
        "alternatives must be from 0 to 3",
    ),
    "a large body": (413, "/translate", b" " * 10_001, "more than 10,000 bytes (--max-body)"),
    "a long text": (413, "/translate", {**PAIR, "q": "a" * 5001}, "may have 5,000 (--max-char"),
    "many texts": (413, "/v1/completions", {"model": "trained_run", "prompt": [""] * 1999 * 2}, ""),
    "no route": (404, "/translation", {**PAIR, "q": "a"}, "POST /translation: Not Found"),
    "no model": (404, "/v1/completions", {"model": "gpt", "prompt": "a"}, "no model 'gpt'; there"),
    "a stream": (
        400,
        "/v1/completions",
        {"model": "a", "prompt": "a", "stream": True},
        "stream: only false",
    ),
    "an image": (
        400,
        "/v1/chat/completions",
        {"model": "a", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "the content of a message is damaged: [0]: there is no field text",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_says_why_it_refuses(client, name):
    status, path, body, message = REFUSED[name]
    found, answer = client.post(path, body)
    text = answer["error"]
    if path.startswith("/v1"):
        assert text.pop("type") == "invalid_request_error"
        text = text["message"]
    assert message in text
    assert found == status


def test_it_refuses_methods_and_types(client):
    status, answer, headers = client.send("GET", "/translate")
    assert (status, headers["Allow"]) == (405, "POST")
    assert answer == {"error": "GET /translate: Method Not Allowed"}
    body = {"q": "a", **PAIR}
    assert client.post("/translate", body, kind="text/plain")[0] == 415
    assert client.post("/v1/completions", b"prompt=a", kind=FORM)[0] == 415
    assert client.post("/translate", body, headers={"Content-Encoding": "gzip"})[0] == 415
    assert client.post("/translate", b"q=%ff&source=en&target=de", kind=FORM)[0] == 400


def test_it_survives_what_is_no_request(client):
    assert client.raw(b"\x16\x03\x01\x02\x00\n\n").startswith(b"HTTP/1.1 400 ")
    assert client.raw(b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000).startswith(b"HTTP/1.1 400 ")
    head = b"POST /translate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    client.raw(head + b"Content-Length: 100\r\n\r\n{")  # And the connection is closed.
    chunked = client.raw(head + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n")
    assert b"200 OK" not in chunked
    assert client.get("/health") == (200, {"status": "ok"})


def test_a_body_has_to_arrive(recorded):
    with serving([recorded], read_seconds=0.1) as client, client.connection() as connection:
        connection.sendall(b"POST /translate HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        (b"", b""),
        (b"", HEALTH),
        (HEALTH + b"\r\n", HEALTH),
        (HEALTH + b"Content-Length: 100\r\n\r\n", b"{"),
    ],
    ids=["nothing", "half a header", "half a second header", "half a body after the answer"],
)
def test_a_connection_on_which_nothing_is_asked_is_closed(recorded, patience, asked, sent):
    with serving([recorded]) as client:
        if not asked:
            patience(0.1)
        with client.connection() as connection:
            if asked:
                connection.sendall(asked[:1])
                until(lambda: client.get("/health")[0] == 200)  # It was connected before.
                patience(0.1)
                connection.sendall(asked[1:])
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
            with contextlib.suppress(ConnectionError):
                connection.sendall(sent)
                while connection.recv(4096):
                    pass


@pytest.fixture
def patience(monkeypatch):
    """A function that says how long connections wait for their clients from now on."""

    def set_seconds(seconds):
        monkeypatch.setattr(http.TimedConnection, "read_seconds", seconds)

    set_seconds(10_000)
    monkeypatch.setattr(http, "connection_class", lambda limits: http.TimedConnection)
    return set_seconds


def is_healthy(client):
    """Whether a request is answered in time."""
    with contextlib.suppress(ConnectionError):
        return b"200 OK" in client.raw(HEALTH + b"Connection: close\r\n\r\n")


def test_an_answer_that_nobody_reads_ends_its_connection(recorded, patience):
    recorded.translator.repeated = 10_000_000
    with serving([recorded], connections=2) as client, socket.socket() as connection:
        recorded.translator.may_continue.clear()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", client.port))
        send_text(connection, "long")
        until(lambda: recorded.translator.calls)
        patience(0.1)
        recorded.translator.may_continue.set()
        until(lambda: is_healthy(client))


def send_text(connection, text):
    """Sends a request without waiting for the answer."""
    body = json.dumps({"q": text, **PAIR})
    connection.sendall(
        b"POST /translate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )


def in_threads(client, texts):
    """Starts a request for each text, and returns the future answers."""
    pool = concurrent.futures.ThreadPoolExecutor(len(texts))
    answers = [pool.submit(client.post, "/translate", {"q": text, **PAIR}) for text in texts]
    pool.shutdown(wait=False)
    return answers


def until(condition):
    while not condition():  # The time limit is that of a test.
        time.sleep(0.01)


@contextlib.contextmanager
def busy(recorded, client):
    """Lets the translator work on a request while others arrive."""
    recorded.translator.may_continue.clear()
    first = in_threads(client, ["first"])
    until(lambda: recorded.translator.calls)
    try:
        yield
    finally:
        recorded.translator.may_continue.set()
    assert first[0].result() == (200, {"translatedText": "FIRST"})


def test_requests_that_wait_are_translated_together(recorded):
    texts = ["a", "b\nc", "d", ""]
    with serving([recorded]) as client:
        with busy(recorded, client):
            answers = in_threads(client, texts)
            until(lambda: recorded.queue.qsize() == len(texts))
        found = [answer.result()[1]["translatedText"] for answer in answers]
    assert found == ["A", "B\nC", "D", ""]
    first, second = recorded.translator.calls
    assert (first, sorted(second)) == (["first"], ["", "a", "b", "c", "d"])


def test_a_request_whose_client_has_gone_is_not_translated(recorded):
    with serving([recorded]) as client:
        with busy(recorded, client):
            (kept,) = in_threads(client, ["kept"])
            until(lambda: recorded.queue.qsize() == 1)
            with client.connection() as connection:
                send_text(connection, "gone")
                until(lambda: recorded.queue.qsize() == 2)
            # The server notices it while the translator is busy.
            until(lambda: [job.done.done() for job in recorded.queue._queue] == [False, True])
        assert kept.result() == (200, {"translatedText": "KEPT"})
    assert recorded.translator.calls == [["first"], ["kept"]]


def test_others_of_a_batch_are_answered_when_one_fails(recorded, capsys):
    with serving([recorded]) as client:
        with busy(recorded, client):
            answers = in_threads(client, ["a", "bad", "worse"])
            until(lambda: recorded.queue.qsize() == 3)
        good, bad, worse = [answer.result() for answer in answers]
        assert good == (200, {"translatedText": "A"})
        assert bad == (400, {"error": "bad cannot be translated"})
        assert worse == (500, {"error": "the server failed; its log has the reason"})
        assert client.post("/translate", {"q": "b", **PAIR}) == (200, {"translatedText": "B"})
    assert "RuntimeError: worse" in capsys.readouterr().err


def test_too_many_requests_are_refused(recorded):
    with serving([recorded], requests=3, body_bytes=1000) as client:
        with busy(recorded, client):
            answers = in_threads(client, ["a", "b"])
            until(lambda: recorded.queue.qsize() == 2)
            status, answer, headers = client.send("POST", "/translate", {"q": "c", **PAIR})
            assert (status, headers["Retry-After"]) == (503, "1")
            assert answer["error"].startswith("3 requests are in work already (--max-requests)")
            assert client.get("/health")[0] == 200
        assert {answer.result()[0] for answer in answers} == {200}
        assert client.post("/translate", {"q": "c", **PAIR})[0] == 200


def test_pairs_of_languages_choose_the_model(recorded, trained_run, monkeypatch, tmp_path):
    (tmp_path / "other").symlink_to(trained_run)
    other = batching.ServedModel(fmt.Run(tmp_path / "other"), "fr-en")
    other.name, other.translator = "other", recorded.translator
    with serving([recorded, other]) as client:
        english = {"code": "en", "name": "en", "targets": ["de"]}
        assert english in client.get("/languages")[1]
        into_english = {"q": "a", "source": "auto", "target": "en"}
        assert client.post("/translate", into_english) == (200, {"translatedText": "A"})
    with pytest.raises(UserError, match="--run: the folders of two runs have the same name"):
        http.Server([recorded, recorded], http.Limits())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--run is missing"),
        (["--run", "runs/none"], "there is no run folder"),
        (["--run", "{run}", "--languages", "ende"], "write source and target, such as en-de"),
        (["--run", "{run}", "--max-requests", "0"], "--max-requests=0: must be at least 1"),
        (["--run", "{run}", "--read-timeout", "0"], "--read-timeout=0.0: must be above 0"),
        (["--run", "{run}", "--languages", "en-de", "--languages", "en-fr"], "once for each"),
        (["--run", "{run}", "--port", "{port}"], "Address already in use"),
    ],
)
def test_it_says_why_it_does_not_start(trained_run, capsys, options, message):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"run": trained_run, "port": taken.getsockname()[1]}
        assert main(["serve", *(option.format(**names) for option in options)]) == 1
    assert message in capsys.readouterr().err


@contextlib.contextmanager
def program(run, *options):
    """Starts the command; yields its process and a client."""
    command = [sys.executable, "-m", "flaxformer_mt", "serve", "--run", run, "--port", "0"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            address = re.fullmatch(r"translating at http://127\.0\.0\.1:(\d+); Ctrl-C ends\n", line)
            yield process, Client(int(address[1]))
        finally:
            process.kill()


def test_sigterm_ends_it_when_everything_is_answered(trained_run):
    with program(trained_run) as (process, client):
        expected = client.post("/translate", {"q": "two birds", **PAIR})
        assert expected[0] == 200
        body = json.dumps({"q": "two birds", **PAIR}).encode()
        with client.connection() as connection:
            answer = client_library.HTTPResponse(connection)
            connection.sendall(
                b"POST /translate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                b"Expect: 100-continue\r\n" + f"Content-Length: {len(body)}\r\n\r\n".encode()
            )
            # The request is in work, and cannot end before the signal.
            assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
            process.send_signal(signal.SIGTERM)
            connection.sendall(body)
            answer.begin()
            assert (answer.status, json.loads(answer.read())) == expected
        assert process.wait(600) == 0


def test_pages_of_other_origins_are_allowed_by_option(recorded):
    def allowed(client, method, path, **headers):
        connection = client_library.HTTPConnection("127.0.0.1", client.port, timeout=300)
        with contextlib.closing(connection):
            connection.request(method, path, headers={"Origin": "https://a.example", **headers})
            return connection.getresponse().headers["Access-Control-Allow-Origin"]

    asked = {"Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "content-type"
    for origins, answer in (((), None), (["https://a.example"], "https://a.example"), ("*", "*")):
        with serving([recorded], origins) as client:
            assert allowed(client, "GET", "/health") == answer
            assert allowed(client, "OPTIONS", "/translate", **asked) == answer
