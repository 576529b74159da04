"""The start of a run: a folder and a configuration become one `Start`, new or continued."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flaxformer_mt import atomic, distributed
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.relations import EFFECTS
from flaxformer_mt.data.dataset import Dataset
from flaxformer_mt.data.run_text import RunText
from flaxformer_mt.data.stream.blocks import Curriculum
from flaxformer_mt.data.stream.token_store import has_parts
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers, read_tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.experiment import checks
from flaxformer_mt.model.functional import with_layer_options
from flaxformer_mt.run_layout import CACHE, CONFIG, CONTENT
from flaxformer_mt.runs import folder as run_folder
from flaxformer_mt.runs.data_file import HOLD_OUT, TOKENIZER
from flaxformer_mt.runs.states import name_of
from flaxformer_mt.training.objective import CROSS_ENTROPY, UserObjective
from flaxformer_mt.training.optimizer import UserOptimizer, with_optimizer
from flaxformer_mt.training.warm_start import WarmStart


@contextlib.contextmanager
def open_folder(workdir: str | Path, announce: Callable[[str], None] = print) -> Iterator[Path]:
    """Creates and locks a run folder; removes what a start wrote if no run came of it.

    A run that is refused before it trained is removed, too: the corrected command then starts anew.
    What was tokenized before an interruption remains, and so do files that others put there.

    Raises:
      UserError: another process trains there, or the folder cannot be written to.
    """
    workdir = Path(workdir)
    if not distributed.is_main():
        yield workdir
        return
    is_new, is_refused = not workdir.is_dir(), False
    before = set() if is_new else {path.name for path in workdir.iterdir()}
    with run_folder.locked(workdir, announce):
        try:
            yield workdir
        except UserError:
            is_refused = not run_folder.has_trained(workdir)
            raise
        finally:
            is_run = (workdir / CONFIG).exists()
            is_empty = is_new and not is_run and not has_parts(workdir / CACHE)
            if CONFIG not in before and (is_refused or is_empty):
                # NFS keeps files that are still open, such as the lock.
                for name in CONTENT.difference(before):
                    with contextlib.suppress(OSError):
                        atomic.delete(workdir / name)
                if not before:
                    with contextlib.suppress(OSError):
                        workdir.rmdir()


@dataclasses.dataclass(frozen=True)
class Start:
    """What a run starts from, or goes on from: all else follows from these."""

    config: ExperimentConfig
    """As given, with the special tokens of the vocabulary, and with what a continued run was
    started from."""
    folder: Path
    text: RunText
    tokenizers: Tokenizers
    is_new: bool


def recorded(
    given: ExperimentConfig,
    objective: UserObjective | None = None,
    optimizer: UserOptimizer | None = None,
    curriculum: Curriculum | None = None,
) -> ExperimentConfig:
    """Returns a configuration that names functions given with it, and all options of layers.

    Raises:
      TypeError: `optimizer` does not make an optimizer.
      UserError: a function has no name, or that of a built-in one; a layer is not registered.
    """
    train, own, data = given.train, given.optimizer, given.data
    if objective is not None:
        name = name_of(objective, "objective", [CROSS_ENTROPY])
        train = dataclasses.replace(train, objective=name)
    if optimizer is not None:
        own = with_optimizer(own, optimizer)
    if curriculum is not None:
        data = dataclasses.replace(data, curriculum=name_of(curriculum, "curriculum"))
    model = with_layer_options(given.model)
    return dataclasses.replace(given, model=model, train=train, optimizer=own, data=data)


def begin(
    given: ExperimentConfig,
    workdir: str | Path,
    *,
    cache: Path | None = None,
    accept_changes: bool = False,
) -> Start:
    """Starts a run, or goes on with the one in a folder; writes to the cache only.

    Args:
      given: the configuration as given by the user.
      workdir: the run folder.
      cache: where text is prepared; by default in the run folder.
      accept_changes: as of `train`.

    Raises:
      UserError: the text or the vocabulary cannot be used, or the folder holds another run.
    """
    folder = Path(workdir)
    cache = cache or folder / CACHE
    if not run_folder.has_run(folder):
        return new_run(given, folder, cache)
    return continued_run(given, folder, cache, accept_changes)


def new_run(given: ExperimentConfig, folder: Path, cache: Path) -> Start:
    """Starts a run, with the vocabulary that it is given or learns."""
    given.require(EFFECTS)
    vocabulary, warm_start = "", None
    if given.train.init_from:
        warm_start = WarmStart(given.train.init_from)
        warm_start.check(given.model)
        if not given.data.tokenizer_path:
            vocabulary = warm_start.tokenizer_path()
    text = RunText(given, cache)
    text.check_not_blank()
    text.check_languages()
    tokenizers = text.vocabularies(vocabulary)
    config = text.with_ids(tokenizers)
    checks.check_vocabulary(config, tokenizers)
    if warm_start and not vocabulary:
        warm_start.check_vocabulary(tokenizers)
    return Start(config, folder, text, tokenizers, is_new=True)


def continued_run(
    given: ExperimentConfig, folder: Path, cache: Path, accept_changes: bool = False
) -> Start:
    """Goes on with the run in a folder, with its vocabulary and what it was started from."""
    checks.check_same_run(folder, given, accept_changes)
    config = run_folder.with_stored_start(folder, given)
    text = RunText(config, cache)
    text.check_not_blank()
    tokenizers = read_tokenizers(folder)
    if not accept_changes:
        run_folder.check_texts(folder, text.fingerprints)
    return Start(config, folder, text, tokenizers, is_new=False)


def record(start: Start, dataset: Dataset) -> None:
    """Writes the run folder; of a continued run, what has changed."""
    named = start.text.fingerprints
    texts = {role: [fingerprint for _, fingerprint in own] for role, own in named.items()}
    if not start.is_new:
        run_folder.update_config(start.folder, start.config, texts)
        return
    start.text.warn_of_shared(dataset)
    division = start.text.division()
    fingerprints: dict[str, Any] = {**texts, TOKENIZER: start.tokenizers.fingerprints}
    fingerprints |= {HOLD_OUT: division} if division else {}
    run_folder.write_run(start.folder, start.config, start.tokenizers.files, fingerprints)
