"""Environment settings made before JAX starts; the user's own take precedence."""

import os
import subprocess
import sys

import pytest

from flaxformer_mt.runtime import cache_folder, set_xla_flags


def test_the_users_flags_take_precedence_and_unknown_ones_are_omitted():
    environment = {"XLA_FLAGS": "--xla_cpu_experimental_ynn_fusion_type=dot --mine"}
    set_xla_flags(environment, "0.10.2")
    flags = environment["XLA_FLAGS"].split()
    assert flags[:2] == ["--xla_cpu_experimental_ynn_fusion_type=dot", "--mine"]
    assert sum("ynn" in flag for flag in flags) == 1
    newer = {}
    set_xla_flags(newer, "0.12.0")
    assert "ynn" not in newer["XLA_FLAGS"]


@pytest.mark.parametrize("chosen", [None, "", "elsewhere"])
def test_jax_starts_with_the_settings(tmp_path, chosen):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "XLA_FLAGS": ""}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    if chosen is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path / chosen) if chosen else ""
    program = (
        "import jax; from flaxformer_mt import runtime; runtime.configure();"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0);"
        "jax.jit(lambda x: x @ x)(jax.numpy.ones((4, 4)))"
    )
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    if chosen == "":
        assert not written
    else:
        folder = tmp_path / chosen if chosen else tmp_path / "flaxformer_mt"
        assert written
        assert all(path.is_relative_to(folder) for path in written)


def test_kinds_of_machines_do_not_share_programs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = cache_folder()
    assert here.is_relative_to(tmp_path)
    monkeypatch.setattr("flaxformer_mt.runtime._processor_features", lambda: "other")
    assert cache_folder() != here
