"""The one exception that means: what the user gave cannot be used."""


class UserError(Exception):
    """The message is one line that names the option or file and says what to do.

    Raised before anything is written. The entry points (`train.py`, `flaxformer-mt`) print the
    message without a traceback and leave with a non-zero exit code.
    """
