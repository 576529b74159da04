"""MarianMT of transformers, trained in PyTorch by the configuration of one of our experiments.

It starts from our initial values, and each step has the sentences of our step, the same loss,
optimizer and learning rate. Dropout has other random numbers, and the sentences of a batch are
padded instead of packed. The trained parameters are written to a run folder, so that they are
translated with, and scored, as ours are.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxformer_mt import experiment, interop
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.stream.batches import Array, Batch, DataPosition, whole_batches
from flaxformer_mt.interop.formats import huggingface
from flaxformer_mt.interop.formats.bundle import ModelBundle
from flaxformer_mt.run_reader import Run
from flaxformer_mt.runs import step_folders
from flaxformer_mt.runs.checkpoint import write_params
from flaxformer_mt.runs.layout import METRICS
from flaxformer_mt.training.reporting.metrics import JsonLinesWriter
from flaxformer_mt.training.reporting.progress import Interval

FAMILY = "marian"


def train(config: ExperimentConfig, workdir: Path) -> Run:
    """Trains in PyTorch; if an earlier training was stopped, from the start.

    Args:
      config: an experiment of the preset `marian`, with plain Adam.
      workdir: the run folder to write. Its only checkpoint is that of the best validation loss,
        without the state of the optimizer.
    """
    if step_folders.has_any(workdir):
        return Run(workdir)
    shutil.rmtree(workdir, ignore_errors=True)
    with experiment.open_folder(workdir):
        parts = experiment.prepare(config, workdir)
        model = _Marian(parts)
        writer = JsonLinesWriter(workdir / METRICS)
        intervals, last = parts.config.train, parts.config.train.num_steps
        position, interval = DataPosition(), Interval()
        best, best_loss = (0, model.params()), np.inf
        for step in range(1, last + 1):
            start = time.perf_counter()
            batch, position = parts.dataset.training.read(position)
            rate = float(parts.schedule(step - 1))
            interval.add(model.step(batch, rate))
            interval.seconds += time.perf_counter() - start
            if step % intervals.log_every == 0 or step == last:
                writer.write(step, "train", _training_metrics(interval, rate))
                interval = Interval()
            if step % intervals.eval_every == 0 or step == last:
                metrics = model.validate()
                writer.write(step, "valid", metrics)
                print(f"step {step:,}: development loss {metrics['loss']:.4f}", flush=True)
                if metrics["loss"] < best_loss:
                    best, best_loss = (step, model.params()), metrics["loss"]
        write_params(workdir, *best)
    return Run(workdir)


def _training_metrics(interval: Interval, rate: float) -> dict[str, float]:
    tokens = int(interval.metrics["loss"][1])
    return interval.means() | {
        "learning_rate": rate,
        "target_tokens": tokens,
        "target_tokens_per_second": tokens / interval.seconds,
    }


class _Marian:
    """`MarianMTModel` with the initial values, loss and optimizer of an experiment."""

    def __init__(self, parts: experiment.Experiment) -> None:
        import torch
        from transformers import MarianMTModel

        from flaxformer_mt.parity.families.recipes import recipe  # Needs PyTorch.

        self._config = config = parts.config
        self._validation = whole_batches(parts.dataset.valid.tokens, config)
        params = jax.device_get(parts.initial_state().params)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / FAMILY
            huggingface.write(ModelBundle(config, params, parts.dataset.tokenizers), path)
            self._model = MarianMTModel.from_pretrained(path)
        # Loading may make the tables of sinusoids trainable.
        for stack in (self._model.model.encoder, self._model.model.decoder):
            stack.embed_positions.weight.requires_grad_(False)
        # Marian trains this bias, and so do we; transformers only reads it.
        bias = self._model.final_logits_bias
        del self._model.final_logits_bias
        self._model.final_logits_bias = torch.nn.Parameter(bias)
        torch.manual_seed(config.train.seed)  # Dropout.
        self._loss = recipe(FAMILY).loss
        adam = config.optimizer
        self._optimizer = torch.optim.Adam(
            self._model.parameters(), betas=(adam.beta1, adam.beta2), eps=adam.epsilon
        )

    def step(self, batch: Batch, rate: float) -> dict[str, tuple[float, float]]:
        """Updates the model; returns the metrics, each a sum and a weight."""
        self._model.train()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        logits, target = self._predict(batch)
        loss, tokens = self._loss(
            logits, target, self._config.train.label_smoothing, self._config.model.pad_id
        )
        (loss / tokens).backward()
        self._optimizer.step()
        return {"loss": (loss.item(), int(tokens)), "accuracy": self._accuracy(logits, target)}

    def validate(self) -> dict[str, float]:
        """Returns the metrics of the development corpus."""
        import torch

        self._model.eval()
        pad_id, sums = self._config.model.pad_id, Interval()
        with torch.no_grad():
            for batch in self._validation:
                logits, target = self._predict(batch)
                values = {"accuracy": self._accuracy(logits, target)}
                for name, smoothing in (
                    ("loss", self._config.train.label_smoothing),
                    ("cross_entropy", 0.0),
                ):
                    total, tokens = self._loss(logits, target, smoothing, pad_id)
                    values[name] = (total.item(), int(tokens))
                sums.add(values)
        means = sums.means()
        return means | {"perplexity": float(np.exp(means["cross_entropy"]))}

    def params(self) -> Any:
        """Copies the parameters, as those of our model."""
        tensors = {name: value.clone() for name, value in self._model.state_dict().items()}
        model = self._config.model
        names = ("num_heads", "pad_id", "bos_id", "eos_id")  # Tensors do not tell them.
        overrides = {name: getattr(model, name) for name in names}
        _, params = interop.load(FAMILY, tensors, **overrides)
        return interop.model_params(params)

    def _predict(self, batch: Batch) -> tuple[Any, Any]:
        """Returns the logits [N, V] and the target tokens [N] of padded sentences."""
        pad_id = self._config.model.pad_id
        source = _padded(batch.encoder_input_tokens, batch.encoder_segment_ids, pad_id)
        decoder_input, target = (
            _padded(tokens, batch.decoder_segment_ids, pad_id)
            for tokens in (batch.decoder_input_tokens, batch.decoder_target_tokens)
        )
        outputs = self._model(
            input_ids=source,
            attention_mask=source != pad_id,
            decoder_input_ids=decoder_input,
            use_cache=False,
        )
        return outputs.logits.flatten(0, 1), target.flatten()

    def _accuracy(self, logits: Any, target: Any) -> tuple[int, int]:
        """Returns the number of right predictions, and that of target tokens."""
        is_token = target != self._config.model.pad_id
        return int(((logits.argmax(1) == target) & is_token).sum()), int(is_token.sum())


def _padded(rows: Array | None, segment_ids: Array | None, pad_id: int) -> Any:
    """Returns the sentences of packed rows [B, L] as padded rows, [sentences, longest]."""
    import torch

    sentences = [torch.from_numpy(tokens).long() for tokens in _sentences(rows, segment_ids)]
    return torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=pad_id)


def _sentences(rows: Array | None, segment_ids: Array | None) -> Iterator[np.ndarray]:
    for row, ids in zip(np.asarray(rows), np.asarray(segment_ids), strict=True):
        for segment in range(1, ids.max() + 1):
            yield row[ids == segment]
