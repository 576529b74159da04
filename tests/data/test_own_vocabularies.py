"""SentencePiece models that were trained elsewhere, with any options."""

import dataclasses
import io
import itertools

import pytest
import sentencepiece

from flaxformer_mt import experiment
from flaxformer_mt.config import DataConfig, ExperimentConfig, TrainConfig, TransformerConfig
from flaxformer_mt.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.experiment import prepare
from flaxformer_mt.experiment.checks import check_same_run
from flaxformer_mt.runs.folder import read_config

ENGLISH = ["the dog runs home", "a small cat sees the old house", "dogs and cats", "new trees"] * 5
GERMAN = ["der hund rennt heim", "eine kleine katze sieht das haus", "hunde und katzen", "wald"] * 5
DEFAULTS = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
"""The special tokens of `spm_train`."""
SYMBOLS = ["<URL>", "\u2581<2de>", "@@"]


def trained(texts=(*ENGLISH, *GERMAN), **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **{"vocab_size": 60} | options,
    )
    return model.getvalue()


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for split, suffix in itertools.product(("train", "valid", "test"), ("en", "de")):
        lines = ENGLISH if suffix == "en" else GERMAN
        (folder / f"{split}.{suffix}").write_text("\n".join(lines) + "\n")
    return folder


def configuration(corpus, path, **model):
    sizes = {"d_model": 8, "num_heads": 2, "d_ff": 8, "dropout_rate": 0.0}
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    return ExperimentConfig(
        model=TransformerConfig(**{**sizes, **layers, **model}),
        data=DataConfig(
            path=str(corpus), tokenizer_path=str(path), source_row_length=32, target_row_length=32
        ),
        train=TrainConfig(num_steps=2, eval_every=2, checkpoint_every=2, batch_tokens=256),
    )


def ids(model):
    return model.pad_id, model.bos_id, model.eos_id


KINDS = [
    {"model_type": kind, **padding, **more}
    for kind, padding, more in itertools.product(
        ("bpe", "unigram", "char", "word"),
        (DEFAULTS, {"pad_id": 3}, {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}),
        ({}, {"user_defined_symbols": SYMBOLS}, {"normalization_rule_name": "identity"}),
    )
] + [{"model_type": kind, "byte_fallback": True, "vocab_size": 320} for kind in ("bpe", "unigram")]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_any_model_round_trips_and_text_has_no_special_tokens(options):
    tokenizer = SentencePieceTokenizer(trained(**options))
    special = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id}
    assert tokenizer.unk_id not in special
    texts = [*ENGLISH[:4], "</s> <s> <pad> <unk> the dog", "see <URL>the dog (<URL>) <2de> a@@b"]
    encoded = tokenizer.encode(texts)
    assert not special & set(itertools.chain(*encoded))
    assert tokenizer.decode(encoded[:4]) == texts[:4]
    assert [len(pieces) for pieces in tokenizer.split(texts)] == list(map(len, encoded))
    known = set(range(tokenizer.vocab_size)) - special
    assert set(itertools.chain(*encoded)) <= known
    start = [tokenizer.bos_id] if tokenizer.bos_id >= 0 else []
    framed = [[*start, *row, tokenizer.eos_id, *row] for row in encoded[:4]]
    assert tokenizer.decode(framed) == texts[:4]


@pytest.mark.slow_except("m")
@pytest.mark.parametrize("name", ["spm.model", "vocabulary of mine.spm", "m", "joint.model"])
def test_a_model_of_spm_train_of_any_name(tmp_path, corpus, name):
    (tmp_path / name).write_bytes(trained())
    run = tmp_path / "run"
    config = configuration(corpus, tmp_path / name)
    prepared = prepare(config, run)
    assert ids(prepared.config.model) == ids(read_config(run).model) == (-1, 1, 2)
    assert (run / "tokenizer/joint.model").read_bytes() == trained()
    check_same_run(run, config)
    assert ids(prepare(config, run).config.model) == (-1, 1, 2)
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, eos_id=3))
    with pytest.raises(UserError, match=r"model\.eos_id: 2 in the run, 3 now"):
        check_same_run(run, other)


@pytest.mark.parametrize("is_folder", [False, True])
def test_one_model_per_side(tmp_path, corpus, is_folder):
    names = ("source.model", "target.model") if is_folder else ("en.spm", "de,x.spm")
    models = trained(ENGLISH, vocab_size=40), trained(GERMAN, vocab_size=44)
    paths = [tmp_path / name for name in (names if is_folder else ("en.spm", "de.spm"))]
    for path, model in zip(paths, models, strict=True):
        path.write_bytes(model)
    given = tmp_path if is_folder else ",".join(map(str, paths))
    config = configuration(corpus, given, tie_embeddings="target_output")
    prepared = prepare(config, tmp_path / "run")
    tokenizers = prepared.dataset.tokenizers
    assert [tokenizers.source.model, tokenizers.target.model] == list(models)
    assert ids(prepared.config.model) == (-1, 1, 2)


@pytest.mark.parametrize(
    ("options", "given", "wanted"),
    [
        ({}, {}, (-1, 1, 2)),
        ({}, {"pad_id": -1}, (-1, 1, 2)),
        ({}, {"bos_id": -1}, (-1, -1, 2)),
        ({"pad_id": 3}, {}, (3, 1, 2)),
        ({"pad_id": 3}, {"bos_id": 0}, (3, 3, 2)),
        ({"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3}, {}, (0, 2, 3)),
        ({"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3}, {"bos_id": 2}, (0, 3, 3)),
        ({"pad_id": 0, "unk_id": 2, "bos_id": -1, "eos_id": 1}, {}, (0, -1, 1)),
        ({"pad_id": 0, "unk_id": 1, "eos_id": 2, "bos_id": 3}, {}, (0, 3, 2)),
    ],
)
def test_special_tokens_are_those_of_the_vocabulary(options, given, wanted):
    tokenizer = SentencePieceTokenizer(trained(**options))
    model = Tokenizers(tokenizer, tokenizer).with_ids(TransformerConfig(**given))
    assert ids(model) == wanted


FAULTS = {
    "nothing.model": "nothing.model: there is no such file or folder",
    "a.model,nothing.model": "there is no such file or folder",
    "a.model,a.model,b.model": "there is no such file or folder",
    "empty": "source.model is missing",
    "text.vocab": "text.vocab is not a SentencePiece model",
    "endless.model": "has no end token: train it without --eos_id=-1",
    "a.model,b.model": "have pad_id=-1 and pad_id=3: train both with the same options",
    "a.model,c.model": "gives both sides one table, but each has a vocabulary of its own",
}


@pytest.mark.parametrize("given", FAULTS)
@pytest.mark.parametrize("start", [experiment.train, experiment.dry_run])
def test_a_dry_run_refuses_the_vocabularies_that_training_refuses(tmp_path, corpus, given, start):
    (tmp_path / "a.model").write_bytes(trained())
    (tmp_path / "b.model").write_bytes(trained(pad_id=3))
    (tmp_path / "c.model").write_bytes(trained(vocab_size=40))
    (tmp_path / "endless.model").write_bytes(trained(eos_id=-1))
    (tmp_path / "text.vocab").write_text("<unk>\t0\n")
    (tmp_path / "empty").mkdir()
    path = ",".join(str(tmp_path / name) for name in given.split(","))
    with pytest.raises(UserError, match=FAULTS[given]):
        start(configuration(corpus, path), tmp_path / "run")
    with pytest.raises(UserError, match=r"model\.pad_id=7, but the tokenizer has pad_id=-1"):
        start(configuration(corpus, tmp_path / "a.model", pad_id=7), tmp_path / "run")
