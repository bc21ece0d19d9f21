"""The browser that the site is searched in."""

from tests.server.conftest import browser

__all__ = ["browser"]
