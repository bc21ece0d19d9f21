"""The example package, installed for the tests that ask for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.installed import installed, write_example


@pytest.fixture
def example(tmp_path: Path) -> Iterator[Path]:
    """The folder in which the package `remask-example` is installed."""
    folder = tmp_path / "site"
    write_example(folder)
    with installed(folder):
        yield folder
