"""Runs requests on an engine that has no thread of its own, step by step."""

from collections.abc import Generator, Sequence

from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.request.result import Event


def check_idle(engine: Engine) -> None:
    """Raise `ConfigError` where `engine` runs requests of somebody else."""
    if engine.busy:
        raise ConfigError("the engine is running other requests; exhaust or close that run, or use new_engine()")


def events_of(requests: Sequence[Request], engine: Engine) -> Generator[list[Event], None, None]:
    """Run requests, and yield the events of each step. They are cancelled where nobody takes more.

    Raises `ConfigError`, before any of them has run, on one that cannot run, and where the engine is not idle.
    """
    check_idle(engine)
    try:
        for request in requests:
            engine.add(request)
        while engine.busy:
            yield _step(engine)
    finally:
        for request in requests:
            engine.cancel(request.id)
        while engine.busy:
            _step(engine)


def _step(engine: Engine) -> list[Event]:
    """One step of `engine`, which begins again where a step fails on nobody's account."""
    try:
        return engine.step()
    except Exception as error:
        engine.recover(error)
        return []
