"""Exit codes, with one meaning each in all commands."""

import enum


class ExitCode(enum.IntEnum):
    """Exit code of `train.py` and of every command of `flaxformer-mt`."""

    SUCCESS = 0
    FAILURE = 1
    USAGE = 2
    INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h
    STOPPED = 130  # 128 + SIGINT, as shells report it

    @property
    def meaning(self) -> str:
        """The meaning, in a line for help and documentation."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.SUCCESS: "success; parity: everything agrees, or is an accepted difference",
    ExitCode.FAILURE: "unusable input or unwritable output; parity: something differs",
    ExitCode.USAGE: "options that cannot be parsed; parity also: input that it cannot compare",
    ExitCode.INTERRUPTED: "training stopped by a signal, saved; rerun to continue",
    ExitCode.STOPPED: "stopped at once by Ctrl-C (training: by the second), without saving",
}


def table() -> str:
    """Returns the codes with their meanings, one per line."""
    return "\n".join(f"{code:<5}{code.meaning}" for code in ExitCode)


def summary() -> str:
    """Returns the codes with their names, in one line."""
    return ", ".join(f"{code} {code.name.lower()}" for code in ExitCode)
