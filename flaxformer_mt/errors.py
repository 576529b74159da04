"""The exception for invalid input."""


class UserError(Exception):
    """Raised for input that cannot be used: options, files, data.

    The message is one line that names the option or file and says what to do. It is raised before
    anything is written. The entry points (`train.py`, `flaxformer-mt`) print the message without a
    traceback and exit with code 1.
    """
