"""Numbers of pairs: from columns through hold-out, filters, stores and packing into batches."""

import json

import jax
import numpy as np
import pytest
from drawn_params import drawn_params

import flaxformer_mt as fmt
from flaxformer_mt.config import DataConfig, ExperimentConfig
from flaxformer_mt.data.dataset import open_all
from flaxformer_mt.data.stream.token_store import open_stores

PAIRS = [
    (f"the dog {number}", f"der Hund {'sehr ' * (number % 3)}{number}") for number in range(60)
]
"""The number of a pair, which is in its texts, gives its weight and its quality."""


def weight_of(number):
    return number % 4 / 2


def table(folder, rows=PAIRS):
    path = folder / "pairs.tsv"
    path.write_text(
        "".join(f"{s}\t{weight_of(number)}\t{t}\t{number}\n" for number, (s, t) in enumerate(rows))
    )
    return path


@pytest.fixture(scope="module")
def tokenizers():
    return fmt.train_tokenizers(PAIRS, size=300)


@pytest.fixture(scope="module")
def config(tokenizers):
    sizes = {"d_model": 8, "num_heads": 2, "d_ff": 8, "dropout_rate": 0.0}
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    return fmt.TransformerConfig(**sizes, **layers, **tokenizers.fields)


def read(folder, **options):
    columns = {"source": 1, "target": 3, "quality": 4}
    return fmt.read_pairs(table(folder), columns=columns, weights=2, **options)


def check(batch, tokenizers, tag=""):
    """Checks the columns of a batch by its texts; returns the numbers of its pairs."""
    numbers = []
    for row in range(len(batch.decoder_segment_ids)):
        count = batch.decoder_segment_ids[row].max()
        for segment in range(1, count + 1):
            tokens = batch.encoder_input_tokens[row, batch.encoder_segment_ids[row] == segment]
            (text,) = tokenizers.source.decode([tokens[:-1].tolist()])
            number = int(text.split()[-1])
            assert batch.columns["quality"][row, segment - 1] == number
            weights = batch.decoder_loss_weights[row, batch.decoder_segment_ids[row] == segment]
            assert set(weights.tolist()) == {weight_of(number)}
            numbers.append(number)
        assert not batch.columns["quality"][row, count:].any()
        assert not batch.decoder_loss_weights[row, batch.decoder_segment_ids[row] == 0].any()
    return numbers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batching": "buckets", "bucket_lengths": (8, 24)},
        {"subword_sampling": 0.1, "workers": 0},
    ],
)
def test_numbers_stay_with_their_pairs(tmp_path, tokenizers, config, options):
    other = [(f"the cat {number}", f"die Katze {number}") for number in range(60)]
    (tmp_path / "other").mkdir()
    rest = fmt.read_pairs(
        table(tmp_path / "other", other),
        columns={"quality": 4, "source": 1, "target": 3},
        weights=2,
    )
    data = fmt.packed(
        [read(tmp_path), rest], tokenizers, config, rows=4, length=24, drop_duplicates=True,
        cache=tmp_path / "cache", **options,
    )  # fmt: skip
    position, numbers = data.start, []
    while position.epoch == 0:
        batch, position = data.read(position)
        numbers += check(batch, tokenizers)
    assert {*range(60)} <= {*numbers}


def test_held_out_and_malformed_pairs_do_not_shift_numbers(tmp_path, tokenizers, config):
    path = table(tmp_path)
    rows = path.read_text().splitlines()
    rows[7] = rows[7].replace("\t7", "\tseven")
    rows[9] = rows[9].replace(f"\t{weight_of(9)}\t", "\t-1\t")
    path.write_text("\n".join(rows) + "\n")
    options = {"columns": ("1", "3"), "pair_columns": ("quality=4", "weight=2"), "hold_out": 10}
    data = DataConfig(path=str(path), **options)
    with pytest.raises(
        fmt.UserError, match=r"line 8: not a number: 'seven' in the column of 'qual"
    ):
        list(open_all(ExperimentConfig(model=config, data=data))["train"][0].pairs())
    data = DataConfig(path=str(path), bad_rows="drop", **options)
    experiment = ExperimentConfig(model=config, data=data)
    corpora = open_all(experiment)
    (store,) = open_stores(tmp_path / "cache", corpora["train"], tokenizers, experiment)
    assert len(store.targets) == 60 - 2 - 2 * 10
    for index in range(len(store.targets)):
        (text,) = tokenizers.source.decode([store.sources[index][:-1].tolist()])
        number = int(text.split()[-1])
        assert store.fields["column.quality"][index].tolist() == [number]
        assert store.fields["column.weight"][index].tolist() == [weight_of(number)]
    assert store.report.dropped["not a weight, a number from 0 on,"].count == 1


def test_weights_of_a_column_are_weights_given_by_hand(tmp_path, tokenizers, config):
    data = fmt.packed(read(tmp_path), tokenizers, config, rows=8, length=24)
    params = drawn_params(config)
    mesh = fmt.make_mesh()
    with data.batches(mesh) as batches:
        batch, _ = next(batches)
    sums = jax.jit(lambda params, batch: fmt.cross_entropy(config, params, batch))
    packed = sums(params, batch)
    numbers = check(jax.device_get(batch), tokenizers)
    loss = weight = 0.0
    for number in numbers:
        alone = fmt.padded([PAIRS[number]], tokenizers, config, length=24)
        each = sums(params, alone)
        loss += weight_of(number) * float(each.loss)
        weight += weight_of(number) * float(each.weight)
    np.testing.assert_allclose(float(packed.loss), loss, rtol=1e-5)
    np.testing.assert_allclose(float(packed.weight), weight, rtol=1e-6)
    # Speed and MFU count tokens, not weights.
    tokens = np.count_nonzero(batch.decoder_segment_ids)
    assert float(packed.tokens) == tokens != weight
    assert float(packed.metrics["flops_per_target_token"][1]) == tokens


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "header"])
def test_columns_of_every_kind_of_table(tmp_path, kind):
    rows = [{"en": "a b", "de": "x y", "score": 0.5}, {"en": "c", "de": "z", "score": 0.0}]
    options = {"columns": {"quality": "score"}, "source_language": "en", "target_language": "de"}
    path = tmp_path / f"pairs.{'tsv' if kind == 'header' else kind}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        comma = "," if kind == "csv" else "\t"
        lines = [[*rows[0]], *([*map(str, row.values())] for row in rows)]
        path.write_text("".join(comma.join(line) + "\n" for line in lines))
    found = [*fmt.read_pairs(path, **options).pairs()]
    assert [(pair, pair.fields) for pair in found] == [
        (("a b", "x y"), {"column.quality": 0.5}), (("c", "z"), {"column.quality": 0.0}),
    ]  # fmt: skip
    with pytest.raises(fmt.UserError, match=r"no (column|member) 'quality'"):
        list(fmt.read_pairs(path, **options | {"columns": {"x": "quality"}}).pairs())


def test_columns_that_cannot_be_used_are_refused(tmp_path, tokenizers, config):
    plain = fmt.read_pairs(table(tmp_path), columns=(1, 3))
    with pytest.raises(
        fmt.UserError, match=r"either all corpora .* the column of '(quality|weight)'"
    ):
        fmt.packed([plain, read(tmp_path)], tokenizers, config, rows=4, length=24)
    with pytest.raises(fmt.UserError, match="has no columns"):
        fmt.read_pairs("", kind="reverse", weights=3)
    with pytest.raises(fmt.UserError, match=r"data\.pair_columns=.* must be NAME=COLUMN"):
        fmt.read_pairs(table(tmp_path), columns={"in pairs": 4})
    # Another column is another stream.
    first = fmt.packed(read(tmp_path), tokenizers, config, rows=4, length=24)
    swapped = fmt.read_pairs(
        table(tmp_path), columns={"source": 1, "target": 3, "quality": 2}, weights=4
    )
    second = fmt.packed(swapped, tokenizers, config, rows=4, length=24)
    with pytest.raises(fmt.UserError, match="another stream of batches"):
        second.batches(fmt.make_mesh(), first.start)


def short_first(epoch, lengths, columns, *, longest=6):
    """Short targets in the first epoch; then all pairs, those of a high quality twice."""
    if epoch == 0:
        return lengths[:, 1] <= longest
    return 1.0 + (columns["quality"] >= 50)


def numbers_of_epochs(data, tokenizers, epochs):
    position = data.start
    found = [[] for _ in range(epochs)]
    while position.epoch < epochs:
        epoch = position.epoch
        batch, position = data.read(position)
        found[epoch] += check(batch, tokenizers)
    return found


def test_a_curriculum_by_length_and_column(tmp_path, tokenizers, config):
    options = {"rows": 1, "length": 24}
    pairs = read(tmp_path)
    data = fmt.packed(pairs, tokenizers, config, curriculum=short_first, **options)
    first, second = numbers_of_epochs(data, tokenizers, 2)
    lengths = {
        number: len(tokenizers.target.encode([target])[0]) + 1
        for number, (_, target) in enumerate(PAIRS)
    }
    short = sorted(number for number, length in lengths.items() if length <= 6)
    assert sorted(first) == short
    assert 0 < len(short) < 60
    assert sorted(second) == sorted([*range(60), *range(50, 60)])
    # The same again, and from the middle.
    again = fmt.packed(pairs, tokenizers, config, curriculum=short_first, **options)
    assert numbers_of_epochs(again, tokenizers, 2) == [first, second]
    with pytest.raises(fmt.UserError, match=r"curriculum: short_first\(longest=6\) there"):
        fmt.packed(pairs, tokenizers, config, **options).batches(fmt.make_mesh(), data.start)


def test_rates_are_probabilities(tmp_path, tokenizers, config):
    def rarely(epoch, lengths, columns):
        return np.full(len(lengths), 0.25)

    data = fmt.packed(read(tmp_path), tokenizers, config, rows=1, length=24, curriculum=rarely)
    counts = [len(each) for each in numbers_of_epochs(data, tokenizers, 12)]
    assert len({*counts}) > 1
    assert 120 < sum(counts) < 240


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        (lambda count: np.zeros(count), "leaves none of 60 pairs in epoch 0"),
        (lambda count: np.full(count, -1.0), "a rate from 0 on"),
        (lambda count: np.full(count, np.nan), "a rate from 0 on"),
        (lambda count: 0.5, "a rate from 0 on"),
    ],
)
def test_rates_that_cannot_be_drawn(tmp_path, tokenizers, config, rates, message):
    def curriculum(epoch, lengths, columns):
        return rates(len(lengths))

    data = fmt.packed(read(tmp_path), tokenizers, config, rows=1, length=24, curriculum=curriculum)
    with pytest.raises(fmt.UserError, match=message):
        data.read(data.start)
    with pytest.raises(fmt.UserError, match=r"data.workers=1 cannot call .*: leave workers out"):
        fmt.packed(
            read(tmp_path), tokenizers, config, rows=1, length=24, curriculum=curriculum, workers=1
        )
