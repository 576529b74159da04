"""Training speed, compared with PyTorch.

    python benchmarks/training.py --data FOLDER [--sizes SMALL MEDIUM BASE] [--json FILE]

FOLDER holds parallel text: train.en, train.de (or .gz). Every competitor trains the same model on
the same text and vocabulary, with Adam, label smoothing and dropout at the same sites:

    ours       `training/step.py` on packed rows
    lean       a Transformer in plain PyTorch: fused query/key/value projection,
               scaled_dot_product_attention, fused Adam, batches of pairs of similar length
    compiled   the same through torch.compile
    marian     `MarianMTModel` of transformers (post-norm, as it is published)

Each has a process of its own, which stays alive and waits, without spinning, until it is told to
make some steps: rounds in which all take turns see the same machine, whatever else it does.
Measurements are medians over the rounds, ratios are medians of the rounds' ratios. All processes
get the same settings of the memory allocator, which matters as much as anything else here
(docs/speed.md).

Versions of this toolkit, or settings, are compared in the same way: `--competitors ours
"before=ours PYTHONPATH=OTHER_CHECKOUT" "flag=ours XLA_FLAGS=--xla_..."`.
"""

import argparse
import contextlib
import dataclasses
import gzip
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, and how many steps a turn has."""

    layers: int
    d_model: int
    d_ff: int
    num_heads: int
    steps: int
    vocab: int = 8000


SIZES = {
    "SMALL": Size(4, 128, 256, 4, steps=4),
    "MEDIUM": Size(6, 256, 1024, 4, steps=2),
    "BASE": Size(6, 512, 2048, 8, steps=1),
    "BIG": Size(6, 1024, 4096, 16, steps=1),
}
PAD, BOS, EOS = 0, 1, 2
DROPOUT, SMOOTHING, LEARNING_RATE, BETAS, EPSILON = 0.1, 0.1, 3e-4, (0.9, 0.98), 1e-9

# glibc hands large blocks back to the system and gets them anew, page by page, at every step.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**26),
    "MALLOC_ARENA_MAX": "1",
}
THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


@dataclasses.dataclass(frozen=True)
class Task:
    """The training task of all competitors."""

    size: Size
    dtype: str
    batch_tokens: int
    row_length: int
    sources: list[np.ndarray]
    targets: list[np.ndarray]
    matrix_side: int = 2048

    def batches_by_length(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Endless random batches [B, S], [B, T] of pairs of similar length, padded."""
        random = np.random.default_rng(0)
        lengths = np.array(
            [(len(t), len(s)) for s, t in zip(self.sources, self.targets, strict=True)]
        )
        while True:
            order = np.lexsort((random.random(len(lengths)), lengths[:, 1], lengths[:, 0]))
            ends = np.cumsum(lengths[order, 0])
            cuts = np.searchsorted(ends, np.arange(self.batch_tokens, ends[-1], self.batch_tokens))
            batches = np.split(order, cuts + 1)[:-1]
            for number in random.permutation(len(batches)):
                yield (
                    _padded([self.sources[pair] for pair in batches[number]]),
                    _padded([self.targets[pair] for pair in batches[number]]),
                )


def _padded(sentences: list[np.ndarray]) -> np.ndarray:
    rows = np.full((len(sentences), max(map(len, sentences))), PAD, np.int32)
    for row, sentence in zip(rows, sentences, strict=True):
        row[: len(sentence)] = sentence
    return rows


def model_config(size: Size, dtype: str) -> Any:
    """Our configuration of the model."""
    from flaxformer_mt.config import TransformerConfig

    return TransformerConfig(
        source_vocab_size=size.vocab,
        target_vocab_size=size.vocab,
        d_model=size.d_model,
        num_heads=size.num_heads,
        d_ff=size.d_ff,
        num_encoder_layers=size.layers,
        num_decoder_layers=size.layers,
        dropout_rate=DROPOUT,
        norm_position="pre",
        final_norm=True,
        dtype=dtype,
    )


def flops_per_target_token(size: Size, sources: np.ndarray, targets: np.ndarray) -> float:
    """What the equations ask for, given the lengths [pairs] of both sides of the corpus."""
    from flaxformer_mt.objectives.flops import training_flops, work_of_sentences

    work = work_of_sentences(sources, targets)
    return float(training_flops(model_config(size, "float32"), work) / work.targets)


Step = Callable[[], int]
"""Runs a step to its end; returns the number of target tokens of its batch, without padding."""


def make_ours(task: Task) -> Step:
    """Our training step on our packed batches."""
    from flaxformer_mt import runtime

    runtime.configure()
    import functools

    import jax

    from flaxformer_mt.config import (
        DataConfig,
        ExperimentConfig,
        OptimizerConfig,
        TrainConfig,
    )
    from flaxformer_mt.data.stream.encoded_corpus import CorpusReport, EncodedCorpus, SideReport
    from flaxformer_mt.data.stream.packing import Sentences
    from flaxformer_mt.data.stream.training_stream import TrainingStream
    from flaxformer_mt.model.transformer import Transformer
    from flaxformer_mt.training.devices import seed_key
    from flaxformer_mt.training.objective import make_objective
    from flaxformer_mt.training.optimizer import make_optimizer, make_schedule
    from flaxformer_mt.training.state import create_state
    from flaxformer_mt.training.step import train_step

    size = task.size
    config = ExperimentConfig(
        model=model_config(size, task.dtype),
        data=DataConfig(target_row_length=task.row_length),
        optimizer=OptimizerConfig(
            schedule="constant",
            learning_rate=LEARNING_RATE,
            beta1=BETAS[0],
            beta2=BETAS[1],
            epsilon=EPSILON,
        ),
        train=TrainConfig(label_smoothing=SMOOTHING, batch_tokens=task.batch_tokens),
    )
    sources, targets = (Sentences.from_lists(side) for side in (task.sources, task.targets))
    report = CorpusReport(
        len(targets),
        {},
        *(SideReport(len(side.tokens), 0.0, 0, 0, 0) for side in (sources, targets)),
    )
    corpus = EncodedCorpus(sources, targets, name="benchmark", report=report)
    stream = TrainingStream([corpus], config)
    config, position = stream.config, stream.start

    model = Transformer(config.model)
    optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer, size.d_model, 1))
    step = jax.jit(
        functools.partial(
            train_step,
            objective=make_objective(model, config.train),
            optimizer=optimizer,
            config=config.train,
        ),
        donate_argnums=0,
    )
    key = seed_key(config.train.seed)
    state = create_state(key, model, optimizer, config.train)

    def run() -> int:
        nonlocal state, position
        batch, position = stream.read(position)
        state, metrics = step(state, batch, jax.random.fold_in(key, state.step))
        return int(metrics["loss"][1])

    return run


def _torch_step(task: Task, model: Any, compiled: bool = False) -> Step:
    """A step of a PyTorch model that maps source [B, S] and decoder inputs [B, T] to logits."""
    import torch
    import torch.nn.functional as F

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).train()
    optimizer = torch.optim.Adam(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True
    )

    def loss_sum(source, decoder_input, target):
        with torch.autocast(device, torch.bfloat16, enabled=task.dtype == "bfloat16"):
            logits = model(source, decoder_input)
        return F.cross_entropy(
            logits.flatten(0, 1).float(),
            target.flatten(),
            ignore_index=PAD,
            label_smoothing=SMOOTHING,
            reduction="sum",
        )

    if compiled:
        loss_sum = torch.compile(loss_sum, dynamic=True)
    batches = task.batches_by_length()

    def run() -> int:
        source, target = next(batches)
        decoder_input = np.concatenate([np.full_like(target[:, :1], BOS), target[:, :-1]], 1)
        tokens = int(np.count_nonzero(target))
        source, decoder_input, target = (
            torch.from_numpy(x).long().to(device, non_blocking=True)
            for x in (source, decoder_input, target)
        )
        optimizer.zero_grad(set_to_none=True)
        loss = loss_sum(source, decoder_input, target) / tokens
        loss.backward()
        optimizer.step()
        loss.item()
        return tokens

    return run


def make_lean(task: Task, compiled: bool = False) -> Step:
    """A pre-norm Transformer in PyTorch, with nothing that costs time without need."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    size = task.size

    def split(x):
        return x.unflatten(-1, (size.num_heads, -1)).transpose(1, 2)

    class Attention(nn.Module):
        def __init__(self, from_encoder: bool):
            super().__init__()
            width = size.d_model
            if from_encoder:
                self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
            else:
                self.query_key_value = nn.Linear(width, 3 * width)
            self.from_encoder = from_encoder
            self.output = nn.Linear(width, width)

        def forward(self, x, encoded=None, mask=None, causal=False):
            if self.from_encoder:
                query, (key, value) = self.query(x), self.key_value(encoded).chunk(2, -1)
            else:
                query, key, value = self.query_key_value(x).chunk(3, -1)
            context = F.scaled_dot_product_attention(
                split(query), split(key), split(value), attn_mask=mask, is_causal=causal
            )
            return self.output(context.transpose(1, 2).flatten(2))

    class Layer(nn.Module):
        def __init__(self, decoder: bool):
            super().__init__()
            self.attention, self.attention_norm = Attention(False), nn.LayerNorm(size.d_model)
            if decoder:
                self.cross, self.cross_norm = Attention(True), nn.LayerNorm(size.d_model)
            self.feed_forward = nn.Sequential(
                nn.LayerNorm(size.d_model),
                nn.Linear(size.d_model, size.d_ff),
                nn.ReLU(),
                nn.Linear(size.d_ff, size.d_model),
                nn.Dropout(DROPOUT),
            )
            self.dropout = nn.Dropout(DROPOUT)

        def forward(self, x, mask, encoded=None):
            if encoded is None:
                x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask))
            else:
                # Padding stands at the end: a causal mask keeps it from real positions.
                x = x + self.dropout(self.attention(self.attention_norm(x), causal=True))
                x = x + self.dropout(self.cross(self.cross_norm(x), encoded, mask))
            return x + self.feed_forward(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(size.vocab, size.d_model) * size.d_model**-0.5)
            self.encoder = nn.ModuleList(Layer(False) for _ in range(size.layers))
            self.decoder = nn.ModuleList(Layer(True) for _ in range(size.layers))
            self.encoder_norm = nn.LayerNorm(size.d_model)
            self.decoder_norm = nn.LayerNorm(size.d_model)
            self.dropout = nn.Dropout(DROPOUT)
            angles = torch.arange(256)[:, None] / 10000 ** (
                torch.arange(0, size.d_model, 2) / size.d_model
            )
            self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], -1))

        def embed(self, tokens):
            x = F.embedding(tokens, self.table) * size.d_model**0.5
            return self.dropout(x + self.positions[: tokens.shape[1]])

        def forward(self, source, decoder_input):
            mask = (source != PAD)[:, None, None, :]
            x = self.embed(source)
            for layer in self.encoder:
                x = layer(x, mask)
            encoded = self.encoder_norm(x)
            x = self.embed(decoder_input)
            for layer in self.decoder:
                x = layer(x, mask, encoded)
            return F.linear(self.decoder_norm(x), self.table)

    return _torch_step(task, Model(), compiled)


def make_compiled(task: Task) -> Step:
    """`make_lean` through torch.compile."""
    return make_lean(task, compiled=True)


def make_marian(task: Task) -> Step:
    """MarianMT of transformers."""
    from torch import nn
    from transformers import MarianConfig, MarianMTModel

    size = task.size
    marian = MarianMTModel(
        MarianConfig(
            vocab_size=size.vocab,
            d_model=size.d_model,
            encoder_layers=size.layers,
            decoder_layers=size.layers,
            encoder_attention_heads=size.num_heads,
            decoder_attention_heads=size.num_heads,
            encoder_ffn_dim=size.d_ff,
            decoder_ffn_dim=size.d_ff,
            activation_function="relu",
            dropout=DROPOUT,
            scale_embedding=True,
            pad_token_id=PAD,
            eos_token_id=EOS,
            forced_eos_token_id=None,
            decoder_start_token_id=BOS,
            use_cache=False,
            max_position_embeddings=256,
        )
    )

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.marian = marian

        def forward(self, source, decoder_input):
            return self.marian(
                input_ids=source, attention_mask=source != PAD, decoder_input_ids=decoder_input
            ).logits

    return _torch_step(task, Model())


COMPETITORS = {
    "ours": make_ours,
    "lean": make_lean,
    "compiled": make_compiled,
    "marian": make_marian,
}


def matrix_peak(name: str, dtype: str, side: int) -> float:
    """The best rate of a competitor's library at products of square matrices, in FLOP/s."""
    if name == "ours":
        import jax
        import jax.numpy as jnp

        matrix = jnp.ones((side, side), dtype)
        product = jax.jit(lambda x: x @ x)

        def multiply() -> None:
            jax.block_until_ready([product(matrix) for _ in range(4)])
    else:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        matrix = torch.ones(side, side, dtype=getattr(torch, dtype), device=device)

        def multiply() -> None:
            for _ in range(4):
                product = matrix @ matrix
            product[0, 0].item()

    multiply()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        multiply()
        seconds.append(time.perf_counter() - start)
    return 4 * 2 * side**3 / min(seconds)


def device_kind(name: str) -> str:
    """What a competitor's library calls the device."""
    if name == "ours":
        import jax

        return jax.devices()[0].device_kind
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def peak_bytes(name: str) -> int:
    """The most memory that the process ever had: of the GPU, if there is one."""
    if name == "ours":
        import jax

        statistics_of_device = jax.devices()[0].memory_stats() or {}
        if "peak_bytes_in_use" in statistics_of_device:
            return statistics_of_device["peak_bytes_in_use"]
    else:
        import torch

        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(name: str, folder: Path) -> None:
    """The competitor's process: does what the lines on its standard input say."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print must not get between the replies.

    def reply(**measurements: float | str) -> None:
        print(json.dumps(measurements), file=replies, flush=True)

    arguments = json.loads((folder / "task.json").read_text())
    text = np.load(folder / "text.npz")
    task = Task(
        Size(**arguments.pop("size")),
        **arguments,
        **{
            side: np.split(text[f"{side}_tokens"], text[f"{side}_ends"][:-1])
            for side in ("sources", "targets")
        },
    )
    step = COMPETITORS[name](task)
    start = time.perf_counter()
    step()
    reply(first_step_seconds=time.perf_counter() - start)
    for line in sys.stdin:
        command = json.loads(line)
        if command == "end":
            memory = peak_bytes(name)
            reply(
                matrix_peak=matrix_peak(name, task.dtype, task.matrix_side),
                device_kind=device_kind(name),
                peak_bytes=memory,
            )
            return
        cpu, start = time.process_time(), time.perf_counter()
        tokens = sum(step() for _ in range(command))
        reply(
            tokens=tokens,
            seconds=time.perf_counter() - start,
            processor_seconds=time.process_time() - cpu,
        )


class Competitor:
    """A process that makes steps when it is told to.

    Args:
      text: "NAME" or "LABEL=NAME VARIABLE=VALUE ...", the variables of its environment.
      folder: where the task is.
    """

    def __init__(self, text: str, folder: Path):
        first, *settings = shlex.split(text)
        self.label, _, name = first.partition("=")
        environment = os.environ | ALLOCATOR | THREADS
        environment |= dict(setting.split("=", 1) for setting in settings)
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name or self.label, str(folder)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.turns: list[dict[str, float]] = []

    def __enter__(self) -> "Competitor":
        self.first_step_seconds = self._answer()["first_step_seconds"]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def make_steps(self, number: int) -> dict[str, float]:
        """Makes steps, and returns what they took."""
        print(number, file=self._process.stdin, flush=True)
        return self._answer()

    def end(self) -> dict[str, Any]:
        """Ends the process, and returns its last measurements."""
        print('"end"', file=self._process.stdin, flush=True)
        answer = self._answer()
        self._process.wait()
        return answer

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.label} failed; what it printed stands above")
        return json.loads(line)


def read_lines(folder: Path, name: str) -> list[str]:
    """The lines of a file that may be compressed."""
    path = folder / name
    content = (
        path.read_bytes()
        if path.exists()
        else gzip.decompress(path.with_name(f"{name}.gz").read_bytes())
    )
    return content.decode("utf-8").splitlines()


def write_text(data: Path, languages: tuple[str, str], vocab: int, folder: Path) -> None:
    """Learns a joint vocabulary and writes the tokenized training text."""
    import sentencepiece

    sides = [read_lines(data, f"train.{language}") for language in languages]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for side in sides for line in side]),
        model_prefix=str(folder / "vocabulary"),
        vocab_size=vocab,
        model_type="bpe",
        pad_id=PAD,
        bos_id=BOS,
        eos_id=EOS,
        unk_id=3,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "vocabulary.model"))
    encoded = [[[*sentence, EOS] for sentence in pieces.encode(side)] for side in sides]
    write_tokens(*encoded, folder)


def write_tokens(sources: list[list[int]], targets: list[list[int]], folder: Path) -> None:
    """Writes the tokenized training text, with its end tokens."""
    arrays = {}
    for name, sentences in (("sources", sources), ("targets", targets)):
        arrays[f"{name}_tokens"] = np.array([t for s in sentences for t in s], np.int32)
        arrays[f"{name}_ends"] = np.cumsum([len(sentence) for sentence in sentences])
    np.savez(folder / "text.npz", **arrays)


def write_task(
    size: Size,
    dtype: str,
    batch_tokens: int,
    row_length: int,
    folder: Path,
    matrix_side: int = 2048,
) -> dict[str, Any]:
    """Writes what the competitors are to do, besides the text; returns it."""
    task = {
        "size": dataclasses.asdict(size),
        "dtype": dtype,
        "batch_tokens": batch_tokens,
        "row_length": row_length,
        "matrix_side": matrix_side,
    }
    (folder / "task.json").write_text(json.dumps(task))
    return task


def measure(
    size: Size,
    competitors: list[str],
    rounds: int,
    warm_up: int,
    folder: Path,
    start_together: bool = False,
) -> dict[str, dict[str, Any]]:
    """Lets the competitors take turns, and returns the measurements of each by its label.

    Args:
      size: the model.
      competitors: see `Competitor`.
      rounds: the number of turns that count.
      warm_up: the number of turns before.
      folder: where text and task are.
      start_together: compile at the same time; the times of compilation then include each other.
    """
    with contextlib.ExitStack() as ends:
        start = (Competitor(text, folder) for text in competitors)
        running = [ends.enter_context(each) for each in (list(start) if start_together else start)]
        for number in range(warm_up + rounds):
            # Every second round goes the other way: nobody always follows the same one.
            for competitor in running if number % 2 else reversed(running):
                turn = competitor.make_steps(size.steps)
                speed = turn["tokens"] / turn["seconds"]
                print(
                    f"round {number}: {competitor.label} {speed:,.0f}", file=sys.stderr, flush=True
                )
                if number >= warm_up:
                    competitor.turns.append(turn)
        text = np.load(folder / "text.npz")
        lengths = (np.diff(text[f"{side}_ends"], prepend=0) for side in ("sources", "targets"))
        flops = flops_per_target_token(size, *lengths)
        return {
            competitor.label: measurements(competitor, running[0], flops) for competitor in running
        }


def measurements(competitor: Competitor, first: Competitor, flops: float) -> dict[str, Any]:
    """What is reported of a competitor; ratios above 1 say that the first one is faster.

    Args:
      competitor: after its last turn.
      first: the one that it is compared with.
      flops: of the equations for a target token.
    """

    def rates(turns: list[dict[str, float]], seconds: str) -> np.ndarray:
        return np.array([turn["tokens"] / turn[seconds] for turn in turns])

    from flaxformer_mt.accelerators import accelerator_of

    last = competitor.end()
    accelerator = accelerator_of(last["device_kind"])
    speed = float(np.median(rates(competitor.turns, "seconds")))
    ratios, by_processor = (
        rates(first.turns, seconds) / rates(competitor.turns, seconds)
        for seconds in ("seconds", "processor_seconds")
    )
    return {
        "target_tokens_per_second": speed,
        "ratio": float(np.median(ratios)),
        "ratio_quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        "ratio_by_processor_time": float(np.median(by_processor)),
        "flops_per_target_token": flops,
        "share_of_peak": speed * flops / last["matrix_peak"],
        **({} if accelerator is None else {"mfu": speed * flops / accelerator.flops}),
        "first_step_seconds": competitor.first_step_seconds,
        **last,
    }


def print_table(name: str, results: dict[str, dict[str, Any]]) -> None:
    """A table of `measure`'s measurements."""
    first = next(iter(results))
    print(
        f"\n{name:<12}{'tokens/s':>9}  {first + ' is faster by':<22}{'(CPU time)':>10}"
        f"{'peak GFLOP/s':>14}{'share':>7}{'memory':>10}{'first step':>12}"
    )
    for label, row in results.items():
        low, high = row["ratio_quartiles"]
        print(
            f"{label:<12}{row['target_tokens_per_second']:>9,.0f}  "
            f"{row['ratio']:<6.3f}({low:.3f} - {high:.3f}) "
            f"{row['ratio_by_processor_time']:>10.3f}"
            f"{row['matrix_peak'] / 1e9:>14,.0f}{row['share_of_peak']:>7.1%}"
            f"{row['peak_bytes'] / 2**20:>6,.0f} MiB{row['first_step_seconds']:>10.1f} s",
            flush=True,
        )


def main() -> None:
    """Measures every size that was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help="folder of the parallel text")
    parser.add_argument("--languages", nargs=2, default=("en", "de"))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["SMALL", "MEDIUM", "BASE"])
    parser.add_argument("--competitors", nargs="+", default=list(COMPETITORS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds that do not count")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="target positions a step")
    parser.add_argument("--row-length", type=int, default=64, help="of our packed rows")
    parser.add_argument("--json", type=Path, help="also write the measurements here")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve[0], Path(arguments.serve[1]))
        return
    if not arguments.data:
        parser.error("--data is needed")

    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(arguments.data, arguments.languages, Size.vocab, folder)
        for size in arguments.sizes:
            task = write_task(
                SIZES[size], arguments.dtype, arguments.batch_tokens, arguments.row_length, folder
            )
            results[size] = measure(
                SIZES[size], arguments.competitors, arguments.rounds, arguments.warm_up, folder
            )
            print_table(size, results[size])
            if arguments.json:
                arguments.json.write_text(json.dumps({**task, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
