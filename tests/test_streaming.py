"""Python as people write it: conversations, prompts that are objects, and answers that are streamed."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from remask import LLM, AsyncLLM, Output, RemaskError
from remask.tasks import transit
from remask.tasks.transit import make_workload
from tests.goldens import model_dir

QUESTIONS = make_workload(6, 3, 5)
CHATS: list[Any] = [list(question.messages) for question in QUESTIONS]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("bundled-transit", dtype="float32", cache="bicache") as made:
        yield made


def test_chat_answers_conversations(llm: LLM) -> None:
    outputs = llm.chat(CHATS, transit.SAMPLING)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        assert question.answer in (output.text or "")
    (one,) = llm.chat(CHATS[0], transit.SAMPLING)
    assert one.text == outputs[0].text == llm.generate(CHATS[0], transit.SAMPLING)[0].text
    others: list[Any] = ["from abbey", [["x"]], [[]], 7]
    for bad in others:
        with pytest.raises(RemaskError, match=r"^messages: a conversation is a list"):
            llm.chat(bad, transit.SAMPLING)


def test_variables_reach_the_template() -> None:
    llm = LLM("bundled-transit", dtype="float32")
    assert llm.tokenizer is not None
    llm.tokenizer.use_chat_template("{{ place }} {% for m in messages %}{{ m.content }} {% endfor %}")
    (request,) = llm.session.requests([CHATS[0]], transit.SAMPLING, variables={"place": "abbey"})
    assert request.prompt_token_ids[:1] == llm.tokenizer.encode("abbey")[:1]
    assert llm.chat(CHATS[0], {"max_tokens": 4}, chat_template_kwargs={"place": "abbey"})[0].text


def test_prompts_may_be_objects_as_in_vllm(llm: LLM) -> None:
    assert llm.tokenizer is not None
    text, own = "abbey > acorn ; from abbey", {"max_tokens": 4}
    ids = llm.tokenizer.encode(text)
    objects: list[Any] = [{"prompt": text}, {"prompt_token_ids": ids}]
    plain, named, tokens = llm.generate([text, *objects], own)
    (alone,) = llm.generate({"prompt_token_ids": ids}, own)
    (first, _) = llm.generate(objects, own)
    assert plain.token_ids == named.token_ids == tokens.token_ids == alone.token_ids == first.token_ids


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ({"prompt": "a", "prompt_token_ids": [1]}, "one field"),
        ({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data"),
        ({"prompt_ids": [1]}, "one field"),
        ({"prompt": [1]}, "prompt must be text"),
        ({"prompt_token_ids": "a"}, "list of token ids"),
        ({"prompt_token_ids": [True]}, "list of token ids"),
        ({"prompt_token_ids": 7}, "list of token ids"),
    ],
)
def test_other_objects_are_refused(llm: LLM, prompt: Any, told: str) -> None:
    with pytest.raises(RemaskError, match=told):
        llm.generate(prompt, {"max_tokens": 4})


def test_a_stream_is_the_answer_piece_by_piece(llm: LLM) -> None:
    (whole,) = llm.chat(CHATS[0], transit.SAMPLING)
    pieces = list(llm.stream(CHATS[0], transit.SAMPLING))
    assert len(pieces) > 2
    assert "".join(piece.delta for piece in pieces) == whole.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == whole.token_ids
    assert [piece.output for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    last = pieces[-1].output
    assert last is not None
    assert (last.text, last.finish_reason) == (whole.text, whole.finish_reason)
    uncached = list(llm.stream(CHATS[0], transit.SAMPLING, cache="none"))[-1].output
    assert uncached is not None
    assert uncached.usage.prefix_depth == 0 < last.usage.prefix_depth


def test_a_consumer_that_stops_early_cancels(llm: LLM) -> None:
    stream = llm.stream(CHATS[0], {**transit.SAMPLING, "ignore_eos": True})
    next(stream)
    with pytest.raises(RemaskError, match="running other requests"):
        next(llm.stream(CHATS[1]))
    stream.close()
    assert not llm.engine.busy
    with pytest.raises(RemaskError, match="has no tokenizer"):
        next(LLM(str(model_dir("llada")), dtype="float32").stream([3, 4], {"max_tokens": 4}))


def test_many_prompts_of_one_event_loop(llm: LLM) -> None:
    expected = llm.chat(CHATS, transit.SAMPLING)

    async def told(model: AsyncLLM, number: int) -> str:
        return "".join([piece.delta async for piece in model.stream(CHATS[number], transit.SAMPLING)])

    async def main() -> tuple[list[str], Output]:
        async with AsyncLLM(llm) as model:
            texts = await asyncio.gather(*(told(model, number) for number in range(len(CHATS))))
            left = model.stream(CHATS[0], transit.SAMPLING)
            await anext(left)
            await left.aclose()
            output = await model.generate(CHATS[0], transit.SAMPLING)
            with pytest.raises(RemaskError, match="max_tokens"):
                await model.generate(CHATS[0], {"max_tokens": 0})
        return texts, output

    texts, output = asyncio.run(main())
    assert texts == [each.text for each in expected]
    assert output.text == texts[0]
    with pytest.raises(RemaskError, match="dtype"):
        AsyncLLM(llm, dtype="float32")


def test_an_async_llm_is_entered_once(llm: LLM) -> None:
    async def main() -> None:
        model = AsyncLLM(llm)
        for again in (False, True):
            if again:
                with pytest.raises(RemaskError, match="an AsyncLLM is entered once"):
                    await model.__aenter__()
            else:
                async with model:
                    await model.generate(CHATS[0], {"max_tokens": 8})

    asyncio.run(main())


def test_an_async_llm_that_is_refused_loads_no_model() -> None:
    with pytest.raises(RemaskError, match=r"^max_queue must be"):
        AsyncLLM("no-such-model", max_queue=-1)
