"""The tabs Fill in, Decide, Tools and Memory in a browser."""

import json
from typing import Any

import pytest

from remask.llm import LLM
from remask.tasks.cards import card
from tests.server.browser import Tab, api_text, opened
from tests.server.serving import TEMPLATE, Running, held, serving

pytestmark = pytest.mark.thorough


@pytest.fixture
def memory(tab: Tab) -> Tab:
    tab.open("memory")
    tab.shown("#pages li")
    return tab


def test_the_allocator_is_the_servers(memory: Tab, server: Running) -> None:
    memory.press("add-shared", "Request 1 added: 7 pages, none of them shared")
    memory.press("add-shared", "Request 2 added: 7 pages, 3 of them shared")
    memory.press("add-own", "Request 3 added: 7 pages, none of them shared")
    assert memory.count("#pages .page.shared") == 3
    assert memory.count("#requests .entry.shared") == 6
    told = memory.totals()
    assert told["Pages used"] == "18 / 24"
    assert told["Wasted slots"] == "6 (8 %)"
    assert told["Utilisation of them"] == "92 %"
    memory.press("add-own", "")
    memory.shown("#pages-problem:not([hidden])")
    assert "pool is full" in memory.text("#pages-problem")
    memory.forgive(409)
    for left in ("3 requests", "3 requests", "All requests have settled"):
        memory.press("step", f"Stepped: {left}" if left[0].isdigit() else left)
    memory.page.locator("#requests button").first.click()
    memory.says("#pages-status", "Request 1 finished")
    assert memory.count("#pages .page.cached") == 3, "what only the store holds"
    memory.press("caching", "Prefix caching is off")
    memory.press("reset", "A fresh pool")
    memory.press("caching", "Prefix caching is off")
    memory.press("add-shared", "Request 1 added: 7 pages, none of them shared")
    memory.press("add-shared", "Request 2 added: 7 pages, none of them shared")
    assert memory.count("#pages .page.shared") == 0
    assert server.cache()["pages"]["used"] == 0, "the serving pool knows nothing of it"


def test_an_allocator_that_the_server_forgot_begins_anew(memory: Tab) -> None:
    with memory.page.expect_response(lambda answer: answer.url.endswith("/requests")) as answer:
        memory.press("add-own", "Request 1 added")
    memory.page.evaluate(
        "async (url) => { await fetch(url, { method: 'DELETE' }) }", answer.value.url.removesuffix("/requests")
    )
    memory.page.click("#step")
    memory.shown("#pages-problem:not([hidden])")
    assert "a new one has begun" in memory.text("#pages-problem")
    memory.press("add-own", "Request 1 added")
    memory.forgive(404)


def test_the_focus_survives_a_redrawn_page_table(memory: Tab) -> None:
    for number in (1, 2, 3):
        memory.press("add-own" if number == 3 else "add-shared", f"Request {number} added")
    memory.page.focus("#finish-2")
    memory.page.evaluate("document.getElementById('step').click()")
    memory.says("#pages-status", "Stepped: 3 requests")
    memory.focused("#finish-2")
    for finished, then in ((2, "#finish-3"), (3, "#finish-1"), (1, "#add-shared")):
        memory.page.keyboard.press("Enter")
        memory.says("#pages-status", f"Request {finished} finished")
        memory.focused(then)


@pytest.mark.parametrize("size", [(1200, 900), (360, 740)], ids=["desktop", "phone"])
def test_decisions_are_the_apis(browser: Any, server: Running, size: tuple[int, int]) -> None:
    with opened(browser, server.base, viewport={"width": size[0], "height": size[1]}) as tab:
        tab.open("decide")
        state = tab.page.input_value("#decide [name=state]")
        tab.page.fill("#decide [name=question]", "where am i ?")
        tab.page.fill("#decide [name=names]", "oak\n elm\n\nivy")
        tab.page.fill("#decide [name=template]", "oak > {answer}")
        tab.page.select_option("#decide [name=labels]", "auto")
        tab.page.check("#decide [name=options]")
        tab.page.press("#decide [name=template]", "Enter")
        tab.says("#decide-status", "Passes: 1.")
        question = {"instructions": "where am i ?", "criteria": ["oak", "elm", "ivy"], "template": "oak > {answer}"}
        body = {"state": state, "questions": {"it": {**question, "show_options": True}}}
        answer = server.client.post("/v1/decisions", json=body).json()["answers"]["it"]
        assert tab.text("#decide-status").startswith(f"{answer['choice']}. Entropy {answer['x_entropy']:.2f}")
        shown = tab.totals("decide-answer")
        assert list(shown) == sorted(shown, key=lambda name: -answer["probabilities"][name])
        assert all(f"{100 * answer['probabilities'][name]:.1f} %" in text for name, text in shown.items())
        assert "the most probable" in shown[answer["choice"]]
        tracks = "[...document.querySelectorAll('#decide-answer meter')].map(e => e.getBoundingClientRect().width)"
        widths = tab.page.evaluate(tracks)
        assert widths == [widths[0]] * 3, "bars of one scale"
        assert widths[0] > 100
        assert tab.fits()
        tab.page.fill("#decide [name=names]", "oak")
        tab.page.click("#decide-run")
        tab.says("#decide-problem", "two alternatives at least")
        assert tab.count("#decide-answer div") == 0
        tab.forgive(400)
        assert tab.said == []


def test_a_bundled_model_decides_its_own_question(tab: Tab) -> None:
    known = card("bundled-transit")
    assert known is not None
    tab.open("decide")
    assert tab.page.input_value("#decide [name=question]") == known.questions[0].question
    tab.page.click("#decide-run")
    tab.says("#decide-status", f"{known.questions[0].answer.split()[2]}. Entropy")


def test_holes_are_filled_between_what_was_typed(tab: Tab, server: Running) -> None:
    known = card("bundled-transit")
    assert known is not None
    sent = tab.sent()
    tab.open("fill")
    assert tab.page.input_value("#fill [name=canvas]") == known.questions[0].canvas
    tab.page.click("#fill-run")
    tab.says("#fill-status", known.questions[0].answer)
    assert tab.text("#fill-answer").split() == known.questions[0].answer.split()
    typed = " ".join(tab.page.locator("#fill-answer .typed").all_inner_texts()).split()
    assert typed == [word for word in known.questions[0].canvas.split() if "[[" not in word]
    assert tab.count("#fill-answer .filled") == known.questions[0].canvas.count("[[")
    assert tab.count("#fill-steps .canvas .token.given") == len(typed)
    (body,) = sent
    assert api_text(server, body)[0] == known.questions[0].answer

    tab.page.click("#fill-code")
    shown = json.loads(tab.text("#as-curl").split("-d '")[1].rstrip("'"))
    assert shown == {name: value for name, value in body.items() if not name.startswith("stream")}
    tab.page.keyboard.press("Escape")
    tab.focused("#fill-code")

    with held(server, steps=1) as hold:
        tab.page.click("#fill-run")
        hold.wait()
        tab.shown("#fill-answer .filled")
        tab.page.click("#fill-stop")
        tab.says("#fill-status", "Stopped")
    assert tab.count("#fill-answer .filled") == 1, "what was filled in is kept"
    tab.page.fill("#fill [name=canvas]", "")
    tab.page.click("#fill-run")
    tab.says("#fill-problem", "canvas has no hole")
    tab.focused("#fill [name=canvas]")
    tab.forgive(400)


def test_calls_of_tools_are_shown_and_their_results_sent(browser: Any) -> None:
    """On a model whose tokens can spell a call, under a template that tells it of tools."""
    llm = LLM("bundled-tariff", dtype="float32", device="cpu")
    assert llm.tokenizer is not None
    llm.tokenizer.use_chat_template(TEMPLATE)
    with serving(llm, sampling={}) as server, opened(browser, server.base) as tab:
        sent = tab.sent()
        tab.open("tools")
        choice = tab.page.locator("#tools [name=choice]")
        assert choice.locator("option").all_inner_texts()[-1] == "of get_weather"
        for chosen in ("required", "name:get_weather"):
            choice.select_option(chosen)
            tab.page.click("#tools-run")
            tab.says("#tools-status", "1 call made.")
            assert tab.text("#tools-turns .call-name") == "get_weather"
            called = json.loads(tab.text("#tools-turns .call pre"))
            assert called["city"] in ("Ulm", "Bonn")
            assert 1 <= called["days"] <= 7
        asked = {"type": "function", "function": {"name": "get_weather"}}
        assert [body["tool_choice"] for body in sent] == ["required", asked]

        tab.page.fill("#tools [name=result]", '{"celsius": 21}')
        tab.page.click("#tools-go-on")
        tab.says("#tools-status", "No call was made.")
        user, call, result = sent[2]["messages"]
        assert (user["role"], call["role"], result["role"]) == ("user", "assistant", "tool")
        assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == called
        assert (result["tool_call_id"], result["content"]) == (call["tool_calls"][0]["id"], '{"celsius": 21}')
        assert sent[2]["tool_choice"] == "none", "an answer in words"
        assert tab.page.locator("#tools-turns h4").all_inner_texts() == ["You", "Model", "Returned", "Model"]
        assert tab.said == []


def test_a_template_without_tools_is_told(browser: Any) -> None:
    llm = LLM("bundled-tariff", dtype="float32", device="cpu")
    with serving(llm, sampling={}, tools_by_form=False) as server, opened(browser, server.base) as tab:
        tab.open("tools")
        choice = tab.page.locator("#tools [name=choice]")
        choice.select_option("auto")
        tab.page.click("#tools-run")
        tab.says("#tools-problem", "does not tell it of tools")
        tab.focused("#tools [name=tools]")
        tab.forgive(400)
        tab.page.fill("#tools [name=tools]", "[")
        tab.page.click("#tools-run")
        tab.says("#tools-problem", "no JSON list")
        assert tab.said == []


def test_the_store_is_the_servers(tab: Tab, server: Running) -> None:
    tab.page.click("#offers button >> nth=0")
    tab.says("#chat-status", "Answer:")
    tab.open("memory")
    tab.shown("#entries:not([hidden])")
    told = server.cache()
    (entry,) = told["entries"]
    row = tab.page.locator("#entries tbody tr").inner_text().split("\t")
    assert row == [entry["prefix_id"], str(entry["tokens"]), str(entry["layers"]), str(entry["hits"])]
    assert f"({told['hits']} / {told['hits'] + told['misses']})" in tab.totals("store")["Hit ratio of the store"]
    assert tab.totals("store")["Stored prefixes"] == "1"
    tab.page.click("#store-drop")
    tab.says("#store-status", "dropped")
    assert server.cache()["entries"] == []
    assert not tab.page.is_visible("#entries")
