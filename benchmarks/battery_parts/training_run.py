"""Training to the end with BLEU: Multi30k if there is its text, otherwise reversed digits."""

import dataclasses
import shutil
import time
from collections.abc import Iterator
from typing import Any

from battery_parts.options import Options


def run(options: Options) -> Iterator[dict[str, Any]]:
    """Trains, and translates the test corpus."""
    from flaxformer_mt import experiment, runtime
    from flaxformer_mt.runs.layout import METRICS
    from flaxformer_mt.runs.metrics_file import read_metrics

    runtime.configure()
    config = configuration(options)
    # Without TensorBoard, whose package is not needed for this.
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, trackers=()))
    begin = time.perf_counter()
    root = options.out / "training_run"
    shutil.rmtree(root, ignore_errors=True)  # A run of an earlier battery would be continued.
    with experiment.open_folder(root) as folder:
        parts = experiment.prepare(config, folder)
        experiment.fit(parts, folder)
        lines = read_metrics(folder / METRICS)
        trained = {
            "corpus": config.data.corpus,
            "steps": config.train.num_steps,
            "seconds_of_training": time.perf_counter() - begin,
            "last_metrics": [line for line in lines if line["split"] == "train"][-1],
        }
        yield trained
        step, _, metrics = experiment.evaluate_test(parts, folder)
        yield {**trained, "best_step": step, "test": metrics}


def configuration(options: Options) -> Any:
    """Returns the configuration of the run."""
    from configs import multi30k_tiny_en_de, reverse
    from flaxformer_mt.config import OptimizerConfig

    if options.data and not options.tiny:
        config = multi30k_tiny_en_de.get_config()
        return dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, dtype="bfloat16"),
            data=dataclasses.replace(config.data, path=str(options.data)),
            train=dataclasses.replace(config.train, eval_every=2000, checkpoint_every=2000),
        )
    config = reverse.get_config()
    if not options.tiny:
        return config
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, d_model=16, d_ff=16, num_encoder_layers=1, num_decoder_layers=1
        ),
        data=dataclasses.replace(config.data, generated_pairs=300),
        optimizer=OptimizerConfig(schedule="constant", learning_rate=1e-3),
        train=dataclasses.replace(
            config.train, num_steps=4, batch_tokens=256, log_every=2, eval_sentences=2
        ),
    )
