"""The tabs Fill in, Decide, Tools and Memory in a browser."""

from typing import Any

import pytest

from tests.server.browser import Tab, opened
from tests.server.serving import Running


@pytest.fixture
def memory(tab: Tab) -> Tab:
    """The page with the tab Memory open."""
    tab.open("memory")
    tab.shown("#pages li")
    return tab


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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
        assert tab.text("#decide-status").startswith(f"{answer['choice']}. Entropy {answer['entropy']:.2f}")
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
