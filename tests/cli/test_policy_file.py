"""`--cache FILE.py:CLASS`: a policy of one's own without a package, and what is wrong with one in words."""

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remask.cli import main
from remask.cli.options import open_llm
from remask.errors import ConfigError, UnknownNameError
from remask.llm import LLM
from remask.policies.registry import from_file
from remask.server.protocol.generation import CompletionBody
from tests.cli.test_generate import GOOD, run
from tests.goldens import model_dir

ROOT = Path(__file__).parents[2]
OWN = f"{ROOT / 'examples' / 'own_policy.py'}:PromptOnce"


def answer(tmp_path: Path, line: dict[str, Any], *options: str) -> dict[str, Any]:
    status, (found,) = run(tmp_path, [line], *options)
    assert status == 0
    return found


def test_a_file_names_a_policy(tmp_path: Path) -> None:
    plain, own = answer(tmp_path, GOOD), answer(tmp_path, GOOD, "--cache", OWN)
    assert own["usage"]["row_layers"] < plain["usage"]["row_layers"]
    often = answer(tmp_path, GOOD, "--cache", OWN, "--cache-config", '{"interval": 1}')
    assert often["token_ids"] == plain["token_ids"]
    assert often["usage"]["row_layers"] == plain["usage"]["row_layers"]
    other = answer(tmp_path, {**GOOD, "cache": "none"}, "--cache", OWN)
    assert other["usage"]["row_layers"] == plain["usage"]["row_layers"]


def test_serve_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As told on the command line; a server that never listens."""
    loaded: list[LLM] = []
    monkeypatch.setattr("remask.server.app.create_app", lambda llm, *_: loaded.append(llm))
    monkeypatch.setattr("remask.server.run.Server", lambda *_: SimpleNamespace(run=lambda: None))
    options = ["--model", "bundled", "--port", "0", "--cache", OWN, "--cache-config", '{"interval": 3}']
    assert main(["--quiet", "serve", *options]) == 0
    (llm,) = loaded
    policy: Any = llm.session.cache
    assert (type(policy).__name__, policy.interval) == ("PromptOnce", 3)


def test_chat_answers_with_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    opened: list[LLM] = []

    def opening(*told: Any) -> LLM:
        opened.append(open_llm(*told))
        return opened[-1]

    monkeypatch.setattr("remask.cli.options.open_llm", opening)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    sampling = '{"max_tokens": 2, "steps": 2}'
    assert main(["--quiet", "chat", "--model", "bundled", "--cache", OWN, "--sampling", sampling]) == 0
    assert type(opened[0].session.cache).__name__ == "PromptOnce"
    assert "error" not in capsys.readouterr().err


def test_inspect_store_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose own settings are checked, so that another name is refused."""
    lines = tmp_path / "requests.jsonl"
    lines.write_text(json.dumps(GOOD), encoding="utf-8")
    words = ["--quiet", "inspect", "store", "--model", "bundled", "--input", str(lines), "--json", "--cache", OWN]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["fullest"]["used"] > 0
    assert main([*words, "--cache-config", '{"intervall": 3}']) == 2
    assert "Unknown setting of cache policy 'PromptOnce' 'intervall'" in capsys.readouterr().err


def test_bench_compares_it(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    shape = ["--requests", "2", "--rounds", "1", "--concurrency", "2", "--prefix-tokens", "8", "--prompt-tokens", "8"]
    words = ["bench", "--model", "llada-tiny", "--load-format", "dummy", *shape, "--max-tokens", "4", "--caches", OWN]
    assert main(["--quiet", *words, "--cache-config", json.dumps({OWN: {"interval": 2}}), "--csv", str(rows)]) == 0
    with rows.open(encoding="utf-8", newline="") as file:
        none, own = csv.DictReader(file)
    assert json.loads(own["settings"]) == {"interval": 2}
    assert int(own["row_layers"]) < int(none["row_layers"])


@pytest.mark.parametrize(
    ("content", "settings", "told"),
    [
        (None, {}, "there is no file"),
        ("x = 1", {}, "has no class 'P'"),
        ("P = 1", {}, "is not a cache policy: it provides an object of type int"),
        ("class P: pass", {}, "is not a cache policy: it provides the class P"),
        ("1 / 0", {}, "cannot be run: ZeroDivisionError"),
        ("raise SystemExit(3)", {}, "cannot be run: SystemExit"),
        ("from remask.policies import Dense as P", {"every": 2}, "Unknown setting of cache policy 'P' 'every'"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, content: str | None, settings: dict[str, Any], told: str) -> None:
    file = tmp_path / "policy.py"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=told):
        from_file(f"{file}:P", settings)


def test_requests_name_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither over HTTP nor in a line: a file is code, and the operator's."""
    marker = tmp_path / "ran"
    file = tmp_path / "policy.py"
    file.write_text(f"open({str(marker)!r}, 'w').close()", encoding="utf-8")
    assert CompletionBody.model_validate({"prompt": "x", "cache": f"{file}:P"}).terms.cache == f"{file}:P"
    status, _ = run(tmp_path, [{**GOOD, "cache": f"{file}:P"}])
    assert status != 0
    assert not marker.exists()
    assert main(["generate", "--model", "bundled", "--prompt", "x", "--cache", f"{tmp_path}/none.py:P"]) == 2
    assert "--cache: there is no file" in capsys.readouterr().err


def test_python_names_a_file_as_the_command_line_does(tmp_path: Path) -> None:
    prompt: list[list[int]] = [[5, 6, 7, 8]]
    params = {"max_tokens": 8}
    llm = LLM(str(model_dir("llada")), dtype="float32")
    plain = llm.generate(prompt, params)[0]
    own = llm.generate(prompt, params, cache=OWN)[0]
    assert own.usage.row_layers < plain.usage.row_layers
    often = llm.generate(prompt, params, cache=OWN, cache_config={"interval": 1})[0]
    assert (often.token_ids, often.usage.row_layers) == (plain.token_ids, plain.usage.row_layers)
    usual = LLM(str(model_dir("llada")), dtype="float32", cache=OWN, cache_config={"interval": 1})
    assert usual.session.cache_name == "PromptOnce"
    assert usual.generate(prompt, params)[0].token_ids == plain.token_ids
    with pytest.raises(ConfigError, match=r"^cache: there is no file '.*nowhere\.py'"):
        llm.generate(prompt, params, cache=f"{tmp_path / 'nowhere.py'}:Policy")
    with pytest.raises(UnknownNameError, match="setting of cache policy 'PromptOnce'"):
        LLM(str(model_dir("llada")), cache=OWN, cache_config={"intervall": 1})
    with pytest.raises(ConfigError, match=r"Unknown cache policy"):
        llm.session.policy(OWN)  # what requests name goes through here, and they name no files
