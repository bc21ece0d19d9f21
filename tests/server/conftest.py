"""One server for most tests of this folder; those that need other settings start their own."""

from collections.abc import Iterator

import pytest

from tests.server.serving import Running, serving


@pytest.fixture(scope="session")
def _shared() -> Iterator[Running]:
    with serving(model_names=["bundled-transit", "another-name"]) as running:
        yield running


@pytest.fixture
def server(_shared: Running) -> Iterator[Running]:
    """A server with nothing running, before and after; its store may hold prefixes."""
    _shared.settle()
    yield _shared
    _shared.settle()
