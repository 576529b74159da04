"""Prepares the experiment of a new run, or of the run in a folder."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flaxformer_mt import distributed
from flaxformer_mt.config import DataConfig, ExperimentConfig
from flaxformer_mt.config.fields import FieldRole, names_with
from flaxformer_mt.data.corpora.corpus import Corpus
from flaxformer_mt.data.corpora.shared_text import HeldOutText
from flaxformer_mt.data.dataset import open_all, open_dataset
from flaxformer_mt.data.sanity_checks import check_languages, check_not_blank, warn_of_shared_text
from flaxformer_mt.data.stream.token_store import make_parts
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers, tags
from flaxformer_mt.decoding.shortlists.shortlist import require_shortlist
from flaxformer_mt.decoding.translator import check_search
from flaxformer_mt.experiment.checks import require_effects, require_shared_vocabulary
from flaxformer_mt.experiment.folder import require_shared
from flaxformer_mt.experiment.parts import Experiment
from flaxformer_mt.remote.reading import local_list
from flaxformer_mt.runs import folder as run_folder
from flaxformer_mt.runs.layout import CACHE
from flaxformer_mt.runs.manifest import made_once
from flaxformer_mt.training.objective import UserObjective, require_objective
from flaxformer_mt.training.warm_start import require_parameters, require_vocabulary, tokenizer_path


def prepare(
    given: ExperimentConfig,
    workdir: str | Path,
    *,
    cache_folder: Path | None = None,
    write: bool = True,
    objective: UserObjective | None = None,
    frozen: Any = None,
    accept_changes: bool = False,
) -> Experiment:
    """Builds the experiment of a new run, or of the run in a folder.

    Of several processes the first one tokenizes and writes the run folder.

    Args:
      given: the configuration as given by the user.
      workdir: the run folder.
      cache_folder: where tokens are stored; by default in the run folder.
      write: whether to write a new run's configuration, vocabulary and fingerprints.
      objective: as of `train`.
      frozen: as of `train`.
      accept_changes: as of `train`.
    """
    workdir = Path(workdir)
    cache = cache_folder or workdir / CACHE
    if not distributed.is_main():
        distributed.barrier("data")
        if write:
            require_shared(workdir)
    require_objective(given.train, objective)
    continued = run_folder.holds_run(workdir, given, accept_changes)
    if continued:
        given = run_folder.with_stored_start(workdir, given)
    else:
        require_effects(given)
        require_parameters(given.train.init_from, given.model)
    if given.decode.shortlist:
        require_shortlist(given.decode.shortlist)
    corpora = open_all(given, cache_folder=cache)
    for of_role in corpora.values():
        check_not_blank(of_role, given.model.has_inputs)
    if continued:
        tokenizers = run_folder.read_tokenizers(workdir)
        if not accept_changes:
            run_folder.check_corpora(workdir, corpora)
    else:
        if given.model.has_inputs and given.data.check_languages:
            check_languages(corpora["train"], [*corpora["valid"], *corpora["test"]])
        given, tokenizers = _with_vocabulary(given, corpora["train"], cache)
    if given.model.has_inputs:
        check_search(given.model, tokenizers, given.decode)
    held_out = HeldOutText.of([*corpora["valid"], *corpora["test"]], given.data)
    config, dataset = open_dataset(
        given,
        corpora,
        tokenizers,
        cache,
        held_out=held_out,
        verify=distributed.is_main(),
    )
    if continued:
        config = run_folder.with_first_schedule(workdir, config)
    experiment = Experiment(config, dataset, objective, frozen)
    if not continued:
        experiment.load_start()  # Errors are raised before anything is written.
    if distributed.is_main():
        if not continued:
            warn_of_shared_text(
                corpora["train"],
                held_out,
                given.data,
                given.model.has_inputs,
                dataset.training.corpora,
            )
        if write and continued:
            run_folder.update_config(workdir, given, corpora)
        elif write:
            run_folder.write_run(workdir, given, corpora, tokenizers)
        distributed.barrier("data")
    # Collectives wait for a late process for a limited time, on CPUs for 30 s.
    distributed.barrier("experiment is prepared")
    return experiment


def learn_vocabulary(given: ExperimentConfig, workdir: str | Path) -> None:
    """Learns the vocabulary of a run, for `tokenize` and `prepare`, unless it is learned or given.

    Raises:
      UserError: the data cannot be used, or the folder cannot be written.
    """
    _opened(given, Path(workdir))


def tokenize(given: ExperimentConfig, workdir: str | Path, index: int, count: int) -> None:
    """Tokenizes part `index` of `count` of the training text of a run, for `prepare` to join.

    Any number of processes can do so at once, on machines that share the run folder. The first of
    them learns the vocabulary.

    Raises:
      UserError: the data cannot be used, or the folder cannot be written.
    """
    config, corpora, tokenizers = _opened(given, Path(workdir))
    held_out = HeldOutText.of([*corpora["valid"], *corpora["test"]], config.data)
    cache = Path(workdir) / CACHE
    make_parts(cache, corpora["train"], tokenizers, config, index, count, held_out)


def _opened(
    given: ExperimentConfig, workdir: Path
) -> tuple[ExperimentConfig, dict[str, list[Corpus]], Tokenizers]:
    """Returns the configuration of a run, its corpora by role, and its vocabularies."""
    corpora = open_all(given, cache_folder=workdir / CACHE)
    check_not_blank(corpora["train"], given.model.has_inputs)
    if run_folder.holds_run(workdir, given):
        config = run_folder.with_stored_start(workdir, given)
        return config, corpora, run_folder.read_tokenizers(workdir)
    config, tokenizers = _with_vocabulary(given, corpora["train"], workdir / CACHE)
    return config, corpora, tokenizers


def _with_vocabulary(
    given: ExperimentConfig, corpora: Sequence[Corpus], cache: Path
) -> tuple[ExperimentConfig, Tokenizers]:
    """Returns the configuration with the special tokens of the vocabularies, and these."""
    path = tokenizer_path(given)
    if path:
        run_folder.check_vocabulary(local_list(path))
    data = dataclasses.replace(given.data, tokenizer_path=path)
    if path:
        tokenizers = Tokenizers.for_run(corpora, data, given.model.has_inputs)
    else:
        tokenizers = _learned(corpora, data, given.model.has_inputs, cache)
    given = dataclasses.replace(given, model=tokenizers.with_ids(given.model))
    require_shared_vocabulary(given.model, tokenizers)
    if given.train.init_from and path != given.train.init_from:
        require_vocabulary(given.train.init_from, tokenizers)
    if data.subword_sampling:
        tokenizers.source.sample([], 0, data.subword_sampling)  # Some vocabularies cannot.
    return given, tokenizers


def _learned(
    corpora: Sequence[Corpus], data: DataConfig, has_inputs: bool, cache: Path
) -> Tokenizers:
    """Returns the vocabularies that are learned from corpora; another process may have done so."""
    key = {
        "text": [corpus.fingerprint for corpus in corpora],
        "tags": tags(data),
        "options": {
            name: getattr(data, name)
            for name in (*names_with(DataConfig, FieldRole.VOCABULARY), "normalization")
        },
        "has_inputs": has_inputs,
    }
    return made_once(
        cache / "vocabulary",
        origin=json.dumps(key, sort_keys=True),
        activity="learning a vocabulary",
        make=lambda partial: Tokenizers.train(corpora, data, has_inputs).save(partial),
        load=Tokenizers.load,
    )
