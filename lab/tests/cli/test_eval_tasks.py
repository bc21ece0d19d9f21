"""`remask eval tasks` on local data: questions, caches, verdicts, interruptions and what is refused."""

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from lab.tests.cli.test_bench import count_answers
from lab.tests.harness.scripted import scripted

from remask.cli import main
from remask.tasks.transit import make_workload
from remask_lab.gsm8k import final_number
from remask_lab.harness import run
from remask_lab.records.record import read_record
from tests.depth.models import with_ascii_tokenizer, write_lines
from tests.goldens import model_dir

GSM8K = Path(__file__).parents[3] / "tests" / "data" / "gsm8k" / "test.jsonl"
PACKAGED = files("remask_lab.gsm8k") / "questions.jsonl"
QUICK = ["--sampling", '{"max_tokens": 4, "steps": 2}']


def tasks(*options: str, model: str = "bundled-transit") -> int:
    return main(["--quiet", "eval", "tasks", "--model", model, "--dtype", "float32", "--device", "cpu", *options])


def gsm8k(*options: str) -> int:
    return tasks("--tasks", "remask_gsm8k", "--data", str(GSM8K), "--limit", "3", *QUICK, *options)


def result(path: Path, row: int = 0) -> Any:
    return read_record(path, "eval tasks").data["rows"][row]["result"]


def test_gsm8k_on_local_data_under_two_caches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.json"
    assert gsm8k("--caches", "none,bicache", "--output", str(output)) == 0
    none, bicache = (result(output, row) for row in (0, 1))
    assert [sample["right"] for sample in none["samples"]] == ["18", "3", "70000"]
    assert none["metrics"]["strict_match"]["value"] == 0, "the bundled model knows no arithmetic"
    assert none["metrics"]["strict_match"]["interval"][1] < 0.6
    assert (none["prefix_hits"], bicache["prefix_hits"]) == (0, 2), "three questions share one system prompt"
    assert bicache["row_layers"] < none["row_layers"]
    assert none["prefix_ratio"] == bicache["prefix_ratio"] > 0.8
    assert none["throughput_tok_s"] == pytest.approx(none["completion_tokens"] / none["seconds"])
    told = capsys.readouterr().out
    assert "| remask_gsm8k | none    | 0.0 % (0.0 to 56.2)" in told
    assert "| 100.0 %   |" in told, "a cache agrees with itself"
    assert f"saved as {output}" in told


def test_the_packaged_questions_are_data_as_they_are(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    data = ["--data", str(PACKAGED), "--limit", "2", "--output", str(output)]
    assert tasks("--tasks", "remask_gsm8k", *data, *QUICK) == 0
    assert [sample["right"] for sample in result(output)["samples"]] == ["18", "3"]


@pytest.mark.thorough
def test_worked_examples_are_part_of_the_shared_prefix(tmp_path: Path) -> None:
    output, shots = tmp_path / "out.json", ["--shots", "2", "--shot-data", str(PACKAGED)]
    assert gsm8k("--caches", "none,reuse", "--output", str(output)) == 0
    bare = result(output, 1)
    output = tmp_path / "shots.json"
    assert gsm8k("--caches", "none,reuse", *shots, "--output", str(output)) == 0
    assert result(output, 1)["prefix_ratio"] > bare["prefix_ratio"]
    assert result(output, 1)["prefix_hits"] == 2, "three questions share the system prompt and its examples"
    preset = [*shots, "--preset", "dkv-cache-dream", "--output", str(tmp_path / "preset.json")]
    assert gsm8k(*preset) == 0, "what is given stands before the preset's"
    record = read_record(tmp_path / "preset.json", "eval tasks")
    settings = record.about["settings"]
    assert (settings["preset"], settings["shots"]) == ("dkv-cache-dream", 2)


@pytest.mark.thorough
def test_a_preset_sets_intervals_and_windows(tmp_path: Path) -> None:
    """As the paper's table 5 has them; what is given stands before them."""
    output = tmp_path / "out.json"
    data = ["--tasks", "remask_gsm8k", "--data", str(GSM8K), "--limit", "1"]
    options = ["--preset", "dkv-cache-llada", "--caches", "dkv-greedy,dkv-decode", "--output", str(output)]
    sampling = '{"max_tokens": 4, "steps": 2, "block_length": 4, "remasking": "random"}'
    given = ["--sampling", sampling, "--cache-config", '{"dkv-greedy": {"refresh_interval": 3}}']
    assert tasks(*data, *options, *given) == 0
    rows = read_record(output, "eval tasks").data["rows"]
    assert [row["point"]["settings"] for row in rows] == [{"refresh_interval": 3, "window": 4}, {"refresh_interval": 8}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shots", "2"], "takes its 2 worked examples from --shot-data FILE"),
        (["--shot-data", "x.jsonl"], "takes its 0 worked examples from --shot-data FILE"),
        (["--preset", "dkv-cache-dream"], "takes its 8 worked examples from --shot-data FILE"),
        (["--shots", "-1"], "--shots must be a whole number from 0"),
    ],
)
def test_examples_without_their_data(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gsm8k(*options) == 2
    assert message in capsys.readouterr().err


def test_examples_are_those_of_one_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert tasks("--tasks", "remask_gsm8k,remask_mmlu", "--shots", "1", "--shot-data", "x.jsonl") == 2
    assert "--shot-data holds the examples of one of our own tasks; got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        ("gsm8k", {"messages": [{"role": "user", "content": "?"}]}, "line 1: field 'messages' must be a user's and an"),
        ("gsm8k", {"messages": "x"}, "line 1: field 'messages' must be a user's and an assistant's message, got 'x'"),
        ("gsm8k", {"messages": [{"role": "user"}, {"role": "assistant"}]}, "line 1: field 'messages' must be"),
    ],
)
def test_conversations_that_are_no_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, line: dict[str, Any], message: str
) -> None:
    data = ["--data", str(write_lines(tmp_path / "x.jsonl", [line]))]
    assert tasks("--tasks", f"remask_{task}", *data) == 2
    assert message in capsys.readouterr().err


def test_perfect_answers_are_scored_right_on_the_same_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [final_number(json.loads(line)["answer"]) for line in GSM8K.read_text().splitlines()[:3]]
    output = tmp_path / "out.json"
    texts = [f"So many.\n## {numbers[0]}", f"## ${numbers[1]}.", f"It is {numbers[2]}"]
    monkeypatch.setattr(run, "generate", scripted(texts))
    assert gsm8k("--output", str(output)) == 0
    found = result(output)
    assert [sample["strict_match"] for sample in found["samples"]] == [1, 0, 0]
    assert [sample["same_answer"] for sample in found["samples"]] == [1, 1, 0]
    assert [sample["answer"] for sample in found["samples"]] == ["18", "$3.", None]
    assert found["metrics"]["strict_match"]["value"] == pytest.approx(1 / 3)
    assert found["metrics"]["same_answer"]["value"] == pytest.approx(2 / 3)


@pytest.mark.thorough
def test_a_model_that_can_answer_gets_answers_right(tmp_path: Path) -> None:
    """The bundled model's own task as another benchmark's data: its table is the role, its questions are the inputs."""
    items = make_workload(8, 1, 3)
    role, output = tmp_path / "role.txt", tmp_path / "out.json"
    role.write_text(items[0].prompt.text)
    lines = [{"question": item.question.text, "answer": item.answer} for item in items]
    options = ["--data", str(write_lines(tmp_path / "x.jsonl", lines)), "--fields", "input=question,target=answer"]
    options += ["--system-prompt", str(role), "--caches", "none,bicache", "--output", str(output)]
    assert tasks("--tasks", "remask_bbh", *options) == 0
    for row in (0, 1):
        assert result(output, row)["metrics"]["strict_match"]["value"] > 0.2, "by chance it would be 2 %"


def test_an_interrupted_evaluation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    output = tmp_path / "out.json"
    assert gsm8k("--caches", "none", "--output", str(output)) == 0
    before = result(output)

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run, "generate", stop)
        assert gsm8k("--caches", "none,bicache", "--output", str(output)) == 130
        assert gsm8k("--caches", "none", "--output", str(output)) == 0, "nothing is computed again"
    assert gsm8k("--caches", "none,bicache", "--output", str(output)) == 0
    assert "1 rows were there already" in capsys.readouterr().out
    assert result(output) == before
    assert len(read_record(output).data["rows"]) == 2
    assert gsm8k("--caches", "none", "--seed", "1", "--output", str(output)) == 2
    assert "rows of another measurement (" in capsys.readouterr().err


def test_our_own_tasks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", "tasks", "--list"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "remask_gsm8k          openai/gsm8k, main" in told
    assert "--include_path" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "remask_gsm9k"], "Did you mean 'remask_gsm8k'?"),
        (["--tasks", " , "], "--tasks names none"),
        (["--tasks", "remask_gsm8k,remask_bbh", "--data", "x"], "questions of one of our own tasks"),
        (["--tasks", "gsm8k", "--data", "x"], "questions of one of our own tasks"),
        (["--tasks", "remask_gsm8k", "--fields", "question=q"], "give both, or neither"),
        (["--tasks", "remask_gsm8k", "--data", "nowhere.jsonl"], "cannot be read"),
        (["--tasks", "remask_gsm8k", "--limit", "0"], "--limit must be a whole number from 1"),
        (["--tasks", "remask_gsm8k", "--caches", "bicach"], "Did you mean 'bicache'?"),
        (["--tasks", "remask_gsm8k", "--cache-config", '{"reuse": {}}'], "not among --caches"),
        (["--tasks", "remask_gsm8k", "--system-prompt", "nowhere.txt"], "cannot be read"),
        (["--tasks", "remask_gsm8k", "--sampling", '{"step": 1}'], "Did you mean 'steps'"),
        (["--tasks", "remask_gsm8k", "--output", "/nowhere/x.json"], "there is no folder"),
        (["--tasks", "remask_gsm8k", "--include-path", "/nowhere"], "which --data does without"),
        (["--tasks", "arc_easy", "--include-path", "/nowhere"], "--include-path: there is no folder"),
        (["--tasks", "remask_gsm8k", "--mc-samples", "16"], "--mc-samples is of tasks that score likelihoods"),
        (["--tasks", "arc_easy", "--mc-samples", "3"], "must be a multiple of strata"),
    ],
)
def test_what_cannot_be_evaluated(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    local = not {"--data", "--fields", "arc_easy"} & set(options)
    data = ["--data", str(GSM8K)] if local else []
    assert tasks(*data, *options) == 2
    assert message in capsys.readouterr().err


def test_a_question_that_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gsm8k("--max-model-len", "64") == 2
    assert "max_model_len" in capsys.readouterr().err


def test_models_that_cannot_be_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = with_ascii_tokenizer(model_dir("llada"), tmp_path / "plain", template=None)
    for folder in (plain, model_dir("llada")):
        assert tasks("--tasks", "remask_gsm8k", "--data", str(GSM8K), model=str(folder)) == 2
        assert "has no chat template" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_benchmark_that_is_beyond_the_model_is_told_after_the_first_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, data = count_answers(monkeypatch), ["--data", str(PACKAGED), "--limit", "12", *QUICK]
    assert tasks("--tasks", "remask_gsm8k", *data) == 2
    said = capsys.readouterr().err
    assert "answers 0.0 % of the questions, less than 10 % (the first 8 of 12 were asked)" in said
    assert "--metric agreement" in said
    assert len(answered) == 8 + 1, "and the first one of a process, to be warm"
    output = tmp_path / "out.json"
    asked = ["--tasks", "remask_gsm8k", *data, "--limit", "1", "--metric", "agreement", "--caches", "reuse"]
    assert tasks(*asked, "--output", str(output)) == 0
    told = capsys.readouterr().out
    assert "| cache | agreement | loss (nats a token) | work saved | speed | prefix hits |" in told
    assert "score" not in told
    none, reuse = (row["result"] for row in json.loads(output.read_text())["data"]["rows"])
    assert none["loss_tokens"] == reuse["loss_tokens"] > 20
    assert none["loss"] > 0
    assert "metrics" not in none
    assert tasks("--tasks", "remask_gsm8k", "--metric", "agreement") == 2
    assert "give --data" in capsys.readouterr().err


def test_lm_eval_is_named_where_it_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # an import of it fails
    assert tasks("--tasks", "remask_gsm8k") == 2
    said = capsys.readouterr().err
    assert "pip install 'lm-eval[api]>=" in said
    assert "remask[" not in said, "no package of that name is published"
