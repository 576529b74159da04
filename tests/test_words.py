"""The project's own idioms, which readers had to translate, stay out of code, docs and messages.

docs/architecture.md has the glossary: the words to use, and the few terms of the project's own.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [
    path
    for pattern in ("*.md", "*.py", *(f"{folder}/**/*.{end}" for folder in (
        "flaxformer_mt", "docs", "configs", "benchmarks", "tests"
    ) for end in ("py", "md")))
    for path in sorted(ROOT.glob(pattern))
    if path != Path(__file__)
]  # fmt: skip

UNITS = (
    "seconds?|ms|milliseconds?|bytes|KiB|MiB|GiB|tokens|steps|pairs|sentences|batches|"
    "parameters|pieces"
)
WORDS = {
    r"\bparted\b": "separated, comma-separated",
    r"\bleft whole\b|\bstays? whole\b": "not sharded, replicated",
    r"\bchange hands\b": "continuous batching",
    r"\bleft over\b": "remaining",
    r"(?<!\")\bfigures\b(?!\")": "metrics, measurements",
    rf"\b({UNITS}) an? (target token|step|device|second|row|token|sentence|update|side)\b": (
        "per ..."
    ),
    r"\b[Uu]nprojected\b|\bwhat logits are made of\b": "factors of the output projection",
    r"\bPast\b|what self-attention remembers": "key/value cache",
    r"\bwhat is asked of\b|(?<!▁)\bwish(es)?\b": "per-sentence constraints",
    r"(?<!teacher )\bforcing\b": "teacher forcing, forced decoding",
    r"(?<!\")\bmerits?\b": "ranking score",
    r"\bdear(er|est)?\b": "expensive",
    r"\brefusals_name\b|\brefused in words\b": "raises UserError with a message that ...",
    r"\bwhole model room\b": "shared numerics",
    r"\bsurveys?\b": "family summary",
    r"\bevidence\b|\bclues?\b": "inputs of a hypothesis test",
    r"\banyhow\b": "unconstrained",
    r"\bon the way\b": "intermediate",
    r"\bone after the other\b": "sequentially",
    r"(?<!one )(?<!one token )(?<!one sentence )\bat a time\b": "in chunks of ...",
    r"\bwhere that can be\b": "if available",
}


def flowing(path):
    """The text of a file in one line, without the marks of comments."""
    return re.sub(r"\s+(# )?", " ", path.read_text(encoding="utf-8"))


TEXTS = {path.relative_to(ROOT).as_posix(): flowing(path) for path in FILES}


@pytest.mark.parametrize("pattern", WORDS)
def test_an_idiom_of_our_own_is_not_used(pattern):
    # As in an editor: capitals in a pattern mean themselves.
    flags = 0 if re.search("[A-Z]", pattern) else re.IGNORECASE
    found = [
        f"{name}: ...{text[max(0, match.start() - 30) : match.end() + 30]}..."
        for name, text in TEXTS.items()
        for match in re.finditer(pattern, text, flags)
    ]
    assert not found, f"write: {WORDS[pattern]}\n" + "\n".join(found)


def test_slopes_are_those_of_alibi():
    """A derivative is called a gradient."""
    found = [name for name, text in TEXTS.items() if re.search(r"(?i)\bslopes?\b", text)]
    assert all("alibi" in f"{name} {TEXTS[name]}".lower() for name in found), found
