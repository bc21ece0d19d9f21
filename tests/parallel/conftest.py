"""Ranks for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.parallel.ranks import Lender, lent


@pytest.fixture(scope="package")
def lenders() -> Iterator[list[Lender]]:
    """Three processes: ranks of up to four."""
    started = [Lender() for _ in range(3)]
    yield started
    for lender in started:
        lender.end()


@pytest.fixture
def ranks(lenders: list[Lender], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models of a test are loaded with these processes."""
    with lent(monkeypatch, lenders):
        yield
