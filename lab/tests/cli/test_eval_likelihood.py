import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remask.cli import main
from remask.llm import LLM
from remask.tasks.transit import STOPS, make_workload
from remask.tasks.workload import messages
from remask_lab.likelihood.masked import Likelihood
from remask_lab.likelihood.scores import Question, score_questions
from remask_lab.records.record import read_record
from tests.depth.models import write_lines
from tests.engine import kinds
from tests.goldens import model_dir


def likelihood(path: Path, *options: str, model: str = "bundled-transit") -> int:
    given = ["--model", model, "--dtype", "float32", "--device", "cpu", "--prompts", str(path)]
    return main(["--quiet", "eval", "likelihood", *given, *options])


def rides(count: int) -> list[dict[str, Any]]:
    """Questions of the bundled task up to the answer, as text, with the right stop among the choices."""
    tokenizer = LLM("bundled-transit", dtype="float32", device="cpu").tokenizer
    assert tokenizer is not None
    lines = []
    for item in make_workload(count, min(2, count), 5):
        asked = tokenizer.render_chat(messages(item.prompt, item.question))
        walked, _, _ = item.reference.rpartition(" ")
        others = [stop for stop in STOPS if stop != item.answer][:2]
        lines.append({"prompt": f"{asked}{walked}", "choices": [others[0], item.answer, others[1]], "answer": 1})
    return lines


def test_the_right_stop_is_the_likeliest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.json"
    questions = rides(6)
    assert likelihood(write_lines(tmp_path / "q.jsonl", questions), "--output", str(output)) == 0
    record = read_record(output, "eval likelihood")
    assert record.data["accuracy"] == 1
    assert record.data["accuracy_interval"][0] > 0.6
    assert [question["chosen"] for question in record.data["questions"]] == [1] * 6
    assert record.data["questions"][0]["choices"][1]["draws"] == 0, "one token: there is one set of masks"
    assert record.about["settings"]["draws"]["samples"] == 128
    assert "accuracy, as it is" in capsys.readouterr().out


def test_labels_letters_and_texts_name_the_answer(tmp_path: Path) -> None:
    (question,) = rides(1)
    texts = question["choices"]
    forms = [
        {**question, "answer": "B"},
        {**question, "answer": texts[1]},
        {**question, "choices": {"text": texts, "label": ["1", "2", "3"]}, "answer": "2"},
        {**question, "choices": {"text": texts, "label": [1, 2, 3]}, "answer": 2},
        {**question, "choices": {"text": texts}, "answer": 1},
    ]
    renamed = [{"question": form["prompt"], "options": form["choices"], "key": form["answer"]} for form in forms]
    output = tmp_path / "out.json"
    path = write_lines(tmp_path / "q.jsonl", 2 * renamed)
    fields = "prompt=question, choices=options,answer=key"
    assert likelihood(path, "--fields", fields, "--limit", "5", "--output", str(output)) == 0
    found = read_record(output).data["questions"]
    assert [question["answer"] for question in found] == [1] * 5
    assert found[0]["choices"] == found[1]["choices"], "the draws do not depend on the line, as all sets were computed"


def test_choices_are_compared_as_they_are_and_by_character() -> None:
    found = [Likelihood(log_likelihood=value, standard_error=0, tokens=1, draws=0) for value in (-2.0, -3.0)]
    estimator: Any = SimpleNamespace(score=lambda *_: found)
    told = score_questions(estimator, [Question("a", ["b", "c d"], 1, [])])
    assert (told["accuracy"], told["accuracy_norm"]) == (0, 1)


def test_responses_with_their_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"prompt": "from ivy", "response": "go 3 , where am i ? from ivy"}, {"prompt": "go", "response": "ivy"}]
    output, path = tmp_path / "out.json", write_lines(tmp_path / "r.jsonl", lines)
    assert likelihood(path, "--mc-samples", "16", "--output", str(output), "--seed", "3") == 0
    long, short = read_record(output).data["responses"]
    assert (long["tokens"], long["draws"], short["tokens"], short["draws"]) == (9, 16, 1, 0)
    assert long["standard_error"] > 0
    assert short["standard_error"] == 0
    data = read_record(output).data
    assert data["log_likelihood_per_token"] == pytest.approx((long["log_likelihood"] + short["log_likelihood"]) / 10)
    assert data["standard_error"] == pytest.approx(long["standard_error"] / 10)
    assert "nats a token, 10 tokens of 2 responses" in capsys.readouterr().out
    assert likelihood(path, "--mc-samples", "16", "--mc-no-exact", "--chat", "--output", str(output)) == 0
    assert [row["draws"] for row in read_record(output).data["responses"]] == [16, 16]


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([{"prompt": "a"}], [], "line 1: has no field 'response'; its fields: prompt. --fields response=NAME"),
        ([{"prompt": "a", "response": " "}], [], "line 1: field 'response' must be a text that is not empty"),
        ([{"prompt": "a", "response": "b"}, {"response": "b"}], [], "line 2: has no field 'prompt'"),
        ([{"prompt": "a", "choices": ["b", "c"]}], [], "line 1: has no field 'answer'"),
        ([{"prompt": "a", "choices": ["b"], "answer": 0}], [], "must be a list of two texts or more"),
        ([{"prompt": "a", "choices": ["b", ""], "answer": 0}], [], "must be a list of two texts or more"),
        ([{"prompt": "a", "choices": {"text": ["b", "c"], "label": 3}, "answer": 0}], [], "must be a list of two"),
        ([{"prompt": "a", "choices": ["b", "c"], "answer": 2}], [], "from 0 to 1, nor one of the labels A, B"),
        ([{"prompt": "a", "choices": ["b", "c"], "answer": True}], [], "field 'answer' is True"),
        ([{"prompt": "a", "response": "b"}, {"prompt": "a", "choices": []}], [], "line 2: a file holds questions"),
        ([{"prompt": "a", "response": "b " * 1100}], [], "line 1: prompt and response have"),
        ([], [], "holds no lines"),
        ([3], [], "must be a JSON object, got int"),
        ([{"prompt": "a", "response": "b"}], ["--fields", "respons=b"], "Did you mean 'response'?"),
        ([{"prompt": "a", "response": "b"}], ["--fields", "response"], "takes FIELD=NAME,FIELD=NAME, got 'response'"),
        ([{"prompt": "a", "response": "b"}], ["--mc-samples", "9"], "samples=9 must be a multiple of strata=8"),
        ([{"prompt": "a", "response": "b"}], ["--limit", "0"], "--limit must be a whole number from 1"),
        ([{"prompt": "a", "response": "b"}], ["--output", "/nowhere/x.json"], "there is no folder"),
    ],
)
def test_what_cannot_be_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[Any], options: list[str], message: str
) -> None:
    assert likelihood(write_lines(tmp_path / "x.jsonl", lines), *options) == 2
    assert message in capsys.readouterr().err


def test_files_and_models_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert likelihood(tmp_path / "none.jsonl") == 2
    assert "--prompts: there is no file" in capsys.readouterr().err
    for content in (b"not gzip", b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 9):  # another file, and a broken one
        (tmp_path / "bad.jsonl.gz").write_bytes(content)
        assert likelihood(tmp_path / "bad.jsonl.gz") == 2
        assert "cannot be read" in capsys.readouterr().err
    path = write_lines(tmp_path / "x.jsonl", [{"prompt": "a", "response": "b"}])
    assert likelihood(path, model=str(model_dir("llada"))) == 2
    assert "no tokenizer" in capsys.readouterr().err
    assert likelihood(path, "--chat", model=str(model_dir("llada"))) == 2
    assert "no tokenizer" in capsys.readouterr().err


def test_compressed_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"prompt": "from", "response": "ivy"}).encode() + b"\n\n"))
    assert likelihood(path) == 0


def test_models_of_other_kinds_have_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"prompt": "a", "response": "b"}])
    assert likelihood(path, model=str(kinds.checkpoint("sdar").folder)) == 2
    assert "bounds of masked models" in capsys.readouterr().err
    assert likelihood(path, model="bundled-uniform") == 2
    assert "The subject 'likelihood of uniform models' left after" in capsys.readouterr().err
