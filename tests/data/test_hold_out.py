"""Pairs that are held out of the training corpora."""

import itertools

import pytest

from flaxformer_mt.config import CorpusConfig, DataConfig, ExperimentConfig
from flaxformer_mt.data.corpora import hold_out
from flaxformer_mt.data.corpora.comparison import comparable as all_comparable
from flaxformer_mt.data.dataset import open_all
from flaxformer_mt.errors import UserError

ROLES = ("valid", "test")


def comparable(text):
    return all_comparable([text])[0]


def numbered(count, first=0):
    """Sentences, each of which occurs twice, with two translations."""
    return [(f"Sentence {i // 2}.", f"Phrase {i}.") for i in range(first, first + count)]


def write(path, pairs):
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return str(path)


def divide(tmp_path, pairs, hold_out=32, **options):
    path = write(tmp_path / "own.tsv", pairs)
    data = DataConfig(path=path, hold_out=hold_out, target_language="fr", **options)
    corpora = open_all(ExperimentConfig(data=data))
    return {role: [pair for each in parts for pair in each.pairs()] for role, parts in
            corpora.items()}, corpora  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hold_out": 5, "train_corpora": (CorpusConfig(tag="<x>"),)}, "has a tag"),
        ({"valid_corpora": (CorpusConfig(hold_out=5),)}, r"valid_corpora\.0\.hold_out=5 has no"),
    ],
)
def test_numbers_without_effect(options, message):
    with pytest.raises(UserError, match=message):
        DataConfig(**options)


def test_frequent_sentences_are_spread_if_there_are_no_others(tmp_path, caplog):
    pairs = [(f"Source {i % 50}.", f"Target {i}.") for i in range(1000)]
    parts, corpora = divide(tmp_path, pairs, 5)
    assert all(len({source for source, _ in parts[role]}) == 5 for role in ROLES)
    assert corpora["train"][0].division()["left_out"] == 10 * 19
    assert not caplog.messages
    parts, _ = divide(tmp_path, pairs, 100)
    assert len(parts["train"]) >= 800
    assert "data.hold_out=100: of 1,000 pairs, 5 are held out for valid, since" in caplog.text
    with pytest.raises(UserError, match=r"0 are held out for valid, since .* ask for fewer"):
        divide(tmp_path, [("Thank you.", f"Merci {i}.") for i in range(1000)], 100)
    # A pair of one of six sources would take a sixth of the text with it; repeated pairs do not.
    for few in (
        [(f"Source {i % 6}.", f"Target {i}.") for i in range(3000)],
        [(f"Source {i}.", f"Target {i % 6}.") for i in range(3000)],
    ):
        with pytest.raises(UserError, match=r"of 3,000 pairs, 0 are held out for valid"):
            divide(tmp_path, few, 200)
    parts, _ = divide(
        tmp_path, [(f"Source {i % 1000}.", f"Target {i % 1000}.") for i in range(3000)], 200
    )
    assert [len(parts[role]) for role in ROLES] == [200, 200]


def test_text_with_another_tag_is_the_same(tmp_path):
    tags = ("<2fr>", "<2xx>", ">>de<<")
    pairs = [(f"{tags[i % 3]} Source {i // 3}.", f"Target {i}.") for i in range(900)]
    parts, _ = divide(tmp_path, pairs, 40)
    sources = [{source.split(" ", 1)[1] for source, _ in parts[role]} for role in parts]
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(sources, 2))
    assert comparable("<2fr>") == comparable("<2fr>.") != ""


def test_most_held_out_pairs_remain_while_the_file_grows(tmp_path):
    few, _ = divide(tmp_path, numbered(1000))
    assert sorted(pair for pairs in few.values() for pair in pairs) == sorted(numbered(1000))
    grown = [*numbered(400, 1000), *reversed(numbered(1000))]
    same_number, _ = divide(tmp_path, grown)
    in_proportion, _ = divide(tmp_path, grown, hold_out=round(32 * 1.4))
    for role in ROLES:
        assert len(few[role]) == len(same_number[role]) == 32
        assert {*same_number[role]} <= {*in_proportion[role]}
        assert len({*few[role]} & {*same_number[role]}) >= 16
        assert len({*few[role]} & {*in_proportion[role]}) >= 26


def test_hold_out_is_of_any_corpus_and_not_too_much(tmp_path):
    data = DataConfig(corpus="reverse", generated_pairs=200, hold_out=20)
    corpora = open_all(ExperimentConfig(data=data))
    assert all(len([*corpora[role][0].pairs()]) == 20 for role in ROLES)
    message = r"data\.hold_out=51 of .*own\.tsv are too many pairs: at most 50"
    with pytest.raises(UserError, match=message):
        divide(tmp_path, numbered(200), 51)[0]
    message = r"own\.tsv has fewer than 4 pairs that can be held out: give more text, or a dev"
    with pytest.raises(UserError, match=message):
        divide(tmp_path, numbered(1), 1)[0]
    message = r"give more text, loosen the filters \(data\.max_length_ratio=0\.1\), or a dev"
    with pytest.raises(UserError, match=message):
        divide(tmp_path, numbered(100), 1, max_length_ratio=0.1)[0]


SPELLINGS = (
    "where is the café?", "Where is the cafe\u0301?", "Where is\xa0the café?",
    "Where is the café", "Where is the caf\u200bé ?!", "Where is the cafe\u200b\u0301?",
    "- Where  is the\tcafé\n",
)  # fmt: skip


def test_comparable_text():
    assert all_comparable(SPELLINGS) == ["where is the café"] * len(SPELLINGS)
    assert [*map(comparable, SPELLINGS)] == ["where is the café"] * len(SPELLINGS)
    assert len({*map(comparable, ("1.5", "15", "?!", "...", ""))}) == 5
    assert comparable(" \u200b\n") == ""
    assert comparable("STRASSE ﬁ") == comparable("Straße fi") == "strasse fi"
    assert comparable("\ud800 A") == "a"
    assert all_comparable(["a", "", "b\nc", "\n"]) == ["a", "", "b c", ""]
    assert all_comparable([]) == []


def test_the_division_is_kept_for_other_processes_and_later_starts(tmp_path, monkeypatch, caplog):
    rows = [f"{source}\t{target}" for source, target in numbered(200)]
    rows[7] = "no tab"
    (tmp_path / "own.tsv").write_text("\n".join(rows))
    data = DataConfig(
        path=str(tmp_path / "own.tsv"), hold_out=20, target_language="fr", bad_rows="drop"
    )
    config = ExperimentConfig(data=data)

    def parts(cache=tmp_path / "cache"):
        corpora = open_all(config, cache_folder=cache)
        pairs = {role: [*corpora[role][0].pairs()] for role in corpora}
        numbers = {role: [pair.number for pair in pairs[role]] for role in pairs}
        return pairs, numbers, corpora["train"][0].division()

    made = parts()
    assert made == parts(None)
    with monkeypatch.context() as patch:
        patch.setattr(hold_out.Division, "_divide", None)  # It is not made again.
        assert parts() == made
    # A damaged one is made again.
    places = tmp_path / "cache" / "division" / "0.npy"
    content = bytearray(places.read_bytes())
    content[-1] ^= 1
    places.write_bytes(content)
    assert parts() == made
    assert "division: 0.npy differs from its manifest" in caplog.text
    # It is of this text.
    (tmp_path / "own.tsv").write_text("\n".join(rows[:150]))
    assert parts()[2]["lines"] == 149
    assert parts() == parts(None)
