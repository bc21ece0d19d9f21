"""What routers of fleets ask of a server: labels of its cache and adapters, prompts as tokens, events of pages."""

import importlib.util
import time
from typing import Any

import pytest

from remask import LLM, EngineConfig
from remask.errors import ConfigError
from remask.server.config import KvEventsConfig, ServerConfig
from remask.server.kv_events import KvEvents
from remask.server.service import Service
from tests.deploy.fleets import free_port
from tests.server.serving import CHATS, Running, make_llm, serving

HAS_ZMQ = all(importlib.util.find_spec(name) for name in ("zmq", "msgspec"))
needs_zmq = pytest.mark.skipif(not HAS_ZMQ, reason="needs pyzmq and msgspec: make test EXTRAS=dev,events")
BLOCKS: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "cache": "exact", "reads": "text"}


def test_a_prompt_is_rendered_as_it_is_answered(server: Running) -> None:
    body = {"messages": CHATS[0], "max_tokens": 8}
    told = server.client.post("/v1/chat/completions/render", json=body).json()
    tokens = server.client.post("/tokenize", json={"messages": CHATS[0]}).json()["tokens"]
    assert told["token_ids"] == tokens
    assert len(tokens) == server.chat(body).json()["usage"]["prompt_tokens"]
    assert told["model"] == server.service.config.model_names[0]
    many: dict[str, Any] = {"prompt": [[8], [5, 6, 7]], "n": 3}
    first, second = server.client.post("/v1/completions/render", json=many).json()
    assert (first["token_ids"], second["token_ids"]) == ([8], [5, 6, 7])
    assert first["request_id"] != second["request_id"]
    assert server.client.post("/v1/completions/render", json={"model": "other", "prompt": "a"}).status_code == 404
    assert server.client.post("/v1/chat/completions/render", json={"messages": []}).status_code == 400


def test_labels_say_what_the_cache_and_the_adapters_are(server: Running) -> None:
    text, allocator = server.client.get("/metrics").text, server.service.llm.engine.allocator
    name = server.service.config.model_names[0]
    (cache,) = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    pages = f'block_size="{allocator.page_size}"', f'num_gpu_blocks="{allocator.references.shape[1]}"'
    assert all(label in cache for label in (f'model_name="{name}"', *pages))
    assert cache.endswith("} 1.0")
    (adapters,) = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    label, _, at = adapters.rpartition(" ")
    none = 'max_lora="0"', 'running_lora_adapters=""', 'waiting_lora_adapters=""'
    assert all(each in label for each in none)
    assert abs(float(at) - time.time()) < 60


def test_events_are_refused_where_no_page_is_exact() -> None:
    config = ServerConfig(model_names=["m"], kv_events=KvEventsConfig())
    with pytest.raises(ConfigError, match="kv_events_config: only block-causal models have pages"):
        Service(make_llm(), config)
    with pytest.raises(ConfigError, match=r"kv_events_config\.buffer_steps must be .* got 0"):
        KvEventsConfig(buffer_steps=0)
    with pytest.raises(ConfigError, match=r"kv_events_config\.hwm must be .* got 2147483648"):
        KvEventsConfig(hwm=2**31)  # ZeroMQ takes no larger one


@needs_zmq
def test_events_are_those_of_vllm() -> None:
    """Read by the classes that vLLM's subscribers decode them with, written from its documentation."""
    import msgspec
    import zmq

    kinds: dict[str, Any] = {"array_like": True, "omit_defaults": True}

    class BlockStored(msgspec.Struct, tag=True, **kinds):  # type: ignore[call-arg,misc]
        block_hashes: list[int | bytes]
        parent_block_hash: int | bytes | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None = None

    class BlockRemoved(msgspec.Struct, tag=True, **kinds):  # type: ignore[call-arg,misc]
        block_hashes: list[int | bytes]
        medium: str | None = None

    class AllBlocksCleared(msgspec.Struct, tag=True, **kinds):  # type: ignore[call-arg,misc]
        pass

    class Batch(msgspec.Struct, **kinds):  # type: ignore[misc]
        ts: float
        events: list[BlockStored | BlockRemoved | AllBlocksCleared]
        data_parallel_rank: int | None = None

    port, other = free_port(), free_port()
    address, replay = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{other}"
    config = KvEventsConfig(endpoint=address, replay_endpoint=replay, topic="kv@pod@m")
    llm = LLM("sdar-tiny", **BLOCKS, engine=EngineConfig(store_budget_tokens=96))  # six pages
    context = zmq.Context()
    subscriber, asker = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    decode = msgspec.msgpack.Decoder(Batch).decode
    held: dict[int | bytes, BlockStored] = {}
    numbers = list[int]()

    def take(number: bytes, content: bytes) -> None:
        numbers.append(int.from_bytes(number, "big"))
        batch = decode(content)
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            if isinstance(event, BlockStored):
                (name,) = event.block_hashes
                assert event.parent_block_hash is None or event.parent_block_hash in held
                assert (event.block_size, len(event.token_ids), event.medium) == (16, 16, "GPU")
                held[name] = event
            elif isinstance(event, BlockRemoved):
                del held[event.block_hashes[0]]
            else:
                held.clear()

    try:
        with serving(llm, sampling={}, kv_events=config) as running:
            subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
            subscriber.connect(address)
            asker.connect(replay)
            for number in range(4):
                prompt = [(number * 7 + place) % 200 for place in range(40)]
                body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True}
                assert running.client.post("/v1/completions", json=body).status_code == 200
                salted = body | {"cache_salt": "tenant", "prompt": [9, *prompt]}
                assert running.client.post("/v1/completions", json=salted).status_code == 200
            running.settle()
            assert subscriber.poll(60_000)
            topic, live, _ = subscriber.recv_multipart()
            assert topic == b"kv@pod@m"
            chain = llm.engine.memory.chain
            assert chain.stats.evictions
            assert {page.salt for page in chain.pages} == {"4+0:", "4+0:0:tenant"}
            expected = {page.key for page in chain.pages if page.salt == "4+0:"}
            while held.keys() != expected or not numbers:  # the thread may still be sending
                held.clear()
                numbers.clear()
                asker.send_multipart([b"", (0).to_bytes(8, "big")])
                while (parts := asker.recv_multipart())[2]:
                    take(*parts[1:])
                assert parts[1] == b"\xff" * 8
            assert numbers == list(range(len(numbers)))
            assert int.from_bytes(live, "big") in numbers
            for page in chain.pages:
                if page.key in held:
                    assert tuple(held[page.key].token_ids) == page.tokens[:16]
                    assert held[page.key].parent_block_hash == page.parent
            llm.engine.memory.reset()
            assert llm.engine.memory.chain.listener is chain.listener
            last: list[Any] = []
            while not any(isinstance(event, AllBlocksCleared) for event in last):
                assert subscriber.poll(60_000)
                last = decode(subscriber.recv_multipart()[2]).events
    finally:
        context.destroy(linger=0)


@needs_zmq
def test_an_address_that_is_taken_is_told() -> None:
    first = KvEvents(KvEventsConfig(endpoint=f"tcp://127.0.0.1:{(port := free_port())}"), 16)
    try:
        with pytest.raises(ConfigError, match=rf"kv_events_config: endpoint='tcp://127.0.0.1:{port}' cannot be bound"):
            KvEvents(KvEventsConfig(endpoint=f"tcp://127.0.0.1:{port}"), 16)
    finally:
        first.close()
