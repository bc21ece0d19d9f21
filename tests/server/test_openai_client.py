"""The official client against the server: what it expects of OpenAI it finds here."""

import asyncio
from typing import Any

import openai
import pytest

from remask.request.sampling_params import SamplingParams
from remask.tasks import transit
from tests.server.serving import CHATS, QUESTIONS, Running, make_llm


def say(client: openai.OpenAI, number: int = 0, **fields: Any) -> Any:
    messages: Any = CHATS[number]
    return client.chat.completions.create(model="bundled-transit", messages=messages, **fields)


def joined(stream: Any) -> str:
    return "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)


def test_answers_are_those_of_the_engine(client: openai.OpenAI) -> None:
    outputs = make_llm().generate(CHATS[:4], SamplingParams.from_mapping(transit.SAMPLING))
    for number, output in enumerate(outputs):
        answer = say(client, number)
        (choice,) = answer.choices
        assert choice.message.content == output.text
        assert choice.message.role == "assistant"
        assert choice.finish_reason == output.finish_reason
        assert QUESTIONS[number].answer in choice.message.content
        assert answer.usage.prompt_tokens == output.usage.prompt_tokens
        assert answer.usage.completion_tokens == len(output.token_ids)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streams_say_the_same(client: openai.OpenAI) -> None:
    whole = say(client, 1)
    chunks = list(say(client, 1, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + [whole.choices[0].finish_reason]


def test_choices(client: openai.OpenAI) -> None:
    answer = say(client, n=2, temperature=1.0, seed=5, extra_body={"ignore_eos": True})
    assert [choice.index for choice in answer.choices] == [0, 1]
    texts = [choice.message.content for choice in answer.choices]
    alone = [say(client, temperature=1.0, seed=5 + i, extra_body={"ignore_eos": True}) for i in (0, 1)]
    assert texts == [each.choices[0].message.content for each in alone], "choice i has seed + i"
    assert answer.usage.completion_tokens == 32
    assert answer.usage.prompt_tokens == alone[0].usage.prompt_tokens, "one prompt counts once"
    chunks = list(say(client, n=2, temperature=1.0, seed=5, stream=True, extra_body={"ignore_eos": True}))
    for index in (0, 1):
        own = [c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == index]
        assert "".join(own) == texts[index]


def test_stop_texts(client: openai.OpenAI) -> None:
    whole = say(client).choices[0].message.content
    before, after = whole.split(" ## ")
    for stop in (" ##", [" ## " + after[:1]], ["nowhere", "#"]):
        answer = say(client, stop=stop).choices[0]
        assert answer.finish_reason == "stop"
        assert answer.message.content.rstrip() == before
        assert joined(say(client, stop=stop, stream=True)) == answer.message.content


def test_text_completions(client: openai.OpenAI) -> None:
    prompt = "abbey > acorn ; acorn > abbey ; from abbey"
    answer = client.completions.create(model="bundled-transit", prompt=prompt, max_tokens=7, logprobs=0)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert answer.usage is not None
    assert len(choice.logprobs.tokens or []) == answer.usage.completion_tokens
    chunks = list(client.completions.create(model="bundled-transit", prompt=prompt, max_tokens=7, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    two = client.completions.create(model="bundled-transit", prompt=[prompt, "from acorn"], max_tokens=4, n=2)
    assert [each.index for each in two.choices] == [0, 1, 2, 3]
    ids = client.completions.create(model="bundled-transit", prompt=[5, 6, 7], max_tokens=4)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["bundled-transit", "another-name"]
    assert client.models.retrieve("another-name").id == "another-name"


def test_errors_have_the_classes_that_clients_catch(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        say(client, temperature=-1)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_the_async_client(server: Running) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.base}/v1", api_key="any", max_retries=0) as client:

            async def ask(number: int) -> str:
                messages: Any = CHATS[number]
                stream = await client.chat.completions.create(model="bundled-transit", messages=messages, stream=True)
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            return list(await asyncio.gather(*(ask(number) for number in range(6))))

    texts = asyncio.run(main())
    for number, text in enumerate(texts):
        assert QUESTIONS[number].answer in text
