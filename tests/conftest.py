"""The world of the tests: 8 simulated CPU devices, strict dtype promotion, warnings are errors."""

import os

# Before JAX starts: the number of devices cannot be changed afterwards.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# PyTorch's threads wait busily for each other, which toy sizes and a busy machine make slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Compiled programs of tests do not belong into the user's cache.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def float64():
    """Lets JAX compute in float64 during one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """Run folder of a tiny trained model in Marian's arrangement; copy it to change it."""
    from trained_run import place, shared_run  # It imports all of train.py.

    return shared_run(place(tmp_path_factory))
