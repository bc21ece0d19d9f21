"""One model has one set of sampling defaults, whichever front a request comes through."""

import argparse
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import remask
from remask import LLM, SamplingParams
from remask.checkpoint.files import read_sampling
from remask.cli import main
from remask.cli.main import parse
from remask.cli.options import engine_config, open_llm, server_settings
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.errors import CheckpointError, ConfigError
from remask.tasks import relay, tariff, transit
from tests.server.serving import serving

BUNDLED_TARIFF = Path(remask.__file__).parent / "bundled_tariff"
USER = {"role": "user", "content": "from abbey go 2 , where am i ?"}
SEEN = "the request is seen"


@dataclass
class Spy:
    """What reaches an engine, which then refuses it, so that nothing is computed."""

    requests: list[Request] = field(default_factory=list)

    def last(self) -> SamplingParams:
        """The parameters of the last request."""
        return self.requests[-1].params


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    found = Spy()

    def check(_: Engine, request: Request) -> None:
        if request.id == "defaults" or request.id == "example":  # a server's own checks of what it can run
            return
        found.requests.append(request)
        raise ConfigError(SEEN)

    monkeypatch.setattr(Engine, "check", check)
    return found


def through_llm(model: str, *_: Any) -> None:
    with pytest.raises(ConfigError, match=SEEN):
        LLM(model).generate([[USER]])


def through_prompt(model: str, *_: Any) -> None:
    assert main(["--quiet", "generate", "--model", model, "--prompt", USER["content"]]) == 2


def through_file(model: str, folder: Path, *_: Any) -> None:
    (folder / "in.jsonl").write_text(json.dumps({"messages": [USER]}), encoding="utf-8")
    assert main(["--quiet", "generate", "--model", model, "--input", str(folder / "in.jsonl")]) == 1


def through_chat(model: str, _: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(USER["content"] + "\n"))
    main(["--quiet", "chat", "--model", model])


def served(model: str, send: Callable[[Any], Any]) -> None:
    """Send a request to the server that `remask serve MODEL` makes."""
    args: argparse.Namespace = parse(["--quiet", "serve", model])
    args.model = args.positional_model
    with serving(open_llm(args, engine=engine_config(args)), **server_settings(args)) as running:
        assert SEEN in send(running).text


def through_server(model: str, *_: Any) -> None:
    served(model, lambda running: running.chat({"messages": [USER]}))


def through_playground(model: str, *_: Any) -> None:
    """The page leaves its fields empty, and shows in them what the server then takes."""

    def send(running: Any) -> Any:
        shown = running.client.get("/playground/example").json()["sampling"]
        response = running.chat({"messages": [USER]})
        assert shown == running.service.llm.session.sampling
        assert running.client.get("/get_model_info").json()["sampling"] == shown
        return response

    served(model, send)


FRONTS = (through_llm, through_prompt, through_file, through_chat, through_server, through_playground)
OWN = {"max_tokens": 12, "block_length": 4, "steps": 6, "temperature": 0.25}
FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bundled-tariff": ({}, {"max_tokens": 8, "steps": 8, "block_length": 8}),
    "bundled-transit": ({}, {"max_tokens": 16, "steps": 8, "block_length": 2}),
    "own file": ({"remask.json": {"sampling": OWN}}, OWN),
    "own file first": ({"remask.json": {"sampling": OWN}, "generation_config.json": {"max_new_tokens": 9}}, OWN),
    "sampled": (
        {
            "generation_config.json": {
                "max_new_tokens": 9,
                "do_sample": True,
                "temperature": 0.7,
                "top_p": 0.8,
                "top_k": 0,
            }
        },
        {"max_tokens": 9, "temperature": 0.7, "top_p": 0.8},
    ),
    "greedy": ({"generation_config.json": {"do_sample": False, "temperature": 0.7, "num_beams": 1}}, {}),
    "nothing": ({"config": {}}, {}),
}


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A bundled model, or a copy of one with other files."""
    files, _ = FILES[request.param]
    if not files:
        yield request.param
        return
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED_TARIFF, folder)
    (folder / "remask.json").unlink()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    yield str(folder)


@pytest.mark.few(13)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("model", FILES, indirect=True)
def test_every_front_takes_the_models_defaults(
    model: str,
    front: Callable[..., None],
    request: pytest.FixtureRequest,
    spy: Spy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    front(model, tmp_path, monkeypatch)
    _, expected = FILES[request.node.callspec.params["model"]]
    assert spy.last() == SamplingParams.from_mapping(expected)


def test_what_is_asked_for_comes_on_top(spy: Spy, tmp_path: Path) -> None:
    """The rest of the defaults gives way: blocks and steps follow the length."""
    expected = SamplingParams(max_tokens=6, steps=3, block_length=2)
    options = ["--model", "bundled-transit", "--prompt", "where ?", "--sampling", '{"max_tokens": 6}']
    assert main(["--quiet", "generate", *options]) == 2
    assert spy.last() == expected
    llm = LLM("bundled-transit")
    for given, params in (({"max_tokens": 6}, expected), (SamplingParams(max_tokens=6), SamplingParams(max_tokens=6))):
        with pytest.raises(ConfigError, match=SEEN):
            llm.generate("where ?", given)
        assert spy.last() == params
    assert llm.session.params({"remasking": {"factor": 1.0}}, {"threshold": 0.5}).threshold is None


def test_a_default_length_gives_way_to_a_long_prompt() -> None:
    llm = LLM("bundled-transit")
    room = llm.engine.max_model_len
    assert llm.session.params(prompt_tokens=room - 7).max_tokens == 6
    assert llm.session.params({"max_tokens": 16}, prompt_tokens=room - 7).max_tokens == 16, "the engine refuses it"


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("remask.json", {"sampling": {"max_tokns": 4}}, "Did you mean 'max_tokens'"),
        ("remask.json", {"sampling": [1]}, "'sampling' is [1]; it may hold 'sampling', an object"),
        ("remask.json", {"sampling": {}, "more": 1}, "'more' is 1; it may hold 'sampling', an object"),
        ("remask.json", {"cache": {}}, "'cache' is {}; it may hold"),
        ("generation_config.json", {"max_new_tokens": "x"}, "max_tokens must be"),
        ("generation_config.json", {"do_sample": True, "temperature": -1}, "temperature must be"),
    ],
)
def test_defaults_that_cannot_be_used_are_named(tmp_path: Path, name: str, content: object, error: str) -> None:
    (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match=re.escape(error)) as raised:
        read_sampling(tmp_path)
    assert name in str(raised.value)


@pytest.mark.parametrize(
    ("model", "task"), [("bundled-tariff", tariff), ("bundled", relay), ("bundled-transit", transit)]
)
def test_the_bundled_models_answer_well_without_a_word_on_sampling(
    model: str, task: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (question,) = task.make_workload(1, 1, 5)
    system, user = (message["content"] for message in question.messages)
    assert main(["--quiet", "generate", "--model", model, "--system", system, "--prompt", user]) == 0
    assert capsys.readouterr().out.split() == question.reference.split()
