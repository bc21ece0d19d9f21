"""The engine stays small enough to be read: bounds on its files, its classes, and what a steady step enters."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import remask.engine
from remask.engine.member import Turn
from remask.plan.canvas import Canvas
from remask.readers.decision import ReadingDecoder
from tests.engine.entered import entered, report, steady_step
from tests.engine.support import make_engine, request

MOST_LINES, MOST_FIELDS, MOST_METHODS = 417, 20, 22
MOST_FILES, MOST_FUNCTIONS = 18, 85  # of a steady step
MOST_OF_A_DECODER, MOST_OF_A_TURN = 12, 8
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


def test_a_decoder_and_a_turn_have_few_members() -> None:
    decoder = ReadingDecoder(Canvas((1,), np.zeros(2, dtype=np.int64), 2), 0)
    assert len([name for name in dir(decoder) if not name.startswith("_")]) <= MOST_OF_A_DECODER
    assert len(Turn.__dataclass_fields__) <= MOST_OF_A_TURN


def test_no_class_has_many_methods() -> None:
    """Those of its bases in the engine count too."""
    counts = {kind.__qualname__: len(methods(kind)) for kind in engine_classes()}
    assert "RunningRequest" in counts
    assert {name: count for name, count in counts.items() if count > MOST_METHODS} == {}


def engine_classes() -> Iterator[type]:
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
