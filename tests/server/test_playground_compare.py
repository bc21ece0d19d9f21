"""The tab Compare in a browser: one prompt under two policies, and the steps of each, which other tabs show alike."""

import re
from typing import Any

import pytest

from remask.llm import LLM
from remask.tasks import transit
from remask.tasks.cards import card
from tests.server.browser import DONE, Tab, api_text, opened, sync_api
from tests.server.serving import Running, held, serving

pytestmark = pytest.mark.thorough


@pytest.fixture
def tab(tab: Tab) -> Tab:
    tab.open("compare")
    return tab


def test_steps_can_be_gone_back_to(tab: Tab) -> None:
    tab.ask_for(16, block_length=16, steps=16)
    tab.page.evaluate(
        "document.getElementById('ask').elements.config_b.value = '{\"depth\": 4, \"refresh_interval\": 4}'"
    )
    tab.page.click("#run-b-only")
    tab.ran("b")
    leased = tab.letters("b").count("S")
    assert tab.letters("b") == "S" * leased + "K" * (10 - leased), "between refreshes nothing of the prefix is computed"
    for step, settled in ((4, 5), (0, 1)):
        tab.slide("b", step)
        assert tab.text("#run-b .scrub-text") == f"Step {step + 1} of 16"
        assert tab.letters("b") == "S" * (leased - 1) + "B" + "R" * (10 - leased), "a refresh restarts at the boundary"
        assert "restored from a stored hidden state" in tab.text("#run-b .words")
        assert tab.count("#run-b .canvas .token.settled") == settled
        assert tab.count("#run-b .canvas .token.draft") == 16 - settled
    tab.page.click("#run-b .replay")
    sync_api.expect(tab.page.locator("#run-b .scrub-text")).not_to_have_text("Step 1 of 16", timeout=DONE)


def folds(tab: Tab, policy: str = "b") -> list[str]:
    """What the marks of end tokens say."""
    found: list[str] = tab.page.locator(f"#run-{policy} .fold").all_inner_texts()
    return found


def seen_tokens(tab: Tab, policy: str = "b") -> list[str]:
    """The tokens of the canvas that are seen, without their steps."""
    cells = tab.page.locator(f"#run-{policy} .canvas .token")
    texts = [cells.nth(place).inner_text() for place in range(cells.count()) if cells.nth(place).is_visible()]
    return [text.splitlines()[0] if "\n" in text else text.rstrip("0123456789") for text in texts]


def seen_blocks(tab: Tab, policy: str = "b") -> list[str]:
    names = tab.page.locator(f"#run-{policy} .canvas .block-name")
    return [names.nth(place).inner_text() for place in range(names.count()) if names.nth(place).is_visible()]


def test_end_tokens_are_one_mark_that_opens(browser: Any) -> None:
    llm = LLM("bundled-transit", dtype="float32", device="cpu")
    # Else a response ends with its first end token, in whose block there are few.
    with serving(llm, sampling={**transit.SAMPLING, "ignore_eos": True}) as server, opened(browser, server.base) as tab:
        tab.open("compare")
        tab.ask_for(16, block_length=4, steps=16)
        tab.page.click("#run-b-only")
        tab.ran("b")
        assert llm.tokenizer is not None
        words = len(llm.tokenizer.encode(tab.text("#expected").removeprefix("The right answer: ")))
        ends, first = 16 - words, words // 4 + 1
        assert ends >= 5, "the question has an answer of a few tokens"
        assert folds(tab) == [f"end of text × {ends} (blocks {first} to 4)"]
        assert len(seen_tokens(tab)) == words
        assert "<|endoftext|>" not in seen_tokens(tab)
        assert seen_blocks(tab) == [str(number) for number in range(1, first + 1)], "the others are folded too"

        mark = "#run-b .fold button"
        tab.page.focus(mark)
        for opened_, key in ((True, "Enter"), (False, "Space")):
            tab.page.keyboard.press(key)
            tab.focused(mark)
            assert tab.page.get_attribute(mark, "aria-expanded") == str(opened_).lower()
            assert len(seen_tokens(tab)) == (16 if opened_ else words)
            assert seen_tokens(tab).count("<|endoftext|>") == (ends if opened_ else 0)
            assert seen_blocks(tab) == [str(number) for number in range(1, (4 if opened_ else first) + 1)]
        tab.page.click(mark)
        assert len(seen_tokens(tab)) == 16, "the mouse opens it too"
        tab.slide("b", 14)
        assert tab.page.get_attribute(mark, "aria-expanded") == "true", "it stays open at other steps"
        assert tab.said == []


def test_end_tokens_that_are_not_all_settled_say_so(tab: Tab) -> None:
    tab.ask_for(16, block_length=16, steps=16)
    tab.page.click("#run-b-only")
    tab.ran("b")
    seen = set()
    for step in range(16):
        tab.slide("b", step)
        tokens = [text.rstrip("0123456789\n") for text in tab.page.locator("#run-b .canvas .token").all_inner_texts()]
        settled = tab.page.locator("#run-b .canvas .token.settled").all_inner_texts()
        count = sum(text.startswith("<|endoftext|>") for text in settled)
        ends = sum(text == "<|endoftext|>" for text in tokens)
        if len(folds(tab)) == 1 and f"× {ends}" in folds(tab)[0]:  # one run holds all
            expected = f"end of text × {ends}" + (f", {count} settled" if 0 < count < ends else "")
            assert folds(tab) == [expected], "there is one block, so none is named"
            seen.add(count == ends)
            assert tab.count("#run-b .fold button.settled") == (count == ends)
    assert seen == {True, False}


def test_a_mark_keeps_its_focus_where_it_moves_and_hands_it_on_where_it_goes(tab: Tab) -> None:
    focused = tab.page.evaluate(
        """async () => {
            const { Canvas } = await import("./playground/steps/canvas.js");
            const [made, near] = [document.createElement("ol"), document.createElement("button")];
            [made.id, near.textContent] = ["made", "near"];
            document.body.prepend(made, near);
            const canvas = new Canvas(made, new Set([7]), near);
            canvas.lay([[0, 2], [2, 6]]);
            const draw = (tokens) => {
                const text = (id) => (id === null ? null : `t${id}`);
                const texts = tokens.map((id) => ({ token_id: id, text: text(id), settled: null }));
                canvas.draw({ step: 0, canvas: texts }, 3);
            };
            const seen = [];
            draw([1, 2, 3, 7, 7, 7]);
            made.querySelector("button").focus();
            seen.push(document.activeElement.textContent);
            draw([1, 7, 7, 7, 7, 7]);
            seen.push(document.activeElement.textContent);
            draw([1, 7, null, 7, null, 7]);
            seen.push(document.activeElement.textContent);
            return seen;
        }"""
    )
    assert focused == ["end of text × 3", "end of text × 5 (blocks 1 to 2)", "near"]
    assert tab.count("#made .fold") == 0
    assert tab.page.locator("#made .token").all_inner_texts() == ["t1", "t7", "▒", "t7", "▒", "t7"]


def test_the_canvas_shows_its_blocks(tab: Tab) -> None:
    tab.ask_for(16, block_length=4, steps=16)
    tab.page.click("#run-b-only")
    tab.ran("b")
    assert tab.count("#run-b .canvas .block") == 4
    for block in range(1, 5):
        assert tab.count(f"#run-b .canvas .block:nth-child({block}) .token") == 4
    for step in range(8):  # the response ends with an end token in its second block
        tab.slide("b", step)
        assert tab.page.locator("#run-b .canvas .block.current").get_attribute("aria-label") == f"Block {step // 4 + 1}"
    assert tab.count("#run-b .canvas .block:nth-child(3) .masked") == 4, "what was never reached"


def test_fill_passes_have_a_row_of_layers_of_their_own(tab: Tab) -> None:
    tab.page.select_option("#ask [name=cache_a]", "bicache+block-dual")
    tab.page.fill("#ask [name=config_a]", '{"fill_pass": "separate"}')
    tab.page.fill("#ask [name=block_length]", "8")
    tab.page.click("#run-a-only")
    tab.ran("a")
    tab.slide("a", 0)
    assert tab.count("#run-a .pass") == 2
    assert "Pass 2, layers 1 to" in tab.text("#run-a .words")


def test_a_run_leaves_the_focus_where_it_is(tab: Tab, server: Running) -> None:
    sent = tab.sent()
    keyboard = tab.page.keyboard
    tab.page.focus("#ask [name=user]")
    while tab.tab_key() != "run":
        pass
    tab.watch_focus()
    with held(server):
        keyboard.press("Enter")
        for name in ("run", "run-a-only", "run-b-only", "another", "stop"):
            sync_api.expect(tab.page.locator(f"#{name}")).to_have_attribute(
                "aria-disabled", str(name != "stop").lower()
            )
        tab.focused("#run")
        keyboard.press("Enter")
    tab.says("#run-status", "Policy B:")
    tab.focused("#run")
    assert len(sent) == 2, "a second Enter began no run"
    assert tab.tab_key() == "run-a-only"
    keyboard.press("Space")
    tab.says("#run-status", "Policy A:")
    tab.focused("#run-a-only")
    assert tab.focus_path() == ["run-a-only"], "the focus went nowhere but where Tab led it"


def test_a_run_is_stopped_by_keyboard(tab: Tab, server: Running) -> None:
    tab.page.focus("#run-b-only")
    with held(server):
        tab.page.keyboard.press("Enter")
        tab.says("#run-status", "Policy B runs.")
        tab.watch_focus()
        assert tab.tab_key() == "stop"
        tab.page.keyboard.press("Enter")
        tab.says("#run-status", "Stopped.")
    tab.focused("#stop")
    assert tab.focus_path() == ["stop"]
    assert tab.page.get_attribute("#stop", "aria-disabled") == "true"
    tab.page.keyboard.press("Enter")
    tab.focused("#stop")
    assert tab.text("#run-status") == "Stopped."


def test_a_stopped_run_keeps_what_was_settled(browser: Any) -> None:
    """On a model that settles names here and there, where nothing can be said from left to right yet."""
    llm = LLM("bundled-tariff", dtype="float32", device="cpu")
    with serving(llm, sampling={}) as server, opened(browser, server.base) as tab:
        tab.open("compare")
        with held(server, steps=4) as hold:
            tab.page.click("#run-b-only")
            hold.wait()
            tab.shown("#run-b .canvas .token.settled")
            tab.page.click("#stop")
            tab.says("#run-b .clock", "of 8 positions settled")
        settled = (
            "[...document.querySelectorAll('#run-b .canvas .token.settled')].map(e => e.firstChild.textContent.trim())"
        )
        assert tab.text("#answer-b").replace("…", " ").split() == tab.page.evaluate(settled) != []
        assert "…" in tab.text("#answer-b"), "what is left open is seen"
        server.settle()
        tab.page.click("#run-b-only")
        tab.ran("b")
        assert tab.text("#expected").endswith(tab.text("#answer-b")), "the next run begins anew"
        assert tab.said == []


def test_the_right_answer_is_that_of_the_question_that_stands_there(tab: Tab) -> None:
    known = card("bundled-transit")
    assert known is not None
    for number in (0, 1):
        question = known.draw(number)
        if number:
            tab.page.click("#another")
        tab.says("#expected", question.answer)
        assert tab.page.input_value("#ask [name=user]") == question.question
        assert tab.text("#answer-b") == "Not run yet.", "the last one is another question's"
        tab.page.click("#run-b-only")
        tab.says("#run-status", "Policy B:")
        assert tab.text("#answer-b") == question.answer
    for typed in ("user", "system"):
        before = tab.page.input_value(f"#ask [name={typed}]")
        tab.page.fill(f"#ask [name={typed}]", f"{before} ?")
        assert not tab.page.is_visible("#expected"), "it is another question now"
        tab.page.fill(f"#ask [name={typed}]", before)
        assert tab.page.is_visible("#expected")


def refused(tab: Tab, words: str) -> None:
    """Run, and wait for an error that says so."""
    tab.page.click("#run-a-only")
    tab.says("#run-problem", words)
    assert tab.count("#run-problem[role=alert]:not([hidden])") == 1


def test_bad_fields_are_named_and_marked(browser: Any, server: Running) -> None:
    with opened(browser, server.base) as tab:
        tab.open("compare")
        tab.page.fill("#ask [name=max_tokens]", "-3")
        refused(tab, "refuses the field max_tokens")
        assert tab.page.evaluate("document.activeElement.name") == "max_tokens"
        assert tab.page.get_attribute("#ask [name=max_tokens]", "aria-invalid") == "true"
        tab.page.fill("#ask [name=max_tokens]", "16")
        tab.page.locator("#ask .settings summary").click()
        tab.page.select_option("#ask [name=cache_a]", "bicache")
        assert tab.page.input_value("#ask [name=config_a]") == '{"refresh_interval":4}', "the example's"
        tab.page.select_option("#ask [name=cache_a]", "none")
        assert tab.page.input_value("#ask [name=config_a]") == "", "no other policy takes them"
        tab.page.evaluate("document.getElementById('ask').elements.config_a.value = '{depth'")
        refused(tab, "no JSON object")
        assert tab.page.evaluate("document.activeElement.name") == "config_a", "the fold opens"
        assert tab.page.get_attribute("#ask [name=max_tokens]", "aria-invalid") is None
        tab.page.fill("#ask [name=config_a]", "")
        tab.page.click("#run-a-only")
        tab.ran("a")
        assert tab.count("#run-problem:not([hidden])") == 0


@pytest.mark.parametrize("width", [1200, 360])
def test_answers_have_the_form_that_was_typed(browser: Any, width: int) -> None:
    """On a model whose tokens can spell it."""
    llm = LLM("bundled-tariff", dtype="float32", device="cpu")
    with serving(llm) as own, opened(browser, own.base, viewport={"width": width, "height": 800}) as tab:
        tab.open("compare")
        tab.ask_for(8, block_length=8, steps=8)
        tab.page.locator("#ask .form-of-answer summary").click()
        assert not tab.page.is_visible("#ask [name=structured_outputs]"), "any text needs no form"
        hints: set[str] = set()
        for kind, form, fits in (
            ("regex", "[0-9]{2}-[0-9]", r"\d\d-\d"),
            ("choice", "rope\n  soap\n\n", "rope|soap"),
            ("json", '{"type": "boolean"}', "true|false"),
        ):
            tab.page.select_option("#ask [name=form_kind]", kind)
            hints.add(tab.page.get_attribute("#ask [name=structured_outputs]", "placeholder"))
            tab.page.fill("#ask [name=structured_outputs]", form)
            tab.page.click("#run-b-only")
            tab.ran("b")
            assert re.fullmatch(fits, tab.text("#answer-b")), kind
        assert len(hints) == 3, "each kind has an example of its own"
        assert tab.fits()
        tab.page.fill("#ask [name=structured_outputs]", "{")
        tab.page.click("#run-b-only")
        tab.says("#run-problem", "no JSON schema")
        tab.focused("#ask [name=structured_outputs]")
        tab.page.select_option("#ask [name=form_kind]", "regex")
        tab.page.fill("#ask [name=structured_outputs]", "(")
        tab.page.click("#run-b-only")
        tab.says("#run-problem", "structured_outputs")
        tab.forgive(400)
        assert tab.said == []


@pytest.mark.parametrize("width", [1200, 360])
def test_holes_are_typed_and_seen_to_be_filled(browser: Any, server: Running, width: int) -> None:
    with opened(browser, server.base, viewport={"width": width, "height": 800}) as tab:
        tab.open("compare")
        sent = tab.sent()
        tab.ask_for(16, block_length=4, steps=6)
        tab.page.locator("#ask .holes summary").click()
        tab.page.fill("#ask [name=canvas]", "go [[2]] alder[[1-4]] arch")
        tab.page.click("#run-b-only")
        tab.ran("b")
        (body,) = sent
        assert "max_tokens" not in body
        parts = [{"text": "go "}, {"mask": 2}, {"text": " alder"}, {"mask": {"min": 1, "max": 4}}, {"text": " arch"}]
        assert body["canvas"] == parts
        assert tab.text("#answer-b").split() == api_text(server, body)[0].split()
        fixed = tab.page.locator("#run-b .canvas .token.given").all_inner_texts()
        assert " ".join(fixed).split() == ["go", "alder", "arch"]
        for step, filled in ((0, 1), (5, 6)):
            tab.slide("b", step)
            assert tab.count("#run-b .canvas .token.settled") == filled
            assert tab.page.locator("#run-b .canvas .token.given").all_inner_texts() == fixed, (
                "they stand from the start"
            )
        assert tab.fits()
        tab.page.fill("#ask [name=canvas]", "no hole")
        tab.page.click("#run-b-only")
        tab.says("#run-problem", "canvas has no hole")
        tab.focused("#ask [name=canvas]")
        tab.forgive(400)
        assert tab.said == []
