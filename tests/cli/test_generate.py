"""`remask generate` and `remask decide`: lines in, lines out, and what bad input comes to."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from remask import LLM
from remask.cli import main
from remask.errors import LAST_TAG, REPLACEMENTS
from remask.policies import Dense
from remask.tasks import relay
from tests.goldens import model_dir

LLADA = str(model_dir("llada"))
GOOD = {"id": "good", "prompt_token_ids": [1, 2, 3], "sampling": {"max_tokens": 8}}
UNNAMED = {name: value for name, value in GOOD.items() if name != "id"}


def run(tmp_path: Path, lines: list[Any], *options: str, model: str = LLADA) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and answers for JSONL lines; texts stand as they are."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n", encoding="utf-8")
    files = ["--input", str(source), "--output", str(target), "--dtype", "float32"]
    status = main(["--quiet", "generate", "--model", model, *files, *options])
    if not target.exists():
        return status, []
    return status, [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]


def test_an_answer_has_all_documented_keys(tmp_path: Path) -> None:
    status, (answer,) = run(tmp_path, [{**GOOD, "prefix_length": 2, "cache": "reuse"}], "--trace")
    assert status == 0
    assert set(answer) == {"id", "token_ids", "text", "finish_reason", "usage", "trace"}
    assert answer["id"] == "good"
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] <= 8
    assert answer["text"] is None, "the golden folders have no tokenizer"
    assert answer["finish_reason"] in ("length", "stop")
    expected = "prompt_tokens completion_tokens cached_tokens steps forwards row_layers prefix_row_layers prefix_depth"
    assert set(answer["usage"]) == {*expected.split(), "prefix_tokens", "approximation"}
    assert answer["usage"]["row_layers"] == answer["usage"]["forwards"] * 9 * 6
    assert set(answer["trace"][0]) == {"step", "positions", "token_ids"}
    assert all(3 <= position < 11 for event in answer["trace"] for position in event["positions"])
    assert "trace" not in run(tmp_path, [GOOD])[1][0]


def test_a_second_line_of_one_id_is_refused_by_its_number(tmp_path: Path) -> None:
    """Ids may be any JSON; lines without one, and with null, have none."""
    short = {"prompt_token_ids": [1, 2], "sampling": {"max_tokens": 1}}
    ids = ["a", {"x": 1, "y": [2]}, 1, None, "1", "a", {"y": [2], "x": 1}, None, "b"]
    status, answers = run(
        tmp_path, [{**short, "id": each} for each in ids] + [short, {"id": "bad"}, {**short, "id": "bad"}]
    )
    assert status == 1
    errors = [answer.get("error", "") for answer in answers]
    assert [bool(error) for error in errors] == [number in (5, 6, 10, 11) for number in range(12)]
    assert errors[5] == "id 'a' is used by line 1 too; ids must differ, or be left out"
    assert "used by line 2" in errors[6]
    assert "used by line 11" in errors[11]


def test_a_line_tells_its_log_probabilities_and_its_rollout(tmp_path: Path) -> None:
    sampling = {"max_tokens": 8, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    asked = {**GOOD, "sampling": sampling, "top_logprobs": 2, "return_trace": True, "return_step_maps": True}
    _, (first,) = run(tmp_path, [asked], "--trace")
    trace = first["trace"]
    assert trace["sampling"] == sampling
    assert sorted(first["step_maps"]) == list(range(1, 9))
    for place, read in enumerate(first["logprobs"]):
        assert set(read) == {"token_id", "logprob", "step", "top"}
        assert read["token_id"] == first["token_ids"][place]
        assert read["step"] + 1 == first["step_maps"][place]
        assert len(read["top"]) == 2
    _, (second,) = run(tmp_path, [{**asked, "sampling": trace["sampling"]}])
    assert second == first
    status, (refused,) = run(tmp_path, [{**asked, "replay": trace}])
    assert status == 1
    assert f"'replay' left after {LAST_TAG}: {REPLACEMENTS['replay']}." in refused["error"]
    _, (drawn,) = run(tmp_path, [{**GOOD, "return_trace": True}])
    assert drawn["trace"]["sampling"]["seed"] >= 0


def test_sampling_parameters_stand_in_an_object_or_by_themselves(tmp_path: Path) -> None:
    bare: dict[str, Any] = {name: value for name, value in GOOD.items() if name != "sampling"}
    lines: list[dict[str, Any]] = [
        {**bare, "sampling": {"max_tokens": 8, "steps": 4}},
        {**bare, "max_tokens": 8, "steps": 4},
        {**bare, "max_tokens": 8, "sampling": {"steps": 4}},
        {**bare, "max_tokens": 8, "steps": 4, "sampling": None, "temperature": None},
    ]
    status, answers = run(tmp_path, [{**line, "id": number} for number, line in enumerate(lines)])
    assert status == 0
    assert {json.dumps({**answer, "id": None}) for answer in answers} == {json.dumps({**answers[0], "id": None})}
    assert answers[0]["usage"]["steps"] == 4


BAD_LINES: list[tuple[Any, str]] = [
    ("{not json", "not JSON"),
    ("[1, 2]", "must be a JSON object"),
    ({"id": "x"}, "exactly one of prompt, messages, prompt_token_ids; got none"),
    ({**GOOD, "prompt": "text"}, "got prompt, prompt_token_ids"),
    ({**GOOD, "steps": 4, "max_tokens": 8}, "max_tokens is both in the request and in its 'sampling'; leave one of"),
    ({**GOOD, "sampling": {"id": "a"}}, "id is not a sampling parameter: it belongs in the request, beside"),
    ({**GOOD, "sampilng": {}}, "Did you mean 'sampling'"),
    ({**GOOD, "sampling": {"max_tokns": 8}}, "Did you mean 'max_tokens'"),
    ({**GOOD, "sampling": {"max_tokens": 8, "block_length": 2, "steps": 6}}, "steps=6 cannot be shared"),
    ('{"id": "nan", "prompt_token_ids": [1], "sampling": {"temperature": NaN}}', "temperature must be"),
    ({**GOOD, "prefix_length": 4}, "prefix_length must be from 0 to the prompt's 3 tokens, got 4"),
    ({**GOOD, "prefix_length": "2"}, "prefix_length must be"),
    ({**GOOD, "prompt_token_ids": []}, "the prompt is empty"),
    ({**GOOD, "prompt_token_ids": [1, 256]}, "token ids are whole numbers from 0 to 255"),
    ({**GOOD, "prompt_token_ids": [1, "a"]}, "prompt_token_ids holds 'a'"),
    ({**GOOD, "prompt_token_ids": "abc"}, "must be a list of token ids"),
    ({**GOOD, "prompt_token_ids": [1] * 600}, "max_model_len is 512"),
    ({"id": "t", "prompt": "hello"}, "no tokenizer"),
    ({"id": "t", "prompt": 5}, "prompt must be a text"),
    ({"id": "t", "messages": "hello"}, "messages must be a list"),
    ({"id": "t", "messages": [1, 2, 3]}, "messages must be a list of {role, content}, got [1, 2, 3]"),
    ({"id": "t", "messages": []}, "messages must be a list of {role, content}, got []"),
    ({**GOOD, "cache": "bicahe"}, "Did you mean 'bicache'"),
    ({**GOOD, "cache": 3}, "cache must be the name of a cache policy, of at most 1024 characters, got 3"),
    ({**GOOD, "cache": "bicache", "cache_config": 3}, "cache_config must be an object"),
    ({**GOOD, "deadline_s": 0}, "deadline_s must be a number above 0 to 1e+08, got 0"),
]


def test_one_bad_line_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each bad line is answered with its error and named on stderr with its number."""
    lines: list[Any] = [UNNAMED]
    for bad, _ in BAD_LINES:
        lines += [{**bad, "id": None} if isinstance(bad, dict) else bad, UNNAMED]
    status, answers = run(tmp_path, lines)
    assert status == 1
    assert ["error" in answer for answer in answers] == [False] + [True, False] * len(BAD_LINES), "in order"
    errors = [answer["error"] for answer in answers if "error" in answer]
    assert len(errors) == len(BAD_LINES)
    for (bad, text), error in zip(BAD_LINES, errors, strict=True):
        assert text in error, bad
    good = [answer for answer in answers if "error" not in answer]
    assert len(good) == len(BAD_LINES) + 1
    assert all(answer["token_ids"] == good[0]["token_ids"] for answer in good)
    stderr = capsys.readouterr().err.splitlines()
    numbers = [2 * index + 2 for index in range(len(BAD_LINES))]
    assert [int(line.split(":")[1].removeprefix(" line ")) for line in stderr] == numbers


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--sampling", "[" * 100_000], "--sampling is not JSON"),
        (["--sampling", f'{{"seed": {"1" * 5000}}}'], "--sampling is not JSON"),
        (["--device", "cuda:99"], "device 'cuda:99' cannot be used"),
        (["--max-model-len", "4096"], "exceeds the model's 512 positions"),
        (["--max-refreshes", "0"], "max_refreshes must be"),
        (["--prefix-match", "longest", "--batch-invariant"], "batch_invariant=True needs prefix_match='exact'"),
        (["--prefix-sharing", "auto", "--batch-invariant"], "batch_invariant=True needs prefix_sharing='exact'"),
        (["--prefix-min", "0"], "prefix_min must be a whole number from 1"),
        (["--prefix-cover", "1.5"], "prefix_cover must be a number from 0 to 1, got 1.5"),
    ],
)
def test_bad_options_end_the_command_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    status, answers = run(tmp_path, [GOOD], *options)
    assert (status, answers) == (2, [])
    assert text in capsys.readouterr().err


NO_REQUESTS: dict[str, str | None] = {
    "there is no file": None,
    "line 1: a line is not JSON": "{\n",
    "line 2: a line must be a JSON object": "\n[1]\n{\n",
}


@pytest.mark.parametrize("said", NO_REQUESTS)
@pytest.mark.parametrize("command", ["generate", "bench", "inspect store", "profile"])
def test_files_without_requests_are_refused_before_a_model_is_loaded(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    said: str,
) -> None:
    monkeypatch.setattr(LLM, "__init__", lambda *_, **__: pytest.fail("a model was loaded"))
    path, content = tmp_path / "in.jsonl", NO_REQUESTS[said]
    if content is not None:
        path.write_text(content)
    assert main(["--quiet", *command.split(), "--model", LLADA, "--input", str(path)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert str(path) in err


def test_missing_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quiet", "generate", "--model", str(tmp_path), "--prompt", "x"]) == 2
    assert "config.json" in capsys.readouterr().err


def test_a_prompt_on_the_command_line_goes_through_the_chat_template(capsys: pytest.CaptureFixture[str]) -> None:
    sampling = json.dumps({"max_tokens": 16, "steps": 8, "block_length": 2})
    options = ["--model", "bundled-transit", "--dtype", "float32", "--sampling", sampling]
    assert main(["--quiet", "generate", *options, "--prompt", "from abbey go 1 , where am i ?"]) == 0
    assert capsys.readouterr().out.strip()


def test_a_prompt_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a broken policy")

    monkeypatch.setattr(Dense, "plan", broken)
    words = ["--quiet", "generate", "--model", "bundled-transit", "--dtype", "float32", "--cache", "none"]
    assert main([*words, "--prompt", "from abbey"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "remask generate: error: " in told.err
    assert "a broken policy" in told.err


def test_standard_input_and_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(GOOD) + "\n\n" + json.dumps({**GOOD, "id": 7}) + "\n"))
    assert main(["--quiet", "generate", "--model", LLADA, "--dtype", "float32", "--input", "-"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["id"] for answer in answers] == ["good", 7]


def test_messages_share_everything_before_the_last_user_turn(tmp_path: Path) -> None:
    system = {"role": "system", "content": "abbey > acorn ; acorn > abbey ;"}
    lines = [
        {"id": str(i), "messages": [system, {"role": "user", "content": f"from abbey go {i} , where am i ?"}]}
        for i in (1, 2, 3)
    ]
    options = ["--cache", "reuse", "--sampling", '{"max_tokens": 4}', "--max-num-seqs", "1"]
    status, answers = run(tmp_path, lines, *options, model="bundled-transit")
    assert status == 0
    cached = [answer["usage"]["cached_tokens"] for answer in answers]
    assert cached[0] == 0
    assert cached[1] == cached[2] > 10


@pytest.mark.parametrize("piped", [False, True])
def test_bytes_that_are_no_text_fail_their_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], piped: bool
) -> None:
    good = b'{"prompt": "where am i ?"}\n'
    lines = good + b'{"prompt": "where \xff am i ?"}\n' + good
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="ascii"))
    source = tmp_path / "in.jsonl"
    source.write_bytes(lines)
    options = ["--input", "-" if piped else str(source), "--dtype", "float32", "--sampling", '{"max_tokens": 4}']
    assert main(["--quiet", "generate", "--model", "bundled-transit", *options]) == 1
    first, bad, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "not valid Unicode" in bad["error"]
    assert first["token_ids"] == last["token_ids"]


def test_lines_carry_salt_priority_and_deadline(tmp_path: Path) -> None:
    shared = {**UNNAMED, "prefix_length": 2, "cache": "reuse"}
    lines = [{**shared, "cache_salt": salt} for salt in ("a", "b", "a")]
    lines += [{**UNNAMED, "deadline_s": 1e-9, "priority": 1}, {**UNNAMED, "deadline_s": None, "priority": -1}]
    status, answers = run(tmp_path, lines)
    assert status == 0
    assert [answer["usage"]["cached_tokens"] for answer in answers] == [0, 0, 2, 0, 0]
    assert [answer["finish_reason"] == "timeout" for answer in answers] == [False, False, False, True, False]
    assert answers[3]["token_ids"] == []


def test_the_longest_stored_prefix_is_read_where_asked_for(tmp_path: Path) -> None:
    lines = [{**UNNAMED, "prompt_token_ids": list(range(n + 1)), "prefix_length": n, "cache": "reuse"} for n in (8, 12)]
    asked = ["--prefix-match", "longest", "--max-num-seqs", "1", "--max-refreshes", "1"]
    cached = [
        [answer["usage"]["cached_tokens"] for answer in run(tmp_path, lines, *options)[1]]
        for options in ([], asked, [*asked, "--prefix-cover", "0.9"])
    ]
    assert cached == [[0, 0], [0, 8], [0, 0]]


def test_answers_of_a_batch_are_those_of_lines_alone(tmp_path: Path) -> None:
    lines = [{**UNNAMED, "prompt_token_ids": list(range(n, 2 * n)), "prefix_length": n // 2} for n in (3, 8, 12)]
    status, together = run(tmp_path, lines, "--batch-invariant")
    assert status == 0
    alone = [run(tmp_path, [line], "--batch-invariant")[1][0]["token_ids"] for line in lines]
    assert [answer["token_ids"] for answer in together] == alone


def test_a_bundled_model_answers_a_prompt_as_it_was_trained_to(capsys: pytest.CaptureFixture[str]) -> None:
    (request,) = relay.make_workload(1, 1, 0)
    system, user = (message["content"] for message in request.messages)
    options = ["--quiet", "generate", "--model", "bundled-uniform", "--system", system, "--prompt", user]
    assert main(options) == 0
    assert capsys.readouterr().out.split() == request.reference.split()
    assert main([*options, "--sampling", '{"max_tokens": 128}']) == 2
    assert "max_model_len is 128, all that the model takes; shorten one of them" in capsys.readouterr().err


def test_lines_and_prompts_with_holes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    canvas = [{"text": "go "}, {"mask": 2}, {"text": " alder"}, {"mask": {"min": 1, "max": 3}}]
    lines: list[Any] = [
        {"prompt": "abbey", "canvas": canvas, "return_step_maps": True, "top_logprobs": 0},
        {"prompt": "abbey", "suffix": " alder", "sampling": {"max_tokens": 4}, "return_step_maps": True},
        {"prompt": "abbey", "canvas": [{"text": "go"}]},
        {"prompt": "abbey", "canvas": canvas, "sampling": {"max_tokens": 4}},
    ]
    options = ("--sampling", '{"max_tokens": 16, "block_length": 16}')
    status, (filled, fill, *bad) = run(tmp_path, lines, *options, model="bundled-transit")
    assert status == 1
    first, second = filled["holes"]
    assert filled["text"] == f"go{first} alder{second}"
    assert len(filled["step_maps"]) == len(filled["token_ids"])
    assert len(filled["logprobs"]) == sum(step > 0 for step in filled["step_maps"]) == 5
    assert "holes" in fill
    assert fill["text"] == fill["holes"][0]
    assert len(fill["token_ids"]) == len(fill["step_maps"]) == fill["usage"]["completion_tokens"] == 4
    assert min(fill["step_maps"]) == 1
    assert ["canvas has no hole" in each["error"] for each in bad] == [True, False]
    assert "max_tokens: the parts of a canvas" in bad[1]["error"]
    common = ["--quiet", "generate", "--model", "bundled-transit", "--dtype", "float32", "--prompt", "abbey"]
    capsys.readouterr()
    assert main([*common, "--canvas", json.dumps(canvas)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("go ")
    assert " alder" in said
    assert main([*common, "--suffix", " alder"]) == 0
    assert main([*common, "--canvas", "{}"]) != 0
    assert "--canvas must be a JSON list" in capsys.readouterr().err
    source = tmp_path / "in.jsonl"
    assert main(["--quiet", "generate", "--model", LLADA, "--input", str(source), "--suffix", "x"]) != 0
    assert "--suffix goes with --prompt" in capsys.readouterr().err


EXAMPLE = Path(__file__).parents[2] / "examples" / "decisions.json"


def test_the_answers_of_a_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = ["--quiet", "decide", "--model", "bundled-tariff", "--dtype", "float32", "--device", "cpu"]
    assert main([*model, "--input", str(EXAMPLE)]) == 0
    printed = json.loads(capsys.readouterr().out)
    body = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    found = LLM("bundled-tariff", dtype="float32", device="cpu").decide(body["state"], body["questions"])
    assert {name: str(each.get("choice", each.get("number"))) for name, each in printed["answers"].items()} == {
        name: each.choice for name, each in found.answers.items()
    }
    assert printed["work"]["forwards"] == found.usage.forwards == 3
    question = {"type": "yes_no", "instructions": "Is it?"}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({**body, "questions": {"\ud800": question}})))
    assert main([*model, "--input", "-"]) == 0
    assert capsys.readouterr().out.startswith(r'{"answers": {"\ud800": ')
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({**body, "questions": {}})))
    assert main([*model, "--input", "-"]) == 2
    assert "questions is empty" in capsys.readouterr().err
