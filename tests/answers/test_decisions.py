"""Decisions of `LLM.decide`, against a dense model, the checkpoint's tokenizer and a chat template written out here."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as RawTokenizer

from remask.answers.decided import Decision, api_answers
from remask.checks import BUNDLED_TARIFF
from remask.engine.config import EngineConfig
from remask.errors import ConfigError, DecisionError
from remask.llm import LLM
from remask.policies import parse
from remask.policies.bicache import BiCache, DepthLookup, Earned
from remask.request.questions import Decisions
from tests.oracles import reading as oracle
from tests.oracles.dense import DenseModel, load

FOLDER = Path(__file__).parents[2] / "src" / "remask" / "bundled_tariff"
STATE = "Orders: rope Anna; soap Ben; lamp Carl."
NAMES = ["Anna", "Ben", "Carl"]
NAMED: dict[str, Any] = {
    "instructions": "Who ordered soap?",
    "criteria": NAMES,
    "labels": "names",
    "show_options": False,
    "template": "soap {answer}",
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(BUNDLED_TARIFF, cache="none", dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=16))


@pytest.fixture(scope="module")
def truth() -> "Truth":
    return Truth()


class Truth:
    """The distribution over labels as it follows from the weights and the texts."""

    def __init__(self) -> None:
        self.model: DenseModel = load(FOLDER, torch.float32)
        self._tokenizer = RawTokenizer.from_file(str(FOLDER / "tokenizer.json"))

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def turns(self, state: str, question: str) -> list[int]:
        def header(role: str) -> str:
            return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

        system = f"{header('system')}{state}<|eot_id|>" if state else ""
        text = f"<|startoftext|>{system}{header('user')}{question}<|eot_id|>{header('assistant')}"
        return self.tokens(text)

    def label(self, prompt: Sequence[int], before: str, label: str, after: str = "<|eot_id|>") -> float:
        """The log-probability of a label, its tokens from left to right, each with the later ones masked."""
        answer, start = self.tokens(before + label + after), len(self.tokens(before.rstrip()))
        own = answer[start : len(answer) - len(self.tokens(after))]
        total = 0.0
        for done in range(len(own)):
            masks = range(start + done, start + len(own))
            total += float(oracle.logprobs(self.model, prompt, answer, masks)[start + done, own[done]])
        return total


def shares(logs: Sequence[float]) -> list[float]:
    return torch.tensor(logs, dtype=torch.float64).softmax(0).tolist()


def check(decision: Decision, logs: Sequence[float]) -> None:
    expected = shares(logs)
    assert list(decision.probabilities.values()) == pytest.approx(expected, abs=2e-4)
    assert decision.label_mass == pytest.approx(math.fsum(map(math.exp, logs)), rel=2e-3)
    assert decision.entropy == pytest.approx(-math.fsum(p * math.log(p) for p in expected if p), abs=2e-3)
    assert decision.choice == max(decision.probabilities, key=lambda name: decision.probabilities[name])
    assert sum(decision.distribution) == pytest.approx(1)


def test_a_choice_of_words(llm: LLM, truth: Truth) -> None:
    prompt = truth.turns(STATE, NAMED["instructions"])
    found = llm.decide(STATE, {"who": NAMED})
    check(found.answers["who"], [truth.label(prompt, "soap ", name) for name in NAMES])
    assert (found.usage.steps, found.usage.completion_tokens) == (1, 0)
    open_end = llm.decide(STATE, {"who": NAMED}, end_turn=False).answers["who"]
    check(open_end, [truth.label(prompt, "soap ", name, "") for name in NAMES])
    assert open_end.probabilities != found.answers["who"].probabilities


def test_letters_stand_for_what_is_shown(llm: LLM, truth: Truth) -> None:
    asked = {"instructions": "Who ordered soap?", "criteria": {"Anna": None, "Ben": "the second"}, "labels": "letters"}
    prompt = truth.turns(STATE, "Who ordered soap?\nA: Anna\nB: Ben, the second\nAnswer with one of A, B.")
    found = llm.decide(STATE, {"who": asked}).answers["who"]
    check(found, [truth.label(prompt, "", letter) for letter in "AB"])
    assert found.labels == {"Anna": "A", "Ben": "B"}


def test_yes_and_no_take_labels_that_the_vocabulary_tells_apart(llm: LLM, truth: Truth) -> None:
    """This vocabulary spells yes in three tokens and no in two."""
    asked = {"type": "noul", "instructions": "Is it soap?", "criteria": {"true": "it is", "false": None}}
    prompt = truth.turns(STATE, "Is it soap?\nY: yes, it is\nN: no\nY or N?")
    found = llm.decide(STATE, {"q": asked}).answers["q"]
    check(found, [truth.label(prompt, "", letter) for letter in "YN"])
    assert found.value == found.system_one["noul"] == found.probabilities["yes"]


def test_a_score_is_an_expected_level(llm: LLM, truth: Truth) -> None:
    prompt = truth.turns(STATE, "How good?\n0: bad\n1: fair\n2: good\nAnswer with one of 0, 1, 2.")
    asked = {"type": "score", "instructions": "How good?", "criteria": ["bad", "fair", "good"]}
    found = llm.decide(STATE, {"q": asked}).answers["q"]
    logs = [truth.label(prompt, "", level) for level in "012"]
    check(found, logs)
    assert found.value == pytest.approx(sum(n * p for n, p in enumerate(shares(logs))), abs=1e-3)
    assert found.system_one["score"] == found.value
    assert found.system_one["legend"] == {"0": "bad", "1": "fair", "2": "good"}


@pytest.mark.parametrize(("low", "high", "passes"), [(3, 7, 1), (98, 103, 5), (0, 12, 3)])
def test_a_number_may_take_several_tokens(llm: LLM, truth: Truth, low: int, high: int, passes: int) -> None:
    """Labels of several tokens take a canvas for each beginning of one; shorter ones are filled up with zeros."""
    width = len(str(high))
    texts = [str(n).zfill(width) for n in range(low, high + 1)]
    prompt = truth.turns(STATE, f"How many?\nAnswer with a number from {texts[0]} to {texts[-1]}.")
    found = llm.decide(STATE, {"q": {"type": "number", "instructions": "How many?", "min": low, "max": high}})
    logs = [truth.label(prompt, "", text) for text in texts]
    check(found.answers["q"], logs)
    assert list(found.answers["q"].probabilities) == [str(n) for n in range(low, high + 1)]
    assert found.answers["q"].value == int(found.answers["q"].choice)
    mean = sum(n * p for n, p in zip(range(low, high + 1), shares(logs), strict=True))
    assert found.answers["q"].mean == pytest.approx(mean, abs=0.01)
    assert found.usage.forwards == passes


def test_masks_of_a_template_are_not_read(llm: LLM, truth: Truth) -> None:
    """Also where the question spells the mask token, which stays text there."""
    asked = NAMED | {"instructions": "Who <|mdm_mask|>?", "template": "{mask} Anna soap {answer} {mask} Ben"}
    prompt, mask = truth.turns(STATE, asked["instructions"]), truth.model.mask_id
    assert prompt.count(mask) == 1
    answer = truth.tokens("<|mdm_mask|> Anna soap Ben <|mdm_mask|> Ben<|eot_id|>")
    assert [at for at, token in enumerate(answer) if token == mask] == [0, 5]
    truths = oracle.logprobs(truth.model, prompt, answer, (0, 3, 5))[3]
    found = llm.decide(STATE, {"q": asked}).answers["q"]
    check(found, [float(truths[truth.tokens(f"soap {name}")[1]]) for name in NAMES])


def test_calibration_divides_by_what_is_said_without_the_state(llm: LLM, truth: Truth) -> None:
    logs, base = (
        [truth.label(truth.turns(state, NAMED["instructions"]), "soap ", name) for name in NAMES]
        for state in (STATE, "N/A")
    )
    found = llm.decide(STATE, {"who": NAMED}, calibrate=True)
    ratios = [p / q for p, q in zip(shares(logs), shares(base), strict=True)]
    expected = [ratio / sum(ratios) for ratio in ratios]
    assert list(found.answers["who"].probabilities.values()) == pytest.approx(expected, abs=1e-3)
    assert found.answers["who"].label_mass == pytest.approx(math.fsum(map(math.exp, logs)), rel=1e-3)
    assert found.usage.forwards == 2


def test_many_are_one_at_a_time_and_together_is_another_thing(llm: LLM, truth: Truth) -> None:
    rng = random.Random(3)
    asked = {str(n): NAMED | {"instructions": f"Who ordered {rng.choice(['rope', 'soap'])}{n}?"} for n in range(30)}
    many = llm.decide(STATE, asked).answers
    for name, question in asked.items():
        one = llm.decide(STATE, {name: question}).answers[name]
        assert list(many[name].probabilities.values()) == pytest.approx(list(one.probabilities.values()), abs=1e-4)
    few = {name: asked[name] for name in ("3", "7")}
    prompt = truth.turns(
        STATE,
        f"3: {few['3']['instructions']}\n\n7: {few['7']['instructions']}\n\n"
        "Give each answer on a line of its own, behind its name and a colon.",
    )
    answer = truth.tokens("3: soap Anna\n7: soap Anna<|eot_id|>")
    label = truth.tokens("soap Anna")[1]
    masks = [at for at, token in enumerate(answer) if token == label]
    truths = oracle.logprobs(truth.model, prompt, answer, masks)
    joint = llm.decide(STATE, few, together=True)
    for name, place in zip(few, masks, strict=True):
        check(joint.answers[name], [float(truths[place, truth.tokens(f"soap {label}")[1]]) for label in NAMES])
        assert joint.answers[name].probabilities != many[name].probabilities
    assert joint.usage.forwards == 1


def test_the_state_is_one_shared_prefix(llm: LLM) -> None:
    """Exactly the shared prefix of a conversation, read by all questions but the first."""
    state = "Orders: " + "; ".join(f"rope {name}" for name in NAMES * 30)
    asked = {str(n): NAMED | {"instructions": f"Who {n}?"} for n in range(4)}
    assert llm.tokenizer is not None
    turns = [{"role": "system", "content": state}, {"role": "user", "content": "Who 0?"}]
    plan = llm.session.plan_decisions(Decisions(state, asked))
    prefix = llm.tokenizer.shared_prefix(turns)
    assert list(plan.shared) == llm.tokenizer.apply_chat(turns)[:prefix]
    before = llm.engine.stats.prefix_passes
    found = llm.decide(state, asked, cache="bicache", cache_config={"depth": 4})
    assert llm.engine.stats.prefix_passes == before + 1
    assert found.usage.prefix_depth == 4
    # The first has made the entry, and the others have hit it.
    assert found.usage.cached_tokens == 3 * prefix
    # No depth that audits earn, as equal questions would get other answers while they run.
    read = plan.request(0, "r", policy=parse("bicache", None, Earned)).policy
    assert isinstance(read, BiCache)
    assert read.depth == DepthLookup({})


def test_a_state_of_json_is_read_as_text(llm: LLM) -> None:
    state = {"orders": [["soap", "Bén"]]}
    one, other = (llm.decide(each, {"q": NAMED}) for each in (state, '{"orders": [["soap", "Bén"]]}'))
    assert one.answers == other.answers
    assert llm.decide("", {"q": NAMED}).answers != one.answers


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "questions.q: the label 'yes' takes more tokens than 'no'": ({"labels": ["no", "yes", "oh"]}, {"together": True}),
    "the label 'yes' takes more tokens than 'no'": ({"labels": ["yes", "no", "a"]}, {"together": True}),
    "the label 'no' is how 'now' begins, and nothing follows it": ({"labels": ["no", "now", "a"]}, {"end_turn": False}),
    "{mask} stands behind labels of different lengths": (
        {"labels": ["x", "yes", "a"], "template": "{answer} {mask}"},
        {},
    ),
    "differ in 2 tokens, and at most 1": ({"labels": ["xy", "yx", "zz"]}, {"together": True}),
    "must hold {answer} once": ({"template": "x{answer}{mask}{answer}"}, {}),
}


OPEN: list[tuple[list[str], str]] = [
    (["no", "now", "a"], "soap "),
    (["vwxyz", "wxyzv", "zvwxy"], ""),
    (["Ann", "Anna", "Annabelle or Anna", "Ben"], ""),
]


@pytest.mark.parametrize(("labels", "before"), OPEN)
def test_labels_of_any_lengths_are_written_out_one_by_one(
    llm: LLM, truth: Truth, labels: list[str], before: str
) -> None:
    """Masks stand for the longest and what follows it; each label is told up to the token that no other has there."""
    asked = {"instructions": "Which?", "criteria": labels, "labels": labels, "show_options": False}
    found = llm.decide(STATE, {"q": {**asked, "template": f"{before}{{answer}}"}})
    prompt, ends = truth.turns(STATE, "Which?"), truth.tokens("<|eot_id|>")
    texts = {label: truth.tokens(f"{before}{label}") + ends for label in labels}
    start = next(at for at in range(99) if len({tuple(text[: at + 1]) for text in texts.values()}) > 1)
    longest = max(map(len, texts.values()))
    logs, passes = [], set[tuple[int, ...]]()
    for label in labels:
        total, told = 0.0, start
        while sum(text[:told] == texts[label][:told] for text in texts.values()) > 1:
            begun = texts[label][:told]
            answer = [*begun, *[0] * (longest - told)]
            read = oracle.logprobs(truth.model, prompt, answer, range(told, longest))
            total += float(read[told, texts[label][told]])
            passes.add(tuple(begun))
            told += 1
        logs.append(total)
    check(found.answers["q"], logs)
    assert found.usage.forwards == len(passes)


def test_labels_that_cannot_be_told_apart_are_refused(llm: LLM) -> None:
    for message, (fields, more) in REFUSED.items():
        with pytest.raises(ConfigError, match=message):
            llm.decide(STATE, {"q": NAMED | fields}, **more)
    transit = LLM("bundled-transit", dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match="vocabulary cannot tell the labels 'yes' and 'no' apart"):
        transit.decide("x", {"q": {"type": "yes_no", "instructions": "Is it?", "labels": ["yes", "no"]}})
    found = transit.decide("x", {"q": {"type": "yes_no", "instructions": "Is it?", "labels": ["oak", "elm"]}})
    assert found.answers["q"].labels == {"yes": "oak", "no": "elm"}


def test_models_without_masks_are_refused() -> None:
    uniform = LLM("bundled-uniform", dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match="uniform models"):
        uniform.decide("x", {"q": NAMED})


def test_a_pass_that_fails_is_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.model, "head", lambda _: 1 / 0)
    monkeypatch.setattr(llm.engine.model, "head", lambda _: 1 / 0)
    with pytest.raises(DecisionError, match="could not be read"):
        llm.decide(STATE, {"q": NAMED})


def test_more_canvases_than_allowed_are_refused_before_any_is_read(llm: LLM) -> None:
    asked = Decisions(STATE, {"q": {"type": "number", "instructions": "n", "min": 10, "max": 99}}, calibrate=True)
    assert len(llm.session.plan_decisions(asked, 20).asks) == 20
    with pytest.raises(ConfigError, match="more than 19 canvases"):
        llm.session.plan_decisions(asked, 19)


def test_more_alternatives_than_letters_take_the_shortest_codes(llm: LLM, truth: Truth) -> None:
    """No code is one token here, so there is a canvas for each first letter, and one that reads it."""
    names = [f"shelf {n}" for n in range(40)]
    found = llm.decide(STATE, {"q": {"instructions": "Where?", "criteria": names}})
    labels = found.answers["q"].label_texts
    assert labels == tuple(f"{a}{b}" for a in "AB" for b in "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")[:40]
    assert found.usage.forwards == 3
    lines = [f"{label}: {name}" for label, name in zip(labels, names, strict=True)]
    prompt = truth.turns(STATE, "\n".join(["Where?", *lines, "Answer with the label of one of them."]))
    check(found.answers["q"], [truth.label(prompt, "", label) for label in labels])


ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Orders are read out."},
    {"role": "user", "content": [{"type": "input_text", "text": "Who?"}, {"type": "input_json", "data": {"a": [1]}}]},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": "soap"}'},
    {"type": "function_call_output", "call_id": "c", "output": "Ben"},
    {"type": "reasoning", "id": "r", "summary": []},
    {"role": "assistant", "content": [{"type": "output_text", "text": "Ben.", "annotations": []}], "status": "x"},
]


def test_a_conversation_is_the_one_that_it_is(llm: LLM, truth: Truth) -> None:
    """This template knows no tools, so calls are texts of the two sides."""
    asked = [{"type": "predicate", "instructions": "Is it soap?", "name": "it"}]
    found = llm.decide(input=ITEMS, questions=asked)

    def turn(role: str, text: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"

    turns = [
        ("system", "Orders are read out."),
        ("user", 'Who?\n{"a": [1]}'),
        ("assistant", 'look({"at": "soap"})'),
        ("user", "look returned: Ben"),
        ("assistant", "Ben."),
        ("user", "Is it soap?\nY: yes\nN: no\nY or N?"),
    ]
    text = (
        "<|startoftext|>" + "".join(turn(*each) for each in turns) + "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    prompt = truth.tokens(text)
    check(found.answers["0"], [truth.label(prompt, "", letter) for letter in "YN"])


def test_answers_have_the_form_of_the_api_that_asked(llm: LLM) -> None:
    """Values keep their types, levels count from 0, and images are refused question by question."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    asked = Decisions.from_mapping(
        {
            "input": "Orders: rope Anna.",
            "questions": [
                {"type": "choice", "instructions": "Is it?", "choices": [{"value": "true"}, {"value": True}]},
                {"type": "predicate", "instructions": [{"type": "input_text", "text": "Is it?"}], "name": "p"},
                {"type": "score", "instructions": "How?", "levels": [{"label": "a"}, {"label": "a"}, {"label": "c"}]},
                {"type": "predicate", "instructions": [{"type": "input_text", "text": "Is it?"}, image], "name": "i"},
            ],
        }
    )
    answers = api_answers(asked, llm.decide(asked).answers)
    assert isinstance(answers, list)
    choice, predicate, score, refused = answers
    assert [(type(each["value"]), each["value"]) for each in choice["probabilities"]] == [(str, "true"), (bool, True)]
    assert choice["name"] is None
    assert 0 < predicate["probability"] < 1
    assert [(each["value"], each["label"]) for each in score["probabilities"]] == [(0, "a"), (1, "a"), (2, "c")]
    assert score["score"] == pytest.approx(sum(each["value"] * each["probability"] for each in score["probabilities"]))
    assert refused == {"type": "refusal", "name": "i"}
    nothing = Decisions(input="x", questions=[{"type": "predicate", "instructions": [image]}])
    assert api_answers(nothing, llm.decide(nothing).answers) == [{"type": "refusal", "name": None}]


def test_what_requests_share_ends_at_breakpoints_where_these_are_asked_for(llm: LLM) -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    parts: list[dict[str, Any]] = [
        {"type": "input_text", "text": "rope Anna;", **mark},
        {"type": "input_text", "text": "soap Ben."},
    ]
    about = [{"role": "system", "content": "Orders:"}, {"role": "user", "content": parts}]
    asked = [{"type": "predicate", "instructions": "Is it?"}]

    def stored(**options: Any) -> list[int]:
        plan = llm.session.plan_decisions(Decisions(input=about, questions=asked, **options))
        return list(plan.shared[: plan.shareable_length])

    assert llm.tokenizer is not None
    turns = [{"role": "system", "content": "Orders:"}, {"role": "user", "content": "rope Anna;\nsoap Ben."}]
    whole = llm.tokenizer.apply_chat(turns, add_generation_prompt=False)
    assert stored() == stored(prompt_cache_options={"mode": "implicit"}) == whole
    text = llm.tokenizer.decode(stored(prompt_cache_options={"mode": "explicit", "ttl": "30m"}))
    assert text.endswith("rope Anna;")
    del parts[0]["prompt_cache_breakpoint"]
    assert stored(prompt_cache_options={"mode": "explicit"}) == []
