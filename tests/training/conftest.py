"""A tiny experiment with real parts."""

import pytest
from tiny_setup import Setup


@pytest.fixture
def setup():
    """Call `setup.of(...)` for a tiny experiment."""
    return Setup
