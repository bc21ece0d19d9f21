"""`--cache FILE.py:CLASS`: a policy of one's own without a package, and what is wrong with one in words."""

from pathlib import Path
from typing import Any

import pytest

from remask.cli import main
from remask.cli.policy_file import policy_option
from remask.errors import ConfigError
from remask.server.protocol import CompletionBody
from tests.cli.test_generate import GOOD, run

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


@pytest.mark.parametrize(
    ("content", "settings", "told"),
    [
        (None, {}, "there is no file"),
        ("x = 1", {}, "has no class 'P'"),
        ("P = 1", {}, "is no cache policy: it provides an object of type int"),
        ("class P: pass", {}, "is no cache policy: it provides the class P"),
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
        policy_option(f"{file}:P", settings)


def test_requests_name_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither over HTTP nor in a line: a file is code, and the operator's."""
    marker = tmp_path / "ran"
    file = tmp_path / "policy.py"
    file.write_text(f"open({str(marker)!r}, 'w').close()", encoding="utf-8")
    assert CompletionBody.model_validate({"prompt": "x", "cache": f"{file}:P"}).terms.policy[0] == f"{file}:P"
    status, _ = run(tmp_path, [{**GOOD, "cache": f"{file}:P"}])
    assert status != 0
    assert not marker.exists()
    assert main(["generate", "--model", "bundled", "--prompt", "x", "--cache", f"{tmp_path}/none.py:P"]) == 2
    assert "--cache: there is no file" in capsys.readouterr().err
