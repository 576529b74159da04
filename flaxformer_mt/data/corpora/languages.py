"""The language that text is in, as py3langid identifies it.

Source: Lui and Baldwin 2011, "Cross-domain Feature Selection for Language Identification".
"""

import copy
import functools
from typing import Any

from flaxformer_mt.data.corpora.language_codes import parsed

_VARIETIES = (
    {"ar", "ary", "arz"},
    {"bs", "hr", "sr"},
    {"da", "nn", "no"},
    {"fa", "prs"},
    {"id", "ms"},
    {"wuu", "yue", "zh"},
)
"""Languages that are too similar for their sentences to be told apart."""

_SCRIPTS = {"sr": {"Cyrl", "Latn"}, "zh": {"Hans", "Hant"}}
"""Scripts that a code may name, of languages that are known in several."""


def are_similar(first: str, second: str) -> bool:
    """Returns whether two codes are of one language, or of varieties of one."""
    return first == second or any({first, second} <= group for group in _VARIETIES)


class Identifier:
    """Identifies the language of text.

    Candidates are the languages with an ISO 639 code of two letters, and those that are expected:
    short text in a widespread language is taken for one of few speakers too often.

    Args:
      expected: languages of the text, those that are unknown to the library among them.

    Raises:
      ImportError: py3langid is not installed.
    """

    def __init__(self, *expected: str):
        self._library, self._labels = _library()
        self.codes = tuple(map(self._code, expected))
        """The codes of `expected`; "" for those that are unknown."""
        chosen = {code for code in self._labels if len(code) == 2} | {*self.codes} - {""}
        self._library = copy.copy(self._library)
        self._library.set_languages([self._labels[code] for code in chosen])

    def identify(self, text: str) -> tuple[str, float]:
        """Returns the code of the most probable language of a text, and its probability."""
        label, probability = self._library.classify(text)
        return parsed(label).language, probability

    def _code(self, language: str) -> str:
        code, script, *_ = parsed(language)
        if script and script not in _SCRIPTS.get(code, {parsed(code).likely.script}):
            return ""
        known = [label for label in self._labels if are_similar(code, label)]
        return code if code in known else next(iter(known), "")


@functools.cache
def _library() -> tuple[Any, dict[str, str]]:
    """Returns py3langid's identifier, and its labels by the codes of `parsed`."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    library = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    labels = (label for label in library.labels if label != "zxx")  # No language, such as numbers.
    return library, {parsed(label).language: label for label in labels}
