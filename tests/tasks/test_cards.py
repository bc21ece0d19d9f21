"""What a bundled model's card offers is what the model can answer: asked, infilled and decided."""

import re
from typing import Any

import pytest

from remask.checks import BUNDLED_MODELS, SMOLLM2, SMOLLM2_BLOCKS
from remask.llm import LLM
from remask.tasks.cards import QUESTION_COUNT, card


def parts(canvas: str) -> list[dict[str, Any]]:
    """The parts of an answer with holes such as `a [[1]] b`."""
    found = re.split(r"\[\[(\d+)\]\]", canvas)
    return [{"mask": int(text)} if place % 2 else {"text": text} for place, text in enumerate(found) if text]


@pytest.mark.parametrize("name", [name for name in BUNDLED_MODELS if name not in (SMOLLM2, SMOLLM2_BLOCKS)])
def test_the_questions_of_a_card_are_answered_right(name: str) -> None:
    llm = LLM(name, dtype="float32", device="cpu")
    known = card(name)
    assert known is not None
    questions = known.questions
    assert len({question.question for question in questions}) == QUESTION_COUNT
    prompts: list[Any] = [known.messages(each) for each in questions]
    # A uniform model begins with noise, which the seed draws.
    seeds = range(3) if llm.loaded.config.kind == "uniform" else range(1)
    answers = [[(output.text or "").strip() for output in llm.generate(prompts, {"seed": seed})] for seed in seeds]
    assert answers == [[question.answer for question in questions]] * len(seeds)
    for prompt, question in zip(prompts, questions, strict=True):
        (filled,) = llm.infill([prompt], parts(question.canvas), {"seed": 0})
        assert (filled.text or "").split() == question.answer.split()
        assert len(filled.holes or ()) == question.canvas.count("[[") > 0
        if question.decision is not None:
            (chosen,) = llm.decide(known.system, {"it": question.decision}).answers.values()
            place = len(question.decision["template"].partition("{answer}")[0].split())
            assert chosen.choice == question.answer.split()[place]
            assert chosen.label_mass > 0.9, "the model would write one of the alternatives"


@pytest.mark.thorough
def test_smollm2_answers_in_english() -> None:
    llm = LLM(SMOLLM2, device="cpu")
    assert (llm.loaded.quantization, llm.session.cache_name) == ("int8", "block-dual")
    known = card(SMOLLM2)
    assert known is not None
    (output,) = llm.chat([[{"role": "user", "content": "What is the capital of France?"}]], {"max_tokens": 16})
    assert output.text == "The capital of France is Paris."
    assert not known.alone, "it may be asked about other pages, and go on"
    outputs = llm.chat([known.messages(question) for question in known.questions], {"max_tokens": 32})
    assert [output.text for output in outputs] == [question.answer for question in known.questions]
    assert all(output.usage.forwards < output.usage.completion_tokens for output in outputs), "several tokens a pass"
    question = known.questions[0]
    (filled,) = llm.infill([known.messages(question)], parts(question.canvas.replace("[[1-16]]", "[[1]]")))
    assert (filled.text or "").startswith(question.canvas.partition("[[")[0])


@pytest.mark.thorough
def test_smollm2_in_blocks_answers_in_english() -> None:
    llm = LLM(SMOLLM2_BLOCKS, device="cpu")
    assert (llm.loaded.quantization, llm.session.cache_name) == ("int8", "exact")
    known = card(SMOLLM2_BLOCKS)
    assert known is not None
    (output,) = llm.chat([[{"role": "user", "content": "What is the capital of France?"}]], {"max_tokens": 16})
    assert output.text == "The capital of France is Paris."
    prompts: list[Any] = [known.messages(question) for question in known.questions]
    outputs = llm.chat(prompts)
    assert [(output.text or "")[:40] for output in outputs] == [question.answer[:40] for question in known.questions]
    assert all(output.usage.forwards * 3 < output.usage.completion_tokens for output in outputs)
    for prompt, question in zip(prompts, known.questions, strict=True):
        (filled,) = llm.infill([prompt], parts(question.canvas.replace("[[1-16]]", "[[1]]")))
        assert (filled.text or "").startswith(question.canvas.partition("[[")[0])
    (output,) = llm.chat([prompts[0]], {"remasking": "entropy_bounded"})
    assert output.text == outputs[0].text, "the default threshold and its fallback give way to a rule"


def test_only_bundled_models_have_a_card() -> None:
    assert all(card(name) for name in BUNDLED_MODELS)
    assert card("GSAI-ML/LLaDA-8B-Instruct") is None


def test_a_card_is_one_line_and_its_questions_are_about_one_system_prompt() -> None:
    for name in BUNDLED_MODELS:
        known = card(name)
        assert known is not None
        assert "\n" not in known.answers
        told = known.as_json()
        assert [each["question"] for each in told["questions"]] == [each.question for each in known.questions]
        assert all(known.messages(each)[:-1] == known.messages(known.draw(9))[:-1] for each in known.questions)
