"""Language codes, and the language that text is in, as py3langid identifies it.

Source: Lui and Baldwin 2011, "Cross-domain Feature Selection for Language Identification".
"""

import copy
import functools
import re
from typing import Any

_COMMON_NAMES = {"chn": "zh", "chs": "zh_Hans", "cht": "zh_Hant", "cn": "zh", "jp": "ja"}
"""Languages by names that are common, but not their ISO 639 codes."""

_VARIETIES = (
    {"ar", "ary", "arz"},
    {"bs", "hr", "sr"},
    {"da", "nb", "nn", "no"},
    {"fa", "prs"},
    {"id", "ms"},
    {"wuu", "yue", "zh"},
)
"""Languages that are too similar for their sentences to be told apart."""

_SCRIPTS = {"sr": {"Cyrl", "Latn"}, "zh": {"Hans", "Hant"}}
"""Scripts that a code may name, of languages that are known in several."""


def divided(language: str) -> tuple[str, list[str]]:
    """Divides a language code ("deu", "sr-Latn", "zh.tok") into its ISO 639 code and the rest.

    The code is the shortest one ("de") if Babel is installed, which the extra `demo` has.
    """
    first, *subtags = re.findall(r"[^\W_]+", language) or [""]
    code, *script = _COMMON_NAMES.get(first.lower(), first.lower()).split("_")
    try:
        from babel.core import get_global
    except ImportError:
        return code, [*script, *subtags]
    code, *more = get_global("language_aliases").get(code, code).split("_")
    return code, [*script, *more, *subtags]


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
        return divided(label)[0], probability

    def _code(self, language: str) -> str:
        code, subtags = divided(language)
        scripts = {tag.title() for tag in subtags if len(tag) == 4 and tag.isalpha()}
        if not scripts <= _SCRIPTS.get(code, set()):
            return ""
        known = [label for label in self._labels if are_similar(code, label)]
        return code if code in known else next(iter(known), "")


@functools.cache
def _library() -> tuple[Any, dict[str, str]]:
    """Returns py3langid's identifier, and its labels by the codes of `divided`."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    library = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    labels = (label for label in library.labels if label != "zxx")  # No language, such as numbers.
    return library, {divided(label)[0]: label for label in labels}
