"""Load on a running server: which prompts, when, how each request went, and the summary of all of them."""

from remask.cli.commands import missing

try:
    import httpx  # noqa: F401 - every module here needs it
except ModuleNotFoundError as error:
    raise missing(error, "server") from error
