"""Records of every data set as questions."""

import re
from pathlib import Path
from typing import Any

import pytest
from lab.tests.harness.records import RECORDS, perfect

from remask.errors import ConfigError, UnknownNameError
from remask.policies import parse
from remask.policies.bicache import DepthLookup
from remask.request.sampling_params import SamplingParams
from remask_lab.harness.benchmark import benchmark, default_role, read_docs, read_role, read_shots, task_names
from remask_lab.harness.formats import FORMATS, Doc
from remask_lab.harness.presets import preset_names, task_settings
from remask_lab.harness.score import judge
from remask_lab.records.jsonl import Line
from tests.depth.models import write_lines

DATA = Path(__file__).parents[3] / "tests" / "data"


def line(record: dict[str, Any], names: dict[str, str] | None = None) -> Line:
    return Line("here, line 4:", record, names or {})


@pytest.mark.parametrize("name", FORMATS)
def test_a_perfect_answer_is_right_and_another_is_not(name: str) -> None:
    record, right = RECORDS[name]
    doc = FORMATS[name].read(line(record))
    assert doc.right == right
    assert set(judge(perfect(name), doc.right).metrics.values()) == {1.0}
    wrong = judge("## wrong", doc.right)
    assert set(wrong.metrics.values()) == {0.0}


@pytest.mark.parametrize("name", FORMATS)
def test_each_field_is_needed_and_may_be_called_otherwise(name: str) -> None:
    record, right = RECORDS[name]
    for field in FORMATS[name].fields:
        without = {key: value for key, value in record.items() if key != field}
        with pytest.raises(ConfigError, match=rf"here, line 4: has no field '{re.escape(field)}'"):
            FORMATS[name].read(line(without))
        renamed = without | {"other": record[field]}
        assert FORMATS[name].read(line(renamed, {field: "other"})).right == right
        with pytest.raises(ConfigError, match=r"here, line 4: field"):
            FORMATS[name].read(line(without | {field: 3.5}))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gsm8k", {"answer": "18"}, "no '####'"),
        ("arc_challenge", {"answerKey": "D"}, "none of the labels 1, 2, 3"),
        ("arc_challenge", {"choices": {"text": ["a"], "label": []}}, "as many text as label"),
        ("arc_challenge", {"choices": {"text": ["a", "b"], "label": [1, 2]}}, "'2', which is none of the labels 1, 2"),
        ("mmlu", {"answer": 4}, "from 0 to 3, got 4"),
        ("mmlu", {"answer": True}, "got True"),
        ("mmlu_pro", {"answer": "K"}, "one of the letters ABCDEFGHIJ, got 'K'"),
        ("mmlu_pro", {"answer": "AB"}, "got 'AB'"),
    ],
)
def test_records_that_contradict_themselves(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FORMATS[name].read(line(RECORDS[name][0] | change))


def test_choices_are_shown_by_letter() -> None:
    assert FORMATS["arc_challenge"].read(line(RECORDS["arc_challenge"][0])).asked == (
        "Which is a metal?\n\nA. wood\nB. iron\nC. glass"
    )


def test_gpqa_does_not_give_the_answer_away_and_is_asked_alike_each_time() -> None:
    record = RECORDS["gpqa"][0]
    docs = [FORMATS["gpqa"].read(line(record | {"Question": f"Number {n}?"})) for n in range(40)]
    assert {doc.right for doc in docs} == set("ABCD")
    for doc in docs:
        assert f"{doc.right}. 2" in doc.asked
    assert docs == [FORMATS["gpqa"].read(line(record | {"Question": f"Number {n}?"})) for n in range(40)]


def test_published_records_are_read() -> None:
    gsm8k = read_docs(benchmark("remask_gsm8k"), str(DATA / "gsm8k" / "test.jsonl"))
    assert [doc.right for doc in gsm8k[:4]] == ["18", "3", "70000", "540"]
    assert len(read_docs(benchmark("remask_gsm8k"), str(DATA / "gsm8k" / "test.jsonl"), limit=2)) == 2


def test_solutions_are_right_answers_in_the_form_that_is_asked_for(tmp_path: Path) -> None:
    path = DATA / "gsm8k" / "test.jsonl"
    for doc in read_shots(benchmark("remask_gsm8k"), str(path), None, 8):
        assert judge(doc.solution, doc.right).strict
        assert "<<" not in doc.solution
        assert "####" not in doc.solution
    for name in ("math500", "arc_challenge", "gpqa", "mmlu", "mmlu_pro", "bbh"):
        doc = FORMATS[name].read(line(RECORDS[name][0]))
        assert judge(doc.solution, doc.right).strict
    path = write_lines(tmp_path / "x.jsonl", [RECORDS["gsm8k"][0]])
    with pytest.raises(ConfigError, match=r"--shots 3 needs as many records .* holds 1"):
        read_shots(benchmark("remask_gsm8k"), str(path), None, 3)


def test_examples_stand_between_the_system_prompt_and_the_question() -> None:
    own, docs = benchmark("remask_bbh"), [Doc(f"{n}?", f"{n}", solution=f"## {n}") for n in range(3)]
    assert own.messages("role", docs[2], docs[:2])[1:] == [
        {"role": "user", "content": "0?"},
        {"role": "assistant", "content": "## 0"},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "## 1"},
        {"role": "user", "content": "2?"},
    ]


def test_presets_are_the_papers() -> None:
    """Table 5 of dKV-Cache, and the examples of its tables 2 and 3."""
    llada = {task: dict(task_settings("dkv-cache-llada", f"remask_{task}").sampling) for task in ("mmlu", "gpqa")}
    assert llada == {
        "mmlu": {"max_tokens": 32, "steps": 32, "block_length": 16},
        "gpqa": {"max_tokens": 128, "steps": 128, "block_length": 64},
    }
    caches = {task: task_settings("dkv-cache-llada", task).caches for task in ("remask_mmlu", "mbpp")}
    assert [caches[task]["dkv-greedy"] for task in caches] == [
        {"refresh_interval": 2, "window": 4},
        {"refresh_interval": 2, "window": 2},
    ]
    assert caches["mbpp"]["dkv-decode"] == {"refresh_interval": 8}
    shots = {task: task_settings("dkv-cache-dream", task).shots for task in ("remask_gsm8k", "mbpp", "remask_mmlu")}
    assert shots == {"remask_gsm8k": 8, "mbpp": 3, "remask_mmlu": 5}
    for name in preset_names():
        for task in ("remask_gsm8k", "humaneval"):
            SamplingParams.from_mapping(task_settings(name, task).sampling)
            for cache, own in task_settings(name, task).caches.items():
                parse(cache, own, lambda: DepthLookup({}))
    with pytest.raises(UnknownNameError, match="task of preset dkv-cache-llada 'remask_bbh'"):
        task_settings("dkv-cache-llada", "remask_bbh")
    with pytest.raises(UnknownNameError, match="dkv-cache-dream"):
        task_settings("dkv-cache", "remask_gsm8k")


def test_the_first_bad_line_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [RECORDS["gsm8k"][0], {"question": "?"}])
    with pytest.raises(ConfigError, match=r"x\.jsonl, line 2: has no field 'answer'.*--fields answer=NAME"):
        read_docs(benchmark("remask_gsm8k"), str(path))


def test_every_task_has_rules_and_one_system_prompt_for_all_questions() -> None:
    for task in task_names():
        own = benchmark(task)
        assert "##" in own.rules
        assert own.max_tokens == 256
        first, second = (
            own.messages("role", FORMATS[task.removeprefix("remask_")].read(line(record)))
            for record, _ in [RECORDS[task.removeprefix("remask_")]] * 2
        )
        assert first[0] == second[0] == {"role": "system", "content": f"role\n\n{own.rules}"}
    with pytest.raises(UnknownNameError, match="Did you mean 'remask_gsm8k'"):
        benchmark("remask_gsm")


def test_the_role_may_come_from_a_file(tmp_path: Path) -> None:
    assert read_role(None) == default_role()
    assert len(default_role().split()) > 300, "long enough to be worth sharing"
    path = tmp_path / "role.txt"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_role(str(path))
    path.write_text(" \n")
    with pytest.raises(ConfigError, match="holds no text"):
        read_role(str(path))
    path.write_text("You are brief.\n")
    assert read_role(str(path)) == "You are brief."
