"""`remask chat`: the same conversation with a server and in process."""

import io
import json

import pytest

from remask.cli import main
from tests.server.serving import CHATS, QUESTIONS, make_llm, serving

SYSTEM, USER = CHATS[0][0]["content"], CHATS[0][1]["content"]


def chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: list[str], *words: str
) -> tuple[int, list[str], str]:
    """Exit status, answers and stderr."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    status = main(["--quiet", "chat", "--system", SYSTEM, *words])
    told = capsys.readouterr()
    return status, told.out.splitlines(), told.err


def test_in_process_and_with_a_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [USER, "", "/new", USER, "/exit", "never read"]
    status, local, _ = chat(monkeypatch, capsys, lines, "--model", "bundled-transit", "--dtype", "float32")
    assert status == 0
    assert len(local) == 2
    assert local[0] == local[1]
    assert QUESTIONS[0].answer in local[0]
    with serving(make_llm(), api_keys=["key"]) as running:
        base = ["--base-url", f"{running.base}/v1", "--api-key", "key"]
        status, remote, _ = chat(monkeypatch, capsys, lines, *base)
        assert (status, remote) == (0, local)
        plain = ["--cache", "bicache", "--cache-config", '{"depth": 2}', "--sampling", '{"max_tokens": 4}']
        status, short, _ = chat(monkeypatch, capsys, [USER], *base, *plain)
        assert (status, len(short)) == (0, 1)
        _, nothing, error = chat(monkeypatch, capsys, [USER], *base, "--sampling", '{"max_tokens": 0}')
        assert nothing == []
        assert "max_tokens must be" in error


def test_turns_add_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(make_llm()) as running:
        seen = []
        intake = running.service.intake
        original = intake.chat

        def spy(body: object, name: str) -> object:
            seen.append([message.role for message in body.messages])  # type: ignore[attr-defined]
            return original(body, name)  # type: ignore[arg-type]

        monkeypatch.setattr(intake, "chat", spy)
        chat(monkeypatch, capsys, [USER, USER], "--base-url", f"{running.base}/v1")
    assert seen == [["system", "user"], ["system", "user", "assistant", "user"]]


def test_help_is_the_chats_own_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is sent: there is no server."""
    lines = ["/help", "/hepl", "/exit", "never read"]
    status, told, error = chat(monkeypatch, capsys, lines, "--base-url", "http://127.0.0.1:9/v1")
    assert status == 0
    assert told == [
        "/new starts a new conversation, /exit or /quit ends it, /help says this. All else is for the model."
    ]
    assert error.splitlines() == [
        "error: Unknown command '/hepl'. Did you mean '/help'? Available: /exit, /help, /new, /quit."
    ]


def test_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, answers, error = chat(monkeypatch, capsys, [USER], "--base-url", "http://127.0.0.1:9/v1")
    assert (status, answers) == (0, [])
    assert "error: the connection to http://127.0.0.1:9/v1 failed" in error
    status, _, error = chat(monkeypatch, capsys, [USER], "--base-url", "http://127.0.0.1:9/v1", "--page-size", "4")
    assert status == 2
    assert "--page-size is for a model in this process" in error
    status, _, error = chat(monkeypatch, capsys, [USER], "--model", "llada-tiny", "--load-format", "dummy")
    assert status == 2
    assert "no chat template" in error
    status, _, error = chat(monkeypatch, capsys, [USER], "--sampling", json.dumps({"max_tokens": 0}))
    assert status == 2
    assert "max_tokens must be" in error
