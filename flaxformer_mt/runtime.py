"""Process settings made before JAX starts: compiler flags, allocator, compilation cache.

Environment variables that are already set take precedence. docs/speed.md has the effect of each
setting, and how to disable it.
"""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import logging
import os
import platform
import sys
import warnings
from collections.abc import MutableMapping
from pathlib import Path

_log = logging.getLogger(__name__)

XLA_FLAGS = {
    # YNNPACK for reductions only, Eigen for matrix products: with both in YNNPACK, the default, a
    # training step is slower. The flag exists in jaxlib 0.10; XLA aborts on unknown flags.
    "--xla_cpu_experimental_ynn_fusion_type": ("reduce", "0.10."),
    # Overlaps communication between GPUs with computation; no effect on one GPU.
    "--xla_gpu_enable_latency_hiding_scheduler": ("true", ""),
}
"""Value of each flag, and the prefix of the jaxlib versions for which it is set."""


def decoding_options() -> dict[str, str]:
    """Returns XLA options for compiling decoding steps.

    Their many small products are up to three times as fast in YNNPACK as in Eigen (docs/speed.md).
    A flag set by the user applies to decoding as well.
    """
    name = "xla_cpu_experimental_ynn_fusion_type"
    flag, (ours, version) = f"--{name}", XLA_FLAGS[f"--{name}"]
    given = [text for text in os.environ.get("XLA_FLAGS", "").split() if text.startswith(flag)]
    is_known = importlib.metadata.version("jaxlib").startswith(version)
    if not is_known or any(text != f"{flag}={ours}" for text in given):
        return {}
    return {name: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"}


MALLOC_OPTIONS = {
    # Environment variable: (option number in malloc.h, value). Each training step allocates its
    # large arrays anew. By default glibc maps and unmaps each of them, and the kernel clears every
    # page again on first use.
    "MALLOC_MMAP_MAX_": (-4, 0),  # No maps: all memory is from the heap,
    "MALLOC_TRIM_THRESHOLD_": (-1, -1),  # which is never given back
    "MALLOC_TOP_PAD_": (-2, 2**26),  # and grows in steps of 64 MiB.
    "MALLOC_ARENA_MAX": (-8, 1),  # One heap, shared by all threads.
}


def configure() -> None:
    """Sets compiler flags, allocator options and the compilation cache.

    Must be called before JAX initializes its devices; later the flags have no effect.
    """
    set_xla_flags(os.environ, importlib.metadata.version("jaxlib"))
    keep_memory()
    use_compilation_cache()


def set_xla_flags(environment: MutableMapping[str, str], jaxlib_version: str) -> None:
    """Adds our flags to XLA_FLAGS, except those set already or unknown to this jaxlib."""
    given = environment.get("XLA_FLAGS", "").split()
    names = {flag.partition("=")[0] for flag in given}
    ours = [
        f"{name}={value}"
        for name, (value, version) in XLA_FLAGS.items()
        if name not in names and jaxlib_version.startswith(version)
    ]
    environment["XLA_FLAGS"] = " ".join([*given, *ours])


def keep_memory() -> None:
    """Makes glibc keep freed memory instead of returning it; no effect with other C libraries."""
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    for name, (option, value) in MALLOC_OPTIONS.items():
        if name not in os.environ:
            mallopt(option, value)


def use_compilation_cache() -> None:
    """Enables JAX's persistent compilation cache, in the user's cache folder.

    JAX_COMPILATION_CACHE_DIR sets another folder, or disables the cache if it is empty. Programs
    are cached even if they compile quickly, because decoding has many of them, unless
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS is set. The folder is private; if others may write to
    it, it is not used.
    """
    # A program that cannot be cached, for example because the disk is full, is compiled again.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    settings: dict[str, str | float] = {"jax_persistent_cache_min_compile_time_secs": 0.0}
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and is_private(cache_root()):
        settings["jax_compilation_cache_dir"] = str(cache_folder())
    for name, value in settings.items():
        if name.upper() in os.environ:
            continue
        # For child processes; if JAX is imported already, this process needs `config.update`.
        os.environ[name.upper()] = str(value)
        if "jax" in sys.modules:
            import jax

            jax.config.update(name, value)


def cache_folder() -> Path:
    """Returns the folder of compiled programs for this kind of processor.

    Home folders may be shared between hosts, but a program compiled for one processor may not run
    on another.
    """
    kind = f"{platform.machine()}-{_processor_features()}"
    version = importlib.metadata.version("jaxlib")
    return cache_root() / "compiled" / f"jaxlib-{version}" / kind


def cache_root() -> Path:
    """Returns the folder of all that is cached for the user, in any run."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "flaxformer_mt"


def is_private(folder: Path) -> bool:
    """Creates a folder for this user only, unless it exists; returns whether it is such a folder.

    One that belongs to another user, or that others may write to, is reported, because the
    programs in it may be theirs. A path that is not absolute is not used: a user may have no home.
    """
    if not folder.is_absolute():
        return False
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.stat()
        if found.st_uid == os.geteuid() and not found.st_mode & 0o022:
            folder.chmod(0o700)  # Others may have been able to read it.
            return folder.is_dir()
    except OSError:  # It cannot be created; everything works without it.
        return False
    _log.warning(
        "%s belongs to another user, or others may write to it: compiled programs are not kept",
        folder,
    )
    return False


def _processor_features() -> str:
    information = Path("/proc/cpuinfo")
    features = platform.processor()
    if information.exists():
        lines = information.read_text().splitlines()
        kinds = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
        features = "\n".join(sorted(kinds))
    return hashlib.sha256(features.encode()).hexdigest()[:12]
