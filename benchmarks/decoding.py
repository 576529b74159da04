"""Compares the speed of decoding with Hugging Face transformers and CTranslate2.

    python benchmarks/decoding.py --run RUN --source FILE [--sentences 1000] [--json FILE]

RUN is a run folder of a model with Marian's architecture (configs/multi30k_marian_en_de.py). FILE
has one source sentence per line and may be compressed (.gz). Every competitor gets the same weights
and the same token sequences, and returns token sequences:

    ours           `ContinuousBatcher` with the default settings
    transformers   `MarianMTModel.generate` with its cache, on batches sorted by length
    ctranslate2    CTranslate2 in float32, which sorts sentences into batches itself
    int8           CTranslate2 with int8 weights

Each runs in a separate process. It first tries several batch sizes on a part of the sentences and
keeps the fastest (except `ours`). Then the competitors alternate, so that other work on the machine
affects all of them. Metrics are medians over the rounds, and ratios are medians of the ratios in
each round. Start-up is reported separately: reading weights, compiling, and the first sentence.
"""

import argparse
import contextlib
import gzip
import json
import os
import pickle
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAX_LENGTH_FACTOR, MAX_LENGTH_EXTRA = 1.5, 20
LONGEST = 96
"""Maximum number of target tokens for competitors that have one limit for all sentences."""

THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Idle threads must not use CPU time of the other competitors."""

Tokens = list[int]
Decode = Callable[[Sequence[Tokens]], list[Tokens]]
"""Translates source sentences and returns target sentences, both with end tokens."""


def make_ours(task: dict[str, Any], beam_size: int, folder: Path) -> list[Decode]:
    """Returns the decoder of this package."""
    from flaxformer_mt import runtime

    runtime.configure()
    from flaxformer_mt.config import DecodeConfig
    from flaxformer_mt.decoding.batching.continuous_batching import ContinuousBatcher, Request

    config = DecodeConfig(
        beam_size=beam_size,
        length_penalty=1.0,
        length_penalty_kind="average",
        early_stopping="heuristic",
    )
    length = task.get("length")
    batcher = ContinuousBatcher([(task["model"], task["params"])], config, scores=False)

    def decode(sources: Sequence[Tokens]) -> list[Tokens]:
        requests = [
            Request(s, length - 1, length)
            if length
            else Request(s, 0, int(MAX_LENGTH_FACTOR * (len(s) - 1)) + MAX_LENGTH_EXTRA)
            for s in sources
        ]
        found = dict(batcher.decode(requests))
        return [list(found[index].tokens[0]) for index in range(len(sources))]

    return [decode]


def make_transformers(task: dict[str, Any], beam_size: int, folder: Path) -> list[Decode]:
    """Returns `generate` with several batch sizes to choose from."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.MarianMTModel.from_pretrained(folder / "huggingface").to(device).eval()
    model.to(getattr(torch, task["model"].dtype))
    length = task.get("length")
    pad_id, eos_id = model.config.pad_token_id, model.config.eos_token_id

    def with_batch_size(size: int) -> Decode:
        def decode(sources: Sequence[Tokens]) -> list[Tokens]:
            order = sorted(range(len(sources)), key=lambda index: -len(sources[index]))
            targets: list[Tokens] = [[]] * len(sources)
            for begin in range(0, len(order), size):
                batch = order[begin : begin + size]
                tokens = torch.full((len(batch), len(sources[batch[0]])), pad_id)
                for row, index in zip(tokens, batch, strict=True):
                    row[: len(sources[index])] = torch.tensor(sources[index])
                with torch.inference_mode():
                    rows = model.generate(
                        input_ids=tokens.to(device),
                        attention_mask=(tokens != pad_id).long().to(device),
                        num_beams=beam_size,
                        do_sample=False,
                        length_penalty=1.0,
                        early_stopping=False,
                        min_length=length + 1 if length else 0,
                        max_length=(length or LONGEST) + 1,
                        bad_words_ids=[[pad_id]],
                        use_cache=True,
                    ).tolist()
                for index, row in zip(batch, rows, strict=True):
                    end = row.index(eos_id) + 1 if eos_id in row else len(row)
                    targets[index] = row[1:end]
            return targets

        return decode

    larger = (512, 1024) if device == "cuda" else ()
    return [with_batch_size(size) for size in (16, 32, 64, 128, 256, *larger)]


def make_ctranslate2(
    task: dict[str, Any], beam_size: int, folder: Path, kind: str = "float32"
) -> list[Decode]:
    """Returns CTranslate2 with one batch per core or one for all cores, and several batch sizes."""
    import ctranslate2

    cores = len(os.sched_getaffinity(0))
    device = "cuda" if ctranslate2.get_cuda_device_count() else "cpu"
    start, end = task["model"].bos_id, task["model"].eos_id

    def with_setting(translator: Any, size: int) -> Decode:
        def decode(sources: Sequence[Tokens]) -> list[Tokens]:
            results = translator.translate_batch(
                [list(map(_as_text, source)) for source in sources],
                beam_size=beam_size,
                max_batch_size=size,
                max_decoding_length=LONGEST,
                length_penalty=1.0,
                suppress_sequences=[[_as_text(start)]],
                return_end_token=True,
            )
            return [[int(text[1:]) for text in result.hypotheses[0]] for result in results]

        return decode

    assert start != end
    return [
        with_setting(
            ctranslate2.Translator(
                str(folder / f"ctranslate2_{kind}"),
                device=device,
                compute_type=kind,
                inter_threads=inter,
                intra_threads=cores // inter,
            ),
            size,
        )
        for inter in {1, cores}
        for size in (32, 64, 128)
    ]


def make_int8(task: dict[str, Any], beam_size: int, folder: Path) -> list[Decode]:
    """Returns CTranslate2 with int8 weights."""
    return make_ctranslate2(task, beam_size, folder, "int8")


COMPETITORS: dict[str, Callable[[dict[str, Any], int, Path], list[Decode]]] = {
    "ours": make_ours,
    "transformers": make_transformers,
    "ctranslate2": make_ctranslate2,
    "int8": make_int8,
}


def _as_text(token: int) -> str:
    return f"t{token}"


def write_task(
    run_folder: Path, source: Path, count: int, competitors: Sequence[str], folder: Path
) -> None:
    """Tokenizes the sentences and writes the weights in each competitor's format."""
    import jax

    from flaxformer_mt.config import with_vocabulary_sizes
    from flaxformer_mt.trained_model import load_run

    run = load_run(run_folder, "last")
    sides = run.tokenizers.source, run.tokenizers.target
    model = with_vocabulary_sizes(run.config.model, *(side.vocab_size for side in sides))
    content = source.read_bytes()
    text = gzip.decompress(content) if source.suffix == ".gz" else content
    lines = [line for line in text.decode("utf-8").splitlines() if line.strip()][:count]
    sources = [[*tokens, model.eos_id] for tokens in run.tokenizers.source.encode(lines)]
    params = jax.device_get(run.params)
    task = {"model": model, "params": params, "sources": sources}
    (folder / "task.pickle").write_bytes(pickle.dumps(task))
    peer = write_transformers(model, params, folder)
    if {"ctranslate2", "int8"} & set(competitors):
        write_ctranslate2(peer, folder)


def write_transformers(model: Any, params: Any, folder: Path) -> Any:
    """Writes the weights as a folder of Hugging Face, and returns its model."""
    import transformers
    from safetensors.torch import load_file

    from flaxformer_mt import interop

    config = transformers.MarianConfig(
        vocab_size=model.target_vocab_size,
        d_model=model.d_model,
        encoder_layers=model.num_encoder_layers,
        decoder_layers=model.num_decoder_layers,
        encoder_attention_heads=model.num_heads,
        decoder_attention_heads=model.num_heads,
        encoder_ffn_dim=model.d_ff,
        decoder_ffn_dim=model.d_ff,
        activation_function=model.activation,
        scale_embedding=model.scale_embeddings,
        max_position_embeddings=model.max_length,
        pad_token_id=model.pad_id,
        eos_token_id=model.eos_id,
        decoder_start_token_id=model.bos_id,
        forced_eos_token_id=None,
    )
    peer = transformers.MarianMTModel(config).eval()
    interop.save("marian", model, params, folder / "weights.safetensors")
    peer.load_state_dict(load_file(folder / "weights.safetensors"), strict=False)
    peer.tie_weights()
    peer.save_pretrained(folder / "huggingface")
    return peer


def write_ctranslate2(peer: Any, folder: Path) -> None:
    """Writes the weights of a model of Hugging Face as folders of CTranslate2.

    It gets names such as "t17" for token 17, so that no tokenizer is needed.
    """
    import torch
    from ctranslate2.converters import transformers as converters

    class Loader(converters.MarianMTLoader):
        """Supports start tokens with an embedding and any id, unlike published models."""

        def get_vocabulary(self, model: Any, tokenizer: Any) -> list[str]:
            return [_as_text(token) for token in range(model.config.vocab_size)]

        def get_model_spec(self, model: Any) -> Any:
            model.config.normalize_before = model.config.normalize_embedding = False
            return converters.BartLoader.get_model_spec(self, model)

        def set_decoder(self, spec: Any, decoder: Any) -> None:
            converters.BartLoader.set_decoder(self, spec, decoder)

        def set_config(self, config: Any, model: Any, tokenizer: Any) -> None:
            start, end = model.config.decoder_start_token_id, model.config.eos_token_id
            config.decoder_start_token = config.bos_token = _as_text(start)
            config.eos_token = config.unk_token = _as_text(end)

    for kind in ("float32", "int8"):
        with torch.no_grad():
            spec = Loader()(peer, None)
        spec.validate()
        spec.optimize(quantization=kind)
        path = folder / f"ctranslate2_{kind}"
        path.mkdir()
        spec.save(str(path))


def serve(name: str, beam_size: int, folder: Path) -> None:
    """Runs a competitor: translates all sentences for each line on standard input."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Output of libraries must not mix with the replies.

    def reply(**values: Any) -> None:
        print(json.dumps(values), file=replies, flush=True)

    start = time.perf_counter()
    task = pickle.loads((folder / "task.pickle").read_bytes())
    sources = task["sources"]
    variants = COMPETITORS[name](task, beam_size, folder)
    variants[0](sources[:1])
    reply(start_seconds=time.perf_counter() - start)
    sys.stdin.readline()
    sample = sources[:: max(1, len(sources) // 256)]
    start = time.perf_counter()
    if len(variants) == 1:
        decode = variants[0]
        decode(sources)  # Compiles the remaining shapes.
    else:
        decode = min(variants, key=lambda variant: _seconds(variant, sample))
    reply(trial_seconds=time.perf_counter() - start)
    for _ in sys.stdin:
        cpu, start = time.process_time(), time.perf_counter()
        targets = decode(sources)
        reply(
            seconds=time.perf_counter() - start,
            processor_seconds=time.process_time() - cpu,
            targets=targets,
        )


def _seconds(decode: Decode, sources: Sequence[Tokens]) -> float:
    start = time.perf_counter()
    decode(sources)
    return time.perf_counter() - start


class Competitor:
    """A competitor's process, which translates on request.

    Args:
      text: "NAME" or "LABEL=NAME VARIABLE=VALUE ...", the variables of its environment.
      beam_size: of its search.
      folder: where the task is.
    """

    def __init__(self, text: str, beam_size: int, folder: Path):
        first, *settings = shlex.split(text)
        self.name, _, name = first.partition("=")
        variables = dict(setting.split("=", 1) for setting in settings)
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name or self.name, str(beam_size), str(folder)],
            env=os.environ | THREADS | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []
        self.targets: list[Tokens] = []

    def __enter__(self) -> "Competitor":
        self.start_seconds = self._answer()["start_seconds"]
        self.trial_seconds = self._ask()["trial_seconds"]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def translate(self) -> None:
        """Translates all sentences."""
        answer = self._ask()
        self.seconds.append(answer["seconds"])
        self.processor_seconds.append(answer["processor_seconds"])
        self.targets = answer["targets"]

    def _ask(self) -> dict[str, Any]:
        print(file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"{self.name} failed; see its output above")
        return json.loads(line)


def measure(names: list[str], beam_size: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Runs the competitors alternately and returns the metrics of each."""
    with contextlib.ExitStack() as ends:
        running = [ends.enter_context(Competitor(name, beam_size, folder)) for name in names]
        for number in range(rounds):
            # Every second round is reversed, so that no competitor always follows the same one.
            for competitor in running if number % 2 else reversed(running):
                competitor.translate()
                print(
                    f"round {number}: {competitor.name} {competitor.seconds[-1]:.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
    first = running[0]
    metrics = {}
    for competitor in running:
        ratios = np.array(competitor.seconds) / np.array(first.seconds)
        by_processor = np.array(competitor.processor_seconds) / np.array(first.processor_seconds)
        pairs = list(zip(first.targets, competitor.targets, strict=True))
        metrics[competitor.name] = {
            "sentences_per_second": len(pairs) / float(np.median(competitor.seconds)),
            "ratio": float(np.median(ratios)),
            "ratio_quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
            "ratio_by_processor_time": float(np.median(by_processor)),
            "tokens_per_sentence": float(np.mean(list(map(len, competitor.targets)))),
            "same_translations": float(np.mean([ours == theirs for ours, theirs in pairs])),
            "same_lengths": float(np.mean([len(ours) == len(theirs) for ours, theirs in pairs])),
            "start_seconds": competitor.start_seconds,
            "trial_seconds": competitor.trial_seconds,
        }
    return metrics


def print_table(beam_size: int, results: dict[str, Any]) -> None:
    """Prints the metrics as a table."""
    first = next(iter(results))
    print(
        f"\nbeam {beam_size:<9}{'sentences/s':>12}  {first + ' is faster by':<22}{'(CPU time)':>10}"
        f"{'tokens':>8}{'same':>8}{'start':>9}{'trials':>9}"
    )
    for name, row in results.items():
        low, high = row["ratio_quartiles"]
        print(
            f"{name:<14}{row['sentences_per_second']:>12,.1f}  "
            f"{row['ratio']:<6.2f}({low:.2f} - {high:.2f}) {row['ratio_by_processor_time']:>12.2f}"
            f"{row['tokens_per_sentence']:>10.2f}{row['same_translations']:>8.1%}"
            f"{row['start_seconds']:>7.1f} s{row['trial_seconds']:>7.1f} s",
            flush=True,
        )


def main() -> None:
    """Measures every requested beam size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help="run folder of a model with Marian's architecture")
    parser.add_argument("--source", type=Path, help="file of source sentences")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--competitors", nargs="+", choices=COMPETITORS, default=list(COMPETITORS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file for the metrics in JSON format")
    arguments = parser.parse_args()
    if arguments.serve:
        name, beam_size, folder = arguments.serve
        serve(name, int(beam_size), Path(folder))
        return
    if not arguments.run or not arguments.source:
        parser.error("--run and --source are required")

    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(
            arguments.run, arguments.source, arguments.sentences, arguments.competitors, folder
        )
        for beam_size in arguments.beams:
            results[beam_size] = measure(arguments.competitors, beam_size, arguments.rounds, folder)
            print_table(beam_size, results[beam_size])
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
