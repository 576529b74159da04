"""What the program sets for its user before JAX starts: one place, and all of it optional.

Whatever the user's own environment says is left as it is. docs/speed.md tells what each setting
gains, and how to switch it off.
"""

import ctypes
import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import MutableMapping
from pathlib import Path

XLA_FLAGS = {
    # This newer library for sums along rows, but Eigen for products of matrices: a training step
    # in which it takes over both, as by default, takes longer. The flag is known to be there in
    # jaxlib 0.10, and one that XLA does not know ends the program.
    "--xla_cpu_experimental_ynn_fusion_type": ("reduce", "0.10."),
    # Communication between GPUs while they compute; it changes nothing on one GPU.
    "--xla_gpu_enable_latency_hiding_scheduler": ("true", ""),
}
"""Value of each flag, and how the version of jaxlib must begin for it to be set."""


def decoding_options() -> dict[str, str]:
    """What XLA is told when it compiles a step of decoding.

    Its products are many and small, and there the newer library is up to three times as fast as
    Eigen (docs/speed.md). The user's own flag counts for decoding, too.
    """
    name = "xla_cpu_experimental_ynn_fusion_type"
    flag, (ours, version) = f"--{name}", XLA_FLAGS[f"--{name}"]
    given = [text for text in os.environ.get("XLA_FLAGS", "").split() if text.startswith(flag)]
    is_known = importlib.metadata.version("jaxlib").startswith(version)
    if not is_known or any(text != f"{flag}={ours}" for text in given):
        return {}
    return {name: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"}


MALLOC_OPTIONS = {
    # (name in the environment): (number of the option in malloc.h, value). Each training step
    # allocates its large arrays anew. By default glibc maps each one and unmaps it afterwards, and
    # the system then clears every page again at its first use.
    "MALLOC_MMAP_MAX_": (-4, 0),  # no maps: all comes from the heap,
    "MALLOC_TRIM_THRESHOLD_": (-1, -1),  # which is never given back
    "MALLOC_TOP_PAD_": (-2, 2**26),  # and grows by 64 MiB at a time.
    "MALLOC_ARENA_MAX": (-8, 1),  # One heap for all threads: what one frees, another can use.
}


def configure() -> None:
    """Sets compiler flags, allocator and the cache of compiled programs.

    It has to be called before JAX looks for its devices; afterwards the flags have no effect.
    """
    set_xla_flags(os.environ, importlib.metadata.version("jaxlib"))
    keep_memory()
    use_compilation_cache()


def set_xla_flags(environment: MutableMapping[str, str], jaxlib_version: str) -> None:
    """Adds to XLA_FLAGS those of our flags that are not there and that this jaxlib knows."""
    given = environment.get("XLA_FLAGS", "").split()
    names = {flag.partition("=")[0] for flag in given}
    ours = [
        f"{name}={value}"
        for name, (value, version) in XLA_FLAGS.items()
        if name not in names and jaxlib_version.startswith(version)
    ]
    environment["XLA_FLAGS"] = " ".join([*given, *ours])


def keep_memory() -> None:
    """Lets the C library keep memory instead of handing it back; only glibc knows how."""
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    for name, (option, value) in MALLOC_OPTIONS.items():
        if name not in os.environ:
            mallopt(option, value)


def use_compilation_cache() -> None:
    """Lets JAX keep compiled programs in the user's cache folder.

    JAX_COMPILATION_CACHE_DIR names another folder, or, if it is empty, none. Programs are kept
    however little time they took, because decoding has many of them, unless
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS says otherwise.
    """
    settings = {
        "jax_compilation_cache_dir": str(cache_folder()),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    for name, value in settings.items():
        if name.upper() in os.environ:
            continue
        # For this process, if it has imported JAX already, and for those that it starts.
        os.environ[name.upper()] = str(value)
        if "jax" in sys.modules:
            import jax

            jax.config.update(name, value)


def cache_folder() -> Path:
    """Where this kind of machine keeps its compiled programs.

    Homes are shared between machines, but a program that was compiled for one processor may not
    run on another: the folder's name tells them apart.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    kind = f"{platform.machine()}-{_processor_features()}"
    version = importlib.metadata.version("jaxlib")
    return Path(base) / "flaxformer_mt" / "compiled" / f"jaxlib-{version}" / kind


def _processor_features() -> str:
    """A short name for what this machine's processors can do."""
    information = Path("/proc/cpuinfo")
    features = platform.processor()
    if information.exists():
        lines = information.read_text().splitlines()
        kinds = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
        features = "\n".join(sorted(kinds))
    return hashlib.sha256(features.encode()).hexdigest()[:12]
