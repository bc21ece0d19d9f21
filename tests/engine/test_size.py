"""The engine stays small enough to be read: bounds on its files, its classes, and what a steady step enters."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import remask.engine
from tests.engine.entered import entered, report, steady_step
from tests.engine.support import make_engine, request

MOST_LINES, MOST_FIELDS, MOST_METHODS = 417, 20, 22
MOST_FILES, MOST_FUNCTIONS = 21, 85  # of a steady step
GENERATED = {"__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__"}  # of dataclasses


def test_a_steady_step_enters_few_files_and_functions() -> None:
    step = steady_step()
    with entered() as calls:
        for _ in range(6):
            step()
    files = {code.co_filename for code in calls}
    assert len(files) <= MOST_FILES, report(calls)
    assert len(calls) <= MOST_FUNCTIONS, report(calls)
    assert any(code.co_qualname == "Transformer.forward" for code in calls), "a pass was run"


def test_no_file_is_long() -> None:
    (folder,) = map(Path, remask.engine.__path__)
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py")}
    assert len(lines) > 20
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_a_running_request_has_few_fields() -> None:
    engine = make_engine()
    engine.add(request())
    engine.step()
    (running,) = engine._lifecycle.requests()
    assert len(vars(running)) <= MOST_FIELDS


def test_no_class_has_many_methods() -> None:
    """Those of its bases in the engine count too."""
    counts = {kind.__qualname__: len(methods(kind)) for kind in engine_classes()}
    assert "RunningRequest" in counts
    assert {name: count for name, count in counts.items() if count > MOST_METHODS} == {}


def engine_classes() -> Iterator[type]:
    """Every class that a module of the engine defines."""
    for info in pkgutil.walk_packages(remask.engine.__path__, "remask.engine."):
        module = importlib.import_module(info.name)
        yield from (each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == info.name)


def methods(kind: type) -> set[str]:
    """Names of methods and properties that somebody has written."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("remask.engine")]
    found = {
        name
        for base in own
        for name, value in vars(base).items()
        if inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
    }
    return found - GENERATED if hasattr(kind, "__dataclass_fields__") else found
