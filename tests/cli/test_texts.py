"""Which texts a model reads: what cannot be read is refused before weights, and tokenizers and templates of others."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from remask import LLM
from remask.cli import main
from remask.errors import ConfigError
from remask.session import Session
from tests.checkpoint import checkpoints
from tests.depth.models import TEMPLATE, with_ascii_tokenizer, write_lines
from tests.goldens import model_dir

BARE = str(model_dir("llada"))
QUICK = ["--dtype", "float32", "--device", "cpu"]
TURNS = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    questions = {"state": "a", "questions": {"q": {"type": "yes_no", "instructions": "is it?"}}}
    (tmp_path / "decide.json").write_text(json.dumps(questions))
    write_lines(tmp_path / "pairs.jsonl", [{"prompt": "a", "response": "b"}])
    write_lines(tmp_path / "texts.jsonl", [{"text": "hello there"}])
    write_lines(tmp_path / "gsm8k.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
    return {path.name: str(path) for path in tmp_path.iterdir()}


COMMANDS: dict[str, list[str]] = {
    "serve": ["serve", "--port", "0"],
    "chat": ["chat"],
    "generate": ["generate", "--prompt", "hello"],
    "decide": ["decide", "--input", "decide.json"],
    "bench": ["bench", "--task", "gsm8k", "--requests", "2"],
    "eval tasks": ["eval", "tasks", "--tasks", "remask_gsm8k", "--data", "gsm8k.jsonl"],
    "eval likelihood": ["eval", "likelihood", "--prompts", "pairs.jsonl"],
    "eval likelihood of chats": ["eval", "likelihood", "--chat", "--prompts", "pairs.jsonl"],
    "eval gen-ppl": ["eval", "gen-ppl", "--prompts", "texts.jsonl", "--judge", "none/such", "--prompt-tokens", "2"],
    "analyze": ["analyze", "prefix-similarity", "--task", "gsm8k"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_without_a_tokenizer_is_refused_before_its_weights_are_read(
    command: str, files: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remask.checkpoint.loaded.load_weights", lambda *_, **__: pytest.fail("weights were read"))
    words = [files.get(word, word) for word in COMMANDS[command]]
    assert main([*words, "--model", BARE, *QUICK]) == 2
    said = capsys.readouterr().err
    assert "no tokenizer" in said
    assert "--tokenizer PATH_OR_ID" in said
    assert "next:" not in said, "no banner of what does not work"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The same model with a tokenizer in its folder."""
    return with_ascii_tokenizer(model_dir("llada"), tmp_path / "own")


def generate(capsys: pytest.CaptureFixture[str], model: str, *options: str) -> str:
    words = ["--quiet", "generate", "--model", model, *QUICK, "--sampling", '{"max_tokens": 8}']
    assert main([*words, *options]) == 0
    return capsys.readouterr().out


def test_another_folder_has_the_tokenizer(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(capsys, str(own), "--prompt", "hello")
    assert generate(capsys, BARE, "--prompt", "hello", "--tokenizer", str(own)) == expected
    told = LLM(BARE, dtype="float32", tokenizer=str(own)).chat(TURNS, {"max_tokens": 8})[0]
    assert told.text == LLM(str(own), dtype="float32").chat(TURNS, {"max_tokens": 8})[0].text
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    words = ["--quiet", "chat", BARE, *QUICK, "--tokenizer", str(own), "--system", "be brief", "--cache", "none"]
    assert main([*words, "--sampling", '{"max_tokens": 8}', "--quantization", "auto"]) == 0
    assert capsys.readouterr().out.strip() == (told.text or "").strip()


def test_tokenizers_that_do_not_fit(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    small = str(checkpoints.write(tmp_path / "small", checkpoints.LLADA, checkpoints.random_tensors(checkpoints.LLADA)))
    for model, tokenizer, message in (
        (BARE, str(empty), "tokenizer: there is none in '"),
        (small, str(own), "tokens, and the model "),
        (BARE, str(tmp_path / "nowhere"), "There is no model"),
    ):
        assert main(["--quiet", "chat", model, *QUICK, "--tokenizer", tokenizer]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match="reads"):
        LLM(str(own), reads="chats")  # type: ignore[arg-type]


def test_random_weights_read_texts_as_bytes_or_with_a_tokenizer(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dummy = ["--load-format", "dummy", "--prompt", "hello"]
    generate(capsys, "llada-tiny", *dummy)
    generate(capsys, "llada-tiny", *dummy, "--tokenizer", str(own), "--system", "be brief")


def rendered(llm: LLM) -> str:
    assert llm.tokenizer is not None
    return llm.tokenizer.render_chat(TURNS)


@pytest.fixture
def plain(tmp_path: Path) -> str:
    """A model with a tokenizer and without a chat template."""
    return str(with_ascii_tokenizer(model_dir("llada"), tmp_path / "plain", template=None))


def test_a_chat_without_a_template_is_plain_paragraphs_and_says_so(
    plain: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert rendered(LLM(plain, dtype="float32", reads="chat")) == "System: be brief\n\nUser: hello\n\nAssistant:"
    (warning,) = caplog.messages
    assert "has no chat template" in warning
    assert "--chat-template FILE" in warning
    caplog.clear()
    LLM(plain, dtype="float32", reads="text")
    LLM(plain, dtype="float32")
    assert not caplog.messages
    own = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert rendered(LLM(plain, dtype="float32", reads="chat", chat_template=own)) == "<be brief><hello>"
    assert not caplog.messages


def test_a_plain_template_begins_as_texts_do(tmp_path: Path) -> None:
    """With the token that the tokenizer puts before each text, and none behind."""
    folder = with_ascii_tokenizer(model_dir("llada"), tmp_path / "model", template=None)
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    first = len(raw["model"]["vocab"])
    raw["added_tokens"] = [
        {"id": first + n, "content": name, "special": True, "normalized": False, "single_word": False, "lstrip": False,
         "rstrip": False} for n, name in enumerate(('<s "{{', "</s>"))
    ]  # fmt: skip
    special = {name: {"id": name, "ids": [first + n], "tokens": [name]} for n, name in enumerate(('<s "{{', "</s>"))}
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": '<s "{{', "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                   {"SpecialToken": {"id": "</s>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }  # fmt: skip
    path.write_text(json.dumps(raw))
    llm = LLM(str(folder), dtype="float32", reads="chat")
    assert rendered(llm) == '<s "{{System: be brief\n\nUser: hello\n\nAssistant:'
    assert llm.tokenizer is not None
    tokens = llm.tokenizer.apply_chat(TURNS)
    assert tokens[0] == first
    assert tokens.count(first) == 1
    assert first + 1 not in tokens


@pytest.mark.thorough
def test_commands_read_chats_by_a_template_of_a_file(
    plain: str,
    files: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(TEMPLATE)
    seen: list[list[int]] = []
    run: Any = Session.run

    def watched(self: Session, requests: list[Any], **settings: Any) -> Any:
        seen.extend(list(each.prompt_token_ids) for each in requests)
        return run(self, requests, **settings)

    monkeypatch.setattr(Session, "run", watched)
    role = tmp_path / "role.txt"
    role.write_text("r")
    asked = ["--tasks", "remask_gsm8k", "--data", files["gsm8k.jsonl"], "--system-prompt", str(role)]
    commands = {
        "decide": ["decide", "--input", files["decide.json"]],
        "eval": ["eval", "tasks", *asked, "--sampling", '{"max_tokens": 2}'],
    }
    for name, words in commands.items():
        found = []
        for more in (["--chat-template", str(template)], []):
            seen.clear()
            assert main(["--quiet", *words, "--model", plain, *QUICK, *more]) == 0
            told = capsys.readouterr()
            assert ("has no chat template" in told.err) is not bool(more), name
            found.append([list(each) for each in seen])
        assert found[0] != found[1], name
    assert main(["--quiet", "chat", plain, *QUICK, "--chat-template", str(tmp_path / "none.jinja")]) == 2
    assert "--chat-template: there is no file" in capsys.readouterr().err
    assert main(["--quiet", "chat", "--base-url", "http://127.0.0.1:9/v1", "--chat-template", str(template)]) == 2
    assert "--chat-template is for a model in this process" in capsys.readouterr().err
