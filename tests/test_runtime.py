"""Environment settings made before JAX starts; the user's own take precedence."""

import io
import os
import socket
import subprocess
import sys

import pytest

from flaxformer_mt import distributed
from flaxformer_mt.runtime import set_xla_flags, use_compilation_cache


def test_the_users_flags_take_precedence_and_unknown_ones_are_omitted():
    environment = {"XLA_FLAGS": "--xla_cpu_experimental_ynn_fusion_type=dot --mine"}
    set_xla_flags(environment, "0.10.2")
    flags = environment["XLA_FLAGS"].split()
    assert flags[:2] == ["--xla_cpu_experimental_ynn_fusion_type=dot", "--mine"]
    assert sum("ynn" in flag for flag in flags) == 1
    newer = {}
    set_xla_flags(newer, "0.12.0")
    assert "ynn" not in newer["XLA_FLAGS"]


@pytest.mark.slow_except("None")
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
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    if chosen == "":
        assert not written
    else:
        folder = tmp_path / chosen if chosen else tmp_path / "flaxformer_mt"
        assert written
        assert all(path.is_relative_to(folder) for path in written)


@pytest.mark.parametrize(
    ("mode", "owner", "is_used"),
    [(None, 0, True), (0o755, 0, True), (0o775, 0, False), (0o755, 1, False), ("file", 0, False)],
)
def test_compiled_programs_of_others_are_not_used(
    monkeypatch, tmp_path, caplog, mode, owner, is_used
):
    """Owners are user ids relative to the user of this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.delitem(sys.modules, "jax")  # Only the environment is set.
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + owner)
    folder = tmp_path / "flaxformer_mt"
    if mode == "file":
        folder.touch()
    elif mode is not None:
        folder.mkdir()
        folder.chmod(mode)
    use_compilation_cache()
    assert ("JAX_COMPILATION_CACHE_DIR" in os.environ) == is_used
    if is_used:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert not caplog.messages
    elif mode != "file":
        assert caplog.messages == [
            f"{folder} belongs to another user, or others may write to it: "
            "compiled programs are not kept"
        ]
        assert folder.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("host", ["::1", "node1"])
def test_an_ipv6_coordinator_is_reached(monkeypatch, host):
    addresses = []

    def connect(address, timeout):
        addresses.append(address)
        return io.BytesIO()

    monkeypatch.setattr(socket, "create_connection", connect)
    shown = f"[{host}]" if ":" in host else host
    distributed._wait_for(f"{shown}:1234", timeout=0)
    assert addresses == [(host, 1234)]
