"""The functions of training scripts: read_pairs, train_tokenizers, packed, padded."""

import dataclasses
import gzip
import itertools
import json

import chex
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import flaxformer_mt as fmt
from flaxformer_mt.config import CorpusConfig, DataConfig, ExperimentConfig, TrainConfig
from flaxformer_mt.data.dataset import open_all, open_dataset
from flaxformer_mt.data.stream.batches import BatchShape, DataPosition
from flaxformer_mt.errors import UserError

PAIRS = [
    (f"the {noun} number {number} sleeps", f"{word} Nummer {number} schläft heute")
    for number in range(30)
    for noun, word in (("dog", "der Hund"), ("cat", "die Katze"), ("old house", "das alte Haus"))
]
SMALL = {"d_model": 16, "num_heads": 2, "d_ff": 16}


@pytest.fixture(scope="module")
def tokenizers():
    return fmt.train_tokenizers(PAIRS, size=400)


@pytest.fixture(scope="module")
def model(tokenizers):
    return fmt.TransformerConfig(**SMALL, **tokenizers.fields)


def mesh_of(devices):
    return Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1), ("data", "fsdp"))


def first_batches(data, count, position=None, devices=1):
    with data.batches(mesh_of(devices), position) as batches:
        return list(itertools.islice(batches, count))


def lines(side):
    return "".join(f"{pair[side]}\n" for pair in PAIRS)


def test_pairs_of_any_source(tmp_path):
    (tmp_path / "mine.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in PAIRS))
    (tmp_path / "three.tsv").write_text("".join(f"x\t{t}\t{s}\n" for s, t in PAIRS))
    (tmp_path / "mine.csv").write_text("en,de\n" + "".join(f"{s},{t}\n" for s, t in PAIRS))
    rows = [json.dumps({"translation": {"en": s, "de": t}}) + "\n" for s, t in PAIRS]
    (tmp_path / "mine.jsonl").write_text("".join(rows))
    (tmp_path / "a.en").write_text(lines(0))
    with gzip.open(tmp_path / "b.de.gz", "wt", encoding="utf-8") as file:
        file.write(lines(1))
    for side, language in enumerate(("en", "de")):
        (tmp_path / f"train.{language}").write_text(lines(side))
        (tmp_path / f"dev.{language}").write_text(lines(side)[: lines(side).index("\n") + 1])
    languages = {"source_language": "en", "target_language": "de"}
    for name, options in {
        "mine.tsv": {},
        "three.tsv": {"columns": (3, 2)},
        "mine.csv": languages,
        "mine.jsonl": languages,
        ".": languages,
    }.items():
        assert list(fmt.read_pairs(tmp_path / name, **options).pairs()) == PAIRS, name
    two = fmt.read_pairs(f"{tmp_path}/a.en,{tmp_path}/b.de.gz")
    assert list(two.pairs()) == PAIRS
    assert list(fmt.read_pairs(tmp_path, split="dev", **languages).pairs()) == PAIRS[:1]
    tagged = fmt.read_pairs(tmp_path / "mine.tsv", tag="<2de>")
    assert next(tagged.pairs()) == (f"<2de> {PAIRS[0][0]}", PAIRS[0][1])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batching": "buckets", "bucket_lengths": (16, 32)},
        {"subword_sampling": 0.2},
        {"max_words": 6, "mixture_temperature": 3.0},
    ],
)
def test_batches_are_those_of_a_run(tmp_path, tokenizers, options):
    (tmp_path / "a.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in PAIRS))
    (tmp_path / "b.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in PAIRS[:20]))
    files = [str(tmp_path / name) for name in ("a.tsv", "b.tsv")]
    run = ExperimentConfig(
        model=fmt.TransformerConfig(**SMALL),
        data=DataConfig(
            train_corpora=(CorpusConfig(path=files[0]), CorpusConfig(path=files[1], weight=2.0)),
            valid_corpora=(CorpusConfig(path=files[0]),),
            test_split="",
            source_row_length=24,
            target_row_length=32,
            **options,
        ),
        train=TrainConfig(batch_tokens=128, seed=5),
    )
    run, dataset = open_dataset(run, open_all(run), tokenizers, tmp_path / "cache")
    stream = dataset.training

    pairs = [fmt.read_pairs(files[0]), fmt.read_pairs(files[1], weight=2.0)]
    data = fmt.packed(pairs, tokenizers, run.model, rows=4, length=(24, 32), seed=5, **options)
    assert data.shapes == stream.shapes
    position = DataPosition()
    for batch, after in first_batches(data, 40):
        expected, position = stream.read(position)
        chex.assert_trees_all_equal(jax.tree.map(np.asarray, batch), expected)
        assert after._replace(stream="") == position


def test_a_position_counts_batches_and_continues_with_the_next(tokenizers, model):
    data = fmt.packed(PAIRS, tokenizers, model, rows=4, length=64)
    whole = first_batches(data, 12)
    assert [position.step for _, position in whole] == list(range(1, 13))
    assert whole[-1][1].epoch > 1
    saved = json.loads(json.dumps(whole[4][1]._asdict()))
    again = fmt.packed(PAIRS, tokenizers, model, rows=4, length=64)
    rest = first_batches(again, 7, DataPosition(**saved))
    chex.assert_trees_all_equal([batch for batch, _ in rest], [batch for batch, _ in whole[5:]])
    assert [position for _, position in rest] == [position for _, position in whole[5:]]


def test_rows_are_sharded_over_the_devices(tokenizers, model):
    data = fmt.packed(PAIRS, tokenizers, model, rows=8, length=48)
    ((batch, _),) = first_batches(data, 1, devices=4)
    assert data.shapes == (BatchShape(8, 48, 48),)
    assert {shard.data.shape for shard in batch.decoder_input_tokens.addressable_shards} == {
        (2, 48)
    }
    odd = fmt.packed(PAIRS, tokenizers, model, rows=6, length=48)
    message = r"the 6 rows of a batch .* among 4 devices: make rows .* a multiple of the devices"
    with pytest.raises(UserError, match=message):
        first_batches(odd, 1, devices=4)


def test_wrong_arguments_are_named(tokenizers, model, tmp_path):
    arguments = {"rows": 4, "length": 64}
    with pytest.raises(TypeError, match="no_such_option"):
        fmt.packed(PAIRS, tokenizers, model, no_such_option=1, **arguments)
    with pytest.raises(TypeError, match=r"mine\.tsv is a path, not pairs: give fmt\.read_pairs"):
        fmt.train_tokenizers("mine.tsv")
    with pytest.raises(UserError, match="there are no pairs"):
        fmt.packed([], tokenizers, model, **arguments)
    with pytest.raises(UserError, match=r"path=.*missing is not a folder"):
        fmt.read_pairs(tmp_path / "missing")
    with pytest.raises(UserError, match="pairs are longer than a row"):
        fmt.packed(PAIRS, tokenizers, model, rows=4, length=3)
    other = dataclasses.replace(model, eos_id=model.eos_id + 1)
    with pytest.raises(UserError, match="eos_id"):
        fmt.packed(PAIRS, tokenizers, other, **arguments)


def test_pairs_that_do_not_fit_are_counted(tokenizers, model, caplog):
    pairs = [
        ("the dog", "der Hund"),
        ("the old house number 7 sleeps", "das alte Haus schläft"),
    ] * 3
    fmt.packed(pairs, tokenizers, model, rows=2, length=6)
    (record,) = caplog.records
    for part in ("3 of 6 pairs", "length=(6, 6)", 'long_sentences="truncate"'):
        assert part in record.getMessage()
    caplog.clear()
    fmt.packed(pairs, tokenizers, model, rows=2, length=6, long_sentences="truncate")
    assert "3 truncated" in caplog.text
    caplog.clear()
    fmt.packed(pairs, tokenizers, model, rows=2, length=32, drop_duplicates=True)
    assert "2 of 6 pairs" in caplog.text
    caplog.clear()
    fmt.padded(pairs, tokenizers, model, length=6)
    assert "3 of 6 pairs" in caplog.text
    caplog.clear()
    fmt.packed(pairs, tokenizers, model, rows=2, length=32)
    fmt.padded(pairs, tokenizers, model, length=32)
    assert not caplog.records
