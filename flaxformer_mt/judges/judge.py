"""Learned metrics as functions: of texts, and, inside compiled programs, of token ids."""

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer
from flaxformer_mt.decoding.batching.length_buckets import Bucket, fill_rows, plan_buckets
from flaxformer_mt.decoding.batching.workers import batch_tokens
from flaxformer_mt.decoding.text_arguments import require_texts
from flaxformer_mt.errors import UserError


class Side(enum.Enum):
    """A text that a metric reads."""

    SOURCE = "sources"
    HYPOTHESIS = "hypotheses"
    REFERENCE = "references"


Template: TypeAlias = tuple[Side | tuple[int, ...], ...]
"""The parts of a row of tokens: texts, and tokens between them."""

_HEAD_ROWS = 1024
"""Rows of the second stage of a metric; one number makes one program."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Judge:
    """A learned metric of translations, from `metric`.

        judge = fmt.metric("metricx-24-hybrid-large")
        judge.scores(["Ein Hund läuft."], ["A dog runs."], ["A dog is running."])  # float64 [1]

    It is also a pure function of padded token ids, `judge(judge.params, source_ids,
    hypothesis_ids, reference_ids)`, for use inside a compiled step; `judge.encode` makes the ids.

    Each row of tokens is mapped to features, and the features of one or more rows to the score of a
    translation. Equal rows are computed once, so that n references of n hypotheses take 2n passes
    of a metric such as COMET that encodes each text by itself.
    """

    name: str
    """The name of the metric in reports."""
    config: TransformerConfig
    """The encoder, or the encoder-decoder model."""
    params: Any
    """The parameters: nested dicts of arrays."""
    tokenizer: Tokenizer
    forms: Mapping[bool, tuple[Template, ...]]
    """The rows of a translation, with a reference (True) and without. A metric may lack a form."""
    features: Callable[[TransformerConfig, Any, Int[Array, "B N"]], Array]
    """(config, params, rows) -> features [B, ...]."""
    head: Callable[..., Float[Array, "B"]]
    """(params, the features of each row of a translation) -> scores."""
    longest_text: int | None
    """The number of tokens to which each text is cut; None = none is cut."""
    longest_row: int
    """The number of tokens to which each row is cut, as the published program does."""
    lower_is_better: bool
    """Whether the metric measures errors."""
    digest: str
    """The SHA-256 of the parameters, in hexadecimal."""

    def __repr__(self) -> str:
        return f"<Judge {self.signature}>"

    @property
    def identity(self) -> dict[str, str]:
        """What identifies a score: the metric, its weights and precision, and which is better."""
        better = "lower" if self.lower_is_better else "higher"
        weights, dtype = self.digest[:12], self.config.dtype
        return {"metric": self.name, "weights": weights, "dtype": dtype, "better": better}

    @property
    def signature(self) -> str:
        """The `identity` in one line, to be quoted beside a score."""
        return "|".join(f"{name}:{value}" for name, value in self.identity.items())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of texts, cut to `longest_text`, without tokens around them."""
        distinct = [*dict.fromkeys(texts)]
        ids = dict(zip(distinct, self.tokenizer.encode_parts(distinct), strict=True))
        return [ids[text][: self.longest_text] for text in texts]

    def __call__(
        self,
        params: Any,
        source_ids: Int[Array, "B S"],
        hypothesis_ids: Int[Array, "B T"],
        reference_ids: Int[Array, "B R"] | None = None,
    ) -> Float[Array, "B"]:
        """Computes scores, inside a compiled program.

        Args:
          params: `params` of this metric, perhaps on other devices.
          source_ids: int32, from `encode`, padded by `tokenizer.pad_id`.
          hypothesis_ids: the same of the translations.
          reference_ids: the same of the references; None = without.

        Raises:
          UserError: the metric needs a reference, or has no use for one.
        """
        ids = {Side.SOURCE: source_ids, Side.HYPOTHESIS: hypothesis_ids}
        ids |= {} if reference_ids is None else {Side.REFERENCE: reference_ids}
        templates = self._templates(reference_ids is not None)
        pad = self.config.pad_id
        rows = [joined(template, ids, pad)[:, : self.longest_row] for template in templates]
        return self.head(params, *(self.features(self.config, params, row) for row in rows))

    def scores(
        self,
        sources: Sequence[str],
        hypotheses: Sequence[str],
        references: Sequence[str] | None = None,
        *,
        mesh: Mesh | None = None,
        batch_size: int = 0,
    ) -> Float[np.ndarray, "N"]:
        """Computes the score of each translation.

        Args:
          sources: N source sentences.
          hypotheses: N translations.
          references: N references; None = without.
          mesh: devices over whose first axis the rows of a batch are divided; None = one device.
          batch_size: the number of tokens in a batch, padding included; 0 = as in decoding.

        Returns:
          float64 [N].

        Raises:
          TypeError: the texts are not lists of strings.
          UserError: their numbers differ; the metric needs a reference, or has no use for one.
        """
        given = {Side.SOURCE: sources, Side.HYPOTHESIS: hypotheses}
        given |= {} if references is None else {Side.REFERENCE: references}
        texts = {side: require_texts(each, side.value) for side, each in given.items()}
        count = len(texts[Side.HYPOTHESIS])
        for side, each in texts.items():
            if len(each) != count:
                raise UserError(f"{self.name}: {count} hypotheses, but {len(each)} {side.value}")
        templates = self._templates(references is not None)
        used = {part for template in templates for part in template if isinstance(part, Side)}
        ids = {side: self.encode(texts[side]) for side in texts if side in used}
        rows = [
            [
                self._row(template, {side: ids[side][index] for side in ids})
                for index in range(count)
            ]
            for template in templates
        ]
        numbers: dict[tuple[int, ...], int] = {}
        positions = [[numbers.setdefault(row, len(numbers)) for row in each] for each in rows]
        features = self._features([*numbers], mesh, batch_size)
        found = np.zeros(count)
        for start in range(0, count, _HEAD_ROWS):
            chosen = [each[start : start + _HEAD_ROWS] for each in positions]
            size = len(chosen[0])
            padded = (
                np.resize(features[each], (_HEAD_ROWS, *features.shape[1:])) for each in chosen
            )
            found[start : start + size] = _head(self.head, self.params, *padded)[:size]
        return found

    def mean_scores(
        self,
        sources: Sequence[str] | None,
        hypotheses: Sequence[str],
        references: Sequence[Sequence[str]],
    ) -> Float[np.ndarray, "N"]:
        """Computes scores, the mean over several references, as a metric of `evaluation`.

            evaluation.evaluate(
                hypotheses, references, sources=sources, metrics={"comet": judge.mean_scores}
            )

        References are left out if the metric has no use for them.

        Raises:
          UserError: there are no sources.
        """
        if sources is None:
            raise UserError(f"the metric {self.name} reads the sources: give sources= (--source)")
        if True not in self.forms:
            return self.scores(sources, hypotheses)
        # One call computes each text once, however many references there are.
        count = len(references)
        every = [*itertools.chain.from_iterable(references)]
        found = self.scores([*sources] * count, [*hypotheses] * count, every)
        return np.mean(found.reshape(count, -1), axis=0)

    def _templates(self, has_reference: bool) -> tuple[Template, ...]:
        if has_reference not in self.forms:
            problem = "has no use for references" if has_reference else "needs references"
            raise UserError(f"the metric {self.name} {problem}")
        return self.forms[has_reference]

    def _row(self, template: Template, ids: Mapping[Side, Sequence[int]]) -> tuple[int, ...]:
        parts = (ids[part] if isinstance(part, Side) else part for part in template)
        return tuple(itertools.chain(*parts))[: self.longest_row]

    def _features(
        self, rows: Sequence[tuple[int, ...]], mesh: Mesh | None, batch_size: int
    ) -> np.ndarray:
        """Returns the features of distinct rows, [number of rows, ...]."""
        params, placed = self.params, jnp.asarray
        divisor = 1
        if mesh is not None:
            divisor = mesh.devices.shape[0]
            over_rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
            params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
            placed = functools.partial(jax.device_put, device=over_rows)
        tokens = batch_size or batch_tokens(DecodeConfig(), jax.default_backend())
        found: dict[int, np.ndarray] = {}
        for bucket in plan_buckets([*map(len, rows)], tokens * divisor, self.config):
            whole = Bucket(bucket.length, -(-bucket.num_rows // divisor) * divisor, bucket.indices)
            batch = placed(fill_rows(rows, whole, self.config.pad_id))
            computed = np.asarray(_features(self.features, self.config, params, batch))
            found |= zip(bucket.indices, computed, strict=False)
        return np.stack([found[index] for index in range(len(rows))]) if rows else np.zeros(0)


def joined(template: Template, ids: Mapping[Side, Array], pad_id: int) -> Int[Array, "B N"]:
    """Joins padded texts [B, N_i] to rows, with all padding at the end."""
    count = len(next(iter(ids.values())))
    parts = [
        ids[part]
        if isinstance(part, Side)
        else jnp.broadcast_to(jnp.array(part, jnp.int32), (count, len(part)))
        for part in template
    ]
    tokens = jnp.concatenate(parts, axis=1)
    order = jnp.argsort(tokens == pad_id, axis=1, stable=True)
    return jnp.take_along_axis(tokens, order, axis=1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _features(function: Any, config: TransformerConfig, params: Any, rows: Array) -> Array:
    return function(config, params, rows)


@functools.partial(jax.jit, static_argnums=0)
def _head(function: Any, params: Any, *features: Array) -> Array:
    return function(params, *features)
