"""`remask chat`: the same conversation with a server and in process, and what a server may answer."""

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from remask.checkpoint.source import resolve_model
from remask.cli import main
from remask.cli.chat import ChatClient
from remask.engine.runner import Runner
from remask.errors import ConfigError, RemaskError
from remask.llm import LLM
from remask.tasks.cards import card
from tests.server.serving import CHATS, QUESTIONS, Running, make_llm, serving

SYSTEM, USER = CHATS[0][0]["content"], CHATS[0][1]["content"]
HELP = (
    "/continue goes on with the last answer, /edit TEXT goes on from TEXT in its place, /new starts a new "
    "conversation, /exit or /quit ends it, /system shows the system prompt, /page FILE takes a page of your own to ask "
    "about, /help says this. All else is for the model."
)


def chat(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lines: list[str],
    *words: str,
    system: str | None = SYSTEM,
) -> tuple[int, list[str], str]:
    """Exit status, answers and stderr."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    status = main(["--quiet", "chat", *([] if system is None else ["--system", system]), *words])
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


def test_an_answer_survives_a_step_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine begins again, as it does under every other front."""
    run, failures = Runner.run, iter([MemoryError("no more")])

    def failing(*given: Any) -> Any:
        for error in failures:
            raise error
        return run(*given)

    monkeypatch.setattr(Runner, "run", failing)
    status, said, _ = chat(monkeypatch, capsys, [USER], "bundled-transit", "--dtype", "float32")
    assert (status, len(said)) == (0, 1)
    assert QUESTIONS[0].answer in said[0]


def test_a_model_alone_is_enough(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It stands without an option, and precision is left to what fits."""
    seen: list[tuple[str, object]] = []
    made = LLM.__init__

    def watched(self: LLM, model: str, **settings: object) -> None:
        seen.append((model, settings["quantization"]))
        made(self, model, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(LLM, "__init__", watched)
    status, said, _ = chat(monkeypatch, capsys, [USER], "bundled-transit", "--dtype", "float32")
    assert (status, len(said)) == (0, 1)
    chat(monkeypatch, capsys, [USER], "bundled-transit", "--quantization", "int8", "--cache", "none")
    assert seen == [("bundled-transit", None), ("bundled-transit", "int8")]


def sent(running: Running, monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The conversations that the server gets from here on."""
    seen: list[list[dict[str, str]]] = []
    intake = running.service.intake
    original = intake.chat

    def spy(body: object, name: str) -> object:
        seen.append([{"role": each.role, "content": each.content} for each in body.messages])  # type: ignore[attr-defined]
        return original(body, name)  # type: ignore[arg-type]

    monkeypatch.setattr(intake, "chat", spy)
    return seen


def test_a_line_that_is_no_text_is_refused_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = io.TextIOWrapper(io.BytesIO(b"\xff\n" + USER.encode() + b"\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", lines)
    status = main(["--quiet", "chat", "--system", SYSTEM, "--model", "bundled-transit", "--dtype", "float32"])
    told = capsys.readouterr()
    assert status == 0
    assert told.err.startswith("error: The text is not valid Unicode")
    assert QUESTIONS[0].answer in told.out


def test_turns_add_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a model that says nothing of what it can answer: the same one, as a folder."""
    llm = LLM(str(resolve_model("bundled-transit")), cache="none", dtype="float32", device="cpu")
    with serving(llm) as running:
        seen = sent(running, monkeypatch)
        _, told, _ = chat(monkeypatch, capsys, ["/help", USER, USER], "--base-url", f"{running.base}/v1")
    assert told[0] == HELP
    assert len(told) == 3
    roles = [[message["role"] for message in turns] for turns in seen]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]


def test_a_bundled_model_says_what_it_can_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = card("bundled-transit")
    assert known is not None
    lines = ["/help", "/system", "/2", known.questions[0].question, "/1", "/4"]
    asked = [known.questions[number] for number in (1, 0, 0)]
    offered = [f"  /{number}  {each.question}" for number, each in enumerate(known.questions, 1)]
    said = [known.answers, *offered, "Each line is a conversation of its own, as the model knows one question only."]
    expected = [HELP, *said, known.system, *(question.answer for question in asked)]
    with serving(make_llm()) as running:
        seen = sent(running, monkeypatch)
        status, remote, error = chat(monkeypatch, capsys, lines, "--base-url", f"{running.base}/v1", system=None)
        own = chat(monkeypatch, capsys, ["/help", "/system"], "--base-url", f"{running.base}/v1")[1]
    assert (status, remote) == (0, expected)
    assert "Unknown command '/4'. Did you mean '/" in error
    assert seen == [known.messages(question) for question in asked], "each line is a conversation of its own"
    assert own == [HELP, known.answers, said[-1], SYSTEM], "with another system prompt its questions have no answer"
    words = ["--model", "bundled-transit", "--dtype", "float32"]
    assert chat(monkeypatch, capsys, lines, *words, system=None)[1] == expected


def test_a_page_of_ones_own_takes_the_place_of_the_system_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, empty = tmp_path / "page.txt", tmp_path / "empty.txt"
    page.write_text("The cafe\nis in Mill Street.\n")
    empty.write_text("\n")
    lines = [f"/page {page}", "/system", f"/page {empty}", "/page", "/1", "/system"]
    own = ["bundled-transit", "--dtype", "float32"]
    status, told, error = chat(monkeypatch, capsys, lines, *own, system=None)
    prompt = "Answer from this page. The cafe is in Mill Street."
    assert (status, told) == (0, ["Ask about it: 6 words.", prompt, prompt])
    refused, missing, unknown = error.splitlines()
    assert refused == f"error: /page: {str(empty)!r} is empty"
    assert missing.startswith("error: /page: cannot open ''")
    assert unknown.startswith("error: Unknown command '/1'"), "the questions were about the other page"


def test_help_is_the_chats_own_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is asked: there is no server."""
    lines = ["/help", "/hepl", "/exit", "never read"]
    status, told, error = chat(monkeypatch, capsys, lines, "--base-url", "http://127.0.0.1:9/v1")
    assert status == 0
    assert told == [HELP]
    assert error.splitlines() == [
        "error: Unknown command '/hepl'. Did you mean '/help'? Available: /continue, /edit, /exit, /help, /new, "
        "/page, /quit, /system."
    ]


def test_an_answer_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where it ended, and from a text in its place, which keeps the space at its end."""
    known = card("bundled-transit")
    assert known is not None
    question, words = known.questions[0].question, str(known.questions[0].answer).split()
    begun, more = " ".join(words[:2]), f" {' '.join(words[2:4])}"
    lines = ["/continue", "/edit x", question, "/continue", "/edit", f"/edit {words[0]} ", "/continue", "/edit any"]
    own = ["--sampling", '{"max_tokens": 2, "ignore_eos": true}']
    status, local, error = chat(monkeypatch, capsys, lines, "bundled-transit", "--dtype", "float32", *own, system=None)
    assert (status, local[:2]) == (0, [begun, more])
    assert error.count("There is no answer to continue") == 2
    assert error.count("/edit needs the text to go on from") == 1
    llm = LLM("bundled-transit", cache="auto", dtype="float32", device="cpu")
    with serving(llm) as running:
        seen = sent(running, monkeypatch)
        lines += [question]
        _, remote, _ = chat(monkeypatch, capsys, lines, "--base-url", f"{running.base}/v1", *own, system=None)
    assert remote == [*local, begun]
    said = [turns[-1]["content"] for turns in seen if turns[-1]["role"] == "assistant"]
    assert said == [begun, f"{words[0]} ", f"{words[0]} {local[2]}", "any"]


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


ASK = {"model": "m", "messages": []}


@contextmanager
def answering(status: int, body: str) -> Iterator[tuple[ChatClient, list[tuple[str, str | None]]]]:
    """A client of a server that answers everything with this, and the paths and keys that it was sent."""
    seen: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            seen.append((self.path, self.headers["Authorization"]))
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_POST = answer  # noqa: N815 - the base class's names

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield ChatClient(f"http://127.0.0.1:{server.server_address[1]}/v1/", "key"), seen
        finally:
            server.shutdown()
            thread.join()


def event(text: str) -> str:
    return f'data: {{"choices": [{{"delta": {{"content": "{text}"}}}}]}}\n\n'


def test_pieces_of_text_in_their_order() -> None:
    role, end = (
        'data: {"choices": [{"delta": {"role": "assistant"}}, {"delta": null}]}\n\n',
        'data: {"choices": [], "usage": {}}\n\n',
    )
    with answering(200, f": comment\n\n{role}{event('né')}{event(' two')}{end}data: [DONE]\n\n") as (client, seen):
        assert "".join(client.stream(ASK)) == "né two"
    assert seen == [("/v1/chat/completions", "Bearer key")]


def test_the_first_model_is_that_of_the_list() -> None:
    with answering(200, '{"data": [{"id": "a"}, {"id": "b"}]}') as (client, seen):
        assert client.first_model() == "a"
    assert seen == [("/v1/models", "Bearer key")]


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (200, '{"data": []}', "lists no model; name one with --model"),
        (200, '{"object": "list"}', "lists no models; is this the URL of an API that ends in /v1"),
        (200, '{"data": [{"name": "a"}]}', "lists no models"),
        (200, "[1]", "is not a JSON object"),
        (200, "<html>", "not JSON: b'<html>'"),
        (404, '{"detail": "Not Found"}', "status 404"),
        (502, "<html>bad gateway", "status 502: <html>bad gateway"),
        (401, '{"error": {"message": "wrong key"}}', "status 401: wrong key"),
        (400, '{"error": "no object"}', "status 400: no object"),
        (500, "", "status 500"),
    ],
)
def test_what_is_no_list_of_models_is_an_error_with_its_cause(status: int, body: str, text: str) -> None:
    with answering(status, body) as (client, _), pytest.raises(RemaskError, match=text.replace("?", r"\?")):
        client.first_model()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (event("a") + 'data: {"error": {"message": "it broke"}}\n\n', "it broke"),
        (event("a") + "data: {half\n\n", "not JSON"),
        (event("a") + 'data: {"choices": [1]}\n\n', "no chunk of a chat"),
        (event("a") + 'data: {"choices": 1}\n\n', "no chunk of a chat"),
    ],
)
def test_an_answer_that_breaks_off_says_why(body: str, text: str) -> None:
    with answering(200, body) as (client, _):
        pieces = client.stream(ASK)
        assert next(pieces) == "a"
        with pytest.raises(RemaskError, match=text):
            next(pieces)


def test_other_urls_are_refused() -> None:
    for url in ("localhost:8000", "file:///etc/hosts", ""):
        with pytest.raises(ConfigError, match="--base-url must begin with http"):
            ChatClient(url)
    with pytest.raises(RemaskError, match=r"the connection to http://127\.0\.0\.1:9/v1 failed: .*is a server running"):
        ChatClient("http://127.0.0.1:9/v1").models()
    with pytest.raises(RemaskError, match="failed"):
        ChatClient("http://[bad/v1").models()
