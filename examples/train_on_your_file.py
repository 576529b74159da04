"""Trains on one file with a source and a target column, and shows what came of it.

    python examples/train_on_your_file.py fra.txt --columns 1 2 --languages en fr

Any tab-separated file, CSV or JSON lines will do (docs/data.md). Started again, it continues.
"""

import argparse

import flaxformer_mt as fmt
from flaxformer_mt.config import (
    DataConfig,
    DecodeConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)


def main() -> None:
    """Trains, plots and translates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--columns", nargs=2, default=("1", "2"))
    parser.add_argument("--languages", nargs=2, default=("en", "fr"))
    parser.add_argument("--workdir", default="runs/mine")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--hold-out", type=int, default=1000)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--beam-size", type=int, default=4)
    parser.add_argument("--devices", type=int, default=0, help="0 = all")
    options = parser.parse_args()

    config = fmt.ExperimentConfig(
        model=fmt.TransformerConfig(
            d_model=options.width,
            num_heads=4,
            d_ff=4 * options.width,
            num_encoder_layers=2,
            num_decoder_layers=2,
            norm_position="pre",
            final_norm=True,
        ),
        data=DataConfig(
            path=options.file,
            columns=tuple(options.columns),
            hold_out=options.hold_out,
            source_language=options.languages[0],
            target_language=options.languages[1],
            vocab_size=options.vocabulary,
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=300),
        train=TrainConfig(
            num_steps=options.steps,
            batch_tokens=options.batch_tokens,
            log_every=max(options.steps // 16, 1),
            eval_every=max(options.steps // 4, 1),
            checkpoint_every=max(options.steps // 4, 1),
            eval_sentences=200,
            best_metric="bleu",
        ),
        parallel=ParallelConfig(num_devices=options.devices),
        decode=DecodeConfig(beam_size=options.beam_size),
    )

    hooks = fmt.Hooks()

    @hooks.add_hook
    def good_enough(info: fmt.StepInfo) -> bool:
        """Stops the run at a BLEU of 40."""
        return "valid" in info.metrics and float(info.metrics["valid"]["bleu"]) > 40

    run = fmt.train(config, options.workdir, hooks=hooks)
    for checkpoint in run.checkpoints:
        print(checkpoint)
    run.plot(smoothing=0.5).save(f"{options.workdir}/curves.html")

    sources = list(run.texts("test").sources[:5])
    for source, translation in zip(sources, run.translator().translate(sources), strict=True):
        print(f"{source} -> {translation}")


if __name__ == "__main__":
    main()
