"""What is said of questions before any is asked, and what follows from what was read."""

import math
import random
import re
from typing import Any

import pytest

from remask.answers.decided import Decision
from remask.errors import ConfigError
from remask.request.questions import Decisions, Question

CHOICE: dict[str, Any] = {"instructions": "which ?", "criteria": ["a", "b"]}


def question(**fields: Any) -> Question:
    made: Question = Decisions("x", {"q": {**CHOICE, **fields}}).questions["q"]
    return made


decided = Decision.of


def test_labels_are_tried_in_order() -> None:
    assert question().labellings == [[("a", "b")], [("A", "B"), ("a", "b")]]
    assert question(labels="letters").labellings == [[("A", "B"), ("a", "b")]]
    assert question(labels="names").labellings == [[("a", "b")]]
    assert question(labels=["x", "y"]).labellings == [[("x", "y")]]
    many = [str(n) for n in range(30)]
    ((codes, names),) = question(criteria=many).labellings
    assert codes[:3] == ("AA", "AB", "AC")
    assert names == tuple(many)
    assert question(type="score").labellings[0][0] == ("0", "1")
    assert question(type="yes_no", criteria=None).labellings[0][0] == ("True", "False")
    numbers = question(type="number", criteria=None, min=8, max=12, step=2)
    assert tuple(each.value for each in numbers.alternatives) == ("8", "10", "12")
    assert numbers.labellings == [[("8", "10", "12"), ("08", "10", "12")]]
    assert question(type="number", criteria=None, min=-1, max=1).labellings == [[("-1", "0", "1")]]


def test_prompts_show_what_labels_do_not_say() -> None:
    asked = question(criteria={"a": "the first", "b": None})
    assert asked.prompt(("A", "B")) == "which ?\nA: a, the first\nB: b\nAnswer with one of A, B."
    assert asked.prompt(("a", "b")) == "which ?\na: the first\nOptions: a, b."
    assert question(show_options=False).prompt(("A", "B")) == "which ?"
    numbers = question(type="number", criteria=None, min=1, max=3)
    assert numbers.prompt(("1", "2", "3")) == "which ?\nAnswer with a number from 1 to 3."
    letters = question(type="number", criteria=None, min=1, max=2, labels="letters")
    assert letters.prompt(("A", "B")) == "which ?\nA: 1\nB: 2\nAnswer with one of A, B."
    words = question(type="number", criteria=None, min=1, max=2, labels=["low", "high"])
    assert words.prompt(("low", "high")) == "which ?\nlow: 1\nhigh: 2\nAnswer with one of low, high."


def test_what_follows_from_log_probabilities() -> None:
    found = decided(question(), [math.log(0.2), math.log(0.1)], ("A", "B"), None)
    assert found.probabilities == pytest.approx({"a": 2 / 3, "b": 1 / 3})
    assert found.label_mass == pytest.approx(0.3)
    assert found.entropy == pytest.approx(-(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3))
    assert (found.choice, found.value, found.mean) == ("a", None, None)
    level = decided(question(), [math.log(0.2), math.log(0.1)], ("A", "B"), [math.log(0.4), math.log(0.1)])
    assert level.probabilities == pytest.approx({"a": 1 / 3, "b": 2 / 3})
    assert level.label_mass == pytest.approx(0.3)
    sure = decided(question(), [-9999.0, 0.0], ("A", "B"), None)
    assert sure.entropy == pytest.approx(0.0)
    assert (sure.label_mass, sure.choice) == (1.0, "b")
    number = decided(question(type="number", criteria=None, min=1, max=3), [-1.0, -1.0, -9.0], ("1", "2", "3"), None)
    assert number.value == 1
    assert number.mean == pytest.approx(1.5, abs=1e-3)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"instructions": " "}, "instructions is empty"),
    ({"instructions": "", "type": "noul", "criteria": None}, "instructions is empty"),
    ({"template": "none"}, "must hold {answer} once"),
    ({"template": "{answer} {answer}"}, "must hold {answer} once"),
    ({"criteria": ["a"]}, "two alternatives at least"),
    ({"criteria": ["a", "a"]}, "names must differ"),
    ({"labels": "digits"}, 'labels must be "auto"'),
    ({"labels": ["x", "x"]}, "labels holds a text twice"),
    ({"labels": "letters", "criteria": [str(n) for n in range(937)]}, "for 936 alternatives at most"),
    ({"criteria": None, "choices": [{"value": "a"}, {"value": True}]}, "goes with `input`"),
    ({"choices": [{"value": "a"}, {"value": "b"}]}, "two forms of the same"),
    ({"criteria": None, "levels": [{"label": "a"}]}, "levels is not for a choice"),
    ({"criteria": None, "choices": [{"value": "a"}, {}]}, "need a value each"),
    ({"choices": [{"value": 1}, {"value": "a"}]}, "must be true or false, or a text"),
    ({"criteria": ["a", {"b": 1}]}, "criteria of a choice are names"),
    ({"type": "score", "criteria": {"0": "a", "1": "b"}}, "a list of its levels"),
    ({"criteria": {"a": None, "b": ""}}, "criteria must be"),
    ({"min": 3}, "min, max and step are those of a number"),
    ({"type": "number", "criteria": None}, "which needs min and max"),
    ({"type": "number", "min": 1, "max": 3}, "criteria is not for a number, whose alternatives are told by min"),
    ({"type": "number", "criteria": None, "min": 3, "max": 3}, "with min < max"),
    ({"type": "number", "criteria": None, "min": 0, "max": 1000}, "make 1001 numbers"),
    ({"type": "score", "criteria": None}, "two alternatives at least for a score"),
    ({"type": "noul", "criteria": {"perhaps": "x"}}, "those of yes and no"),
    ({"type": "yes_no"}, "an object of those of yes and no"),
    ({"type": "yes_no", "criteria": {"yes": "x", "true": "y"}}, "those of yes and no"),
    ({"type": "maybe"}, "Unknown type 'maybe'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_questions_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^questions\.q: .*" + re.escape(message)):
        question(**fields)


@pytest.mark.parametrize("seed", range(3))
def test_confidence_is_that_of_system_one(seed: int) -> None:
    """Against sums that are written out; 1 where one alternative is certain, and 0 where all are as probable."""
    rng = random.Random(seed)
    for kind in ("choice", "score"):
        count = rng.randint(2, 6)
        asked = question(type=kind, criteria=[str(n) for n in range(count)])
        logs = [rng.gauss(0, 2) for _ in range(count)]
        found = decided(asked, logs, tuple(map(str, range(count))), None)
        shares, best = found.distribution, max(range(count), key=logs.__getitem__)
        expected = (shares[best] - 1 / count) / (1 - 1 / count)
        if kind == "score":
            even = sum(abs(n - (count - 1) / 2) for n in range(count)) / count
            expected = max(0, 1 - sum(p * abs(n - best) for n, p in enumerate(shares)) / even)
        assert found.confidence == pytest.approx(expected)
        assert decided(asked, [0.0] * count, [""] * count, None).confidence == pytest.approx(0)
        assert decided(asked, [0.0, *[-99.0] * (count - 1)], [""] * count, None).confidence == pytest.approx(1)


def test_criteria_alone_say_what_is_asked() -> None:
    told = question(type="noul", instructions="", criteria={"true": {"a": 1}})
    assert told.prompt(("Yes", "No")) == 'Which of these applies?\nYes: {"a": 1}\nYes or No?'
    assert question(type="noul", criteria=None).prompt(("Y", "N")) == "which ?\nY: yes\nN: no\nY or N?"
    assert question(instructions=["a", {"b": "c"}]).question_text == '["a", {"b": "c"}]'


def items(*more: Any) -> list[Any]:
    return [{"role": "user", "content": "a"}, *more]


def call(**fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", **fields}


def part(data: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_json", "data": data}]}


DEEP: Any = {"a": 1}
for _ in range(32):
    DEEP = {"a": DEEP}
TEXT = {"type": "input_text", "text": "a"}
IMAGE = {"type": "input_image", "image_url": "https://example.com/a.png"}
WRONG: list[tuple[Any, str]] = [
    ([], "input must be a text, or a list"),
    ([1], "input[0] must be an object"),
    (items({"type": "guess"}), "input[1].type must be one of message"),
    (items({"role": "tool", "content": "a"}), "input[1].role must be one of system"),
    (items({"role": "user"}), "input[1].content must be a text, or a list"),
    (items({"role": "user", "content": "a", "mood": 1}), "mood"),
    (items({"role": "user", "content": [IMAGE]}), "input[1].content[0] is an image, and the served models"),
    (items({"role": "assistant", "content": [{"type": "input_text", "text": "a"}]}), "one of output_text, refusal"),
    (items({"role": "system", "content": [{"type": "input_json", "data": {}}]}), "one of input_text, got"),
    (items(call(), {"type": "custom_tool_call_output", "call_id": "c", "output": ""}), "that of a custom_tool_call"),
    (items({"type": "function_call_output", "call_id": "c", "output": ""}, call()), "that of a function_call before"),
    (items(call(), call()), "is that of another call"),
    (items(call(), {"type": "function_call_output", "call_id": "c", "output": [IMAGE]}), "output[0] is an image"),
    ([part([1])], "must be an object or a list of objects"),
    ([part(DEEP)], "more than 32 levels"),
    ([part({"a": [0] * 10_000})], "more than 10000 values"),
    ([part({"a": {1}})], "input[0].content[0].data must be a text or JSON, got {'a': {1}}"),
    (items({**call(), "arguments": {"a": {1}}}), "input[1].arguments must be a text or JSON, got {'a': {1}}"),
    ([part({"a": "x" * (1 << 18)})], "bytes as compact JSON; at most 262144"),
    (
        [{"role": "user", "content": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": 1}]}],
        '{"mode": "exp',
    ),
]


def test_what_openai_asks_about_is_checked() -> None:
    asked = [{"type": "predicate", "instructions": "it ?"}]
    for about, message in WRONG:
        with pytest.raises(ConfigError, match=re.escape(message)):
            Decisions(input=about, questions=asked)
    forms: list[tuple[dict[str, Any], str]] = [
        ({"state": "a", "input": "b", "questions": asked}, "state and input both"),
        ({"state": "a", "questions": asked}, "questions are a list where"),
        ({"input": "b", "questions": {"q": asked[0]}}, "questions are a list where"),
        ({"input": "b", "questions": asked * 401}, "at most 400 questions"),
        ({"input": "b", "questions": [{**asked[0], "name": "x"}] * 2}, "the name 'x' is that of two"),
        ({"input": "b", "questions": [{"type": "predicate"}]}, "questions.0: instructions is empty"),
        (
            {"input": "b", "questions": [{**asked[0], "instructions": [{"type": "text"}]}]},
            "questions.0: instructions[0]",
        ),
        (
            {
                "input": "b",
                "questions": [{"instructions": "a", "choices": [{"value": str(n)} for n in range(256)]}],
            },
            "questions.0: choices holds 256 choices; from 2 to 255",
        ),
        ({"input": "b", "questions": asked, "prompt_cache_options": {"ttl": "1h"}}, "Unknown ttl '1h'"),
    ]
    for fields, message in forms:
        with pytest.raises(ConfigError, match=re.escape(message)):
            Decisions.from_mapping(fields)


def test_the_cost_of_tokenizing_grows_with_labels() -> None:
    few, many = (
        Decisions("x", {"q": {**CHOICE, "labels": "names", "criteria": list(names)}}) for names in ("ab", "abcdefgh")
    )
    assert few.chars * 3 < many.chars
    assert Decisions("x", {"p": CHOICE, "q": CHOICE}, together=True).chars > 2 * Decisions("x", {"q": CHOICE}).chars


def test_what_is_no_json_is_refused_by_name() -> None:
    asked = {"q": {"type": "yes_no", "instructions": "it ?"}}
    with pytest.raises(ConfigError, match="state must be a text, or an object or a list"):
        Decisions({"a": {1}}, asked)
    with pytest.raises(ConfigError, match=r"questions\.q: instructions must be a text, or an object or a list"):
        Decisions("x", {"q": {"type": "yes_no", "instructions": [{1}]}})


def test_levels_have_a_legend_in_both_forms() -> None:
    levels = [{"label": "low", "description": "not much"}, {"label": "high"}]
    asked = Decisions(input="x", questions=[{"type": "score", "instructions": "how ?", "levels": levels}])
    answer = decided(asked.questions["0"], [-1.0, -2.0], ("0", "1"), None)
    assert answer.system_one["legend"] == {"0": "low", "1": "high"}
