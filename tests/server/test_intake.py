"""What one request gives to read delays no other: sizes are checked first, and short texts keep a thread."""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.request.sampling_params import SamplingParams
from remask.request.terms import PRIORITY_STEP_S
from remask.server.bodies import SHORT_CHARS, FairSemaphore
from remask.server.config import CHARS_A_TOKEN
from remask.server.protocol.generation import CompletionBody
from tests.server.serving import CHATS, SLOW, URL, Running, held, make_llm, serving
from tests.waiting import LONGEST_S, Clock, eventually

COMPLETIONS = "/v1/completions"
WORDS = "from ivy go one , "
SMALL = {"prompt": "from ivy", "max_tokens": 8, "block_length": 8, "steps": 8}
MIB4 = 4_000_000
QUICK = SamplingParams(max_tokens=2, steps=1)
LONGEST = CHARS_A_TOKEN * 1024  # of the bundled model's 1,024 positions


class Texts:
    """Stands before a tokenizer: long texts wait until they may pass."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.passing = inner, threading.Event()
        self.begun: list[int] = []  # lengths of the long texts that a thread has taken

    def __call__(self, text: str, *args: Any, **kwargs: Any) -> Any:
        if len(text) > SHORT_CHARS:
            self.begun.append(len(text))
            assert self.passing.wait(LONGEST_S)
        return self.inner(text, *args, **kwargs)


@pytest.fixture(scope="module")
def wide() -> Iterator[Running]:
    """A server that takes texts of any length, with two text threads and room for eight requests."""
    limits: dict[str, Any] = {
        "max_prompt_chars": MIB4,
        "max_request_chars": MIB4,
        "max_choices": 8192,
        "text_workers": 2,
    }
    with serving(make_llm(max_num_seqs=2), max_queue=6, **limits) as running:
        yield running


@pytest.fixture
def texts(wide: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Texts]:
    """The tokenizer of `wide`, held up on long texts."""
    made = Texts(wide.service.intake.tokenizer.encode)
    monkeypatch.setattr(wide.service.intake.tokenizer, "encode", made)
    yield made
    made.passing.set()


@pytest.mark.thorough
def test_long_texts_leave_a_thread_to_short_ones(wide: Running, texts: Texts) -> None:
    """Four long ones cannot be tokenized, whatever they wait for; short requests of all kinds are answered."""
    long = WORDS * 2000
    bodies: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {**SMALL, "prompt": long}),
        (COMPLETIONS, {**SMALL, "prompt": [""] * 8000}),
        (URL, {"messages": [{"role": "user", "content": long}]}),
        ("/tokenize", {"prompt": long}),
    ]
    with ThreadPoolExecutor(4) as pool:
        held = []
        for number, (url, body) in enumerate(bodies, start=1):
            held.append(pool.submit(wide.client.post, url, json=body))
            # The first holds the only place of long ones. The many short texts of another would pass through it.
            eventually(lambda number=number: len(texts.begun) == 1 and wide.service._open_bodies == number)  # type: ignore[misc]
        for _ in range(3):
            assert wide.ask().status_code == 200
            assert wide.client.post(COMPLETIONS, json=SMALL).status_code == 200
            assert wide.client.post("/tokenize", json={"prompt": "from ivy"}).status_code == 200
            assert wide.client.get("/playground/example").status_code == 200
        assert not any(each.done() for each in held)
        assert len(texts.begun) == 1, "the other thread takes no long text"
        texts.passing.set()
        assert [each.result().status_code for each in held] == [400, 400, 400, 200]


def test_no_more_texts_wait_than_requests_may(wide: Running, texts: Texts) -> None:
    """And half as many long ones of one client."""
    transport = httpx.HTTPTransport(local_address="127.0.0.2")

    def ask(client: httpx.Client, **body: Any) -> tuple[int, str | None]:
        told = client.post("/tokenize", json={"prompt": WORDS * 2000, **body})
        return told.status_code, told.json()["error"]["code"] if told.is_error else None

    with ThreadPoolExecutor(8) as pool, httpx.Client(base_url=wide.base, transport=transport, timeout=None) as other:
        held = [pool.submit(ask, wide.client) for _ in range(4)]
        eventually(lambda: wide.service._open_bodies == 4)
        assert ask(wide.client) == (429, "queue_full")
        assert ask(wide.client, prompt="from ivy") == (200, None)
        held += [pool.submit(ask, other) for _ in range(4)]
        eventually(lambda: wide.service._open_bodies == 8)
        assert ask(wide.client, prompt="from ivy") == (429, "queue_full")
        assert wide.client.get("/health").status_code == 200
        texts.passing.set()
        assert {each.result() for each in held} == {(200, None)}
    assert ask(wide.client) == (200, None)
    assert not wide.service._long_bodies


def test_choices_without_room_are_refused_by_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(make_llm(max_num_seqs=2), max_queue=100, max_client_work=10_000) as running:
        engine, counted = running.service.llm.engine, list[str]()

        def check(request: Request) -> Any:
            counted.append(request.id)
            return Engine.check(engine, request)

        monkeypatch.setattr(engine, "check", check)
        assert "asks for" in running.refusal(COMPLETIONS, {**SMALL, "n": 50}, 429)["message"]
        assert len(counted) == 1
        assert running.client.post(COMPLETIONS, json={**SMALL, "n": 2}).status_code == 200
        assert len(counted) == 3


def test_texts_of_clients_that_have_gone_are_not_read(
    wide: Running, texts: Texts, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "remask.server.gate"):
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(wide.post("/tokenize", {"prompt": WORDS * 2000}))
            eventually(lambda: wide.service._open_bodies == 3 and texts.begun)
        eventually(lambda: wide.service._open_bodies == 0 and len(caplog.messages) == 3)
    assert [json.loads(each)["status"] for each in caplog.messages] == [499] * 3, "nothing failed"
    texts.passing.set()
    last = wide.client.post("/tokenize", json={"prompt": WORDS * 2001})
    assert last.status_code == 200
    assert len(texts.begun) == 2, "the one that a thread had begun, and the last"


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("url", "body", "param", "text"),
    [
        (COMPLETIONS, {"prompt": "x" * MIB4}, "prompt", f"at most {LONGEST}"),
        (COMPLETIONS, {"prompt": ["from ivy", "x" * (LONGEST + 1)]}, "prompt", f"{LONGEST + 1} characters"),
        (COMPLETIONS, {"prompt": ["x" * LONGEST] * 5}, "prompt", f"at most {4 * LONGEST}"),
        (COMPLETIONS, {"prompt": [""] * 129}, "n", "from 1 to 128, got 1 x 129"),
        (COMPLETIONS, {"prompt": [""] * 100_000}, "prompt", "at most 8192 items"),
        (COMPLETIONS, {"prompt": [[1]] * 100_000}, "prompt", "at most 8192 items"),
        (COMPLETIONS, {"prompt": "from ivy", "n": 129}, "n", "from 1 to 128, got 129 x 1"),
        (URL, {"messages": [{"role": "user", "content": "x" * MIB4}]}, "messages", f"at most {LONGEST}"),
        (URL, {"messages": [{"role": "user", "content": "x" * 1000}] * 100}, "messages", "100000 characters"),
        (URL, {"messages": [{"role": "user", "name": "x" * MIB4, "content": ""}]}, "messages.0.name", "at most 1024"),
        (URL, {"messages": [{"role": "user", "content": ""}] * 1025}, "messages", "1025 messages"),
        (URL, {"messages": [{"role": "user", "content": ""}] * 100_000}, "messages", "at most 8192 items"),
        (URL, {"messages": [{}] * 500_000}, "messages.0.role", "is missing"),
        (
            URL,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 9000}]},
            "messages.0.content",
            "8192",
        ),
        ("/tokenize", {"prompt": "x" * MIB4}, "prompt", f"at most {LONGEST}"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * MIB4}]}, "messages", f"at most {LONGEST}"),
        ("/detokenize", {"tokens": [1] * (LONGEST + 1)}, "tokens", f"at most {LONGEST}"),
    ],
)
def test_sizes_are_refused_before_a_text_is_read(
    server: Running, monkeypatch: pytest.MonkeyPatch, url: str, body: dict[str, Any], param: str | None, text: str
) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("a text was read")

    for name in ("encode", "decode", "render_chat"):
        monkeypatch.setattr(server.service.intake.tokenizer, name, read)
    error = server.refusal(url, body)
    assert error["param"] == param
    assert text in error["message"]
    assert len(error["message"]) < 1000


def test_what_is_as_long_as_allowed_is_read(server: Running) -> None:
    assert server.client.post("/tokenize", json={"prompt": "x" * LONGEST}).status_code == 200
    refused = server.client.post(COMPLETIONS, json={"prompt": [(WORDS * LONGEST)[:LONGEST]] * 4})
    assert "max_model_len" in refused.json()["error"]["message"]


def ask_with(running: Running, key: str | None, priority: int) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(
        f"{running.base}{COMPLETIONS}", json={**SMALL, "priority": priority}, headers=headers, timeout=LONGEST_S
    )


def test_nobody_puts_himself_before_others_unless_allowed(server: Running) -> None:
    for priority in (0, 1, 2**63 - 1):
        assert ask_with(server, None, priority).status_code == 200
    for priority in (-1, -(2**63 - 1)):
        refused = ask_with(server, None, priority)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "priority"
        assert "send 0 or more" in refused.json()["error"]["message"]


def test_all_may_go_as_far_as_the_server_says() -> None:
    with serving(max_priority=3) as running:
        assert ask_with(running, None, -3).status_code == 200
        assert "send -3 or more" in ask_with(running, None, -4).text


def test_where_keys_lead_others_do_not() -> None:
    with serving(api_keys=["plain"], priority_keys=["lead"], max_priority=2) as running:
        assert ask_with(running, "lead", -2).status_code == 200
        assert ask_with(running, "lead", -3).status_code == 400
        assert ask_with(running, "plain", 0).status_code == 200
        refused = ask_with(running, "plain", -1)
        assert refused.status_code == 400
        assert "priority key" in refused.json()["error"]["message"]
        assert ask_with(running, None, 0).status_code == 401
        assert ask_with(running, "leads", 0).status_code == 401
        assert "lead" not in repr(running.service.config)


def test_a_request_that_waits_is_overtaken_for_a_while_only() -> None:
    """Urgent requests keep coming, one as soon as the last has begun; the patient one still begins."""
    engine = make_llm(max_num_seqs=1).engine
    engine.clock = clock = Clock()
    begun: list[str] = []

    def run(engine: Engine) -> None:
        while len(begun) < 20 and "patient" not in begun:
            begun.extend(event.id for event in engine.step() if event.queued_s is not None)

    engine.add(Request("first", [1, 2, 3], params=QUICK, priority=-2))
    engine.add(Request("patient", [1, 2, 3], params=QUICK, priority=3))
    for number in range(12):
        clock.now += PRIORITY_STEP_S
        engine.add(Request(f"urgent-{number}", [1, 2, 3], params=QUICK, priority=-2))
    run(engine)
    overtaken = begun.index("patient")
    assert begun[:overtaken] == ["first", *(f"urgent-{number}" for number in range(overtaken - 1))]
    assert overtaken - 1 == 5 - 1, "those that came within five steps of priority"
    for name in tuple(engine._lifecycle.ids):
        engine.cancel(name)


def test_priorities_order_what_waits(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Over HTTP: what yields begins after what came later and does not. The server logs requests as they end."""
    with (
        serving(make_llm(max_num_seqs=1), max_priority=1) as running,
        caplog.at_level(logging.INFO, "remask.server.gate"),
        ThreadPoolExecutor(4) as pool,
    ):

        def ask(priority: int) -> None:
            body = {**SMALL, "priority": priority}
            answer = running.client.post(COMPLETIONS, json=body, headers={"X-Request-Id": f"priority{priority}"})
            assert answer.status_code == 200

        with held(running, steps=1) as hold, running.post(URL, {"messages": CHATS[0], **SLOW}):
            hold.wait()
            asked = []
            for waiting, priority in enumerate((1, 0, -1), start=1):
                asked.append(pool.submit(ask, priority))
                eventually(lambda waiting=waiting: running.service.engine.waiting == waiting)  # type: ignore[misc]
        for each in asked:
            each.result()
    order = [json.loads(each.getMessage())["id"] for each in caplog.records if each.name == "remask.server.gate"]
    assert [name for name in order if name.startswith("priority")] == ["priority-1", "priority0", "priority1"]


async def _served(asked: list[str], places: int = 1, cancelled: tuple[int, ...] = ()) -> list[str]:
    """The order in which owners get a place, each of which gives it back at once."""
    turns, order = FairSemaphore(places), []
    for _ in range(places):
        await turns.acquire("before")

    async def one(owner: str) -> None:
        await turns.acquire(owner)
        order.append(owner)
        turns.release()

    tasks = [asyncio.create_task(one(owner)) for owner in asked]
    await asyncio.sleep(0)  # all stand in line
    for index in cancelled:
        tasks[index].cancel()
    for _ in range(places):
        turns.release()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(places):  # every place is free again
        await turns.acquire("after")
    return order


@pytest.mark.parametrize("places", [1, 3])
def test_owners_take_turns_whoever_asks_most(places: int) -> None:
    order = asyncio.run(_served(["a"] * 60 + ["b", "b", "c"], places))
    assert order[:6] == ["a", "b", "c", "a", "b", "a"]
    assert len(order) == 63


def test_who_leaves_the_line_costs_nobody_a_turn() -> None:
    assert asyncio.run(_served(["a", "a", "b", "c"], cancelled=(0, 2))) == ["a", "c"]


def test_a_place_that_is_given_to_one_who_leaves_in_the_same_moment_goes_on() -> None:
    async def main() -> None:
        turns = FairSemaphore(1)
        await turns.acquire("a")
        leaving = asyncio.create_task(turns.acquire("b"))
        await asyncio.sleep(0)
        turns.release()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await turns.acquire("c")

    asyncio.run(main())


def test_fixed_texts_count_for_each_prompt() -> None:
    fields = {"canvas": [{"text": "abc"}, {"mask": 1}, {"token_ids": [1]}]}
    assert CompletionBody.model_validate({"prompt": [[1], [2, 3], [4]], **fields}).prompt_chars == [3, 3, 3]
    assert CompletionBody.model_validate({"prompt": ["xy", ""], "suffix": "abcd"}).prompt_chars == [6, 4]
    assert CompletionBody.model_validate({"prompt": [1, 2]}).prompt_chars == [0]
