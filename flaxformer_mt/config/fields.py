"""What the declarations of configuration fields share."""

from flaxformer_mt.errors import UserError


def require(condition: bool, message: str) -> None:
    """Raises `UserError` with the message unless the condition holds."""
    if not condition:
        raise UserError(message)
