"""What has left is refused with what to use in its place, at every door that took it."""

import re
from typing import Any

import pytest

from remask import LLM
from remask.cli import main
from remask.errors import LAST_TAG, REPLACEMENTS, UnknownNameError
from remask.policies import DepthLookup, parse
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms

FIELDS = ("speculate",)
TERMS = ("replay", "segments")
TASKS = ("remask_humaneval", "remask_mbpp")
PACKAGED = ("acache", "elastic-cache", "entropy-cache", "slowfast")
OPTIONS = tuple(name for name in REPLACEMENTS if " --" in name)
COMMANDS = tuple(name for name in REPLACEMENTS if name.startswith(("analyze ", "bench ")))
MODULES = ("gpu-bounds", "paper-shapes", "speed host")


def sentence(kind: str, name: str) -> str:
    return f"The {kind} {name!r} left after {LAST_TAG}: {REPLACEMENTS[name]}."


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


def test_an_option_that_left_says_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    for name in OPTIONS:
        with pytest.raises(SystemExit):
            main(["--quiet", *name.split(), "x"])
        assert sentence("option", name) in capsys.readouterr().err


@pytest.mark.parametrize("name", TASKS)
def test_a_task_that_left_says_what_to_use(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quiet", "eval", "tasks", "--model", "bundled", "--tasks", name]) == 2
    assert capsys.readouterr().err == f"remask eval: error: {sentence('task', name)}\n"


def test_a_class_that_left_says_what_to_use() -> None:
    with pytest.raises(ImportError, match=re.escape(sentence("class", "SlowFastKnobs"))):
        from remask import SlowFastKnobs  # noqa: F401


def test_a_keyword_that_left_says_what_to_use() -> None:
    llm = LLM("llada-tiny", load_format="dummy", dtype="float32", device="cpu")
    with pytest.raises(UnknownNameError, match=re.escape(sentence("argument", "segments"))):
        llm.generate([[5, 6]], segments=[[5]])  # type: ignore[call-arg]
    with pytest.raises(UnknownNameError, match=r"Unknown argument 'cash'. Did you mean 'cache'\?"):
        llm.generate([[5, 6]], cash="none")  # type: ignore[call-arg]


def test_all_that_left_is_listed_here() -> None:
    of_lab = {*COMMANDS, *OPTIONS, *MODULES, "likelihood of uniform models"}
    assert {*FIELDS, *TERMS, *TASKS, *PACKAGED, "SlowFastKnobs", *of_lab} == REPLACEMENTS.keys()


OF_CACHES = "install remask-caches, which provides it (pip install remask-caches, in a checkout ./caches)"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other package is installed."""
    monkeypatch.setattr("remask.checks.plugins.plugins", lambda _: {})


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("name", PACKAGED[:-1])
def test_a_policy_of_a_package_says_how_to_install_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"The cache policy {name!r} left after {LAST_TAG}: {OF_CACHES}."
    for spec in (name, f"{name}+block-dual", f"bicache+{name}"):
        with pytest.raises(UnknownNameError) as caught:
            parse(spec, None, lambda: DepthLookup({}))
        assert str(caught.value) == expected
    words = ["--quiet", "generate", "--model", "bundled-transit", "--prompt", "x"]
    assert main([*words, "--cache", name]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("remasking", ["slowfast", {"rule": "slowfast", "config": {"window": 3}}])
def test_a_rule_of_a_package_says_how_to_install_it(remasking: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"The remasking.rule 'slowfast' left after .* install remask-caches, "):
        SamplingParams(remasking=remasking)


def test_another_name_is_merely_unknown() -> None:
    with pytest.raises(UnknownNameError, match="Unknown sampling parameter 'speculates'"):
        SamplingParams.from_mapping({"speculates": 2})
