"""What has left is refused with what to use in its place, at every door that took it."""

import pytest

from remask.cli import main
from remask.errors import LAST_FULL, LEFT, UnknownNameError
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms

FIELDS = ("speculate",)
TERMS = ("replay", "segments")
TASKS = ("remask_humaneval", "remask_mbpp")
COMMANDS = tuple(name for name in LEFT if " " in name)


def sentence(kind: str, name: str) -> str:
    return f"The {kind} {name!r} left after {LAST_FULL}: {LEFT[name]}."


@pytest.mark.parametrize("name", FIELDS)
def test_a_sampling_parameter_that_left_says_what_to_use(name: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        SamplingParams.from_mapping({name: 2})
    assert str(caught.value) == sentence("sampling parameter", name)


@pytest.mark.parametrize("name", TERMS)
def test_a_field_that_left_says_what_to_use(name: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        Terms.from_mapping({name: []})
    assert str(caught.value) == sentence("term", name)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_left_says_what_to_use(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quiet", *name.split(), "--model", "x"]) == 2
    assert capsys.readouterr().err == f"remask: error: {sentence('command', name)}\n"


@pytest.mark.parametrize("name", TASKS)
def test_a_task_that_left_says_what_to_use(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quiet", "eval", "tasks", "--model", "x", "--tasks", name]) == 2
    assert capsys.readouterr().err == f"remask eval: error: {sentence('task', name)}\n"


def test_all_that_left_is_listed_here() -> None:
    assert {*FIELDS, *TERMS, *TASKS, *COMMANDS} == LEFT.keys()


def test_another_name_is_merely_unknown() -> None:
    with pytest.raises(UnknownNameError, match="Unknown sampling parameter 'speculates'"):
        SamplingParams.from_mapping({"speculates": 2})
