import gzip
import sys

import pytest

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpus import HELD_OUT_PAIRS, load_corpus, read_lines
from flaxformer_mt.errors import UserError

ENGLISH = "A house.\nTwo houses.\n"
GERMAN = "Ein Haus.\nZwei Häuser.\n"


def text_config(folder, **options):
    return DataConfig(corpus="text", path=str(folder), **options)


def write_pair(folder, english=ENGLISH, german=GERMAN):
    (folder / "train.en").write_text(english, encoding="utf-8", newline="")
    (folder / "train.de").write_text(german, encoding="utf-8", newline="")


def test_text_pairs(tmp_path):
    write_pair(tmp_path)
    corpus = load_corpus(text_config(tmp_path), "train")
    assert corpus.sources == ["A house.", "Two houses."]
    assert corpus.targets == ["Ein Haus.", "Zwei Häuser."]
    assert len(corpus) == 2


def test_gzipped_text_is_the_same_corpus(tmp_path):
    write_pair(tmp_path)
    plain = load_corpus(text_config(tmp_path), "train")
    for name in ("train.en", "train.de"):
        path = tmp_path / name
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    zipped = load_corpus(text_config(tmp_path), "train")
    assert (zipped.sources, zipped.targets) == (plain.sources, plain.targets)
    assert zipped.fingerprint == plain.fingerprint


def test_languages_choose_the_direction(tmp_path):
    write_pair(tmp_path)
    config = text_config(tmp_path, source_language="de", target_language="en")
    assert load_corpus(config, "train").sources == ["Ein Haus.", "Zwei Häuser."]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\n\n b \n", ["a", "", " b "]),
        ("a\u2028b\u0085c\x0bd\x0ce\n".encode(), ["a\u2028b\u0085c\x0bd\x0ce"]),
        (b"a\rb\n", ["a\rb"]),
        (b"\xef\xbb\xbfa\n", ["a"]),
        (b"\n", [""]),
    ],
)
def test_lines_end_at_line_feeds_only(tmp_path, data, lines):
    (tmp_path / "text").write_bytes(data)
    assert read_lines(tmp_path / "text") == lines


def test_invalid_utf8_names_file_and_line(tmp_path):
    path = tmp_path / "train.de"
    path.write_bytes(b"gut\nauch gut\nnicht \xff gut\n")
    with pytest.raises(UserError, match=r"train\.de, line 3: not UTF-8"):
        read_lines(path)


def test_different_line_counts_name_both(tmp_path):
    write_pair(tmp_path, german=GERMAN + "Drei.\n")
    with pytest.raises(UserError, match=r"train\.en has 2 lines but .*train\.de has 3"):
        load_corpus(text_config(tmp_path), "train")


def test_empty_file(tmp_path):
    write_pair(tmp_path, german="")
    with pytest.raises(UserError, match=r"train\.de is empty"):
        load_corpus(text_config(tmp_path), "train")


@pytest.mark.parametrize("damage", [lambda data: data[:-10], lambda data: b"no gzip " + data])
def test_damaged_gzip(tmp_path, damage):
    path = tmp_path / "train.en.gz"
    path.write_bytes(damage(gzip.compress(ENGLISH.encode() * 100)))
    with pytest.raises(UserError, match=r"train\.en\.gz: damaged gzip file"):
        read_lines(path)


def test_corrupt_gzip_content(tmp_path):
    data = bytearray(gzip.compress(ENGLISH.encode() * 100))
    data[12] ^= 0xFF
    (tmp_path / "train.en.gz").write_bytes(data)
    with pytest.raises(UserError, match="damaged gzip file"):
        read_lines(tmp_path / "train.en.gz")


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(UserError, match=r"data\.path is empty"):
        load_corpus(text_config(""), "train")
    with pytest.raises(UserError, match=r"data\.path=.*nowhere is not a folder"):
        load_corpus(text_config(tmp_path / "nowhere"), "train")
    with pytest.raises(UserError, match=r"has neither train\.en nor train\.en\.gz"):
        load_corpus(text_config(tmp_path), "train")
    with pytest.raises(UserError, match="there is no file"):
        read_lines(tmp_path / "train.en")
    with pytest.raises(UserError, match="cannot read"):
        read_lines(tmp_path)


def test_tsv_pairs(tmp_path):
    config = DataConfig(corpus="tsv", path=str(tmp_path))
    (tmp_path / "train.tsv").write_text("A house.\tEin Haus.\r\n\tZwei\n", encoding="utf-8")
    corpus = load_corpus(config, "train")
    assert corpus.sources == ["A house.", ""]
    assert corpus.targets == ["Ein Haus.", "Zwei"]


@pytest.mark.parametrize(("line", "tabs"), [("no tab", 0), ("a\tb\tc", 2), ("", 0)])
def test_tsv_line_without_exactly_one_tab(tmp_path, line, tabs):
    (tmp_path / "train.tsv").write_text(f"a\tb\n{line}\n", encoding="utf-8")
    with pytest.raises(UserError, match=rf"train\.tsv, line 2: {tabs} tabs"):
        load_corpus(DataConfig(corpus="tsv", path=str(tmp_path)), "train")


@pytest.mark.parametrize("kind", ["phrases", "reverse"])
def test_generated_splits_are_distinct_disjoint_and_reproducible(kind):
    config = DataConfig(corpus=kind, target_language="fr", generated_pairs=1500)
    splits = {split: load_corpus(config, split) for split in ("train", "valid", "test")}
    assert [len(corpus) for corpus in splits.values()] == [1500, HELD_OUT_PAIRS, HELD_OUT_PAIRS]
    sources = [source for corpus in splits.values() for source in corpus.sources]
    assert len(set(sources)) == len(sources)
    assert load_corpus(config, "valid") == splits["valid"]


def test_generated_held_out_pairs_do_not_depend_on_the_size_of_training():
    small = DataConfig(corpus="reverse", generated_pairs=10)
    large = DataConfig(corpus="reverse", generated_pairs=1000)
    assert load_corpus(small, "test") == load_corpus(large, "test")
    assert load_corpus(large, "train").sources[:10] == load_corpus(small, "train").sources


def test_generator_seed_changes_the_pairs():
    first = DataConfig(corpus="reverse", generated_pairs=100)
    second = DataConfig(corpus="reverse", generated_pairs=100, generator_seed=1)
    assert load_corpus(first, "train") != load_corpus(second, "train")


def test_reverse_is_the_same_on_every_machine():
    corpus = load_corpus(DataConfig(corpus="reverse", generated_pairs=20), "train")
    assert corpus.sources[:3] == ["8 8", "2 7 8 4 9 2 1 5 8 1 8 9", "4 2 4"]
    assert corpus.targets[:3] == ["8 8", "9 8 1 8 5 1 2 9 4 8 7 2", "4 2 4"]


def test_generated_corpus_has_no_other_splits():
    with pytest.raises(UserError, match="no split dev, only valid, test, train"):
        load_corpus(DataConfig(corpus="reverse"), "dev")


def test_phrases_in_an_unknown_language():
    with pytest.raises(UserError, match=r"data\.target_language=xx: .* de, en, fr only"):
        load_corpus(DataConfig(corpus="phrases", target_language="xx"), "train")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Folder of a TensorFlow Datasets builder, prepared without TensorFlow."""
    tfds = pytest.importorskip("tensorflow_datasets")
    pytest.importorskip("array_record")

    class HousePairs(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.Translation(["de", "en"])
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for number in range(10):
                yield number, {"en": f"house {number}", "de": f"Häuschen {number}"}

    folder = tmp_path_factory.mktemp("tfds")
    builder = HousePairs(data_dir=str(folder), file_format="array_record")
    builder.download_and_prepare()
    return str(builder.data_path)


def tfds_config(path, **options):
    return DataConfig(corpus="tfds", path=path, **options)


def test_tfds_pairs(prepared):
    corpus = load_corpus(tfds_config(prepared), "train")
    expected = {(f"house {number}", f"Häuschen {number}") for number in range(10)}
    assert set(zip(corpus.sources, corpus.targets, strict=True)) == expected
    assert load_corpus(tfds_config(prepared), "train[:30%]").sources == corpus.sources[:3]


def test_tfds_language_that_the_builder_lacks(prepared):
    config = tfds_config(prepared, target_language="fr")
    with pytest.raises(UserError, match=r"data\.target_language=fr: .* has only de, en"):
        load_corpus(config, "train")


def test_tfds_empty_split(prepared):
    with pytest.raises(UserError, match=r"split train\[:0\]: "):
        load_corpus(tfds_config(prepared), "train[:0]")


def test_tfds_unknown_split(prepared):
    with pytest.raises(UserError, match="split dev: Unknown split 'dev'"):
        load_corpus(tfds_config(prepared), "dev")


@pytest.mark.usefixtures("prepared")
def test_tfds_builder_that_is_unknown_or_not_prepared(tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
    with pytest.raises(UserError, match=r"data\.path=no_such_builder.* not found"):
        load_corpus(tfds_config("no_such_builder"), "train")
    with pytest.raises(UserError, match="wmt14_translate/de-en is not prepared"):
        load_corpus(tfds_config("wmt14_translate/de-en"), "train")


def test_tfds_without_a_name():
    pytest.importorskip("tensorflow_datasets")
    with pytest.raises(UserError, match=r"data\.path is empty: name a builder"):
        load_corpus(DataConfig(corpus="tfds"), "train")


def test_tfds_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UserError, match=r"flaxformer_mt\[data\]"):
        load_corpus(DataConfig(corpus="tfds", path="wmt14_translate/de-en"), "train")
