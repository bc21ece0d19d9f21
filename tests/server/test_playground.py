"""The playground in a browser: Debian's `chromium`, driven by Playwright, against a real server."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from remask.checkpoint.source import resolve
from remask.engine.config import EngineConfig
from remask.llm import LLM
from remask.tasks.cards import card
from remask_lab.bench.workload import TRANSIT_SAMPLING
from tests.server.serving import CHATS, SLOW, URL, Running, held, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make test EXTRAS=dev")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
DONE = 120_000  # milliseconds
WATCH = """addEventListener("securitypolicyviolation", (event) => console.error("csp: " + event.violatedDirective))"""


@dataclass
class Tab:
    """A page of the browser, what its console said, and where it sent requests."""

    page: Any
    base: str
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def count(self, selector: str) -> int:
        """How many elements there are."""
        found: int = self.page.locator(selector).count()
        return found

    def text(self, selector: str) -> str:
        """The text that a person sees."""
        found: str = self.page.inner_text(selector)
        return found

    def shown(self, selector: str) -> None:
        """Wait for an element to be seen."""
        self.page.wait_for_selector(selector, timeout=DONE)

    def says(self, selector: str, words: str) -> None:
        """Wait for an element to hold a text."""
        sync_api.expect(self.page.locator(selector)).to_contain_text(words, timeout=DONE)

    def focused(self, selector: str) -> None:
        """Wait for an element to have the focus."""
        sync_api.expect(self.page.locator(selector)).to_be_focused(timeout=DONE)

    def tab_key(self) -> str:
        """Press Tab. Returns the id of the element that has the focus then, or its kind if it has no id."""
        self.page.keyboard.press("Tab")
        found: str = self.page.evaluate("document.activeElement.id || document.activeElement.tagName")
        return found

    def watch_focus(self) -> None:
        """Record from here on where the focus goes, a loss of it as `lost`."""
        self.page.evaluate(
            """() => {
                window.focusPath = [];
                addEventListener("focusin", (event) => focusPath.push(event.target.id));
                addEventListener("focusout", (event) => event.relatedTarget || focusPath.push("lost"));
            }"""
        )

    def focus_path(self) -> list[str]:
        """The ids of the elements that had the focus since `watch_focus`."""
        found: list[str] = self.page.evaluate("window.focusPath")
        return found

    def ran(self, policy: str) -> None:
        """Wait for the end of a run."""
        self.says(f"#run-{policy} .clock", "Done")

    def press(self, name: str, status: str) -> None:
        """Click a button of the allocator and wait for what it tells."""
        self.page.click(f"#{name}")
        self.says("#pages-status", status)

    def forgive(self, status: int) -> None:
        """Forget one line that Chromium itself writes about an answer of this status."""
        line = next(line for line in self.said if f"status of {status}" in line)
        self.said.remove(line)

    def totals(self, place: str = "totals") -> dict[str, str]:
        """A list of numbers by name."""
        names = self.page.locator(f"#{place} dt").all_inner_texts()
        return dict(zip(names, self.page.locator(f"#{place} dd").all_inner_texts(), strict=True))

    def slide(self, policy: str, step: int) -> None:
        """Go to a step of a finished run, counted from 0."""
        self.page.locator(f"#run-{policy} input[type=range]").fill(str(step))

    def ask_for(self, tokens: int, block_length: int, steps: int) -> None:
        """Fill in how a response is made."""
        for name, value in (("max_tokens", tokens), ("block_length", block_length), ("steps", steps)):
            self.page.fill(f"#{name}", str(value))

    def letters(self, policy: str) -> str:
        """What the layers did with the prefix, a letter each, of the passes one after the other."""
        cells = self.page.locator(f"#run-{policy} .layer")
        return "".join(cells.nth(i).inner_text()[0] for i in range(cells.count()))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as driver:
        # Test machines run as root, where Chromium's sandbox cannot be.
        made = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@contextmanager
def opened(browser: Any, base: str, ready: str = "#pages li", **settings: Any) -> Iterator[Tab]:
    """The playground in a fresh tab."""
    context = browser.new_context(**settings)
    context.add_init_script(WATCH)
    tab = Tab(context.new_page(), base)
    tab.page.on("console", lambda message: tab.said.append(f"{message.type}: {message.text}"))
    tab.page.on("pageerror", lambda error: tab.said.append(f"error: {error}"))
    tab.page.on("request", lambda request: tab.asked.append(request.url))
    try:
        tab.page.goto(f"{base}/")
        tab.shown(ready)
        yield tab
        assert all(url.startswith(f"{base}/") for url in tab.asked), "a request left the server"
    finally:
        context.close()


@pytest.fixture
def tab(browser: Any, server: Running) -> Iterator[Tab]:
    """The playground; nothing may be said on the console, by the content security policy least of all."""
    server.client.delete("/v1/cache")
    with opened(browser, server.base, viewport={"width": 1200, "height": 900}) as made:
        yield made
        assert made.said == []


@contextmanager
def standing(server: Running) -> Iterator[None]:
    """Within the block the engine makes no step, so that no run ends."""
    engine = server.service.llm.engine
    go, inner = threading.Event(), engine.step

    def step() -> Any:
        assert go.wait(120)
        return inner()

    vars(engine)["step"] = step
    try:
        yield
    finally:
        go.set()
        del vars(engine)["step"]


def api_text(server: Running, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The same request without a stream: its text and the work it took."""
    kept = {name: value for name, value in body.items() if not name.startswith("stream")}
    told = server.chat(kept).json()
    return told["choices"][0]["message"]["content"], told["remask"]


def test_two_policies_side_by_side_show_what_the_api_says(tab: Tab, server: Running) -> None:
    sent: list[dict[str, Any]] = []
    tab.page.on("request", lambda request: sent.append(request.post_data_json) if "chat" in request.url else None)
    tab.ask_for(16, block_length=16, steps=16)
    tab.page.click("#run")
    tab.shown("#compare:not([hidden])")
    assert [body["cache"] for body in sent] == ["none", "bicache"]
    rows = tab.page.locator("#measures tr").all_inner_texts()
    measures = {name: cells for name, *cells in (row.split("\t") for row in rows)}
    assert all(re.fullmatch(r"[\d,.]+ ms", time) for time in measures["Time to the end"])
    for column, (name, body) in enumerate(zip("ab", sent, strict=True)):
        text, work = api_text(server, body)
        assert tab.text(f"#answer-{name}") == text
        assert tab.text("#expected").endswith(text.strip())
        assert measures["Row-layers computed"][column] == f"{work['row_layers']:,}"
        steps = tab.page.locator(f"#run-{name} .canvas .token.settled sub").all_inner_texts()
        assert sorted(map(int, steps)) == list(range(1, 17)), "each step settles one of the sixteen positions"
    assert "Both gave the same text" in tab.text("#verdict")
    assert "miss" in tab.text("#verdict")
    tab.page.click("#run-b-only")
    tab.says("#run-b .numbers", "hit: read in layers 1 to")
    told = server.cache()
    tab.says("#store", f"({told['hits']} / {told['hits'] + told['misses']})")
    assert tab.totals("store")["Stored prefixes"] == "1"


@pytest.mark.thorough
def test_steps_can_be_gone_back_to(tab: Tab) -> None:
    tab.ask_for(16, block_length=16, steps=16)
    tab.page.click("#run-b-only")
    tab.ran("b")
    leased = tab.letters("b").count("S")
    assert tab.letters("b") == "S" * leased + "K" * (10 - leased), "between refreshes nothing of the prefix is computed"
    for step, settled in ((4, 5), (0, 1)):
        tab.slide("b", step)
        assert tab.text("#run-b .scrub-text") == f"Step {step + 1} of 16"
        assert tab.letters("b") == "S" * (leased - 1) + "B" + "R" * (10 - leased), "a refresh restarts at the boundary"
        assert "restored from a stored hidden state" in tab.text("#run-b .words")
        assert tab.count("#run-b .token.settled") == settled
        assert tab.count("#run-b .token.draft") == 16 - settled
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
    """The numbers of the blocks that are seen."""
    names = tab.page.locator(f"#run-{policy} .block-name")
    return [names.nth(place).inner_text() for place in range(names.count()) if names.nth(place).is_visible()]


@pytest.mark.thorough
def test_end_tokens_are_one_mark_that_opens(browser: Any) -> None:
    llm = LLM("bundled-transit", dtype="float32", device="cpu")
    # Else a response ends with its first end token, in whose block there are few.
    with serving(llm, sampling={**TRANSIT_SAMPLING, "ignore_eos": True}) as server, opened(browser, server.base) as tab:
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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_a_mark_keeps_its_focus_where_it_moves_and_hands_it_on_where_it_goes(tab: Tab) -> None:
    focused = tab.page.evaluate(
        """async () => {
            const { Canvas } = await import("./playground/canvas.js");
            document.body.insertAdjacentHTML("afterbegin", "<ol id='made'></ol><button id='near'>near</button>");
            const [made, near] = [document.getElementById("made"), document.getElementById("near")];
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


@pytest.mark.thorough
def test_the_canvas_shows_its_blocks(tab: Tab) -> None:
    tab.ask_for(16, block_length=4, steps=16)
    tab.page.click("#run-b-only")
    tab.ran("b")
    assert tab.count("#run-b .block") == 4
    for block in range(1, 5):
        assert tab.count(f"#run-b .block:nth-child({block}) .token") == 4
    for step in range(8):  # the response ends with an end token in its second block
        tab.slide("b", step)
        assert tab.page.locator("#run-b .block.current").get_attribute("aria-label") == f"Block {step // 4 + 1}"
    assert tab.count("#run-b .block:nth-child(3) .masked") == 4, "what was never reached"


@pytest.mark.thorough
def test_fill_passes_have_a_row_of_layers_of_their_own(tab: Tab) -> None:
    tab.page.select_option("#cache-a", "bicache+block-dual")
    tab.page.fill("#config-a", '{"fill_pass": "separate"}')
    tab.page.fill("#block_length", "8")
    tab.page.click("#run-a-only")
    tab.ran("a")
    tab.slide("a", 0)
    assert tab.count("#run-a .pass") == 2
    assert "Pass 2, layers 1 to" in tab.text("#run-a .words")


@pytest.mark.thorough
def test_the_allocator_is_the_servers(tab: Tab, server: Running) -> None:
    tab.press("add-shared", "Request 1 added: 7 pages, none of them shared")
    tab.press("add-shared", "Request 2 added: 7 pages, 3 of them shared")
    tab.press("add-own", "Request 3 added: 7 pages, none of them shared")
    assert tab.count("#pages .page.shared") == 3
    assert tab.count("#requests .entry.shared") == 6
    told = tab.totals()
    assert told["Pages used"] == "18 / 24"
    assert told["Wasted slots"] == "6 (8 %)"
    assert told["Utilisation of them"] == "92 %"
    tab.press("add-own", "")
    tab.shown("#pages-problem:not([hidden])")
    assert "pool is full" in tab.text("#pages-problem")
    tab.forgive(409)
    for left in ("3 requests", "3 requests", "All requests have settled"):
        tab.press("step", f"Stepped: {left}" if left[0].isdigit() else left)
    tab.page.locator("#requests button").first.click()
    tab.says("#pages-status", "Request 1 finished")
    assert tab.count("#pages .page.cached") == 3, "what only the store holds"
    tab.press("caching", "Prefix caching is off")
    tab.press("reset", "A fresh pool")
    tab.press("caching", "Prefix caching is off")
    tab.press("add-shared", "Request 1 added: 7 pages, none of them shared")
    tab.press("add-shared", "Request 2 added: 7 pages, none of them shared")
    assert tab.count("#pages .page.shared") == 0
    assert server.cache()["pages"]["used"] == 0, "the serving pool knows nothing of it"


@pytest.mark.thorough
def test_an_allocator_that_the_server_forgot_begins_anew(tab: Tab) -> None:
    with tab.page.expect_response(lambda answer: answer.url.endswith("/requests")) as answer:
        tab.press("add-own", "Request 1 added")
    tab.page.evaluate(
        "async (url) => { await fetch(url, { method: 'DELETE' }) }", answer.value.url.removesuffix("/requests")
    )
    tab.page.click("#step")
    tab.shown("#pages-problem:not([hidden])")
    assert "a new one has begun" in tab.text("#pages-problem")
    tab.press("add-own", "Request 1 added")
    tab.forgive(404)


@pytest.mark.thorough
def test_everything_is_reached_by_keyboard(tab: Tab) -> None:
    seen: list[str] = []
    for _ in range(40):
        seen.append(tab.tab_key())
        assert tab.page.evaluate(
            "(e => e.matches(':focus-visible') && getComputedStyle(e).outlineStyle !== 'none')(document.activeElement)"
        ), f"the focus on {seen[-1]!r} is not seen"
        if seen[-1] == "reset":
            break
    wanted = ["user", "run", "run-a-only", "stop", "system", "cache-a", "cache-b", "steps", "add-shared", "add-own",
              "step", "caching", "reset"]  # fmt: skip
    assert [name for name in seen if name in wanted] == wanted
    unnamed = tab.page.evaluate(
        "[...document.querySelectorAll('input, select, textarea')].filter(e => !e.labels.length).map(e => e.id)"
    )
    assert unnamed == []


@pytest.mark.thorough
def test_a_run_leaves_the_focus_where_it_is(tab: Tab, server: Running) -> None:
    sent: list[str] = []
    tab.page.on("request", lambda request: sent.append(request.url) if "chat" in request.url else None)
    keyboard = tab.page.keyboard
    tab.page.focus("#user")
    while tab.tab_key() != "run":
        pass
    tab.watch_focus()
    with standing(server):
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


@pytest.mark.thorough
def test_a_run_is_stopped_by_keyboard(tab: Tab, server: Running) -> None:
    tab.page.focus("#run-b-only")
    with standing(server):
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


@pytest.mark.thorough
def test_a_stopped_run_keeps_what_was_settled(browser: Any) -> None:
    """On a model that settles names here and there, where nothing can be said from left to right yet."""
    llm = LLM("bundled-tariff", dtype="float32", device="cpu")
    with serving(llm, sampling={}) as server, opened(browser, server.base) as tab:
        with held(server, steps=4) as hold:
            tab.page.click("#run-b-only")
            hold.wait()
            tab.shown("#run-b .token.settled")
            tab.page.click("#stop")
            tab.says("#run-b .clock", "of 8 positions settled")
        settled = "[...document.querySelectorAll('#run-b .token.settled')].map(e => e.firstChild.textContent.trim())"
        assert tab.text("#answer-b").replace("…", " ").split() == tab.page.evaluate(settled) != []
        assert "…" in tab.text("#answer-b"), "what is left open is seen"
        server.settle()
        tab.page.click("#run-b-only")
        tab.ran("b")
        assert tab.text("#expected").endswith(tab.text("#answer-b")), "the next run begins anew"
        assert tab.said == []


@pytest.mark.thorough
def test_a_bundled_model_says_what_it_can_answer(tab: Tab) -> None:
    known = card("bundled-transit")
    assert known is not None
    assert tab.text("#known-line") == known.answers
    offers = tab.page.locator("#offers button")
    assert offers.all_inner_texts() == [each.question for each in known.questions]
    for place in (1, 0):
        offered = known.questions[place]
        offers.nth(place).click()
        sync_api.expect(tab.page.locator("#user")).to_have_value(offered.question)
        assert tab.page.get_attribute("#canvas", "placeholder") == offered.canvas
        assert offered.decision is not None
        assert tab.page.input_value("#decide-question") == offered.question
        assert tab.text("#expected") == f"The right answer: {offered.answer}"
        assert tab.text("#answer-b") == "Not run yet.", "the last one is another question's"
        tab.page.click("#run-b-only")
        tab.says("#run-status", "Policy B:")
        assert tab.text("#answer-b") == offered.answer
    tab.page.click("#decide-run")
    tab.says("#decide-status", f"{known.questions[0].answer.split()[2]}. Entropy")
    for typed in ("#user", "#system"):
        before = tab.page.input_value(typed)
        tab.page.fill(typed, f"{before} ?")
        assert not tab.page.is_visible("#expected"), "it is another question now"
        tab.page.fill(typed, before)
        assert tab.page.is_visible("#expected")
    tab.page.fill("#decide-question", "mine")
    tab.page.click("#another")
    tab.says("#expected", known.draw(1).answer)
    assert tab.page.input_value("#decide-question") == "mine", "what somebody typed stays"


@pytest.mark.thorough
def test_another_model_promises_nothing(browser: Any) -> None:
    llm = LLM(str(resolve("bundled-transit")), cache="none", dtype="float32", device="cpu")
    with serving(llm) as server, opened(browser, server.base) as tab:
        for hidden in ("#known", "#expected", "#another"):
            assert not tab.page.is_visible(hidden)
        assert tab.count("#offers button") == 0
        assert "The sky is" in tab.page.get_attribute("#canvas", "placeholder")
        assert tab.page.input_value("#decide-question") == ""


@pytest.mark.thorough
def test_a_model_without_conversations_goes_on_with_a_text(browser: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(resolve("bundled-uniform"), tmp_path / "model"))
    words = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**words, "chat_template": None}))
    llm = LLM(str(folder), dtype="float32", device="cpu")
    with serving(llm, sampling={"max_tokens": 8}) as server, opened(browser, server.base) as tab:
        assert not tab.page.is_visible("#system")
        tab.page.fill("#user", "The sky is")
        tab.page.click("#run")
        tab.shown("#compare:not([hidden])")
        assert tab.said == []


@pytest.mark.thorough
def test_a_uniform_model_answers_the_question_of_its_card(browser: Any) -> None:
    known = card("bundled-uniform")
    assert known is not None
    llm = LLM("bundled-uniform", dtype="float32", device="cpu")
    with serving(llm, sampling={}) as server, opened(browser, server.base) as tab:
        tab.page.click("#run")
        tab.shown("#compare:not([hidden])")
        assert tab.text("#answer-a") == tab.text("#answer-b") == known.questions[0].answer
        tab.page.fill("#canvas", tab.page.get_attribute("#canvas", "placeholder"))
        tab.page.click("#run-a-only")
        tab.says("#run-status", "Policy A:")
        assert tab.text("#answer-a") == known.questions[0].answer
        assert tab.said == []


@pytest.mark.thorough
def test_the_focus_survives_a_redrawn_page_table(tab: Tab) -> None:
    for number in (1, 2, 3):
        tab.press("add-own" if number == 3 else "add-shared", f"Request {number} added")
    tab.page.focus("#finish-2")
    tab.page.evaluate("document.getElementById('step').click()")
    tab.says("#pages-status", "Stepped: 3 requests")
    tab.focused("#finish-2")
    for finished, then in ((2, "#finish-3"), (3, "#finish-1"), (1, "#add-shared")):
        tab.page.keyboard.press("Enter")
        tab.says("#pages-status", f"Request {finished} finished")
        tab.focused(then)


def brightness(tab: Tab, age: str) -> float:
    """The mean of red, green and blue, each from 0 to 1, behind a settled token of the legend."""
    colour = str(tab.page.evaluate(f"getComputedStyle(document.querySelector('.token.settled{age}')).backgroundColor"))
    assert colour.startswith("color(srgb ")
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def top(tab: Tab, selector: str) -> float:
    """Where an element begins on the page, in pixels."""
    found: float = tab.page.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().top + scrollY")
    return found


@pytest.mark.thorough
def test_a_phone_needs_no_sideways_scrolling(browser: Any, server: Running) -> None:
    settings: dict[str, Any] = {
        "viewport": {"width": 360, "height": 740},
        "color_scheme": "dark",
        "reduced_motion": "reduce",
    }
    with opened(browser, server.base, **settings) as tab:
        tab.page.select_option("#cache-a", "bicache+block-dual")
        tab.page.click("#run")
        tab.shown("#compare:not([hidden])")
        tab.press("add-shared", "Request 1")
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert tab.text("#answer-a") == tab.text("#answer-b") != ""
        assert top(tab, "#answer-b") < 740, "the answers are seen without scrolling"
        below = [
            "#known",
            "#system",
            "#cache-a",
            "#max_tokens",
            "#settings",
            "#store",
            ".legends",
            "#compare",
            "#allocator",
        ]
        for each in (*below, ".card.run", "label:has(#system) ~ p"):
            assert top(tab, "#answer-b") < top(tab, each), f"{each} stands above the answer"
        assert tab.page.evaluate("getComputedStyle(document.querySelector('.token')).transitionDuration") == "0s"
        tab.slide("a", 3)
        tab.page.click("#run-a .replay")
        assert tab.text("#run-a .scrub-text").startswith("Step 1 "), "who wants no motion gets no replay"
        ground = "getComputedStyle(document.documentElement).backgroundColor"
        dark = tab.page.evaluate(ground)
        assert brightness(tab, ".late") < brightness(tab, ".early") - 0.1, "later is darker"
        tab.page.emulate_media(color_scheme="light")
        assert dark == "rgb(16, 21, 20)" != tab.page.evaluate(ground)
        assert brightness(tab, ".late") < brightness(tab, ".early") - 0.1
        assert tab.said == []


@pytest.mark.thorough
@pytest.mark.parametrize("size", [(1200, 900), (360, 740)], ids=["desktop", "phone"])
def test_decisions_are_the_apis(browser: Any, server: Running, size: tuple[int, int]) -> None:
    with opened(browser, server.base, viewport={"width": size[0], "height": size[1]}) as tab:
        state = tab.page.input_value("#system")
        tab.page.fill("#decide-question", "where am i ?")
        tab.page.fill("#decide-names", "oak\n elm\n\nivy")
        tab.page.fill("#decide-template", "oak > {answer}")
        tab.page.select_option("#decide-labels", "auto")
        tab.page.check("#decide-options")
        tab.page.press("#decide-template", "Enter")
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
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        tab.page.fill("#decide-names", "oak")
        tab.page.click("#decide-run")
        tab.says("#decide-problem", "two alternatives at least")
        assert tab.count("#decide-answer div") == 0
        tab.forgive(400)
        assert tab.said == []


def refused(tab: Tab, words: str) -> None:
    """Run, and wait for an error that says so."""
    tab.page.click("#run-a-only")
    tab.says("#run-problem", words)
    assert tab.count("#run-problem[role=alert]:not([hidden])") == 1


@pytest.mark.thorough
def test_bad_fields_are_named_and_marked(browser: Any, server: Running) -> None:
    with opened(browser, server.base) as tab:
        tab.page.fill("#max_tokens", "-3")
        refused(tab, "refuses the field max_tokens")
        assert tab.page.evaluate("document.activeElement.id") == "max_tokens"
        assert tab.page.get_attribute("#max_tokens", "aria-invalid") == "true"
        tab.page.fill("#max_tokens", "16")
        tab.page.locator("#settings summary").click()
        tab.page.select_option("#cache-a", "bicache")
        assert tab.page.input_value("#config-a") == '{"refresh_interval":4}', "the example's"
        tab.page.select_option("#cache-a", "none")
        assert tab.page.input_value("#config-a") == "", "no other policy takes them"
        tab.page.evaluate("document.getElementById('config-a').value = '{depth'")
        refused(tab, "no JSON object")
        assert tab.page.evaluate("document.activeElement.id") == "config-a", "the fold opens"
        assert tab.page.get_attribute("#max_tokens", "aria-invalid") is None
        tab.page.fill("#config-a", "")
        tab.page.click("#run-a-only")
        tab.ran("a")
        assert tab.count("#run-problem:not([hidden])") == 0


@pytest.mark.thorough
def test_the_key_is_asked_for_and_a_busy_or_ending_server_said_so(browser: Any) -> None:
    key = "a-secret-key"
    llm = LLM("bundled-transit", cache="none", dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=1))
    with serving(llm, api_keys=[key], max_queue=0) as server, opened(browser, server.base, "#key") as tab:
        assert tab.count("#main:not([hidden])") == 0
        for wrong, words in (("wrong", "not known"), ("", "not empty")):
            tab.page.fill("#key", wrong)
            tab.page.keyboard.press("Enter")
            tab.says("#key-problem", words)
        tab.page.fill("#key", key)
        tab.page.keyboard.press("Enter")
        tab.shown("#pages li")
        kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, document.body.innerHTML])"
        assert key not in tab.page.evaluate(kept)
        assert tab.page.input_value("#key") == ""
        tab.page.click("#run-a-only")
        tab.ran("a")

        with held(server, steps=1) as hold, server.post(URL, {"messages": CHATS[0], **SLOW}):
            hold.wait()
            refused(tab, "The server is busy")
            server.service.engine.draining = True
            refused(tab, "about to stop")
        assert key not in "".join(tab.asked)
        tab.page.reload()
        tab.shown("#key-form:not([hidden])")


@pytest.mark.thorough
@pytest.mark.parametrize("width", [1200, 360])
def test_answers_have_the_form_that_was_typed(browser: Any, width: int) -> None:
    """On a model whose tokens can spell it."""
    llm = LLM("bundled-tariff", dtype="float32", device="cpu")
    with serving(llm) as own, opened(browser, own.base, viewport={"width": width, "height": 800}) as tab:
        tab.ask_for(8, block_length=8, steps=8)
        tab.page.locator("#form-of-answer summary").click()
        assert not tab.page.is_visible("#structured_outputs"), "any text needs no form"
        hints: set[str] = set()
        for kind, form, fits in (
            ("regex", "[0-9]{2}-[0-9]", r"\d\d-\d"),
            ("choice", "rope\n  soap\n\n", "rope|soap"),
            ("json", '{"type": "boolean"}', "true|false"),
        ):
            tab.page.select_option("#form-kind", kind)
            hints.add(tab.page.get_attribute("#structured_outputs", "placeholder"))
            tab.page.fill("#structured_outputs", form)
            tab.page.click("#run-b-only")
            tab.ran("b")
            assert re.fullmatch(fits, tab.text("#answer-b")), kind
        assert len(hints) == 3, "each kind has an example of its own"
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        tab.page.fill("#structured_outputs", "{")
        tab.page.click("#run-b-only")
        tab.says("#run-problem", "no JSON schema")
        tab.focused("#structured_outputs")
        tab.page.select_option("#form-kind", "regex")
        tab.page.fill("#structured_outputs", "(")
        tab.page.click("#run-b-only")
        tab.says("#run-problem", "structured_outputs")
        tab.forgive(400)
        assert tab.said == []


@pytest.mark.thorough
@pytest.mark.parametrize("width", [1200, 360])
def test_holes_are_typed_and_seen_to_be_filled(browser: Any, server: Running, width: int) -> None:
    with opened(browser, server.base, viewport={"width": width, "height": 800}) as tab:
        sent: list[dict[str, Any]] = []
        tab.page.on("request", lambda request: sent.append(request.post_data_json) if "chat" in request.url else None)
        tab.ask_for(16, block_length=4, steps=6)
        tab.page.fill("#canvas", "go [[2]] alder[[1-4]] arch")
        tab.page.click("#run-b-only")
        tab.ran("b")
        (body,) = sent
        assert "max_tokens" not in body
        parts = [{"text": "go "}, {"mask": 2}, {"text": " alder"}, {"mask": {"min": 1, "max": 4}}, {"text": " arch"}]
        assert body["canvas"] == parts
        assert tab.text("#answer-b").split() == api_text(server, body)[0].split()
        fixed = tab.page.locator("#run-b .token.given").all_inner_texts()
        assert " ".join(fixed).split() == ["go", "alder", "arch"]
        for step, filled in ((0, 1), (5, 6)):
            tab.slide("b", step)
            assert tab.count("#run-b .token.settled") == filled
            assert tab.page.locator("#run-b .token.given").all_inner_texts() == fixed, "they stand from the start"
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        tab.page.fill("#canvas", "no hole")
        tab.page.click("#run-b-only")
        tab.says("#run-problem", "canvas has no hole")
        tab.focused("#canvas")
        tab.forgive(400)
        assert tab.said == []
