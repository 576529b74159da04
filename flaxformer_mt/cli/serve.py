"""The command `serve`."""

import itertools
from typing import Annotated

import tyro

from flaxformer_mt.cli.options import CheckpointChoice, RunFolders, require_runs
from flaxformer_mt.config.fields import Bounds
from flaxformer_mt.errors import UserError, requiring

Origins = tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="ORIGIN")]]
Pairs = tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="S-T")]]
Count = Annotated[int, Bounds(1, 2**31)]


def serve(
    run: RunFolders = (),
    languages: Pairs = (),
    host: str = "127.0.0.1",
    port: Annotated[int, Bounds(0, 65535)] = 5000,
    cors_origin: Origins = (),
    checkpoint: CheckpointChoice = "best",
    max_body: Count = 2**20,
    max_characters: Count = 5000,
    max_requests: Count = 64,
    max_connections: Count = 1000,
    read_timeout: Annotated[float, Bounds(0, 86_400, excludes_lowest=True)] = 30.0,
) -> None:
    """Translates over HTTP, with a page to type into.

    Answers the requests of LibreTranslate and, under /v1, of OpenAI. Requests that wait at the same
    time are translated together. SIGTERM or Ctrl-C ends the server when it has answered the
    requests that are in work; a second Ctrl-C ends it at once. There is no encryption and
    no password: put a reverse proxy before it if others can reach it. See docs/serving.md.

    Examples:
      flaxformer-mt serve --run RUN
      flaxformer-mt serve --run A --run B --languages en-de --languages en-fr
      flaxformer-mt serve --run RUN --cors-origin https://example.org

    Args:
      run: Run folder of a trained model. Repeat the option to serve several models, which are named
        by their folders.
      languages: Source and target of each --run, in the same order, such as en-de. Default: those
        of the run.
      host: Address to listen at; 0.0.0.0 is every network.
      port: Port to listen at; 0 is any free one.
      cors_origin: Origin of web pages that may use the server from a browser, such as
        https://example.org, or * for all. Repeat the option for several.
      checkpoint: "best" by validation, "last", or the step of a checkpoint.
      max_body: Largest body of a request, in bytes.
      max_characters: Most characters of all texts of a request together.
      max_requests: Most requests in work at the same time; further ones get status 503.
      max_connections: Most connections that are open at the same time.
      read_timeout: Seconds that a client has to send a header or a body, or to read an answer;
        then the connection is closed.
    """
    require_runs(run)
    if languages and len(languages) != len(run):
        raise UserError("--languages: give it once for each --run, or not at all")
    with requiring("flaxformer-mt serve", "'flaxformer_mt[serve]'"):
        from flaxformer_mt.serving import http
    from flaxformer_mt.run_reader import Run
    from flaxformer_mt.serving.batching import ServedModel

    limits = http.Limits(max_body, max_characters, max_requests, max_connections, read_timeout)
    models = [
        ServedModel(Run(folder), pair, checkpoint)
        for folder, pair in itertools.zip_longest(run, languages)
    ]
    server = http.Server(models, limits, cors_origin)
    for model in models:
        model.translator.translate("a")  # Compiles the programs for short sentences.
    http.serve(server, host, port)
