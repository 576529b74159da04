"""Finds out which learned metric a folder holds, and reads it."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax

from flaxformer_mt.config.fields import check_value
from flaxformer_mt.decoding.text_arguments import require_path
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import read_json
from flaxformer_mt.judges import comet, metricx
from flaxformer_mt.judges.judge import Judge
from flaxformer_mt.remote.reading import local

Precision = Literal["float32", "bfloat16", "float64"]


def metric(folder: str | Path, *, dtype: Precision = "float32") -> Judge:
    """Loads a learned metric from a folder; nothing is downloaded.

        judge = fmt.metric("wmt22-comet-da")
        judge.scores(["Ein Hund läuft."], ["A dog runs."], ["A dog is running."])  # float64 [1]

    Args:
      folder: a folder of MetricX (`config.json`, weights, and the vocabulary of mT5), or of COMET
        (`hparams.yaml`, `checkpoints/model.ckpt`, and the vocabulary of the encoder, XLM-R). The
        published folders lack the vocabulary: copy `tokenizer.json` or the SentencePiece model of
        google/mt5-base or xlm-roberta-large into the folder. The number of heads of COMET's
        encoder is its width over 64, unless the encoder's `config.json` is there, too.
      dtype: that of the computation. Softmax, norms and the score use float32 at least.

    Raises:
      TypeError: `folder` is not a path.
      UserError: there is no such folder, it holds no metric that can be read, or it is damaged.
    """
    path = local(require_path(folder, "folder"), as_it_is_now=True)
    check_value(dtype, Precision, None, "dtype")
    judge = _read(path, dtype)
    # Every batch would transfer arrays of the host again.
    return dataclasses.replace(judge, params=jax.device_put(judge.params))


def _read(path: Path, dtype: Precision) -> Judge:
    if (path / comet.SETTINGS).is_file():
        return comet.read(path, dtype)
    config = path / "config.json"
    if not config.is_file():
        raise UserError(f"{path} holds no metric: it has no {comet.SETTINGS} and no config.json")
    settings = read_json(config, dict[str, Any])
    if settings.get("model_type") != "mt5":
        raise UserError(
            f"{config} is of model_type={settings.get('model_type')}: metrics are MetricX, an mt5, "
            f"and COMET, which has {comet.SETTINGS}"
        )
    return metricx.read(path, settings, dtype)
