"""Writes docs/accelerators.md from the results of the battery and of the compilers."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "accelerators.md"
INTRODUCTION = """\
# Accelerators

Measurements and compile-time estimates for GPUs and TPUs. `benchmarks/battery.py` writes this page;
change the program, not the page:

<!-- not run: needs a GPU -->
```sh
python benchmarks/battery.py --out DIR --data MULTI30K
python benchmarks/accelerators.py --config configs/wmt14_en_de_base.py --device h100 --json FILE
python benchmarks/battery.py --out DIR --write-docs --compilers FILE ...
```

The first command needs a GPU and at most nine minutes. The second compiles for the device with XLA,
and needs none. MFU is the model FLOPs per second, without those of padding, divided by the peak for
bfloat16 in `flaxformer_mt/accelerators.py`.
"""
NOT_RUN = "Not run on a device yet."
_LOGS = "https://github.com/mlcommons/training_results_v0.7/blob/master"
_MLPERF = "MLPerf 0.7: Transformer big, WMT14 English to German until BLEU 25"
OTHERS = (
    (
        _MLPERF,
        "8 A100",
        "472 s with validations; 101,000 target tokens/s per GPU",
        f"[NVIDIA's log]({_LOGS}/NVIDIA/results/dgxa100_ngc20.06_pytorch/transformer/result_0.txt)",
    ),
    (
        _MLPERF,
        "4,096 TPU v3 chips",
        "13.9 s with validations",
        f"[Google's log]({_LOGS}/Google/results/tpu-v3-8192-JAX/transformer/result_0.txt)",
    ),
    (
        "NeMo: T5 of 220M parameters",
        "32 A100",
        "102,000 tokens/s per GPU",
        "[NeMo Framework Launcher](https://github.com/NVIDIA/NeMo-Framework-Launcher), 7.2",
    ),
    (
        "MaxText: decoders of 16B to 128B parameters",
        "256 to 8,192 TPU v5e chips",
        "46% to 67% MFU",
        "[MaxText, 2024](https://github.com/google/maxtext/tree/cc7478e29dcf12d2f03d38d65d21d21f65380a60)",
    ),
)
"""Program and task, hardware, what was reached, source."""
MARKS = """\
### Marks

Training steps of 16,384 target positions on one H100 and a decoding step, with jax 0.12. Both
columns are compiled from this repository, before and after the logits of GPUs were computed in
chunks of 2^29 instead of 2^27:

<!-- not run: takes minutes, and needs jax[cuda13] -->
```sh
python benchmarks/accelerators.py --config configs/wmt14_en_de_base.py --device h100 \\
    --target-tokens 16384 --steps training,decoding
```

| step | figure | before | after | mark |
| --- | --- | --- | --- | --- |
| base | bound | 13.49 ms | 13.33 ms | 12.0 ms |
| base | kernels | 988 | 910 | 800 |
| base | temporary memory | 2.71 GiB | 3.14 GiB | |
| big | bound | 36.16 ms | 35.62 ms | 34 ms |
| big | kernels | 938 | 852 | 800 |
| big | temporary memory | 5.44 GiB | 5.89 GiB | |
| decoding, base | kernels | 196 | 196 | 120 |

No mark is met. Of the 3.17 ms of the loss in base, three matrix products take 1.89 ms at the peak
rate; reading the logits and writing their gradient takes 0.73 ms, and reading them for the sums
0.37 ms. With `--model.remat=none`, base has a bound of 13.04 ms and 851 kernels, for 3.68 GiB of
temporary memory.

CUDA graphs (`--xla_gpu_enable_command_buffer`) were not compiled: the text of a program does not
show them. By kinds of kernels, `FUSION` would cover fusions and matrix products outside of loops:
796 of the 910 launches of base (87%), 738 of 852 of big (87%), and 185 of 196 of the decoding step
(94%). The loop over chunks has 34 launches in each training step and needs `WHILE`. The 72 launches
of Mosaic kernels need `CUSTOM_CALL`; whether XLA accepts these kernels there is not known. The rest
are copies (8 and 10) and one `TopK`. Products that a device tunes to cuBLAS need `CUBLAS` or
`CUBLASLT` instead of `FUSION`.
"""
TIME_TO_BLEU = """\
The log of a run as MLPerf has it, and the time until its validation reached a BLEU:

<!-- not run: takes hours -->
```sh
python benchmarks/time_to_bleu.py RUN --target-bleu 25 --log FILE
```
"""


def write(folder: Path, compilers: Sequence[Path]) -> None:
    """Writes the page.

    Args:
      folder: where the battery has written its results, all, some or none of them.
      compilers: what `benchmarks/accelerators.py --json` has written.
    """
    measured = [json.loads(path.read_text(encoding="utf-8")) for path in compilers]
    lines = [INTRODUCTION, *_compilers(measured), *_others(folder, measured), *_devices(folder)]
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _compilers(measured: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The section of the compilers."""
    yield "## Compile-time estimates\n"
    yield (
        "A step of training or decoding, compiled for the device. The bound is the least time\n"
        "that the program can take: kernel by kernel, the larger of its products at the peak rate\n"
        "and its bytes at the peak bandwidth, without launches. It is a property of the program,\n"
        "not a measurement; the last column is the share of the peak at the bound.\n"
        "\n"
        "None of the kernels for GPUs and TPUs (see [Training](training.md)) has been run on a\n"
        "device. What is known of them are their results in interpreters on CPUs, and that the\n"
        "compilers take them.\n"
    )
    if not measured:
        yield "Not compiled yet.\n"
        return
    yield from _table(
        "step",
        "configuration",
        "device",
        "mesh",
        "positions per device",
        "bound",
        "kernels",
        "moved",
        "temporary memory",
        "share of peak",
    )
    for results in measured:
        for name, step in results.items():
            mesh = " x ".join(f"{axis} {n}" for axis, n in step["mesh"].items() if n > 1)
            is_training = name == "training"
            yield _row(
                name,
                Path(step["config"]).stem,
                f"{step['device']} {step['topology']}",
                (mesh if is_training else "") or "one device",
                f"{step['target_positions_per_device']:,}" if is_training else "",
                f"{step['bound'] * 1e3:,.2f} ms",
                f"{step['kernels']:,}",
                f"{step['bytes'] / 1e9:,.2f} GB",
                f"{step['temporary'] / 2**30:,.2f} GiB",
                f"{step['share_of_peak']:.1%}",
            )
    yield ""
    yield MARKS


def _others(folder: Path, measured: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The section of the published results of others, beside our bounds."""
    yield "## What others reached\n"
    yield from _table("program and task", "hardware", "reached", "source")
    for row in OTHERS:
        yield _row(*row)
    for step in (results["training"] for results in measured if "training" in results):
        rate = step["target_positions_per_device"] / step["bound"]
        yield _row(
            f"ours: {Path(step['config']).stem}, not run",
            f"{step['device']} {step['topology']}",
            f"at most {float(f'{rate:.3g}'):,.0f} target positions/s per device, "
            f"{step['share_of_peak']:.0%} of the peak",
            "the bound above",
        )
    yield ""
    if not (folder / "training_speed.json").exists():
        yield "No training speed of ours has been measured on a GPU or TPU."
    yield (
        "No time to a BLEU of ours has been measured on them. Devices differ: the peak of an A100\n"
        "for bfloat16 is 312 TFLOP/s, that of an H100 is 989.\n"
    )
    yield TIME_TO_BLEU


def _devices(folder: Path) -> Iterator[str]:
    """The sections of the battery's parts."""
    for name, (title, describe) in PARTS.items():
        yield f"## {title}\n"
        path = folder / f"{name}.json"
        if not path.exists():
            yield f"{NOT_RUN}\n"
            continue
        part = json.loads(path.read_text(encoding="utf-8"))
        if part["status"] != "done":
            yield f"{part['status'].capitalize()} after {part['seconds']:.0f} s: {part['reason']}\n"
        if "results" not in part:
            continue
        versions = part["device"]
        yield (
            f"{versions['device_kind']}, jax {versions['jax']}, torch {versions['torch']}, "
            f"transformers {versions['transformers']}; {part['seconds']:.0f} s.\n"
        )
        yield from describe(part["results"])
        yield ""


def _parity(results: dict[str, Any]) -> Iterator[str]:
    yield from _table(
        "family", "logits, float32", "gradients", "bfloat16 from float32", "the same on the CPU"
    )
    for name, row in results["families"].items():
        exact, narrow = row["float32"], row["bfloat16"]
        yield _row(
            name,
            _small(exact["logits"]),
            _small(exact["gradients"]),
            _small(narrow["device"]),
            _small(narrow["cpu"]),
        )


def _attention(results: dict[str, Any]) -> Iterator[str]:
    yield from _table("dtype", "backend", "largest difference from einsum", "forward and backward")
    for dtype, rows in results.items():
        for backend, row in rows.items():
            if "not_here" in row:
                yield _row(dtype, backend, row["not_here"], "")
            else:
                apart = _small(row.get("largest_difference"))
                yield _row(dtype, backend, apart, f"{row['milliseconds']:.2f} ms")


def _training(results: dict[str, Any]) -> Iterator[str]:
    yield from _table(
        "model", "program", "target tokens/s", "ours is faster by", "MFU", "memory", "first step"
    )
    for size, rows in results.items():
        for name, row in rows.items():
            yield _row(
                size,
                name,
                f"{row['target_tokens_per_second']:,.0f}",
                f"{row['ratio']:.2f}",
                f"{row['mfu']:.1%}" if "mfu" in row else "unknown peak",
                f"{row['peak_bytes'] / 2**30:,.1f} GiB",
                f"{row['first_step_seconds']:.0f} s",
            )


def _decoding(results: dict[str, Any]) -> Iterator[str]:
    yield from _table("search", "program", "sentences/s", "ours is faster by", "same translations")
    for search, rows in results.items():
        for name, row in rows.items():
            yield _row(
                search.replace("_", " "),
                name,
                f"{row['sentences_per_second']:,.1f}",
                f"{row['ratio']:.2f}",
                f"{row['same_translations']:.1%}",
            )


def _training_run(results: dict[str, Any]) -> Iterator[str]:
    last = results["last_metrics"]
    share = f", MFU {last['mfu']:.1%}" if "mfu" in last else ""
    yield (
        f"Corpus: {results['corpus']}. {results['steps']:,} steps in "
        f"{results['seconds_of_training']:.0f} s with validations, the last ones at "
        f"{last['target_tokens_per_second']:,.0f} target tokens/s{share}."
    )
    if "test" in results:
        test = results["test"]
        yield (
            f"\nTest corpus, checkpoint of step {results['best_step']:,}: BLEU {test['bleu']:.2f}, "
            f"chrF {test['chrf']:.2f} [{test['bleu_signature']}]."
        )


def _continuing(results: dict[str, Any]) -> Iterator[str]:
    yield from _table(
        "operations", "compared with an undisturbed run", "parameters that differ", "by at most"
    )
    for operations, pairs in results.items():
        for name, row in pairs.items():
            apart = row["parameters_that_differ"]
            yield _row(
                operations.replace("_", " "),
                name,
                f"{len(apart)}",
                _small(row["largest_difference"]) if apart else "0, equal to the bit",
            )


PARTS: dict[str, tuple[str, Callable[[dict[str, Any]], Iterator[str]]]] = {
    "parity": ("Parity with PyTorch", _parity),
    "attention": ("Fused attention", _attention),
    "training_speed": ("Training speed", _training),
    "decoding_speed": ("Decoding speed", _decoding),
    "training_run": ("A run to its end", _training_run),
    "continuing": ("A run that was killed and continued", _continuing),
}
"""The title of each part's section, and what it says of the results."""


def _table(*names: str) -> Iterator[str]:
    yield _row(*names)
    yield _row(*["---"] * len(names))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _small(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.1e}"
