"""Languages of files: codes, headers, and the units of translation memories."""

import collections
import json
import random
import xml.etree.ElementTree as ElementTree
from xml.sax.saxutils import escape

import pytest

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import open_corpora
from flaxformer_mt.data.corpora.language_codes import chosen, sides_of
from flaxformer_mt.data.corpora.rows import merged
from flaxformer_mt.errors import UserError

WANTED = ("en", "fr")


def opened(path, languages=WANTED, **options):
    source, target = languages
    data = DataConfig(path=str(path), source_language=source, target_language=target, **options)
    return open_corpora(data, "train")[0]


@pytest.mark.parametrize(
    ("wanted", "codes", "best"),
    [
        ("en", "de en-GB en-US en", 3),
        ("en", "de en-GB eng_Latn_US", 2),
        ("en", "EN-gb", 0),
        ("pt-BR", "pt-PT", None),
        ("pt-BR", "pt-PT pt", 1),
        ("pt_PT", "pt-BR por pt-pt", 2),
        ("zh-TW", "zh zh-CN zh-Hant", 2),
        ("zh-Hant", "zh-TW zh-Hant-TW", 0),
        ("zh-Hant-TW", "zh-HK zh_TW", 1),
        ("zh-Hans-CN", "zho_Hant cmn_Hans", 1),
        ("zh", "zh-TW zh-CN", 1),
        ("zh-CHT", "zh-Hans zh-Hant", 1),
        ("sr-Latn", "sr-Cyrl sr-RS sr_RS@latin", 2),
        ("sr-Latn", "sr", 0),
        ("sr", "sr-Latn sr-Cyrl", 1),
        ("no", "nn nb-NO", 1),
        ("he", "iw", 0),
        ("ger", "de_DE.UTF-8", 0),
        ("jp", "ja", 0),
        ("bpe", "de bpe", 1),
    ],
)
def test_the_best_code_for_a_language(wanted, codes, best):
    assert chosen(codes.split(), [wanted]) == (None if best is None else (best,))


@pytest.mark.parametrize(
    ("header", "languages", "sides"),
    [
        ("en-GB|fr-CA", "en fr", (0, 1)),
        ("en_US|de", "en de", (0, 1)),
        ("deu_Latn|eng_Latn", "en de", (1, 0)),
        ("id|English (US)|French (Canada)", "en fr", (1, 2)),
        ("sentence_eng_Latn|sentence_fra_Latn", "en fr", (0, 1)),
        ("Chinese (Traditional)|Chinese (Simplified)|en", "en zh-TW", (2, 0)),
        ("en|pt-PT|pt-BR", "en pt-BR", (0, 2)),
        ("en|pt-PT", "en pt-BR", None),
        ("English|French|English", "en fr", None),
        ("English|Anglais", "en fr", None),
    ],
)
def test_headers(tmp_path, header, languages, sides):
    cells, wanted = header.split("|"), tuple(languages.split())
    assert sides_of(cells, wanted) == sides
    if sides is not None:
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps({name: str(index) for index, name in enumerate(cells)}))
        assert [*opened(path, wanted).pairs()] == [tuple(map(str, sides))]


def memory(*units, head='<?xml version="1.0"?>'):
    return f'{head}<tmx version="1.4"><header/><body>{"".join(units)}</body></tmx>'


def unit(*variants, attribute="xml:lang"):
    texts = ("" if text is None else f"<seg>{text}</seg>" for _, text in variants)
    return "<tu>{}</tu>\n".format(
        "".join(
            f'<tuv {attribute}="{code}">{text}</tuv>'
            for (code, _), text in zip(variants, texts, strict=True)
        )
    )


def test_units_that_are_not_used_are_counted(tmp_path, caplog):
    path = tmp_path / "a.tmx"
    path.write_text(
        memory(
            unit(("EN-us", "a&#13;&#10;b"), ("fr", "c")),
            unit(("en-GB", "d"), ("en-US", "e"), ("fr-CA", "f"), attribute="lang"),
            unit(("en", "x"), ("de", "y")),
            unit(("en", "x"), ("fr", None)),
            unit(("en", " "), ("fr", "y")),
        )
    )
    corpus = opened(path)
    assert [*corpus.pairs()] == [("a b", "c"), ("e", "f")]
    counts = {
        "units without fr": 1,
        "units without <seg>": 1,
        "units with an empty <seg>": 1,
    }
    assert {kind: rows.count for kind, rows in corpus.malformed().items()} == counts
    assert all(any(kind in message for message in caplog.messages) for kind in counts)
    # Also if the last rows are no pairs, and if parts are read by several processes.
    found = [chunk.malformed for chunk in opened(path).chunks(2) if chunk]
    assert {kind: rows.count for kind, rows in merged(found).items()} == counts
    british = opened(path, columns=("en-GB", "fr"))
    assert [*british.pairs()] == [("d", "f")]


def test_text_of_units_is_whole(tmp_path):
    path = tmp_path / "a.tmx"
    doctype = '<?xml version="1.0"?><!DOCTYPE tmx SYSTEM "tmx14.dtd">'
    text = "&eacute;<bpt i='1'>&lt;b&gt;<sub>no</sub></bpt> <hi>x</hi><ph/>&amp;"
    path.write_text(memory(unit(("en", text), ("fr", "y")), head=doctype), encoding="utf-16")
    assert [*opened(path).pairs()] == [("é x&", "y")]
    path.write_text(memory(unit(("en", "&nosuch;"), ("fr", "y")), head=doctype))
    with pytest.raises(UserError, match="declares the entity nosuch, which is not read: replace"):
        [*opened(path).pairs()]
    path.write_text(memory(unit(("en", "a"), ("pt-PT", "b"))))
    with pytest.raises(UserError, match="only in en, pt-PT; 1 units without pt-BR: name the lang"):
        [*opened(path, ("en", "pt-BR")).pairs()]


def random_memory(rng):
    """Returns a translation memory by a small grammar."""

    def text():
        parts = rng.choices(
            ["a", "b c", "&amp;", "&#233;", "\n ", "<hi>d</hi>", "<it>x<sub>y</sub></it>"],
            k=rng.randrange(5),
        )  # fmt: skip
        return rng.choice([None, "", "".join(parts), *["".join(parts) + escape("<t>")] * 5])

    codes = ["en", "en", "EN-us", "en_GB", "fr", "fr", "fr-FR", "fr-CA", "de", "fra"]
    units = [
        unit(*((rng.choice(codes), text()) for _ in range(rng.randrange(4)))) for _ in range(20)
    ]
    return memory(*units, unit(("en", "a"), ("fr", "b")))


def counted(content):
    """Returns the pairs of a memory in English and French, and how many units are none."""

    def of(segment):
        if segment.tag in ("ph", "it"):
            return ""
        return (segment.text or "") + "".join(of(child) + (child.tail or "") for child in segment)

    pairs, reasons = [], collections.Counter()
    order = {"en": ["en", "en-us", "en-gb"], "fr": ["fr", "fra", "fr-fr", "fr-ca"]}
    for element in ElementTree.fromstring(content).iter("tu"):
        texts = collections.defaultdict(list)
        for variant in element.iter("tuv"):
            code = variant.get("{http://www.w3.org/XML/1998/namespace}lang")
            segment = variant.find("seg")
            texts[code.lower().replace("_", "-")].append(None if segment is None else of(segment))
        # The three-letter code is the same language.
        found = {
            side: [(o if o != "fra" else "fr", t) for o in known for t in texts.get(o, ())]
            for side, known in order.items()
        }
        best = [[t for _, t in found[side] if t and t.strip()] for side in order]
        if all(best):
            pairs.append([best[0][0].replace("\n", " "), best[1]])
        elif not all(found.values()):
            reasons["language"] += 1
        else:
            reasons["segment"] += 1
    return pairs, reasons


@pytest.mark.parametrize("seed", range(10))
def test_random_memories_are_read_as_another_parser_does(tmp_path, seed):
    content = random_memory(random.Random(seed))
    (tmp_path / "a.tmx").write_text(content)
    corpus = opened(tmp_path / "a.tmx")
    ours = [*corpus.pairs()]
    pairs, reasons = counted(content)
    assert [source for source, _ in ours] == [source for source, _ in pairs]
    # "fr" and "fra" are equally good: the first in the file.
    for (_, target), (_, targets) in zip(ours, pairs, strict=True):
        assert target in [text.replace("\n", " ") for text in targets]
    dropped = {kind: rows.count for kind, rows in corpus.malformed().items()}
    absent = sum(n for kind, n in dropped.items() if "seg" not in kind)
    assert (absent, sum(dropped.values()) - absent) == (reasons["language"], reasons["segment"])
