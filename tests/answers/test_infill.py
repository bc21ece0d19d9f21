"""`LLM.infill`, templates of parts, and their texts."""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remask.answers.infill import response_of, template_of
from remask.errors import ConfigError
from remask.llm import LLM
from remask.plan.canvas import OPEN, Hole, Template
from remask.request.sampling_params import SamplingParams
from remask.request.terms import MaskLength, Part, Terms
from remask.text.detokenize import ResponseText

SYSTEM = {
    "role": "system",
    "content": "Orders: saw Luis; mat Ben; guitar Nina; flute Amir; ladder Ruth; fan Rita; pillow Max; fork Hans.",
}
CHAT = [SYSTEM, {"role": "user", "content": "Plan family: who pays 5, 7, 1, 3?"}]
ANSWER: list[dict[str, Any]] = [
    {"text": "5"},
    {"mask": 1},
    {"text": " 7"},
    {"mask": 1},
    {"text": " 1"},
    {"mask": 1},
    {"text": " 3"},
    {"mask": 1},
]


@cache
def bundled() -> LLM:
    return LLM("bundled-tariff", cache="bicache", dtype="float32")


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Iterator[None]:
    """The model goes with the tests that share it: it has processes that render its chat template."""
    yield
    bundled.cache_clear()


@pytest.mark.parametrize("policy", [None, "none", "block-dual", "dkv-decode"])
def test_a_model_fills_the_holes_of_its_answer(policy: str | None) -> None:
    (output,) = bundled().infill([CHAT], ANSWER, cache=policy, top_logprobs=1, trace=True)
    assert output.holes == (" Nina", " Ruth", " Rita", " Hans")
    assert output.text == "5 Nina 7 Ruth 1 Rita 3 Hans"
    assert output.finish_reason == "stop"
    assert output.usage.steps == output.usage.completion_tokens == 4
    assert output.logprobs is not None
    assert len(output.logprobs) == 4


def test_a_canvas_for_each_prompt_and_parameters_for_each() -> None:
    canvases: list[list[dict[str, Any]]] = [ANSWER, [{"mask": 2}, {"text": " 7 Ruth"}, {"mask": {"min": 1, "max": 4}}]]
    first, second = bundled().infill([CHAT, CHAT], canvases, [None, {"steps": 2}])
    assert first.text == "5 Nina 7 Ruth 1 Rita 3 Hans"
    assert second.holes is not None
    assert second.holes[0] == "5 Nina"
    assert second.usage.steps == 2
    for canvas, params, told in (([ANSWER], None, "canvas: one for all"), (ANSWER, [None], "params: one for all")):
        with pytest.raises(ConfigError, match=told):
            bundled().infill([CHAT, CHAT], canvas, params)
    with pytest.raises(ConfigError, match="max_tokens: the parts of a canvas"):
        bundled().infill([CHAT], ANSWER, {"max_tokens": 8})


def test_default_blocks_and_steps_follow_the_holes() -> None:
    """A prime length has no divisor, and fixed places take no steps."""
    llm = bundled()
    template = Template((OPEN,) * 5 + (7,) * 24 + (OPEN,) * 2, (Hole(0, 5), Hole(29, 31)))
    params = llm.session.params({"max_tokens": 31}, prompt_tokens=4, template=template)
    assert (params.block_length, params.steps) == (8, 7)
    assert llm.session.params({"max_tokens": 31}, prompt_tokens=4).block_length == 1


def test_a_fill_without_room_is_refused_before_it_is_made() -> None:
    llm = bundled()
    assert llm.tokenizer is not None
    most, fixed = llm.engine.max_model_len, len(llm.tokenizer.encode(" 3", add_special_tokens=False))
    with pytest.raises(ConfigError, match=f"{1 + fixed} given tokens and max_tokens={most - fixed} make a canvas of"):
        llm.session.response(Terms(suffix=" 3"), {"max_tokens": most - fixed}, 1)


def test_uniform_models_fill_holes() -> None:
    llm = LLM("bundled-uniform", dtype="float32")
    canvas: list[dict[str, Any]] = [{"mask": 3}, {"text": " 7"}, {"mask": {"max": 4}}]
    (output,) = llm.infill(["a"], canvas)
    assert output.text is not None
    assert output.holes is not None
    assert output.text == f"{output.holes[0]} 7{output.holes[1]}"


def test_parts_make_a_template() -> None:
    tokenizer = bundled().tokenizer
    assert tokenizer is not None
    parts = Terms(canvas=[{"text": "5 Nina"}, {"mask": 2}, {"mask": {"max": 3}}, {"token_ids": [9, 8]}]).canvas  # type: ignore[list-item]
    assert parts is not None
    assert parts[1] == Part(mask=MaskLength(2, 2))
    template = template_of(parts, tokenizer)
    assert template.tokens == (282, 519, OPEN, OPEN, OPEN, OPEN, OPEN, 9, 8), "nothing is put around a part"
    assert template.holes == (Hole(2, 4, 2), Hole(4, 7, 0))
    assert (template.tail, template.open_places, len(template)) == (9, 5, 9)
    with pytest.raises(ConfigError, match="no tokenizer, so fixed parts must be token_ids"):
        template_of(parts, None)
    with pytest.raises(ConfigError, match=r"^suffix: this model folder has no tokenizer"):
        response_of(
            Terms(suffix="a"), {}, 1, tokenizer=None, stop_ids=(), resolve=lambda *_: SamplingParams(), max_length=8
        )


@pytest.mark.parametrize("seed", range(4))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_texts_do_not_depend_on_the_pieces(seed: int, data: st.DataObject) -> None:
    """However tokens arrive, the text is that of all of them, without padding; holes and fixed parts make it up."""
    tokenizer = bundled().tokenizer
    assert tokenizer is not None
    rng = random.Random(seed)
    words = tokenizer.encode("5 Nina 7 Ruth 1 Rita é ☃ 3 Hans", add_special_tokens=False)
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    first = data.draw(st.booleans())
    tokens: list[int] = []
    holes: list[Hole] = []
    for number, length in enumerate(lengths):
        start = len(tokens)
        if (number % 2 == 0) == first:
            tokens += [OPEN] * length
            holes.append(Hole(start, len(tokens)))
        else:
            tokens += tokenizer.encode(" Max 1 Ben 2 saw"[:length], add_special_tokens=False)
    if not holes:
        return
    padding = tuple(rng.sample(words, 2))
    template = Template(tuple(tokens), tuple(holes), padding)
    settled = [rng.choice(words) if token == OPEN else token for token in tokens]
    kept = [t for t, fixed in zip(settled, template.tokens, strict=True) if fixed != OPEN or t not in padding]
    params = SamplingParams(max_tokens=len(tokens))
    text, rest, said = ResponseText(tokenizer, template, params), settled, ""
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        said, rest = said + text.push(rest[:count]), rest[count:]
    said += text.finish()
    assert text.length == len(said)
    if "\N{REPLACEMENT CHARACTER}" not in said:  # a hole that ends within a character ends with what there is
        assert said == tokenizer.decode(kept)
    whole = ResponseText(tokenizer, template, params)
    assert whole.push(settled) + whole.finish() == said
    assert whole.holes == text.holes
    fill = ResponseText(tokenizer, Template(tuple(tokens), tuple(holes), padding, fill_only=True), params)
    assert fill.push(settled) + fill.finish() == "".join(text.holes)


@pytest.mark.parametrize("included", [False, True])
def test_characters_are_counted_without_a_stop_text_that_is_left_out(included: bool) -> None:
    tokenizer = bundled().tokenizer
    assert tokenizer is not None
    hole = tokenizer.encode("5 Nina 7 Ruth", add_special_tokens=False)
    fixed = tokenizer.encode(" Max", add_special_tokens=False)
    template = Template((*[OPEN] * len(hole), *fixed), (Hole(0, len(hole)),))
    params = SamplingParams(max_tokens=len(template), stop=["a 7"], include_stop_str_in_output=included)
    text, lengths, said = ResponseText(tokenizer, template, params), list[int](), ""
    for token in [*hole, *fixed]:
        said += text.push([token])
        lengths.append(text.length)
    assert said == ("5 Nina 7" if included else "5 Nin") + " Max"
    assert lengths[-1] == len(said)
    assert lengths[-len(fixed) - 1] == len(said) - len(" Max"), "where the fixed text begins"


def test_a_stop_ends_its_hole_alone() -> None:
    tokenizer = bundled().tokenizer
    assert tokenizer is not None
    five, nina, seven, ruth = tokenizer.encode("5 Nina 7 Ruth", add_special_tokens=False)
    template = Template((OPEN, OPEN, OPEN, seven, OPEN), (Hole(0, 3), Hole(4, 5)))
    for more, first in (({"stop": ["Nina"]}, "5 "), ({"stop_token_ids": [nina]}, "5 Nina"), ({}, "5 Nina Ruth")):
        fields: dict[str, Any] = {"max_tokens": 5, **more}
        text = ResponseText(tokenizer, template, SamplingParams(**fields))
        assert text.push([five, nina, ruth, seven, ruth]) + text.finish() == f"{first} 7 Ruth"
        assert text.holes == [first, " Ruth"]


def test_what_is_too_long_is_refused_before_it_is_made() -> None:
    most = 2**24
    with pytest.raises(ConfigError, match="but max_model_len is 1024; shorten one of them"):
        bundled().infill([CHAT], [{"mask": most}] * 4096)
    with pytest.raises(ConfigError, match="but max_model_len is 1024; shorten one of them"):
        bundled().session.response(Terms(suffix="5"), {"max_tokens": most}, 4)
