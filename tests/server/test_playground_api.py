"""The playground's endpoints: its files, its example, and allocators that belong to a session each."""

import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from remask.checkpoint.source import resolve_model
from remask.llm import LLM
from remask.server.errors import ApiError
from remask.server.pages import FILES
from remask.server.playground.sandbox import PAGE_SIZE, PAGES, PoolFullError, Sandbox, SandboxState, Sessions
from remask.server.routes.playground import example
from remask.tasks.cards import card
from tests.server.serving import Running, serving

URL = "/playground/pages"
GOLDENS = Path(__file__).parents[1] / "goldens"


def conserved(sandbox: Sandbox) -> SandboxState:
    """The state, after a check that every reference to a page has one owner and all numbers fit each other."""
    expected: Counter[int] = Counter()
    for request in sandbox.requests.values():
        for extent in request.extents:
            expected.update(extent.pages.tolist())
    expected.update(int(page.extent.pages[0]) for page in sandbox.chain.pages)
    assert [expected[page] for page in range(PAGES)] == sandbox.allocator.references[0].tolist()
    state = sandbox.state("a")
    readers = Counter(page for request in state["requests"] for page in request["page_table"])
    assert [len(page["requests"]) for page in state["pages"]] == [readers[page] for page in range(PAGES)]
    totals = state["totals"]
    filled = {page: extent.length for r in sandbox.requests.values() for extent in r.table for page in extent.pages}
    assert totals["pages_in_use"] == len(readers) == totals["slots_in_use"] / PAGE_SIZE
    assert totals["slots_wasted"] == len(readers) * PAGE_SIZE - sum(filled.values())
    assert totals["pages_shared"] == sum(count > 1 for count in readers.values())
    assert totals["pages_saved"] == sum(readers.values()) - len(readers)
    assert totals["pages_in_use"] + totals["pages_cached"] == np.count_nonzero(sandbox.allocator.references)
    for request in sandbox.requests.values():
        assert sum(extent.length for extent in request.table) == len(request.canvas)
    return state


def test_a_shared_prefix_is_the_same_pages() -> None:
    sandbox = Sandbox()
    for shared in (True, True, False):
        sandbox.add(shared)
    first, second, third = (request["page_table"] for request in conserved(sandbox)["requests"])
    assert first[:3] == second[:3], "three whole pages of the prefix"
    assert not set(first[3:]) & set(second[3:]), "the page that the prefix ends in is not shared"
    assert not set(third) & set(first + second)


def test_what_nobody_reads_is_found_again_and_gives_way_to_others() -> None:
    sandbox = Sandbox()
    sandbox.add(True)
    sandbox.finish(1)
    kept = conserved(sandbox)["totals"]["pages_cached"]
    assert kept == 4, "pages that the prompt fills"
    sandbox.add(True)
    assert conserved(sandbox)["requests"][0]["pages_found"] == 3
    sandbox.finish(2)
    for _ in range(3):
        sandbox.add(False)
    assert conserved(sandbox)["totals"]["evictions"] > 0
    with pytest.raises(PoolFullError, match="finish a request first"):
        sandbox.add(False)
    assert len(conserved(sandbox)["requests"]) == 3


def test_steps_settle_blocks_and_publish_pages() -> None:
    sandbox = Sandbox()
    sandbox.add(False)
    settled = []
    stored = []
    for _ in range(5):
        sandbox.step()
        state = conserved(sandbox)
        settled.append(state["requests"][0]["settled_tokens"])
        stored.append(sum(page["stored"] for page in state["pages"]))
    assert settled == [2, 6, 8, 8, 8], "prompt of 18: the first block holds two of its tokens"
    assert stored == [5, 6, 6, 6, 6], "the last page is never full"


def test_caching_off_shares_and_keeps_nothing() -> None:
    sandbox = Sandbox()
    sandbox.add(True)
    sandbox.set_caching(False)
    sandbox.add(True)
    sandbox.step()
    state = conserved(sandbox)
    assert state["totals"]["pages_shared"] == 0
    assert sum(page["stored"] for page in state["pages"]) == 4, "what is read stays until it is not"
    sandbox.finish(1)
    sandbox.finish(2)
    assert conserved(sandbox)["totals"]["pages_cached"] == 0
    assert sandbox.allocator.used == 0
    assert not sandbox.finish(2)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_pressed_pages_are_conserved(seed: int) -> None:
    draw = random.Random(seed)
    sandbox = Sandbox()
    for _ in range(120):
        act = draw.choice(["add", "add", "add", "step", "step", "finish", "caching"])
        if act == "add":
            try:
                sandbox.add(draw.random() < 0.6)
            except PoolFullError:
                assert sandbox.requests
        elif act == "finish" and sandbox.requests:
            assert sandbox.finish(draw.choice(list(sandbox.requests)))
        elif act == "caching":
            sandbox.set_caching(draw.random() < 0.7)
        else:
            sandbox.step()
        conserved(sandbox)
    for number in list(sandbox.requests):
        sandbox.finish(number)
    sandbox.set_caching(False)
    assert sandbox.allocator.used == 0


def test_sessions_are_few_and_end() -> None:
    now = 0.0
    sessions = Sessions(limit=2, idle_s=10, clock=lambda: now)
    first, sandbox = sessions.open()
    second, _ = sessions.open()
    assert sessions.find(first) is sandbox
    third, _ = sessions.open()
    assert len(sessions) == 2
    with pytest.raises(ApiError, match="no such session"):
        sessions.find(second)
    now = 9.0
    sessions.find(third)
    now = 11.0
    with pytest.raises(ApiError):
        sessions.find(first)
    sessions.close(third)
    assert len(sessions) == 0
    assert len({sessions.open()[0] for _ in range(20)}) == 20


def test_a_session_over_http(server: Running) -> None:
    client = server.client
    mine, other = (client.post(URL).json() for _ in range(2))
    assert mine["session"] != other["session"]
    url = f"{URL}/{mine['session']}"
    added = client.post(f"{url}/requests", json={"shared_prefix": True})
    assert added.headers["cache-control"] == "no-store"
    assert client.post(f"{url}/step").json()["requests"][0]["settled_tokens"] == 2
    seen = client.get(url).json()
    assert [request["request"] for request in seen["requests"]] == [1]
    assert client.get(f"{URL}/{other['session']}").json()["requests"] == []
    assert client.post(f"{url}/caching", json={"enabled": False}).json()["caching"] is False
    assert client.delete(f"{url}/requests/1").json()["requests"] == []
    assert client.delete(url).json() == {"closed": mine["session"]}
    assert client.get(url).status_code == 404


def test_bad_requests_of_a_session(server: Running) -> None:
    client = server.client
    url = f"{URL}/{client.post(URL).json()['session']}"
    for body in ({}, {"shared_prefix": 1}, {"shared_prefix": True, "tokens": 9}, [True]):
        response = client.post(f"{url}/requests", json=body)
        assert response.status_code == 400, body
        assert response.json()["error"]["message"]
    assert client.post(f"{url}/caching", json={"enabled": "on"}).json()["error"]["param"] == "enabled"
    assert client.delete(f"{url}/requests/7").json()["error"]["code"] == "not_found"
    assert client.delete(f"{url}/requests/first").status_code == 400
    for _ in range(3):
        assert client.post(f"{url}/requests", json={"shared_prefix": False}).status_code == 200
    full = client.post(f"{url}/requests", json={"shared_prefix": False})
    assert (full.status_code, full.json()["error"]["code"]) == (409, "conflict")
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/step")):
        assert client.request(method, f"{URL}/unknown{path}").status_code == 404


def test_files_are_open_strict_and_point_nowhere_else() -> None:
    with serving(api_keys=["k"]) as running:
        for path in FILES:
            response = running.client.get(path, headers={"Authorization": ""})
            assert response.status_code == 200, path
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'self';")
            assert "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            if "/vendor/" in path:
                continue  # its comments name its home
            text = response.text.replace("http://www.w3.org/2000/svg", "")
            assert "//" not in re.sub(r"^.*// .*$", "", text, flags=re.MULTILINE), f"{path} names another host"
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text), f"{path} has inline code"
        for path in ("/playground/example", f"{URL}/x", "/playground/page/index.html", "/playground/sandbox.py"):
            assert running.client.get(path, headers={"Authorization": ""}).status_code == 401
            assert running.client.get(path).status_code in (200, 404)


def test_the_example_is_one_that_the_model_can_answer(server: Running) -> None:
    first, second = (server.client.get(f"/playground/example?number={n}").json() for n in range(2))
    assert first["messages"][0] == second["messages"][0], "one line, so one prefix"
    assert first["messages"][1] != second["messages"][1]
    for told in (first, second):
        body = {"messages": told["messages"], **told["sampling"], "cache": told["cache"]}
        answer = server.chat({**body, "cache_config": told["cache_config"]}).json()
        assert answer["choices"][0]["message"]["content"].strip() == told["answer"]
        assert told["canvas"].count("[[") > 0 < len(told["decision"]["criteria"])
    assert first["pair"] == ["none", "bicache"]
    assert {"none", "bicache", "bicache+block-dual"} <= set(first["policies"])
    assert not {"uniform-cache", "exact", "dkv-greedy"} & set(first["policies"]), "not of this model, or not so sampled"
    for bad in ("-1", "1000", "x"):
        error = server.client.get(f"/playground/example?number={bad}").json()["error"]
        assert error["param"] == "number"
        assert error["message"].startswith("number")


@pytest.mark.thorough
def test_the_list_of_models_says_what_a_bundled_one_can_answer(server: Running) -> None:
    known = card("bundled-transit")
    assert known is not None
    listed = server.client.get("/v1/models").json()["data"]
    assert [each["card"] for each in listed] == [known.as_json()] * len(listed)
    assert server.client.get(f"/v1/models/{listed[0]['id']}").json() == listed[0]
    first = server.client.get("/playground/example").json()
    assert first["messages"] == known.messages(known.questions[0])
    folder = LLM(str(resolve_model("bundled-transit")), cache="none", dtype="float32", device="cpu")
    with serving(folder) as other:
        assert all("card" not in each for each in other.client.get("/v1/models").json()["data"])


@pytest.mark.thorough
def test_every_policy_of_the_page_is_one_that_the_server_takes(server: Running) -> None:
    told = server.client.get("/playground/example").json()
    for spec in told["policies"]:
        body = {"messages": told["messages"], **told["sampling"], "cache": spec}
        assert server.chat(body).status_code == 200, spec


@pytest.mark.parametrize(
    ("folder", "some", "others", "pair"),
    [
        ("dream", {"none", "bicache+dkv-decode"}, {"exact", "uniform-cache"}, ["none", "reuse"]),
        ("block_causal/sdar_b4", {"exact"}, {"bicache", "dkv-decode"}, ["none", "exact"]),
        ("uniform/unif", {"none", "uniform-cache"}, {"bicache", "exact"}, ["none", "block-prefix"]),
    ],
)
def test_other_models_get_a_plain_example_and_their_own_policies(
    folder: str, some: set[str], others: set[str], pair: list[str]
) -> None:
    cache = min(some - {"bicache+dkv-decode"})
    llm = LLM(str(GOLDENS / folder), cache=cache, cache_config=None, dtype="float32", device="cpu")
    told = example(llm, {}, 3)
    assert (told["decision"], told["canvas"]) == (None, "The sky is [[4]] because [[2-12]].")
    assert (told["answer"], told["sampling"], told["cache"], told["cache_config"]) == (None, {}, cache, None)
    assert [message["role"] for message in told["messages"]] == ["system", "user"]
    assert some <= set(told["policies"])
    assert list(told["pair"]) == pair
    assert not others & set(told["policies"])


def test_drafts_tell_what_was_done_with_the_prefix(server: Running) -> None:
    told = server.client.get("/playground/example").json()
    body = {"messages": told["messages"], "max_tokens": 4, "block_length": 4, "steps": 4, "stream_drafts": True}
    chunks = server.stream({**body, "cache": "bicache", "cache_config": {"depth": 3, "refresh_interval": 2}})
    passes = [chunk["remask"]["passes"] for chunk in chunks if "canvas" in chunk.get("remask", {})]
    prompt = len(next(chunk["remask"]["prompts"] for chunk in chunks if "prompts" in chunk.get("remask", {}))[0])
    assert len(passes) == 4
    for step, told_passes in enumerate(passes):
        ((shallow, above, deep),) = told_passes
        prefix = shallow["reused"]
        own = prompt + 4 - prefix
        refresh = step % 2 == 0
        assert shallow == {
            "layers": [0, 3],
            "rows": own,
            "reused": prefix,
            "leased": prefix,
            "restored": 0,
            "refreshed": 0,
        }
        again = prefix if refresh else 0
        assert above == {
            "layers": [3, 4],
            "rows": own + again,
            "reused": prefix,
            "leased": prefix,
            "restored": again,
            "refreshed": 0,
        }, "the boundary state decides its K/V"
        assert deep == {
            "layers": [4, 10],
            "rows": own + again,
            "reused": prefix - again,
            "leased": 0,
            "restored": 0,
            "refreshed": again,
        }
