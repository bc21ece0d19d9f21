"""The oracle and the engine against what was recorded of documents that stand anywhere."""

from typing import Any

import pytest

from tests.engine.support import poisoned_engine, run
from tests.engine.test_against_oracles import model_of, work_of
from tests.goldens import parts


@pytest.mark.parametrize(("line", "expected"), parts.recorded())
def test_the_oracle_decodes_as_it_did(line: dict[str, Any], expected: dict[str, Any]) -> None:
    assert parts.decoded(line) == expected


@pytest.mark.parametrize("model", ["llada", "dream"])
def test_the_engine_decodes_what_was_recorded(model: str) -> None:
    asked = [(line, expected) for line, expected in parts.recorded() if line["model"] == model]
    work = [work_of(line, str(number), number) for number, (line, _) in enumerate(asked)]
    results = run(poisoned_engine(model_of(model), page_size=4), work)
    for number, (_, expected) in enumerate(asked):
        result = results[str(number)]
        assert list(result.token_ids) == expected["output_ids"]
        assert result.usage.row_layers == expected["row_layers"]
        written = [[list(each.positions), list(each.token_ids)] for each in result.trace]
        assert written == [each[1:] for each in expected["transfers"]]
    found = [results[str(number)].usage.cached_tokens for number in range(len(asked))]
    assert (found[0], set(found[1:])) == (0, {15})
