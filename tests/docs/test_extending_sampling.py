"""The examples of docs/extending.md, run as they stand there."""

import re
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remask.checks import fields
from remask.checks import values as checks
from remask.denoising.rules import BlockFacts, Knobs, Remasking, Step
from remask.errors import ConfigError
from remask.request.sampling_params import SamplingParams
from remask.sampling.blocks import even_blocks
from remask.sampling.decoder import Predictions
from remask.sampling.masked import MaskedDecoding, Rule

DOCS = Path(__file__).parents[2] / "docs"
TEXT = "".join((DOCS / page).read_text(encoding="utf-8") for page in ("extending.md", "lab/hooks-and-readers.md"))


def example(section: str) -> str:
    """The Python of a section."""
    found = re.search(rf"\n## {section}\n.*?```python\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def apart() -> Remasking:
    names: dict[str, Any] = {}
    exec(example("A remasking rule"), names)
    rule = names["APART"]
    assert isinstance(rule, Remasking)
    return rule


def test_the_rule_of_the_example_decodes_a_canvas(apart: Remasking) -> None:
    params = SamplingParams(max_tokens=8, steps=4)
    decoding = MaskedDecoding([1], 0, params, Rule(apart, None), even_blocks(params), 99)
    canvas = decoding.canvas()
    decoder = decoding.decoder(canvas, "all")
    transferred: list[list[int]] = []
    while not decoder.finished:
        positions = np.flatnonzero(canvas.noisy)
        confidence = np.linspace(0.9, 0.1, len(positions), dtype=np.float32)
        chosen = decoder.choose(Predictions(positions, positions, confidence))
        transferred.append(chosen.tolist())
        canvas.settle(chosen, decoder.step)
        decoder.advance()
    assert transferred[:2] == [[1, 3], [2, 4]], "neighbours wait, although they are the most confident"
    assert sorted(place for step in transferred for place in step) == list(range(1, 9))


def test_the_rule_of_the_example_chooses_no_neighbours(apart: Remasking) -> None:
    choose = apart.begin(BlockFacts(4, 1, Knobs()))
    positions, confidence = np.array([3, 4, 5, 9]), np.array([0.9, 0.8, 0.7, 0.1], dtype=np.float32)
    step = Step(positions, confidence, 0, 4, None, None, lambda count: np.zeros(count, dtype=np.float32))
    assert choose(step).tolist() == [0, 2, 3]


def test_the_field_of_the_example_is_a_declaration() -> None:
    names: dict[str, Any] = {**vars(checks), **vars(fields)}
    # The annotated name is a field of a class: its value is what `declare` returns.
    exec(example("A sampling field").replace(": int | None", "", 1), names)
    owner = make_dataclass("Owner", [("max_per_step", "int | None", names["max_per_step"])])
    field = fields.declared(owner)["max_per_step"]
    assert field.description.endswith("sets no limit. For masked models.")
    field.check("max_per_step", None)
    with pytest.raises(ConfigError, match="max_per_step must be a whole number from 1"):
        field.check("max_per_step", 0)


def test_every_place_that_the_page_names_is_there() -> None:
    root = Path(__file__).parents[2]
    part = TEXT[TEXT.index("## A remasking rule") :]
    for name in re.findall(r"`((?:src|tests|scripts)/[\w/]+\.py)`", part):
        assert (root / name).is_file(), name
