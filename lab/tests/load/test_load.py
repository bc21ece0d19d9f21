"""Load: when requests are sent, what is asked, and how outcomes add up."""

import asyncio
import math
import subprocess
import sys
from itertools import pairwise
from typing import Any

import httpx
import pytest

from remask.errors import ConfigError
from remask_lab.load.client import RequestOutcome, send
from remask_lab.load.load import Load, LoadRun, run_load
from remask_lab.load.mix import CHAT, TEXT, HttpRequest, PromptMix, ServerError, Target, find_target
from remask_lab.load.result import TIMES, detail, lines, summary

TARIFF = Target("http://x", "bundled-tariff", info={"model_path": "bundled-tariff", "has_chat_template": True})
RELAY = Target("http://x", "bundled", info={"model_path": "bundled", "has_chat_template": True})
TRANSIT = Target("http://x", "bundled-transit", info={"model_path": "bundled-transit", "has_chat_template": True})
BARE = Target("http://x", "m", info={"has_chat_template": False, "vocab_size": 20, "mask_token_id": 3})
FOREIGN = Target("http://x", "gpt")


def test_arrivals_are_a_poisson_process() -> None:
    times = Load(request_rate=50.0, seed=4).arrivals(4000)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert times[0] == 0
    assert mean == pytest.approx(1 / 50, rel=0.06)
    assert deviation == pytest.approx(mean, rel=0.06), "gaps of a Poisson process deviate by their mean"
    assert Load(request_rate=50.0, seed=4).arrivals(10) == times[:10]
    assert Load().arrivals(3) == [0, 0, 0]


def systems(asks: list[HttpRequest]) -> list[str]:
    return [ask.body["messages"][0]["content"] for ask in asks]


@pytest.mark.parametrize("target", [TARIFF, RELAY, TRANSIT, FOREIGN], ids=["tariff", "relay", "transit", "gsm8k"])
@pytest.mark.parametrize(("share", "different"), [(1.0, 3), (0.5, 3 + 10), (0.0, 20)])
def test_the_asked_share_has_shared_prefixes(target: Target, share: float, different: int) -> None:
    mix = PromptMix(num_prompts=20, prefixes=3, prefix_share=share, seed=1)
    asks = mix.draw(target)
    assert all(ask.path == CHAT for ask in asks)
    assert len(asks) == 20
    assert len(set(systems(asks))) == different
    assert asks == mix.draw(target)
    assert asks != PromptMix(num_prompts=20, prefixes=3, prefix_share=share, seed=2).draw(target)
    assert all(ask.answer for ask in asks)


@pytest.mark.parametrize(
    ("target", "wrong"),
    [(TARIFF, "1 Anna"), (RELAY, "Oslo"), (TRANSIT, "oak")],
    ids=["tariff", "relay", "transit"],
)
def test_a_task_judges_its_own_answers(target: Target, wrong: str) -> None:
    for ask in PromptMix(num_prompts=4, prefixes=2).draw(target):
        assert ask.answer is not None
        right = f"oak > elm ## {ask.answer}" if target is TRANSIT else ask.answer
        assert ask.check(right, ask.answer)
        assert not ask.check(wrong, ask.answer)


def test_random_tokens_where_there_is_no_chat_template() -> None:
    mix = PromptMix(num_prompts=6, prefixes=2, prefix_tokens=12, prompt_tokens=3)
    asks = mix.draw(BARE)
    assert {ask.path for ask in asks} == {TEXT}
    assert {len(ask.body["prompt"]) for ask in asks} == {15}
    assert len({tuple(ask.body["prompt"][:12]) for ask in asks}) == 2
    assert all(ask.body["prefix_length"] == 12 for ask in asks)
    assert not any({3} & set(ask.body["prompt"]) for ask in asks), "no mask tokens"
    assert len({tuple(ask.body["prompt"][:12]) for ask in PromptMix(num_prompts=6, prefix_share=0).draw(BARE)}) == 6
    with pytest.raises(ConfigError, match="reports no vocabulary"):
        PromptMix("random").draw(FOREIGN)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dataset": "gsm9k"}, "Did you mean 'gsm8k'"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"prefixes": 0}, "prefixes"),
        ({"prefix_share": 1.5}, "prefix_share must be a number from 0 to 1"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_mixes(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        PromptMix(**fields)


def test_more_prefixes_than_questions_allow() -> None:
    with pytest.raises(ConfigError, match="at most 12"):
        PromptMix("gsm8k", prefixes=13).draw(FOREIGN)


@pytest.mark.parametrize("fields", [{"request_rate": 0.0}, {"max_concurrency": 0}, {"timeout_s": 0.0}, {"seed": -1}])
def test_bad_loads(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Load(**fields)


def answered(handler: Any) -> RequestOutcome:
    """The outcome of one request to `handler`."""

    async def ask() -> RequestOutcome:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://x") as client:
            return await send(client, HttpRequest(CHAT, {"messages": []}, "oak"), {}, 0.0)

    return asyncio.run(ask())


CHUNK = 'data: {"choices": [{"delta": {"content": "## oak"}}]}\n\n'
LAST = 'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}}\n\n'


def test_what_can_go_wrong_with_a_request() -> None:
    def raises(error: httpx.HTTPError) -> Any:
        def handler(_request: httpx.Request) -> httpx.Response:
            raise error

        return handler

    def gives(text: str, status: int = 200) -> Any:
        return lambda _request: httpx.Response(status, text=text)

    assert answered(raises(httpx.ReadTimeout("slow"))).error == "timeout"
    assert answered(raises(httpx.ConnectError("nobody"))).error == "connection"
    full = answered(gives('{"error": {"message": "full"}}', 429))
    assert (full.error, full.status) == ("429", 429)
    assert "full" in (full.message or "")
    assert answered(gives(CHUNK)).error == "stream", "it does not end with [DONE]"
    assert answered(gives("data: {\n\n")).error == "stream"
    broken = answered(gives(CHUNK + 'data: {"error": {"code": "draining"}}\n\ndata: [DONE]\n\n'))
    assert broken.error == "stream"
    assert "draining" in (broken.message or "")
    empty = 'data: {"choices": null}\n\ndata: {"choices": [{"delta": null}]}\n\n'
    fine = answered(gives(empty + CHUNK + LAST + "data: [DONE]\n\n"))
    assert (fine.error, fine.text, fine.correct) == (None, "## oak", True)
    assert (fine.input_tokens, fine.output_tokens, fine.cached_tokens, fine.forwards) == (7, 4, 0, None)


def test_totals_and_times() -> None:
    outcomes = [
        RequestOutcome(0.0, 200, None, None, "a", 0.1, [0.2, 0.2], 0.5, 100, 5, 80, 4, True),
        RequestOutcome(0.0, 200, None, None, "a", 0.3, [], 0.3, 100, 1, 0, 2, False),
        RequestOutcome(0.0, 429, "429", "full", elapsed_s=9.0),
        RequestOutcome(0.0, None, "timeout", "slow", elapsed_s=9.0),
    ]
    run = LoadRun(outcomes, 2.0, 4)
    told = summary(TARIFF, PromptMix(num_prompts=4), Load(), run)
    assert (told["completed"], told["failed"]) == (2, 2)
    assert told["errors_by_status"] == {"429": 1, "timeout": 1}
    assert (told["total_input_tokens"], told["total_output_tokens"]) == (200, 6)
    assert (told["request_throughput"], told["output_throughput"], told["total_token_throughput"]) == (1, 3, 103)
    assert told["tokens_per_forward"] == 1
    assert (told["cached_tokens"], told["prefix_hits"], told["prefix_hit_ratio"]) == (80, 1, 0.4)
    assert told["accuracy"] == 0.5
    assert told["mean_ttft_ms"] == pytest.approx(200)
    assert told["std_ttft_ms"] == pytest.approx(100)
    assert told["median_itl_ms"] == pytest.approx(200)
    assert told["mean_tpot_ms"] == pytest.approx(100), "the request of one token has none"
    assert told["p99_e2el_ms"] == pytest.approx(498), "failed requests have no part in it"
    assert detail(run)["errors"] == ["", "", "full", "slow"]
    empty = summary(TARIFF, PromptMix(), Load(), LoadRun(outcomes[2:], 2.0, 2))
    assert all(empty[f"mean_{name}_ms"] is None for name in TIMES)
    assert empty["prefix_hit_ratio"] is empty["tokens_per_forward"] is empty["accuracy"] is None
    assert any("429" in line for line in lines(empty))


def test_never_more_at_a_time_than_asked() -> None:
    open_now = most = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        while most < 3:  # until as many as may be are there
            await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": (CHUNK + LAST + "data: [DONE]\n\n").encode()})
        open_now -= 1

    original = httpx.AsyncClient

    def local(**options: Any) -> httpx.AsyncClient:
        return original(transport=httpx.ASGITransport(app), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx, "AsyncClient", local)
        asks = [HttpRequest(CHAT, {})] * 20
        run = asyncio.run(run_load(FOREIGN, asks, Load(max_concurrency=3)))
        assert (most, run.peak_concurrency) == (3, 3)
        assert all(outcome.error is None for outcome in run.outcomes)
        rate = Load(request_rate=100.0)
        run = asyncio.run(run_load(FOREIGN, asks, rate))
        for outcome, at in zip(run.outcomes, rate.arrivals(len(asks)), strict=True):
            assert outcome.started_s >= at, "they arrive one after another"
        with pytest.raises(ConfigError, match="at least one"):
            asyncio.run(run_load(FOREIGN, [], Load()))


def test_servers_that_are_none() -> None:
    with pytest.raises(ConfigError, match="http://"):
        find_target("127.0.0.1:8000")
    with pytest.raises(ServerError, match="no server answers"):
        find_target("http://127.0.0.1:9")


WITHOUT_HTTPX = "import sys; sys.modules['httpx'] = None\n"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "code",
    [
        "from remask.cli import main; sys.exit(main(['bench', 'serve', '--base-url', 'http://127.0.0.1:1']))",
        "import remask_lab.speed.routing",
    ],
)
def test_a_missing_extra_is_named(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_HTTPX + code], capture_output=True, text=True)
    assert done.returncode != 0
    said = done.stderr.splitlines()[-1]
    assert "the package 'httpx' is not installed; install it with: pip install " in said
    assert "'httpx>=" in said
