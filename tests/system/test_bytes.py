"""Bytes as tokens through the whole product: a run, its translations, tags and exports."""

import json

import numpy as np
import pytest

import flaxformer_mt as fmt
from flaxformer_mt import presets
from flaxformer_mt.cli import main
from flaxformer_mt.config import CorpusConfig
from flaxformer_mt.interop.convert import OWN, convert

MODEL = presets.preset(
    "marian", d_model=16, num_heads=2, d_ff=16, num_encoder_layers=1, num_decoder_layers=1
)


@pytest.mark.slow
def test_a_run_of_bytes_is_trained_translates_and_is_exported(tmp_path, capfd):
    corpus = CorpusConfig(tag="<2fr>")
    config = fmt.ExperimentConfig(
        model=MODEL,
        data=fmt.DataConfig(
            corpus="phrases", generated_pairs=200, target_language="fr", tokenizer="bytes",
            train_corpora=(corpus,), target_row_length=256, keep_whole=("<URL>",),
        ),
        train=fmt.TrainConfig(num_steps=3, batch_tokens=2048, eval_every=3, checkpoint_every=3),
    )  # fmt: skip
    run = fmt.train(config, tmp_path / "run")
    translator = run.translator()
    source = translator.tokenizers.source
    tokens = source.encode(["<2fr> né <URL>"])[0]
    assert len(tokens) == 1 + len(" né ".encode()) + 1
    texts = translator.translate(["<2fr> one", "猫 " * 300], beam_size=2, max_length=12)
    assert len(texts) == 2
    (tmp_path / "source").write_text("<2fr> one two\n")
    files = ["--source", str(tmp_path / "source"), "--reference", str(tmp_path / "source")]
    capfd.readouterr()
    assert main(["evaluate", "--run", str(run.folder), "--beam-size", "1", *files]) == 0
    assert "bleu" in json.loads(capfd.readouterr().out)
    for name in ("jax", "ctranslate2", "marian"):
        convert(OWN, name, run.folder, tmp_path / name)  # With a certificate that they agree.
    again = fmt.load(tmp_path / "marian")
    assert again.tokenizers.source.encode(["né two"]) == source.encode(["né two"])
    np.testing.assert_array_equal(
        again.params["target_embedding"]["embedding"],
        run.model().params["target_embedding"]["embedding"],
    )
