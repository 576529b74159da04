"""What all tests of decoding share."""

import pytest
from talker import make_talker


@pytest.fixture(scope="session")
def talker():
    return make_talker()
