"""Adapters by name behind the server: listed, asked for as models, apart in the prefix store, and refused where bad."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from remask.cli import main
from remask.engine.config import EngineConfig
from remask.errors import CheckpointError, ConfigError, UnknownNameError
from remask.llm import LLM
from tests.checkpoint.adapters import adapted
from tests.leftovers import lasting_folder
from tests.server.serving import CHATS, URL, Running, bundled, cached_tokens, joined, serving, text_of

BUNDLED = Path(__file__).parents[2] / "src" / "remask" / "bundled_transit"
NAME = "bundled-transit"
SHORT = {"max_tokens": 16, "seed": 1}


@pytest.fixture(scope="module")
def folders() -> dict[str, str]:
    folder, tensors = lasting_folder(), load_file(BUNDLED / "model.safetensors")
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    adapted(folder / "one", tensors, 1, lora_alpha=24, target_modules=["q_proj", "v_proj", "attn_out"])
    adapted(folder / "two", tensors, 2, r=8, lora_alpha=64, target_modules=["k_proj", "up_proj"])
    adapted(folder / "cut", tensors, 3, target_modules=["q_proj"])
    file = folder / "cut" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return {name: str(folder / name) for name in ("one", "two", "cut", "nowhere")}


def load(adapters: dict[str, str], **more: Any) -> LLM:
    return bundled("transit", "reuse", engine=EngineConfig(max_model_len=512), adapters=adapters, **more)


@pytest.fixture(scope="module")
def running(folders: dict[str, str]) -> Iterator[Running]:
    with serving(load(folders, skip_bad_adapters=True)) as running:
        yield running


def text(running: Running, model: str | None = None, number: int = 0, **fields: Any) -> str:
    body = {"messages": CHATS[number], **SHORT, **({} if model is None else {"model": model}), **fields}
    answer = running.answer(URL, body)
    assert answer["model"] == (model or NAME)
    return text_of(answer)


def test_they_are_listed_with_root_and_parent(running: Running, folders: dict[str, str]) -> None:
    listed = {each["id"]: each for each in running.client.get("/v1/models").json()["data"]}
    assert list(listed) == [NAME, "one", "two"]
    assert [(listed[name]["root"], listed[name]["parent"]) for name in listed] == [
        (NAME, None),
        (folders["one"], NAME),
        (folders["two"], NAME),
    ]
    assert "card" in listed[NAME]
    assert "card" not in listed["one"]
    assert running.client.get("/v1/models/two").json() == listed["two"]


def test_a_name_is_a_model_and_answers_are_those_of_python(running: Running, folders: dict[str, str]) -> None:
    llm = load({name: folders[name] for name in ("one", "two")})
    params = {**running.service.config.sampling, **SHORT}
    found = {}
    for adapter in (None, "one", "two"):
        (alone,) = llm.generate([CHATS[0]], params, adapter=adapter)
        found[adapter] = text(running, adapter)
        assert found[adapter] == alone.text
        assert text(running, adapter=adapter) == alone.text
    assert len(set(found.values())) == 3


def test_each_has_stored_prefixes_of_its_own(running: Running) -> None:
    running.client.delete("/v1/cache")
    models = (NAME, "one", "two", "one", NAME)
    cached = [cached_tokens(running.ask(1, model=model, **SHORT).json()) > 0 for model in models]
    assert cached == [False, False, False, True, True]


def test_streams_and_fingerprints_tell_which(running: Running) -> None:
    whole = running.ask(model="one", **SHORT).json()
    chunks = running.stream({"messages": CHATS[0], "model": "one", **SHORT})
    assert joined(chunks) == text_of(whole)
    prints = {running.ask(model=model, **SHORT).json()["system_fingerprint"] for model in (NAME, "one", "two")}
    assert len(prints) == 3
    traces = [running.ask(model=model, return_trace=True, **SHORT).json() for model in (NAME, "one")]
    models = [each["choices"][0]["remask"]["trace"]["model"] for each in traces]
    assert models[1].startswith(f"{models[0]}-")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
def test_every_endpoint_takes_the_name(running: Running, path: str) -> None:
    body = {
        "/v1/completions": {"prompt": "In winter: route from Oslo?", "max_tokens": 8},
        "/v1/responses": {"input": "In winter: route from Oslo?", "max_output_tokens": 8},
        "/v1/messages": {"messages": [{"role": "user", "content": "In winter: route from Oslo?"}], "max_tokens": 8},
    }[path]
    answers = [running.client.post(path, json={**body, "seed": 3, "model": model}) for model in (NAME, "one", "nobody")]
    assert [answer.status_code for answer in answers] == [200, 200, 404]
    base, one = (answer.json() for answer in answers[:2])
    assert one["model"] == "one"
    (key,) = {"choices", "output", "content"} & base.keys()
    assert base[key] != one[key]


def test_decisions_are_read_with_it(running: Running) -> None:
    question = {"type": "choice", "instructions": "Where to?", "criteria": ["reef", "garden", "barley"]}
    body: dict[str, Any] = {"state": "In winter.", "questions": {"next": question}}
    base, one = (running.answer("/v1/decisions", {**body, "model": model}) for model in (NAME, "one"))
    assert base["answers"] != one["answers"]
    llm = running.service.llm
    with pytest.raises(UnknownNameError, match="Unknown adapter 'three'"):
        llm.decide(body["state"], body["questions"], adapter="three")


def test_bad_ones_are_named_and_the_others_served(running: Running) -> None:
    assert set(running.service.llm.refused_adapters) == {"cut", "nowhere"}
    for name, why in (("cut", "cannot be read"), ("nowhere", "There is no adapter")):
        for field in ("model", "adapter"):
            error = running.refusal(URL, {"messages": CHATS[0], field: name, **SHORT}, 404)
            assert (error["code"], error["param"]) == ("model_not_found", field)
            for part in (
                f"the model {name!r} is an adapter that could not be loaded: ",
                why,
                f"served: {NAME}, one, two",
            ):
                assert part in error["message"]
    assert text(running, "one")


def test_two_names_that_differ_are_refused(running: Running) -> None:
    asked = {"messages": CHATS[0], **SHORT}
    for fields, told in (
        ({"model": "one", "adapter": "two"}, "model='one' and adapter='two' are two adapters"),
        ({"adapter": "three"}, "Unknown adapter 'three'"),
    ):
        assert told in running.refusal(URL, {**asked, **fields})["message"]
    for model in ("one", NAME):
        assert running.ask(model=model, adapter="one", **SHORT).status_code == 200


@pytest.mark.parametrize(
    ("name", "path", "more", "error", "message"),
    [
        (NAME, "one", {}, ConfigError, f"'{NAME}' is a name of the model and of an adapter"),
        ("cut", "cut", {}, CheckpointError, "cannot be read"),
        ("two", "two", {"max_lora_rank": 4}, CheckpointError, r"Its rank is 8; allowed: 4 \(--max-lora-rank"),
    ],
)
def test_what_cannot_be_used_is_refused_at_the_start(
    folders: dict[str, str], name: str, path: str, more: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message), serving(load({"one": folders["one"], name: folders[path]}, **more)):
        pass


def test_lines_of_a_file_name_adapters(folders: dict[str, str], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = {"prompt": "In winter: route from Oslo?", "sampling": {"max_tokens": 16}}
    names = (None, "one", "two", "three")
    source.write_text("\n".join(json.dumps({"id": name, "adapter": name, **line}) for name in names))
    modules = [f"one={folders['one']}", json.dumps({"name": "two", "path": folders["two"]})]
    files = ["--input", str(source), "--output", str(target), "--dtype", "float32"]
    status = main(["--quiet", "generate", "--model", NAME, *files, "--enable-lora", "--lora-modules", *modules])
    answers = [json.loads(each) for each in target.read_text().splitlines()]
    assert status == 1
    assert "Unknown adapter 'three'" in answers[3]["error"]
    assert len({each["text"] for each in answers[:3]}) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["one"], "'one' must be NAME=PATH"),
        (["=path"], "must be NAME=PATH"),
        (["one="], "must be NAME=PATH"),
        (['{"name": "one"}'], "must be an object of two texts"),
        (['{"name": "one", "path": 3}'], "must be an object of two texts"),
        (['{"name": "one"'], "--lora-modules"),
        (["one=a", "one=b"], "'one' names two adapters, 'a' and 'b'"),
        ([], "no adapter is named"),
    ],
)
def test_options_say_what_is_wrong(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    modules = ["--lora-modules", *words] if words else []
    assert main(["serve", NAME, "--port", "0", "--enable-lora", *modules]) != 0
    assert message in capsys.readouterr().err


def test_a_file_of_flags_names_them_either_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("lora-modules:\n- one=here\n- {name: one, path: there}\n")
    assert main(["serve", NAME, "--port", "0", "--config", str(file)]) != 0
    assert "'one' names two adapters, 'here' and 'there'" in capsys.readouterr().err
