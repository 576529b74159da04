"""Evaluates a run: validations while it trains, and the test at its end."""

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxformer_mt import distributed
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.dataset import Dataset
from flaxformer_mt.data.stream.batches import whole_batches
from flaxformer_mt.data.stream.placement import own_shard, row_shards
from flaxformer_mt.decoding.batching.workers import decoding_on
from flaxformer_mt.decoding.parameters import on_devices
from flaxformer_mt.decoding.scoring.teacher_forcing import predict_tokens
from flaxformer_mt.decoding.translator import Sentence, Translator, into_languages
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation import evaluate, teacher_forced
from flaxformer_mt.memory_limits import explained_exhaustion
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.run_layout import METRICS
from flaxformer_mt.runs.checkpoint import restore_params
from flaxformer_mt.training.devices import RunDevices, place
from flaxformer_mt.training.reporting.console import Sample, some_of
from flaxformer_mt.training.reporting.metrics import JsonLinesWriter, validate
from flaxformer_mt.training.step import eval_step


class Tested(NamedTuple):
    """The best checkpoint of a run on the test corpus."""

    step: int
    translations: list[str]
    """A language model has none."""
    metrics: dict[str, Any]


def _of_all_processes(
    function: Callable[[Sequence[Any]], list[str]], items: Sequence[Any], params: Any
) -> list[str]:
    """Returns a text per item; processes with parameters of their own compute a part each."""
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params)):
        return function(items)  # All compute together.
    return distributed.gather_texts(function(distributed.share_out(items)))


class Validation:
    """Evaluates parameters of a run on its development and test sets."""

    def __init__(self, config: ExperimentConfig, dataset: Dataset, devices: RunDevices) -> None:
        self._config = config
        self._dataset = dataset
        self._devices, mesh = devices, devices.mesh
        self._batches = {
            split: whole_batches(evaluated.tokens, config, row_shards(mesh), own_shard(mesh))
            for split, evaluated in dataset.evaluation_sets.items()
        }
        batches = itertools.chain.from_iterable(self._batches.values())
        shapes = {str(jax.tree.map(np.shape, batch)) for batch in batches}
        self._eval_step = devices.compile_eval_step(
            functools.partial(eval_step, model=Transformer(config.model), config=config.train),
            len(shapes),
        )

    def measure(self, split: str, params: Any) -> dict[str, Any]:
        """Computes loss, accuracy and perplexity of the development or test corpus."""
        batches = map(self._devices.place_batch, self._batches[split])
        corpus = self._dataset.evaluation_sets[split].tokens
        lengths = np.maximum(*corpus.lengths)
        longest = int(lengths.argmax())
        if lengths[longest] <= self._config.data.target_row_length:
            return validate(self._eval_step, params, batches)
        with explained_exhaustion(
            f"the loss of {corpus.name}",
            f"shorten or remove its longest pair, number {longest + 1:,}, which has "
            f"{lengths[longest]:,} tokens",
        ):
            return validate(self._eval_step, params, batches)

    def validate(self, params: Any) -> tuple[dict[str, Any], list[Sample]]:
        """Computes the metrics of a validation from parameters on the devices.

        Also returns translations to show: of some of the sentences, and of `train.watch`.
        """
        metrics = self.measure("valid", params)
        if not self._config.model.has_inputs:
            return metrics, []
        train = self._config.train
        texts, watched = self._dataset.valid.texts, train.watch
        chosen = texts.sample(train.eval_sentences or len(texts))
        sources, references = (
            [side[index] for index in chosen] for side in (texts.sources, texts.targets)
        )
        sentences, (references,) = into_languages(
            sources, [references], self._dataset.tokenizers.target
        )
        hypotheses = self.translate(params, [*sentences, *watched])
        own = hypotheses[: len(sources)]
        quality = evaluate(own, references, standard=("bleu", "chrf"))
        which = "" if len(own) == len(texts) else f"random {len(own):,} of "
        quality["translated"] = f"{which or 'all '}{len(texts):,} sentences"
        samples = [
            *some_of([Sample(*each) for each in zip(sources, own, references, strict=True)]),
            *(Sample(*each) for each in zip(watched, hypotheses[len(sources) :], strict=True)),
        ]
        return {**metrics, **quality, **self._teacher_forced_metrics(params)}, samples

    def _teacher_forced_metrics(self, params: Any) -> dict[str, float]:
        wanted = self._config.train.teacher_forced_metrics
        corpus = self._dataset.valid.tokens
        if not wanted or corpus.sources is None:
            return {}
        sources, targets = (
            [side[index].tolist() for index in range(len(side))]
            for side in (corpus.sources, corpus.targets)
        )
        decode = self._config.decode
        ((model, params),) = on_devices([(self._config.model, params)], decode, rounded=False)

        def predicted(pairs: Sequence[int]) -> list[str]:
            own = ([side[index] for index in pairs] for side in (sources, targets))
            return [json.dumps(each) for each in predict_tokens(params, model, decode, *own)]

        lines = _of_all_processes(predicted, range(len(targets)), params)
        predictions = [json.loads(line) for line in lines]
        return teacher_forced.metrics(wanted, predictions, targets, list(map(len, sources)))

    def translate(
        self, params: Any, sources: Sequence[str | Sentence], show_progress: bool = False
    ) -> list[str]:
        """Translates; each of several processes, which all call it, translates a part."""
        decode = self._config.decode
        if self._config.parallel.num_devices:
            decode = decoding_on(self._devices.devices, decode)
        translator = Translator(self._config.model, params, self._dataset.tokenizers, decode)

        def translated(own: Sequence[str | Sentence]) -> list[str]:
            return translator.translate(own, show_progress=show_progress)

        return _of_all_processes(translated, sources, translator.models[0][1])

    def test(self, workdir: str | Path, show_progress: bool = False) -> Tested:
        """Evaluates the best checkpoint on the test corpus, and writes the metrics."""
        test, devices = self._dataset.test, self._devices
        if test is None:
            raise UserError("data.test_split is empty: there is nothing to test on")
        step, restored = restore_params(workdir, "best")
        params = place(restored, devices.mesh, devices.rules)
        del restored
        hypotheses: list[str] = []
        metrics = self.measure("test", params)
        if self._config.model.has_inputs:
            sentences, (references,) = into_languages(
                test.texts.sources, [test.texts.targets], self._dataset.tokenizers.target
            )
            hypotheses = self.translate(params, sentences, show_progress)
            metrics |= evaluate(hypotheses, references, standard=("bleu", "chrf"))
        if distributed.is_main():
            JsonLinesWriter(Path(workdir, METRICS)).write(step, "test", metrics)
        return Tested(step, hypotheses, metrics)
