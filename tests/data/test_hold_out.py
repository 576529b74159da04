"""Pairs that are held out of the training corpora."""

import dataclasses

import pytest

from flaxformer_mt.config import CorpusConfig, DataConfig, ExperimentConfig
from flaxformer_mt.data.corpora import hold_out
from flaxformer_mt.data.corpora.comparison import comparable as all_comparable
from flaxformer_mt.data.corpora.filters import PairFilter
from flaxformer_mt.data.dataset import open_all, open_dataset
from flaxformer_mt.data.run_text import RunText
from flaxformer_mt.data.sanity_checks import check_not_blank
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
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


def untagged(corpus):
    tag = f"{corpus.tag} " if corpus.tag else ""
    return [(source.removeprefix(tag), target) for source, target in corpus.pairs()]


def check(corpora, lines, wanted, data):
    """Checks what is true of every division: numbers, filters, and that no side is shared."""
    parts = {role: [untagged(corpus) for corpus in corpora[role]] for role in corpora}
    for number, corpus in enumerate(corpora["train"]):
        counts = corpus.division()
        assert counts["lines"] == lines[number] == sum(counts.values()) - counts["lines"]
        assert counts["train"] == len(parts["train"][number])
    compared = {
        (role, side): {comparable(pair[side]) for part in parts[role] for pair in part} - {""}
        for role in parts
        for side in (0, 1)
    }
    for side in (0, 1):
        assert not compared["train", side] & (compared["valid", side] | compared["test", side])
        assert not compared["valid", side] & compared["test", side]
    for role in ROLES:
        held = [pair for part in parts[role] for pair in part]
        assert len(held) <= 1.1 * wanted
        if data.filter_held_out:
            assert len({tuple(map(comparable, pair)) for pair in held}) == len(held)
        for corpus, part in zip(corpora[role], parts[role], strict=True):
            chosen = PairFilter(data, corpus)
            assert not data.filter_held_out or all(chosen.keep(0, pair) for pair in part)
    return {role: sum(map(len, parts[role])) for role in ROLES}


def test_synthetic_text_is_not_held_out(tmp_path):
    genuine = [(f"source {i}", f"target {i}") for i in range(800)]
    synthetic = [(f"sauce {i}", f"target {i % 800}") for i in range(2400)]
    write(tmp_path / "bt.tsv", synthetic)
    bt = CorpusConfig(path=str(tmp_path / "bt.tsv"), tag="<bt>")
    parts, corpora = divide(tmp_path, genuine, 100, train_corpora=(CorpusConfig(), bt))
    assert {role: len(pairs) for role, pairs in parts.items()} == {
        "train": 600 + 1800, "valid": 100, "test": 100,
    }  # fmt: skip
    assert {*parts["valid"], *parts["test"]} < {*genuine}
    check(corpora, [800, 2400], 100, DataConfig())
    assert [corpus.name for corpus in corpora["test"]] == [f"held out of {tmp_path}/own.tsv"]
    chosen = dataclasses.replace(bt, hold_out=40)
    both, corpora = divide(tmp_path, genuine, 100, train_corpora=(CorpusConfig(), chosen))
    assert [len([*corpus.pairs()]) for corpus in corpora["valid"]] == [100, 40]
    assert sum(source.startswith("<bt> ") for source, _ in both["test"]) == 40
    check(corpora, [800, 2400], 140, DataConfig())
    none, _ = divide(
        tmp_path, genuine, 0, train_corpora=(CorpusConfig(), CorpusConfig(hold_out=20))
    )
    assert len(none["valid"]) == 20


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
    parts, corpora = divide(tmp_path, pairs, 10)
    assert all(len({source for source, _ in parts[role]}) == 10 for role in ROLES)
    assert corpora["train"][0].division()["left_out"] == 20 * 19
    assert not caplog.messages
    parts, _ = divide(tmp_path, pairs, 100)
    assert len(parts["train"]) >= 500
    assert "data.hold_out=100: of 1,000 pairs, 11 are held out for valid, since" in caplog.text
    with pytest.raises(UserError, match=r"0 are held out for valid, since .* ask for fewer"):
        divide(tmp_path, [("Thank you.", f"Merci {i}.") for i in range(1000)], 100)


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


def test_reports_add_up_to_the_lines_of_the_text(tmp_path):
    pairs = [*numbered(200), *[("", "Nothing.")] * 7]
    bt = [(f"Sauce {i}.", f"Phrase {i}.") for i in range(200)]
    config = ExperimentConfig(
        data=DataConfig(
            path=write(tmp_path / "own.tsv", pairs),
            hold_out=20,
            target_language="fr",
            train_corpora=(
                CorpusConfig(),
                CorpusConfig(path=write(tmp_path / "bt.tsv", bt), tag="<bt>"),
            ),
            vocab_size=300,
        )
    )
    corpora = open_all(config)
    tokenizers = Tokenizers.for_run(corpora["train"], config.data, has_inputs=True)
    _, dataset = open_dataset(config, corpora, tokenizers, tmp_path / "cache")
    lines = [line for _, line in dataset.report()]
    assert lines[1:3] == [
        "167 of 207 pairs to train on; 20 held out for valid; 20 held out for test",
        "160 of 167 pairs kept (7 empty side dropped)",
    ]
    assert (
        "160 of 200 pairs to train on; 0 held out for valid; 0 held out for test; 40 left out, "
        "with the source or the target of a held-out pair"
    ) in lines
    assert RunText(config, tmp_path / "cache").division() == {
        "lines": 407, "valid": 20, "test": 20, "train": 327, "left_out": 40,
    }  # fmt: skip


def test_the_test_split_is_optional(tmp_path):
    with_test, _ = divide(tmp_path, numbered(1000))
    without, corpora = divide(tmp_path, numbered(1000), test_split="")
    assert corpora["test"] == []
    assert without["valid"] == with_test["valid"]
    assert len(without["train"]) == len(with_test["train"]) + len(with_test["test"])


def test_nothing_has_to_be_held_out_of_a_small_corpus(tmp_path):
    write(tmp_path / "small.tsv", [("One.", "Un.")])
    corpora = (CorpusConfig(), CorpusConfig(path=str(tmp_path / "small.tsv")))
    _, corpora = divide(tmp_path, numbered(1000), train_corpora=corpora)
    for of_role in corpora.values():
        check_not_blank(of_role)
    assert [len([*corpus.pairs()]) > 0 for corpus in corpora["valid"]] == [True, False]
    with pytest.raises(UserError, match=r"held out of .*small\.tsv: .* raise data\.hold_out"):
        check_not_blank(corpora["valid"][1:])
    write(tmp_path / "small.tsv", [(" ", "Un.")])
    with pytest.raises(UserError, match=r"small\.tsv without held-out pairs: .* split or file"):
        check_not_blank(corpora["train"])


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
