"""A policy and a family of another package, through Python, the command line and JSONL, the server and its page."""

import json
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from remask import LLM, SamplingParams
from remask.cli import main
from remask.engine.running import RunningRequest
from remask.errors import ConfigError, UnknownNameError
from remask.families import family_of
from remask.families.llada import LLADA
from remask.policies import name_of, names_for, parse, policy_names, settings_of
from tests.checkpoint.checkpoints import LLADA as LLADA_CONFIG
from tests.checkpoint.checkpoints import write
from tests.plugins.installed import PACKAGE
from tests.plugins.package.remask_example.policy import LateRows
from tests.policies.views import no_table
from tests.server.serving import serving

TOKENIZER = Path(__file__).parents[2] / "src" / "remask" / "bundled_transit"
VOCAB = json.loads((TOKENIZER / "config.json").read_text(encoding="utf-8"))["vocab_size"]
SHAPE = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "mask_token_id": VOCAB - 1,
    "eos_token_id": VOCAB - 2,
}
FOREIGN = {"model_type": "plain_llama", **SHAPE}
# The same model in the layout of a family that remask has.
KNOWN = {
    **LLADA_CONFIG,
    "d_model": 32,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_layers": 2,
    "mlp_hidden_size": 48,
    "vocab_size": VOCAB,
    "embedding_size": VOCAB,
    "max_sequence_length": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "mask_token_id": VOCAB - 1,
    "eos_token_id": VOCAB - 2,
}
PROMPT = list(range(5, 21))
SAMPLING = {"max_tokens": 8, "steps": 8, "block_length": 4, "ignore_eos": True}


@pytest.fixture
def model(example: Path, tmp_path: Path) -> Path:
    """A checkpoint of the package's family, with the bundled model's tokenizer; `known` beside it has the same weights.

    Their tensors differ in nothing but their names.
    """
    generator = torch.Generator().manual_seed(3)
    family = family_of(FOREIGN)
    foreign, known = family.tensors(family.config(FOREIGN)), LLADA.tensors(LLADA.config(KNOWN))
    drawn = {slot.name: torch.randn(slot.shape, generator=generator) * 0.3 for slot in foreign}
    write(tmp_path / "foreign", FOREIGN, drawn)
    write(tmp_path / "known", KNOWN, {b.name: drawn[a.name] for a, b in zip(foreign, known, strict=True)})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, tmp_path / "foreign")
    return tmp_path / "foreign"


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="float32", device="cpu", **options)


def test_no_module_is_imported_before_its_name_is_asked_for(example: Path) -> None:
    def imported() -> set[str]:
        return {name for name in sys.modules if name.startswith("remask_example")}

    assert "late-rows" in policy_names()
    LLM("llada-tiny", load_format="dummy", dtype="float32").generate([PROMPT], SamplingParams(max_tokens=4))
    assert imported() == set()
    parse("late-rows", None, no_table)
    assert imported() == {"remask_example", "remask_example.policy"}
    LLM("plain-llama-tiny", load_format="dummy", dtype="float32")
    assert imported() == {"remask_example", "remask_example.policy", "remask_example.family"}


def test_python(model: Path) -> None:
    params = SamplingParams.from_mapping(SAMPLING)
    llm = load(model, cache="late-rows", cache_config={"every": 2})
    (named,) = llm.generate([PROMPT], params)
    (given,) = llm.generate([PROMPT], params, cache=LateRows(2))
    assert (given.token_ids, given.usage.row_layers) == (named.token_ids, named.usage.row_layers)
    # Half of the 8 steps compute all 24 rows in both layers, the others the response and the row before it.
    assert named.usage.row_layers == 2 * (4 * 24 + 4 * 9)
    (none,) = llm.generate([PROMPT], params, cache="none")
    (every,) = llm.generate([PROMPT], params, cache=LateRows(1))
    assert every.token_ids == none.token_ids
    (known,) = load(model.parent / "known").generate([PROMPT], params)
    assert known.token_ids == none.token_ids, "the same weights under other names"


def test_names_and_settings(example: Path) -> None:
    policy = parse("bicache+late-rows", {"depth": 1, "every": 3}, no_table)
    assert name_of(policy) == "bicache+late-rows"
    assert settings_of(policy) == {"depth": 1, "refresh_interval": 16, "boundary": "stored", "every": 3}
    assert "late-rows" in names_for("masked")
    assert "late-rows" not in names_for("uniform")
    with pytest.raises(ConfigError, match="every must be a whole number >= 1, got 0"):
        parse("late-rows", {"every": 0}, no_table)
    with pytest.raises(UnknownNameError, match=r"Unknown setting of cache policy 'late-rows' 'ever'. Did you mean"):
        parse("late-rows", {"ever": 1}, no_table)
    with pytest.raises(UnknownNameError, match=r"Unknown cache policy 'late-row'. Did you mean 'late-rows'\?"):
        parse("late-row", None, no_table)
    with pytest.raises(ConfigError, match="'late-rows' cannot wrap another policy; only bicache"):
        parse("late-rows+none", None, no_table)


def test_a_rule_chooses_no_neighbours(model: Path) -> None:
    llm = load(model)
    sampling = {**SAMPLING, "steps": 4, "block_length": 8, "remasking": "apart"}
    (output,) = llm.generate([PROMPT], SamplingParams.from_mapping(sampling), trace=True)
    assert output.trace is not None
    assert all(np.diff(each.positions).min(initial=9) > 1 for each in output.trace)
    assert sorted(p for each in output.trace for p in each.positions) == list(range(len(PROMPT), len(PROMPT) + 8))
    with pytest.raises(UnknownNameError, match="Did you mean 'apart'"):
        SamplingParams(remasking="aparts")


def test_command_line_and_jsonl(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[dict[str, Any]] = [
        {"id": "own"},
        {"id": "set", "cache": "late-rows", "cache_config": {"every": 1}},
        {"id": "none", "cache": "none"},
        {"id": "inside", "cache": "bicache+late-rows", "cache_config": {"depth": 1}, "prefix_length": 8},
        {"id": "typo", "cache": "late-row"},
        {"id": "bad", "cache": "late-rows", "cache_config": {"every": "2"}},
    ]
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps({**line, "prompt_token_ids": PROMPT}) + "\n" for line in lines))
    options = ["--model", str(model), "--dtype", "float32", "--sampling", json.dumps(SAMPLING)]
    own = ["--cache", "late-rows", "--cache-config", '{"every": 2}']
    assert main(["--quiet", "generate", *options, *own, "--input", str(file)]) == 1, "two lines are wrong"
    answers = {answer["id"]: answer for answer in map(json.loads, capsys.readouterr().out.splitlines())}
    assert answers["own"]["usage"]["row_layers"] == 2 * (4 * 24 + 4 * 9)
    assert answers["set"]["token_ids"] == answers["none"]["token_ids"]
    assert answers["inside"]["finish_reason"] == "length"
    assert "Did you mean 'late-rows'?" in answers["typo"]["error"]
    assert "every must be a whole number >= 1, got '2'" in answers["bad"]["error"]


def test_server_and_playground(model: Path) -> None:
    llm = load(model, cache="late-rows", cache_config={"every": 2})
    with serving(llm, model_names=["foreign"], sampling={}) as running:
        url, body = "/v1/completions", {"prompt": PROMPT, **SAMPLING}

        def answered(**fields: Any) -> dict[str, Any]:
            response: httpx.Response = running.client.post(url, json={**body, **fields})
            assert response.status_code == 200, response.text
            answer: dict[str, Any] = response.json()
            return answer

        asked: dict[str, dict[str, Any]] = {
            "default": {},
            "named": {"cache": "late-rows", "cache_config": {"every": 2}},
            "often": {"cache": "late-rows", "cache_config": {"every": 1}},
            "none": {"cache": "none"},
        }
        texts = {name: answered(**fields)["choices"][0]["text"] for name, fields in asked.items()}
        assert texts["default"] == texts["named"]
        assert texts["often"] == texts["none"]
        answered(cache="bicache+late-rows", cache_config={"depth": 1}, prefix_length=8)
        refused = running.client.post(url, json={**body, "cache": "late-row"})
        assert refused.status_code == 400
        assert "Did you mean 'late-rows'?" in refused.json()["error"]["message"]
        info = running.client.get("/get_model_info").json()
        assert (info["family"], info["cache"], info["cache_config"]) == ("plain-llama", "late-rows", {"every": 2})
        page = running.client.get("/playground/example").json()
        assert {"none", "late-rows", "bicache+late-rows"} <= set(page["policies"])
        assert page["pair"] == ["none", "late-rows"]


def test_a_policy_object_is_a_servers_default(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    parse("late-rows", None, no_table)

    class Own(LateRows):
        """Somebody's own, which no package provides."""

    with caplog.at_level("INFO", "remask"):
        llm = load(model, cache=Own(3))
    assert "cache=Own{'every': 3}" in caplog.text
    with serving(llm, model_names=["foreign"], sampling={}) as running:
        body = {"prompt": PROMPT, **SAMPLING}
        default = running.client.post("/v1/completions", json=body).json()
        named = {"cache": "late-rows", "cache_config": {"every": 3}}
        assert default["choices"] == running.client.post("/v1/completions", json={**body, **named}).json()["choices"]
        refused = running.client.post("/v1/completions", json={**body, "cache_config": {"every": 1}})
        assert refused.status_code == 400
        assert "is for a policy that is named; give an object of type Own" in refused.json()["error"]["message"]
        page = running.client.get("/playground/example").json()
        assert page["cache"] == "Own"
        assert "Own" not in page["policies"], "no request can name it"
        assert page["pair"][0] == "none"


DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "extending.md", DOCS / "lab" / "hooks-and-readers.md")


def blocks(language: str) -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_code_is_the_example_packages(example: Path) -> None:
    shown = blocks("python")
    for name in ("policy", "family", "rule", "frontier", "measures"):
        assert (PACKAGE / "remask_example" / f"{name}.py").read_text(encoding="utf-8") in shown
    (test,) = [block for block in shown if "assert" in block]
    exec(compile(test, str(DOCS), "exec"), {})


@pytest.mark.usefixtures("example")
def test_the_commands_of_the_policy_give_right_answers(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in blocks("bash") if "late-rows" in block]
    commands = [shlex.split(line) for line in block.splitlines() if line.startswith("remask generate")]
    assert len(commands) == 2
    for command in commands:
        file = command.index("--input") + 1
        command[file] = str(DOCS.parent / command[file])
        assert main(["--quiet", *command[1:]]) == 0
        answers = map(json.loads, capsys.readouterr().out.splitlines())
        said = {answer["id"]: answer["text"].split("## ")[1] for answer in answers}
        assert said == {"q0": "laurel", "q1": "meadow", "q2": "river", "q3": "quarry"}


def test_the_entry_points_are_the_example_packages() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shown = [tomllib.loads(block)["project"]["entry-points"] for block in blocks("toml")]
    for group, entries in project["entry-points"].items():
        assert {group: entries} in shown


FRONTIER = {"rule": "frontier", "config": {"reach": 3, "least": 0.02}}


def test_a_rule_with_a_measure_parameters_and_a_state(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads its own measure, fills from the left, leaves out what is far, and a batch of many equals many of one."""
    sampling = {"max_tokens": 16, "ignore_eos": True, "remasking": FRONTIER}
    left_out, seen = list[int | None](), list[float]()
    plans = RunningRequest.plan

    def noting(running: RunningRequest) -> Any:
        turn = plans(running)
        left_out.append(None if (cut := running.decoder.context.cut) is None else int(cut[0]))
        return turn

    def looking(rule: Any, step: Any) -> Any:
        seen.extend(step.confidence.tolist())
        return choose(rule, step)

    llm = load(model)
    params = SamplingParams.from_mapping(sampling)
    choose = resolve_name("remask_example.frontier:Frontier").__call__
    with monkeypatch.context() as patch:
        patch.setattr(RunningRequest, "plan", noting)
        patch.setattr("remask_example.frontier.Frontier.__call__", looking)
        (alone,) = llm.generate([PROMPT], params)
    assert any(left_out)
    assert 0 < min(seen) < max(seen) < 1
    prompts = [PROMPT, PROMPT[:9], PROMPT[3:]]
    for cache in ("none", "block-dual", "dllm-cache", "late-rows"):
        together = llm.generate(prompts, params, cache=cache)
        assert [each.token_ids for each in together] == [
            llm.generate([prompt], params, cache=cache)[0].token_ids for prompt in prompts
        ]
    assert alone.token_ids == llm.generate(prompts, params)[0].token_ids


def test_parameters_of_a_rule_are_checked(example: Path) -> None:
    assert SamplingParams(remasking=FRONTIER).knobs.config.reach == 3
    assert SamplingParams(remasking="frontier").knobs.config.reach == 8
    for config, message in (
        ({"reach": 0}, "remasking.config.reach must be a whole number from 1"),
        ({"raech": 1}, "'remasking.config.raech'. Did you mean 'reach'"),
        ({"least": 2}, "remasking.config.least must be a number from 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            SamplingParams(remasking={"rule": "frontier", "config": config})
    with pytest.raises(ConfigError, match="follows no schedule, so steps=4 has no part in it"):
        SamplingParams(remasking="frontier", steps=4)
