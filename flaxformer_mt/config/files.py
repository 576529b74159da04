"""Configuration files.

A configuration file is a Python program, which runs when the configuration is loaded. It can import
modules of its folder, as a script can.
"""

import builtins
import contextlib
import dataclasses
import importlib
import os
import re
import sys
import traceback
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

from flaxformer_mt.config.data import CorpusConfig
from flaxformer_mt.config.experiment import ExperimentConfig, groups
from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.config.serialization import from_json
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import open_regular

_CLASSES = {kind.__name__: kind for kind in (ExperimentConfig, CorpusConfig, *groups().values())}
_MODULE_NAME = "flaxformer_mt_configuration_file"


def load_config(path: str | Path) -> ExperimentConfig:
    """Calls `get_config()` of a configuration file, or reads the `config.json` of a run.

    The name of an included configuration ("first_hour") stands for its file. `UserError`, with the
    file and the line, if it does not give an `ExperimentConfig`.
    """
    if not isinstance(path, str | os.PathLike):
        kind = type(path).__name__
        raise TypeError(f"config must be an ExperimentConfig or a path, not {kind}")
    path = Path(path)
    if not path.exists():
        known = included()
        if str(path) not in known:
            raise UserError(f"there is no file {path}{suggestion(path.stem, known)}")
        path = known[str(path)]
    with _module_of(path) as module:
        with open_regular(path) as file:
            source = file.read()
        if path.suffix == ".json":
            return from_json(source)
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
        get_config = getattr(module, "get_config", None)
        if not callable(get_config):
            raise UserError("it defines no get_config()")
        config = get_config()
        if not isinstance(config, ExperimentConfig):
            raise UserError(f"get_config() returns {type(config).__name__}, not ExperimentConfig")
        return config


def included() -> dict[str, Path]:
    """Returns the files of the configurations that come with the package, by name.

    They are the folder `configs` of a clone, or the copy of it that is installed as package data.
    """
    package = Path(__file__).parents[1]
    installed = package / "configs"
    folder = installed if installed.is_dir() else package.with_name("configs")
    return {file.stem: file for file in sorted(folder.glob("*.py"))}


@contextlib.contextmanager
def _module_of(path: Path) -> Iterator[types.ModuleType]:
    """Yields an empty module for the code of a file, to which classes of that code can refer.

    Meanwhile the modules of its folder can be imported. Afterwards they count as not imported:
    another configuration file may have neighbors of the same names.

    Raises:
      UserError: the block raised an exception, which it names with the file and the line.
    """
    folder = path.resolve().parent
    known = {name.partition(".")[0] for name in sys.modules}
    outer = sys.modules.get(_MODULE_NAME)  # Code of one file may load another.
    module = sys.modules[_MODULE_NAME] = types.ModuleType(_MODULE_NAME)
    module.__file__ = str(path)
    writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # Anyone's folder.
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield module
    except (Exception, SystemExit) as error:  # User code may raise anything.
        raise UserError(_describe(error, path, folder)) from error
    finally:
        sys.dont_write_bytecode = writes_bytecode
        with contextlib.suppress(ValueError):  # The code may have removed it.
            sys.path.remove(str(folder))
        new = {name for name in sys.modules if name.partition(".")[0] not in known}
        neighbors = {name for name in new if _folder_of(sys.modules[name]) == folder}
        for name in new:
            if name.partition(".")[0] in neighbors:
                del sys.modules[name]
        sys.modules.pop(_MODULE_NAME, None)
        if outer is not None:
            sys.modules[_MODULE_NAME] = outer


def _folder_of(module: types.ModuleType) -> Path | None:
    paths = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
    return Path(paths[0]).parent if paths[0] else None


def _describe(error: BaseException, path: Path, folder: Path) -> str:
    # Code in a string has no file: it is called "<string>".
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
        text = f": {error.text.strip()[:80]}" if error.text else ""
        return f"{error.filename}, line {error.lineno}: {error.msg}{text}"
    # The innermost line of user code: libraries raise their exceptions behind it.
    own = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == str(path) or Path(frame.f_code.co_filename).parent == folder
    ]
    if not own:
        return f"{path}: {_message(error, [])}"
    frame, line = own[-1]
    visible = [*frame.f_locals, *frame.f_globals, *dir(builtins)]
    if isinstance(error, ModuleNotFoundError):
        visible = [file.stem for file in folder.glob("*.py")]
    return f"{frame.f_code.co_filename}, line {line}: {_message(error, visible)}"


def _message(error: BaseException, visible: Iterable[str]) -> str:
    """Returns the message of an exception, with one of the `visible` names if one is misspelled."""
    text = str(error)
    if isinstance(error, UserError):
        return text
    unknown = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", text)
    if unknown and unknown[1] in _CLASSES:
        fields = [field.name for field in dataclasses.fields(_CLASSES[unknown[1]])]
        return f"{unknown[1]} has no field {unknown[2]}{suggestion(unknown[2], fields)}"
    absent = re.search(r"cannot import name '(\w+)'", text)
    hint = ""
    if isinstance(error, AttributeError) and error.name:
        hint = suggestion(error.name, dir(error.obj))
    elif isinstance(error, NameError | ModuleNotFoundError) and error.name:
        hint = suggestion(error.name, visible)
    elif isinstance(error, ImportError) and absent and error.name in sys.modules:
        hint = suggestion(absent[1], dir(sys.modules[error.name]))
    return f"{type(error).__name__}: {text}{hint}"
