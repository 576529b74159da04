"""Fixtures of the decoding tests."""

import pytest
from talker import make_talker


@pytest.fixture(scope="session")
def talker():
    return make_talker()
