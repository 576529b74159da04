"""What a conversion changes of a vocabulary: `convert --trim-vocabulary`, `--add-token`, ..."""

import dataclasses
from collections.abc import Mapping

from flaxformer_mt.interop.formats.bundle import ModelBundle
from flaxformer_mt.interop.vocabulary.changes import with_vocabulary
from flaxformer_mt.interop.vocabulary.extension import extended
from flaxformer_mt.interop.vocabulary.trimming import trimmed


@dataclasses.dataclass(frozen=True)
class VocabularyOptions:
    """Tokens to remove, then tokens to add."""

    texts: tuple[str, ...] = ()
    """Sentences whose tokens are kept; without any, all are."""
    tokens: tuple[str, ...] = ()
    languages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """New languages with those whose rows theirs begin with."""


UNCHANGED = VocabularyOptions()


def with_options(
    bundle: ModelBundle, options: VocabularyOptions
) -> tuple[ModelBundle, tuple[str, ...]]:
    """Returns a model with the vocabulary that options describe, and a line about each change.

    Raises:
      UserError: the vocabulary cannot be changed like this.
    """
    notes: tuple[str, ...] = ()
    if options.texts:
        bundle, lines = with_vocabulary(bundle, trimmed(bundle.tokenizers, options.texts))
        notes += lines
    if options.tokens or options.languages:
        change = extended(bundle.tokenizers, options.tokens, options.languages)
        bundle, lines = with_vocabulary(bundle, change)
        notes += lines
    return bundle, notes
