"""Checkpoints of the small references after two steps of Adam, in their published layout."""

from typing import Any

import torch
from toy_references import Variant

OPTIMIZER_KEYS = {"fairseq": "last_optimizer_state", "opennmt": "optim"}

# Token ids that are padding in no family.
SOURCE = torch.tensor([[5, 7, 8, 4, 9, 6], [4, 7, 6, 8, 5, 9]])
TARGET = torch.tensor([[6, 4, 9, 8, 7], [9, 6, 5, 4, 4]])


def train(variant: Variant, dtype: str = "float32") -> tuple[Any, torch.optim.Adam]:
    """Returns a reference and its optimizer after two steps."""
    reference = variant.build(dtype)
    adam = torch.optim.Adam(reference.parameters(), lr=0.01)
    inputs: Any = (SOURCE, TARGET)
    if variant.family == "double_projection":
        vectors = torch.randn(2, 2, 5, reference.encoder[0].norm1.weight.numel())
        masks = torch.ones(2, 1, 5, dtype=torch.bool), torch.ones(2, 5, 5, dtype=torch.bool)
        inputs = (*vectors.to(getattr(torch, dtype)), *masks)
    for _ in range(2):
        adam.zero_grad()
        reference(*inputs).square().sum().backward()
        adam.step()
    return reference, adam


def trained_checkpoint(variant: Variant, dtype: str = "float32") -> dict[str, Any]:
    """Returns a checkpoint with the state dict and optimizer state, under the published keys."""
    reference, adam = train(variant, dtype)
    model, generator = dict(reference.state_dict()), {}
    if variant.family == "opennmt":
        generator = {name: model.pop(f"generator.{name}") for name in ("weight", "bias")}
    return {
        "model": model,
        **({"generator": generator} if generator else {}),
        OPTIMIZER_KEYS.get(variant.family, "optimizer"): adam.state_dict(),
    }


def assert_identical(found: Any, expected: Any) -> None:
    """Asserts that nested dicts and lists are bitwise equal, with their keys in the same order."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_identical(found[key], expected[key])
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_identical(one, other)
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.numpy().tobytes() == expected.numpy().tobytes()
    else:
        assert (type(found), found) == (type(expected), expected)
