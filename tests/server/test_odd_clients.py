"""Characters that span tokens, several choices of them at a time, and clients that leave during a prefix-only pass."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from remask.engine.config import EngineConfig
from remask.llm import LLM
from tests.server.serving import CHATS, LONG, URL, Running, held, left_alone, make_llm, serving
from tests.text.test_detokenize import bytewise
from tests.waiting import eventually

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def bytes_server() -> Iterator[Running]:
    """A random model whose tokens are bytes, so that most of what it says is no whole character."""
    llm = LLM("llada-tiny", load_format="dummy", dtype="float32", device="cpu", engine=EngineConfig(max_model_len=256))
    tokenizer = bytewise()
    tokenizer.use_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    llm.session.loaded = replace(llm.loaded, tokenizer=tokenizer)
    # Ids beyond the tokenizer's have no text.
    with serving(llm, sampling={"max_tokens": 48, "steps": 24, "block_length": 16}) as running:
        yield running


def texts(chunks: list[dict[str, Any]], index: int = 0) -> list[str]:
    """What the chunks say of one choice."""
    return [each["text"] for chunk in chunks for each in chunk["choices"] if each["index"] == index]


@pytest.mark.parametrize("prompt", ["é", "日本語", "a\u200d👩\u200d🚀", "\x00", "\ufffd"])
def test_characters_are_streamed_whole(bytes_server: Running, prompt: str) -> None:
    """Whatever bytes come: the pieces join to the answer in one, and each is told once it is certain."""
    body = {"prompt": prompt, "temperature": 1.5, "seed": len(prompt), "ignore_eos": True}
    whole = bytes_server.client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
    said = texts(bytes_server.stream(body, COMPLETIONS))
    assert "".join(said) == whole
    assert len([piece for piece in said if piece]) > 2


def test_choices_do_not_share_their_held_back_bytes(bytes_server: Running) -> None:
    body = {"prompt": "日本", "n": 3, "temperature": 1.5, "seed": 5, "ignore_eos": True}
    whole = bytes_server.client.post(COMPLETIONS, json=body).json()["choices"]
    chunks = bytes_server.stream(body, COMPLETIONS)
    assert ["".join(texts(chunks, index)) for index in range(3)] == [choice["text"] for choice in whole]
    assert len({choice["text"] for choice in whole}) == 3
    ends = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"] is not None]
    assert ends == ["length"] * 3


def spelt(token: str) -> bytes:
    """The bytes of a token as OpenAI's completions tell it."""
    return (
        bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) if token.startswith("bytes:") else token.encode()
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_client_can_put_characters_together(bytes_server: Running, seed: int) -> None:
    """By the bytes of tokens that are a part of one, in answers and streams of every API."""
    own = {"seed": seed, "temperature": 1.5, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "é"}], "logprobs": True, "top_logprobs": 3, **own}
    choice = bytes_server.chat(chat).json()["choices"][0]
    tokens = choice["logprobs"]["content"]
    joined = b"".join(bytes(each["bytes"]) for each in tokens)
    assert joined.decode(errors="replace") == choice["message"]["content"]
    assert any("\ufffd" in each["token"] and each["bytes"] for each in tokens)
    assert all(len(top["bytes"]) <= 1 for each in tokens for top in each["top_logprobs"])
    streamed = [c["choices"][0]["logprobs"] for c in bytes_server.stream(chat)]
    parts = [each["bytes"] for told in streamed if told for each in told["content"]]
    assert parts == [each["bytes"] for each in tokens]
    body = {"prompt": "é", "logprobs": 2, **own}
    choice = bytes_server.client.post(COMPLETIONS, json=body).json()["choices"][0]
    assert b"".join(map(spelt, choice["logprobs"]["tokens"])).decode(errors="replace") == choice["text"]
    offsets = choice["logprobs"]["text_offset"]
    assert len(choice["logprobs"]["token_logprobs"]) == len(offsets) == 48
    assert offsets == sorted(offsets)
    assert all(len(top) in (2, 3) for top in choice["logprobs"]["top_logprobs"]), "none hides another"
    asked = {"input": "é", "include": ["message.output_text.logprobs"], **own}
    told = bytes_server.client.post("/v1/responses", json=asked).json()["output"][0]["content"][0]
    assert b"".join(bytes(each["bytes"]) for each in told["logprobs"]).decode(errors="replace") == told["text"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_during_a_prefix_pass(stream: bool) -> None:
    """The pass, a layer a step, runs to its end for others; whoever left holds nothing."""
    with serving(make_llm(depth=5, max_row_layers=1, max_num_seqs=2)) as running:
        engine = running.service.llm.engine
        with held(running, steps=3) as hold:
            with running.post(URL, {"messages": CHATS[0], **LONG, "stream": stream}):
                hold.wait()
                (entry,) = engine.store.entries
                assert (entry.ready, entry.leases) == (False, 1)
            left_alone(running)
        eventually(lambda: not running.open)
        assert running.between_steps(lambda _: entry.leases) == 0
        running.settle()
        answer = running.ask()
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert engine.stats.prefix_passes == 1
