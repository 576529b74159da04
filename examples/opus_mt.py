"""Loads an OPUS-MT model, translates, looks into it, and trains it further on your file.

    python examples/opus_mt.py opus-mt-en-de mine.tsv --workdir runs/tuned

The folder is that of any Marian model of the Hugging Face Hub, once it is downloaded; folders of
NLLB, M2M-100, mBART-50, BART and T5 work in the same way.
"""

import argparse
from pathlib import Path

import flaxformer_mt as fmt


def main() -> None:
    """Translates before and after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("file", help="tab-separated: source, target")
    parser.add_argument("--workdir", default="runs/tuned")
    parser.add_argument("--languages", nargs=2, default=("en", "de"))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--hold-out", type=int, default=500)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--beam-size", type=int, default=4)
    parser.add_argument("--devices", type=int, default=0, help="0 = all")
    parser.add_argument("--sentence", default="A dog runs across the green grass.")
    options = parser.parse_args()
    workdir = Path(options.workdir)

    model = fmt.load(options.folder)
    print(model, model.translate(options.sentence, beam_size=options.beam_size))

    # A run folder, from which training starts and which every command accepts.
    start = workdir.with_name(f"{workdir.name}-start")
    run = fmt.Run(start) if start.exists() else model.save(start)
    model.attention(options.sentence).save(start / "attention.html")

    config = run.fine_tuning_config(
        data={
            "path": options.file,
            "columns": ("1", "2"),
            "hold_out": options.hold_out,
            "source_language": options.languages[0],
            "target_language": options.languages[1],
        },
        train={
            "num_steps": options.steps,
            "batch_tokens": options.batch_tokens,
            "eval_every": max(options.steps // 5, 1),
            "checkpoint_every": max(options.steps // 5, 1),
        },
        optimizer={"learning_rate": 1e-4, "warmup_steps": 50},
        decode={"beam_size": options.beam_size},
        parallel={"num_devices": options.devices},
    )
    tuned = fmt.train(config, workdir)
    print(tuned, tuned.translator().translate(options.sentence))
    tuned.plot().save(workdir / "curves.png")


if __name__ == "__main__":
    main()
