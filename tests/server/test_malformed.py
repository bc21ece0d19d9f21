"""Malformed bodies: nested too deep, of odd content types and encodings, cut off, too large. None harms the server."""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from remask.checks.values import LARGEST, MAX_DEPTH, SHOWN, Flag, ListOf, Values, Whole, parse_json, shown
from remask.errors import ConfigError
from remask.server.bodies import SMALL_BYTES
from tests.server.serving import CHATS, URL, Running
from tests.waiting import LONGEST_S, eventually

USER = {"role": "user", "content": "from abbey"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SHORT = {"max_tokens": 2, "steps": 2, "block_length": 1}
BODIES: dict[str, dict[str, Any]] = {
    URL: {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, USER], "tools": [TOOL], **SHORT},
    "/v1/completions": {"prompt": "from abbey", "cache_config": {}, "stop": ["x"], "logit_bias": {"5": 1}, **SHORT},
    "/v1/responses": {"input": [USER], "text": {"format": {"type": "text"}}, **SHORT},
    "/v1/messages": {"messages": [USER], "system": "a", "max_tokens": 2, "metadata": {}},
    "/v1/systemone": {"state": {"a": [1]}, "questions": {"q": {"instructions": "x", "criteria": ["a", "b"]}}},
    "/rerank": {"query": "a", "documents": ["a", "b"]},
    "/tokenize": {"messages": [USER], "chat_template_kwargs": {"a": {}}},
}
KINDS = (
    "application/json",
    "APPLICATION/JSON",
    "Application/Json; charset=UTF-8",
    "application/json;boundary=x",
    "application/vnd.api+json",
)
OTHERS = (
    "",
    "text/plain",
    "application/x-www-form-urlencoded",
    "text/json",
    "json",
    "application/jsonx",
    "multipart/form-data",
    "application/json, text/plain",
)


def refused(path: str) -> int:
    return 422 if path == "/v1/systemone" else 400


def nested(depth: int, kind: str = "[") -> Any:
    """A value with so many lists or objects within each other."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "[" else {"a": value}
    return value


def text(value: Any, depth: int, kind: str = "[") -> str:
    """JSON in which the text "DEEP" is replaced by a value that is nested so deep, which Python could not write."""
    left, right = ("[", "]") if kind == "[" else ('{"a":', "}")
    return json.dumps(value).replace('"DEEP"', f"{left * depth}1{right * depth}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_body_is_never_parsed_on_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    parsed = list[int]()
    loads = json.loads

    def counted(given: Any, **more: Any) -> Any:
        parsed.append(len(given))
        return loads(given, **more)

    monkeypatch.setattr(json, "loads", counted)
    body = json.dumps({"messages": CHATS[0], "max_tokens": 4, "metadata": [1] * SMALL_BYTES})
    told = server.client.post(URL, content=body, headers={"Content-Type": kind})
    assert told.status_code == 200, told.text
    assert max(parsed, default=0) < SMALL_BYTES
    many = json.dumps({"messages": CHATS[0], "metadata": [1] * server.service.config.max_body_items})
    assert server.client.post(URL, content=many, headers={"Content-Type": kind}).status_code == 413
    assert max(parsed, default=0) < SMALL_BYTES


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("pad", ["", " " * SMALL_BYTES], ids=["small", "large"])
def test_any_other_content_type_is_refused_unread(server: Running, kind: str, pad: str) -> None:
    headers = {"Content-Type": kind} if kind else {}
    told = server.client.post(URL, content=json.dumps({"messages": CHATS[0]}) + pad, headers=headers)
    assert told.status_code == 400
    assert "'Content-Type: application/json'" in told.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_a_body_may_be_in_any_encoding_that_json_allows(server: Running, encoding: str) -> None:
    body = json.dumps({"messages": CHATS[0], "seed": 1, "user": "ä"}, ensure_ascii=False)
    told = server.client.post(URL, content=body.encode(encoding), headers={"Content-Type": KINDS[0]})
    assert told.json()["choices"] == server.ask(seed=1).json()["choices"]


@pytest.mark.few(3)
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 600, 975, 990, 100_000])
@pytest.mark.parametrize("path", BODIES)
def test_depth_is_bounded_wherever_it_is(server: Running, path: str, depth: int) -> None:
    for name in (*BODIES[path], "metadata", "chat_template_kwargs", "depth", "no_such_field"):
        for body in (
            {**BODIES[path], name: "DEEP"},
            {**BODIES[path], name: ["DEEP"]},
            {**BODIES[path], name: {"a": "DEEP"}},
        ):
            told = server.client.post(
                path, content=text(body, depth, "{["[depth % 2]), headers={"Content-Type": KINDS[0]}
            )
            assert told.status_code == refused(path), (name, told.text)
            assert f"nested more than {MAX_DEPTH} deep" in told.text
    broken = text({**BODIES[path], "user": "DEEP"}, depth)[: depth + 20]
    assert server.client.post(path, content=broken, headers={"Content-Type": KINDS[0]}).status_code == refused(path)


@pytest.mark.few(4)
@pytest.mark.parametrize("path", BODIES)
def test_what_is_as_deep_as_allowed_is_read(server: Running, path: str) -> None:
    """In every field: the answer is one, or names the field."""
    for name in (*BODIES[path], "metadata", "structured_outputs", "response_format", "cache_config"):
        for value in (nested(MAX_DEPTH - 1), nested(MAX_DEPTH - 1, "{"), {"json": nested(MAX_DEPTH - 2, "{")}):
            told = server.client.post(path, json={**BODIES[path], name: value})
            assert told.status_code in (200, refused(path)), (name, told.text)
            assert "nested more than" not in told.text
            assert len(told.text) < 4000


def test_brackets_in_texts_are_no_depth() -> None:
    values: tuple[Any, ...] = (["[" * 1000], {"{" * 1000: 1}, ['\\"[' * 500], ["[", "]"] * 500, [[]] * 1000)
    for value in values:
        assert parse_json(json.dumps(value)) == value
    for wrong in ("]" * 1000 + "[" * 1000, '"' + "[" * 1000, "[" * 1000):
        with pytest.raises(ValueError, match=r"nested more than|Extra data|Expecting|Unterminated"):
            parse_json(wrong)


@pytest.mark.thorough
def test_a_quoted_value_ends_however_deep_or_long_it_is() -> None:
    plain: tuple[Any, ...] = (
        None,
        1,
        -2.5,
        "a'b",
        b"x",
        [],
        (),
        {},
        (1,),
        [1, "a", None],
        {"a": [1, {"b": ()}]},
        {1: 2},
        Flag,
    )
    for value in plain:
        assert shown(value) == repr(value)
    assert shown(nested(100_000)) == "[" * SHOWN + "..."
    assert shown(nested(100_000, "{")).startswith("{'a': {'a': ")
    assert len(shown({"a" * 10**6: 1})) == len(shown(["x"] * 10**6)) == len(shown(10**9000)) == SHOWN + 3
    endless: list[Any] = []
    endless.append(endless)
    assert len(shown(endless)) == SHOWN + 3
    sets: tuple[Values, ...] = (Whole(0), Flag(), ListOf(Whole(0), "numbers", 4))
    for values in sets:
        with pytest.raises(ConfigError, match="x"):
            values.check("x", nested(100_000))
    with pytest.raises(ConfigError, match=r"x must be a whole number .*, got 0x"):
        Whole(0, LARGEST).check("x", 10**9000)


def malformed(rng: random.Random) -> tuple[str, bytes, dict[str, str]]:
    """The path, the content and the headers of a request that is wrong in some way, or nearly."""
    path = rng.choice(list(BODIES))
    body: dict[str, Any] = dict(BODIES[path])
    name = rng.choice([*body, "metadata", "no_such_field", "stream", "n", "response_format", "chat_template_kwargs"])
    values: list[Any] = [
        None,
        True,
        -1,
        2**70,
        1e308,
        "",
        "\ud800",
        "x" * 3000,
        [],
        {},
        [[]],
        {"a": {"b": []}},
        ["DEEP"],
        "DEEP",
    ]
    body[name] = rng.choice(values)
    if rng.random() < 0.3:
        body[rng.choice(list(body))] = rng.choice(values)
    content = text(body, rng.choice([3, 100, 127, 140, 600, 960, 985, 5000, 50_000]), rng.choice("[{")).encode()
    if rng.random() < 0.2:
        content = content.decode().encode(rng.choice(["utf-8-sig", "utf-16", "utf-32-be"]))
    if rng.random() < 0.2:
        content = content[: rng.randrange(len(content))] + rng.randbytes(rng.randrange(20))
    if rng.random() < 0.3:
        content += b" " * rng.choice([SMALL_BYTES, 10 * SMALL_BYTES])
    elif rng.random() < 0.1:
        content = json.dumps({**body, "metadata": [1] * rng.choice([1000, 200_000, 600_000])}).encode()
    kind = rng.choice([*KINDS, *KINDS, *OTHERS])
    kind = "".join(rng.choice([char.upper(), char.lower()]) for char in kind)
    header = rng.choice(["Content-Type", "content-type", "CONTENT-TYPE"])
    return path, content, {header: kind} if kind else {}


def send_malformed(server: Running, seed: int, count: int) -> Counter[int]:
    """The statuses of so many malformed bodies, none of which is a failure of the server."""
    rng, statuses = random.Random(seed), Counter[int]()
    for number in range(count):
        path, content, headers = malformed(rng)
        told = server.client.post(path, content=content, headers=headers)
        assert told.status_code in (200, refused(path), 404, 413), (seed, number, path, content[:300], told.text[:500])
        if told.status_code != 200:
            assert len(told.text) < 2000, (seed, number)
        statuses[told.status_code] += 1
    return statuses


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(2, 12))])
def test_malformed_bodies_are_refused(server: Running, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    assert send_malformed(server, seed, 60)[400] > 30
    assert not [each for each in caplog.records if each.exc_info]
    server.settle()


def longest_pause(server: Running, act: Callable[[], object]) -> float:
    """Seconds that the health check waited at most while `act` was running."""
    pauses, over = list[float](), threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=server.base, timeout=LONGEST_S) as client:
            while not over.is_set():
                began = time.perf_counter()
                assert client.get("/health").status_code == 200
                pauses.append(time.perf_counter() - began)
                time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        eventually(lambda: pauses)
        act()
    finally:
        over.set()
        watcher.join()
    return max(pauses)


@pytest.mark.soak
def test_the_health_check_never_waits_for_a_malformed_body(server: Running) -> None:
    """What the machine does beside it makes it wait now and then; what a body does makes it wait each time."""
    server.ask()
    pauses = []
    for seed in range(99, 109):
        attempts = (longest_pause(server, partial(send_malformed, server, seed, 50)) for _ in range(3))
        pauses.append(next((pause for pause in attempts if pause < 0.1), None))
    print(f"health check: at most {pauses} s beside 50 malformed bodies each")
    assert None not in pauses
