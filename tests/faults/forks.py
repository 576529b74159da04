"""Commands in forks of one process that has imported everything, so that each start is quick.

The process is started with `calls.c` before all other libraries. It has not initialized a backend,
whose threads a fork would lack.
"""

import json
import os
import subprocess
import sys

_SERVER = """
import json, os, sys, traceback
import jax, orbax.checkpoint, sacrebleu, sentencepiece, tensorstore, tyro
from flaxformer_mt.cli import convert, corpora, checkpoints, evaluate, main, training, translate
from flaxformer_mt import experiment
from flaxformer_mt.decoding import line_format, translator
from flaxformer_mt.interop.formats import huggingface
from flaxformer_mt.runs import checkpoint
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if not child:
        os.environ.update(request["environment"])
        error = os.open(request["error"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(error, 2)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        code = 1
        try:
            code = main(request["arguments"])
        except SystemExit as exit:
            code = exit.code
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(int(code or 0))
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Commands:
    """Runs commands of `flaxformer-mt`, possibly with a fault at a call below a folder."""

    def __init__(self, library, workplace):
        self._workplace = workplace
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            env=os.environ
            | {
                "LD_PRELOAD": str(library),
                "JAX_COMPILATION_CACHE_DIR": str(workplace / "compilations"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, arguments, folder, **environment):
        """Returns the exit code, standard error, and the calls, a letter for each.

        `environment` has the variables of `calls.c`; without FAULT_AT no call fails.
        """
        error, count = self._workplace / "error", self._workplace / "count"
        count.write_text("")
        request = {
            "arguments": [*map(str, arguments)],
            "error": str(error),
            "environment": {"FAULT_FOLDER": str(folder), "FAULT_COUNT": str(count)}
            | {name: str(value) for name, value in environment.items()},
        }
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline()), error.read_text(), count.read_text()

    def close(self):
        self._process.communicate()  # Closes its input, upon which it ends.
