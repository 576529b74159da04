"""Whole models: read from folders of any kind, ready to translate, and written to run folders."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack, overload

from flaxformer_mt.config import DataConfig, ExperimentConfig, TransformerConfig
from flaxformer_mt.config.decode import DecodeOptions
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.decoding.attention_weights import sentence_attention
from flaxformer_mt.decoding.text_arguments import require_path
from flaxformer_mt.decoding.translator import Sentence, Translator
from flaxformer_mt.errors import UserError, shown
from flaxformer_mt.interop.formats import adapters as peft
from flaxformer_mt.interop.formats import folders
from flaxformer_mt.interop.formats.bundle import ModelBundle, read_bundle
from flaxformer_mt.interop.formats.hub_families import HUB_FAMILIES
from flaxformer_mt.interop.weight_maps.mapping import model_params
from flaxformer_mt.model.functional import require_params
from flaxformer_mt.plotting.attention_page import AttentionPicture
from flaxformer_mt.presets import canonical_family
from flaxformer_mt.remote.reading import local
from flaxformer_mt.run_reader import Run
from flaxformer_mt.trained_model import write_model


class Model:
    """A model with its vocabulary and search options, from `load`.

        model = load("opus-mt-en-de")
        model.translate("A dog runs.")
        run = model.save("runs/opus")  # To train it further, or for the command line.

    `folder` and `family` are where and as what it was read, `notes` what of the folder has no
    counterpart here, in one line each.
    """

    def __init__(
        self, bundle: ModelBundle, folder: Path, family: str, notes: tuple[str, ...] = ()
    ) -> None:
        self.folder = folder
        self.family = family
        self.notes = notes
        self.config: ExperimentConfig = bundle.config
        """The model, its search options, and the defaults for training it further."""
        self.params: dict[str, Any] = bundle.params
        """The parameters, nested dicts of arrays."""
        self.tokenizers: Tokenizers = bundle.tokenizers
        """The vocabularies of source and target."""
        self._bundle = bundle
        self._translator: Translator | None = None

    def __repr__(self) -> str:
        return f"<Model {self.family} {shown(str(self.folder))!r}>"

    def translator(self) -> Translator:
        """Returns the translator, which has further methods; UserError without an encoder."""
        if self._translator is None:
            self._translator = Translator(
                self.config.model, self.params, self.tokenizers, self.config.decode
            )
        return self._translator

    @overload
    def translate(  # type: ignore[overload-overlap]
        self,
        sentences: str | Sentence,
        beam_size: int | None = None,
        **options: Unpack[DecodeOptions],
    ) -> str: ...

    @overload
    def translate(
        self,
        sentences: Iterable[str | Sentence],
        beam_size: int | None = None,
        **options: Unpack[DecodeOptions],
    ) -> list[str]: ...

    def translate(
        self,
        sentences: str | Sentence | Iterable[str | Sentence],
        beam_size: int | None = None,
        **options: Unpack[DecodeOptions],
    ) -> str | list[str]:
        """Translates a sentence, or each sentence of a list; see `Translator.translate`."""
        return self.translator().translate(sentences, beam_size, **options)

    def attention(self, source: str, target: str | None = None) -> AttentionPicture:
        """Returns the attention of every layer and head; see `Run.attention`."""
        found = sentence_attention(self.translator(), source, target)
        return AttentionPicture(found, shown(str(self.folder)))

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Run:
        """Writes a run folder, as `flaxformer-mt convert` does, and returns the run.

        It can be trained further: `Run.fine_tuning_config`. `overwrite` replaces a run folder that
        `save` or `save_run` wrote and that has no other files.

        Raises:
          TypeError: `folder` is not a path.
          UserError: it exists, or cannot be written.
        """
        path = require_path(folder, "folder")
        _require_new(path, overwrite)
        self._bundle.write_run(path, replace=overwrite)
        return Run(path)


def _require_new(folder: str | Path, overwrite: bool) -> None:
    if not overwrite and os.path.lexists(folder):
        raise UserError(
            f"{folder} exists: give another folder, or overwrite=True, which replaces a run folder "
            "in which no run was trained"
        )


def load(folder: str | Path, family: str | None = None, *, base: str | Path | None = None) -> Model:
    """Loads a whole model from a folder.

    Args:
      folder: a folder of OPUS-MT or another family of the Hugging Face Hub, a folder of Marian,
        fairseq or OpenNMT-py, an export to JAX, a run folder, whose best checkpoint is loaded, or
        an adapter of PEFT, which is merged into its base. Nothing is downloaded.
      family: what to read it as, as in `flaxformer-mt convert --from`; by default it is found out.
      base: the folder of the model that an adapter changes, if it is neither beside the adapter nor
        where the adapter's settings say.

    Returns:
      The model, with its vocabularies and search options; `notes` has what could not be converted.

    Raises:
      TypeError: an argument is of another type.
      UserError: there is no such folder, it holds no model that can be read, or it is damaged.
    """
    path = local(require_path(folder, "folder"), as_it_is_now=True)
    if family is not None and not isinstance(family, str):
        raise TypeError(f"family must be a string, not {type(family).__name__}")
    if path.is_file():
        raise UserError(f"{path} is a file: give the folder that has its vocabulary, too")
    if not path.is_dir():
        raise UserError(f"there is no folder {path}")
    origin = None if base is None else local(require_path(base, "base"), as_it_is_now=True)
    known = canonical_family(family) if family else folders.family_of(path, origin)
    bundle, notes = read_bundle(known, path, {}, origin)
    return Model(bundle, path, known, notes)


def save_run(
    folder: str | Path,
    config: TransformerConfig,
    tokenizers: Tokenizers,
    params: Any,
    *,
    step: int = 0,
    languages: tuple[str, str] = ("", ""),
    overwrite: bool = False,
) -> None:
    """Writes trained parameters as a run folder, which all commands can use.

        fmt.save_run("runs/mine-final", config, tokenizers, state["params"])

    Args:
      folder: the folder to create.
      config: of the model.
      tokenizers: its vocabularies.
      params: its parameters, on any devices; of several processes, all have to call this. Carried
        tensors, as in what `interop.load` returns, are left out.
      step: the number of training steps made.
      languages: the codes of source and target, by which `evaluate` chooses its tokenizer.
      overwrite: whether a run folder of `save_run` is replaced, atomically. It must have no files
        but those that `save_run` wrote, so a folder in which a run was trained is not replaced.

    Raises:
      UserError: the folder exists or cannot be written, or the parameters are not of this model.
    """
    _require_new(folder, overwrite)
    require_params(tokenizers.with_sizes(config), params, str(folder))
    params = model_params(params)
    data = DataConfig(source_language=languages[0], target_language=languages[1])
    write_model(
        folder,
        ExperimentConfig(model=config, data=data),
        tokenizers,
        params,
        step=step,
        replace=overwrite,
    )


def save_adapter(
    folder: str | Path,
    model: Model,
    adapters: Mapping[str, Mapping[str, Any]],
    *,
    alpha: float,
    family: str | None = None,
) -> None:
    """Writes low-rank adapters of a model (LoRA, Hu et al. 2021) for the library PEFT.

        fmt.save_adapter("runs/adapter", model, adapters, alpha=16)

    `peft.PeftModel.from_pretrained` and `load` read the folder.

    Args:
      folder: the folder to create.
      model: the base, from a folder of Hugging Face, whose path the adapter records.
      adapters: by the path of a kernel [L, inputs, outputs], two factors: "a" [L, inputs, r] and
        "b" [L, r, outputs]. The adapted kernel is the kernel plus alpha / r * a @ b.
      alpha: the scale.
      family: the family of the base; by default, the one as which it was read.

    Raises:
      UserError: the model is not of such a family, a parameter is not a matrix that PEFT adapts,
        the ranks differ, or the folder exists or cannot be written.
    """
    known = canonical_family(family or model.family)
    if known not in HUB_FAMILIES:
        raise UserError(
            f"PEFT adapts models of Hugging Face, not of {known}: convert the model to one of "
            f"{', '.join(HUB_FAMILIES)}, and give family="
        )
    config = model.tokenizers.with_sizes(model.config.model)
    path = require_path(folder, "folder")
    peft.write(path, HUB_FAMILIES[known].family, config, adapters, alpha, str(model.folder))
