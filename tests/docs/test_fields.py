"""Every declared field reaches each place where users meet it: JSONL, the HTTP body, the help."""

from typing import Any, cast

import pytest

from remask.checks.fields import Declared, declared, paths
from remask.cli import main
from remask.cli.lines import KEYS
from remask.denoising.rules import REMASKING
from remask.errors import ConfigError, UnknownNameError
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms
from remask.server.protocol.generation import ChatBody, CompletionBody

SAMPLING, TERMS = declared(SamplingParams), declared(Terms)
FIELDS: dict[str, Declared] = {**SAMPLING, **TERMS}
LEAVES: dict[str, Declared] = {**paths(SamplingParams), **TERMS}


def test_the_help_holds_every_field_and_rule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["generate", "--help-fields"])
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in LEAVES.items():
        assert f" {name} {field.values.words}" in text
        assert field.description in text
    for name, rule in REMASKING.items():
        assert f" {name} {rule.meaning}" in text


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
@pytest.mark.parametrize("name", FIELDS)
def test_bodies_hold_every_field(name: str, body: type[ChatBody] | type[CompletionBody]) -> None:
    schema = body.model_json_schema()["properties"][name]
    assert schema["description"] == FIELDS[name].description
    assert schema["anyOf"] == [FIELDS[name].values.schema(), {"type": "null"}]


class _Unfit:
    """In no set of values."""


@pytest.mark.parametrize("name", FIELDS)
def test_a_bad_value_has_one_error_through_every_door(name: str) -> None:
    """The declaration's: raised alike by the constructor, by a line and by a body."""
    bad = _Unfit()
    with pytest.raises(ConfigError) as expected:
        FIELDS[name].values.check(name, bad)
    owner = cast(type[Any], SamplingParams if name in SAMPLING else Terms)
    with pytest.raises(ConfigError) as built:
        owner(**{name: bad})
    with pytest.raises(ConfigError) as line:
        owner.from_mapping({name: bad})
    with pytest.raises(ValueError) as body:
        CompletionBody.model_validate({"prompt": "x", name: bad})
    assert str(built.value) == str(line.value) == str(expected.value)
    assert str(expected.value) in str(body.value)


def test_a_line_takes_every_term_and_its_object_every_parameter() -> None:
    assert set(TERMS) <= set(KEYS)
    with pytest.raises(UnknownNameError, match=r"Did you mean 'top_k', 'stop' or 'top_p'\?$"):
        SamplingParams.from_mapping({"topk": 1})
    assert SamplingParams.from_mapping({name: field.default for name, field in SAMPLING.items()}) == SamplingParams()
