"""The page at `/` as a whole in a browser: its chat, hostile texts, keyboard, phone and key."""

import json
import re
from typing import Any

import pytest

from remask.checkpoint.source import resolve_model
from remask.engine.config import EngineConfig
from remask.llm import LLM
from remask.tasks.cards import card
from tests.server.browser import Tab, api_text, opened
from tests.server.serving import CHATS, SLOW, URL, Running, held, serving

ALLOWED = "P|H[3-6]|STRONG|EM|DEL|CODE|PRE|A|BR|HR|UL|OL|LI|BLOCKQUOTE|TABLE|THEAD|TBODY|T[RHD]|DIV|SPAN|BUTTON|svg|use"
HOSTILE = (
    "<script>document.title = 'hit'</script>",
    "<img src=x onerror=\"document.title = 'hit'\">",
    "text <svg onload=\"document.title = 'hit'\"> text",
    "<iframe srcdoc=\"<script>parent.document.title = 'hit'</script>\"></iframe>",
    "<style>* { display: none }</style><form action=/><input autofocus onfocus=\"document.title = 'hit'\">",
    "[a](javascript:document.title='hit')",
    "[a](JaVaScRiPt:document.title='hit') [b]( \tjava\nscript:alert(1))",
    "[a](data:text/html,<script>alert(1)</script>) [b](vbscript:x) [c](file:///etc/passwd) [d](//elsewhere.test/x)",
    "[a](/health) [b](blob:http://127.0.0.1/x) [c](ftp://elsewhere.test/x)",
    "![a](https://elsewhere.test/pixel.png) ![b](javascript:alert(1))",
    "[a](https://elsewhere.test/\"onmouseover=\"alert(1)) <https://elsewhere.test/'onclick='x>",
    "```html\"><img src=x onerror=alert(1)>\n</code></pre><script>document.title = 'hit'</script>\n```",
    "| a | <b onclick=alert(1)>b</b> |\n|---|---|\n| <script>x</script> | [x](javascript:x) |",
    "&lt;script&gt;document.title = 'hit'&lt;/script&gt; &#x3C;img src=x onerror=alert(1)&#x3E;",
    "- [ ] <details open ontoggle=alert(1)>\n- [x] __proto__ constructor ${alert(1)} {{7*7}}",
    "# <a href=javascript:alert(1)>title</a>\n\n[ref]: javascript:alert(1)\n\n[ref]",
    ">" * 20_000 + " deep",
    "*" * 20_000 + "[" * 20_000,
)


def test_a_chat_is_kept_and_its_answers_are_the_apis(tab: Tab, server: Running) -> None:
    known = card("bundled-transit")
    assert known is not None
    sent = tab.sent()
    assert tab.text("#known-line") == known.answers
    offers = tab.page.locator("#offers button")
    assert offers.all_inner_texts() == [each.question for each in known.questions]
    offers.nth(1).click()
    tab.says("#chat-status", f"Answer: {known.questions[1].answer}")
    assert tab.text(".of-model .said") == known.questions[1].answer
    assert "The right answer" in tab.text(".of-model .about")
    tab.say("from ash go 1 , where am i ?")
    assert [len(body["messages"]) for body in sent] == [2, 2], "the model knows one question"
    body = {name: value for name, value in sent[1].items() if not name.startswith("stream")}
    assert (
        tab.page.locator(".of-model .said").last.inner_text()
        == server.chat(body).json()["choices"][0]["message"]["content"]
    )
    tab.page.locator(".of-model [aria-expanded]").last.click()
    assert tab.count(".steps .canvas .token.settled") > 3, "it is seen how it formed"

    said = tab.page.locator(".said").all_inner_texts()
    tab.page.reload()
    tab.page.click("#conversations button >> nth=0")
    assert tab.page.locator(".said").all_inner_texts() == said
    tab.page.click("#conversations .act")
    assert tab.count("#conversations li") == tab.count(".turn") == 0
    tab.page.reload()
    tab.shown("#no-conversations")


def test_a_hostile_answer_does_nothing(tab: Tab) -> None:
    """Texts of the model and of users become elements of a few kinds, whose links lead away and do nothing else."""
    made = tab.page.evaluate(
        """async (texts) => {
            const { markdown } = await import("./playground/shared/markdown.js");
            const place = document.createElement("div");
            document.getElementById("log").append(place);
            for (const text of texts) place.append(...markdown(text));
            await new Promise((done) => setTimeout(done, 50));
            const all = [...place.querySelectorAll("*")];
            return {
                names: [...new Set(all.map((each) => each.tagName))],
                attributes: [...new Set(all.flatMap((each) => each.getAttributeNames()))],
                links: [...place.querySelectorAll("a")].map((each) => [each.href, each.rel, each.target]),
                said: place.textContent,
            };
        }""",
        list(HOSTILE),
    )
    assert [name for name in made["names"] if not re.fullmatch(ALLOWED, name)] == []
    assert set(made["attributes"]) <= {
        "class",
        "href",
        "rel",
        "target",
        "tabindex",
        "role",
        "aria-label",
        "aria-hidden",
        "title",
        "type",
    }
    assert {tuple(rest) for _, *rest in made["links"]} == {("noopener noreferrer nofollow", "_blank")}
    assert all(re.match(r"https?://|mailto:", link) for link, *_ in made["links"])
    assert "<script>document.title = 'hit'</script>" in made["said"], "it is shown as what it is"

    answer = "\n\n".join(HOSTILE[:15])
    chunk = {"choices": [{"index": 0, "delta": {"content": answer}, "finish_reason": "stop"}]}
    work = {"steps": 1, "forwards": 1, "row_layers": 1, "prefix_depth": 0}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    events = [chunk, {"choices": [], "usage": usage, "remask": work}]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    tab.page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=stream))
    tab.say(HOSTILE[1])
    tab.says(".of-model .said", "onload")
    tab.page.reload()
    tab.page.click("#conversations button >> nth=0")
    tab.says(".of-model .said", "onload")
    assert tab.page.title() == "Chat · remask"
    assert tab.text(".of-user .said") == HOSTILE[1]
    assert tab.count(".said img, .said script, .said iframe, .said style, .said form") == 0


def test_two_policies_side_by_side_show_what_the_api_says(tab: Tab, server: Running) -> None:
    tab.open("compare")
    sent = tab.sent()
    tab.ask_for(16, block_length=16, steps=16)
    tab.page.click("#run")
    tab.shown("#side-by-side:not([hidden])")
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


def focus_path(tab: Tab, last: str) -> list[str]:
    """The names of what Tab leads to, until `last`. Each must be seen to have the focus."""
    seen: list[str] = []
    while not seen or seen[-1] != last:
        tab.page.keyboard.press("Tab")
        seen.append(tab.page.evaluate("document.activeElement.id || document.activeElement.name || ''"))
        assert len(seen) < 60, seen
        drawn = tab.page.evaluate(
            """(([e, around]) => e.matches(":focus-visible")
                && [e, around].some((each) => getComputedStyle(each).outlineStyle !== "none")
            )([document.activeElement, document.activeElement.parentElement])"""
        )
        assert drawn, f"the focus on {seen[-1]!r} is not seen"
    return [name for name in seen if name]


@pytest.mark.thorough
def test_everything_is_reached_by_keyboard(tab: Tab) -> None:
    tab.focused("#message")
    tab.page.focus(".skip")
    middle = ["tab-chat", "theme", "new-chat", "log", "message", "send"]
    settings = ["system", "chat-temperature", "chat-temperature-slider", "chat-length", "chat-length-slider", "forming"]
    assert focus_path(tab, "next-request") == [*middle, *settings, "turns", "reset-settings", "next-request"]
    tab.page.focus("#tab-chat")
    for name, key in (
        ("compare", "ArrowRight"),
        ("memory", "End"),
        ("chat", "ArrowRight"),
        ("memory", "ArrowLeft"),
        ("chat", "Home"),
        ("compare", "ArrowRight"),
    ):
        tab.page.keyboard.press(key)
        tab.focused(f"#tab-{name}")
        tab.shown(f"#{name}:not([hidden])")
        assert tab.page.evaluate("location.hash") == f"#/{name}"
        assert tab.count("[role=tabpanel]:not([hidden])") == tab.count("[role=tab][aria-selected=true]") == 1
    wanted = ["user", "run", "run-a-only", "stop", "system", "cache_a", "cache_b", "steps", "config_b"]
    assert [name for name in focus_path(tab, "config_b") if name in wanted] == wanted
    tab.page.go_back()
    tab.shown("#chat:not([hidden])")
    unnamed = tab.page.evaluate(
        """[...document.querySelectorAll("input, select, textarea, button")]
            .filter((each) => !each.labels?.length && !each.ariaLabel && !each.textContent.trim())
            .map((each) => each.outerHTML)"""
    )
    assert unnamed == []


def brightness(tab: Tab, age: str) -> float:
    """The mean of red, green and blue, each from 0 to 1, behind a settled token of the legend."""
    colour = str(tab.page.evaluate(f"getComputedStyle(document.querySelector('.token.settled{age}')).backgroundColor"))
    assert colour.startswith("color(srgb ")
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def top(tab: Tab, selector: str) -> float:
    found: float = tab.page.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().top + scrollY")
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("width", [360, 820])
def test_narrow_screens_need_no_sideways_scrolling(browser: Any, server: Running, width: int) -> None:
    settings: dict[str, Any] = {
        "viewport": {"width": width, "height": 740},
        "color_scheme": "dark",
        "reduced_motion": "reduce",
        "has_touch": True,
    }
    with opened(browser, server.base, **settings) as tab:
        tab.page.click("#offers button >> nth=0")
        tab.says("#chat-status", "Answer:")
        tab.page.click(".of-model [aria-expanded]")
        assert tab.fits()
        assert tab.page.evaluate("document.querySelector('#message').getBoundingClientRect().bottom < innerHeight")
        for side, inside in (("history", "#conversations li"), ("settings", "#chat-temperature")):
            assert not tab.page.is_visible(inside)
            tab.page.click(f"#open-{side}")
            tab.shown(inside)
            tab.page.keyboard.press("Escape")
            tab.focused(f"#open-{side}")
            assert not tab.page.is_visible(inside)
        tab.page.click(".of-model [aria-label*=curl]")
        assert tab.fits()
        tab.page.click("#close-code")

        tab.open("compare")
        tab.page.select_option("#ask [name=cache_a]", "bicache+block-dual")
        tab.page.click("#run")
        tab.shown("#side-by-side:not([hidden])")
        assert tab.fits()
        assert tab.text("#answer-a") == tab.text("#answer-b") != ""
        if width < 800:
            assert top(tab, "#answer-b") < 740, "the answers are seen without scrolling"
            for each in (
                "#ask [name=system]",
                "#ask [name=cache_a]",
                "#ask [name=max_tokens]",
                "#ask .settings",
                "#side-by-side",
                ".card.run",
            ):
                assert top(tab, "#answer-b") < top(tab, each), f"{each} stands above the answer"
        assert tab.page.evaluate("getComputedStyle(document.querySelector('.token')).transitionDuration") == "0s"
        tab.slide("a", 3)
        tab.page.click("#run-a .replay")
        assert tab.text("#run-a .scrub-text").startswith("Step 1 "), "who wants no motion gets no replay"
        for name in ("fill", "decide", "tools", "memory"):
            tab.open(name)
            assert tab.fits(), name
        tab.page.click("#add-shared")
        tab.says("#pages-status", "Request 1")
        assert tab.fits()

        ground = "getComputedStyle(document.documentElement).backgroundColor"
        dark = tab.page.evaluate(ground)
        assert brightness(tab, ".late") < brightness(tab, ".early") - 0.1, "later is darker"
        tab.page.emulate_media(color_scheme="light")
        tab.shown("html[data-theme=light]")
        light = tab.page.evaluate(ground)
        assert dark == "rgb(16, 21, 20)" != light
        assert brightness(tab, ".late") < brightness(tab, ".early") - 0.1
        tab.page.click("#theme")
        assert tab.page.evaluate(ground) == dark, "it can be chosen"
        tab.page.reload()
        tab.shown("#tabs:not([hidden])")
        assert tab.page.evaluate(ground) == dark, "and is remembered"
        tab.page.click("#theme")
        assert tab.page.evaluate(ground) == light
        assert tab.said == []


@pytest.mark.thorough
def test_another_model_promises_nothing(browser: Any) -> None:
    llm = LLM(str(resolve_model("bundled-transit")), cache="none", dtype="float32", device="cpu")
    with serving(llm) as server, opened(browser, server.base) as tab:
        for hidden in ("#known-line", "#offers", "#alone"):
            assert not tab.page.is_visible(hidden)
        assert tab.page.input_value("#chat-settings [name=system]") == ""
        assert tab.page.is_checked("#chat-settings [name=turns]"), "others know conversations"
        tab.open("compare")
        for hidden in ("#expected", "#another"):
            assert not tab.page.is_visible(hidden)
        tab.open("fill")
        assert "The sky is" in tab.page.input_value("#fill [name=canvas]")
        tab.open("decide")
        assert tab.page.input_value("#decide [name=question]") == ""


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
        tab.shown("#main:not([hidden])")
        assert tab.page.input_value("#key") == ""
        tab.page.click("#offers button >> nth=0")
        tab.says("#chat-status", "Answer:")
        tab.page.click(".of-model [aria-label*=curl]")
        assert "REMASK_API_KEY" in tab.text("#as-curl")
        assert "REMASK_API_KEY" in tab.text("#as-python")
        tab.page.click("#close-code")
        kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, document.body.innerHTML])"
        assert key not in tab.page.evaluate(kept)

        with held(server, steps=1) as hold, server.post(URL, {"messages": CHATS[0], **SLOW}):
            hold.wait()
            for words in ("The server is busy", "about to stop"):
                tab.say("again")
                tab.says("#chat-problem", words)
                assert tab.page.input_value("#message") == "again", "what was not answered can be sent again"
                assert tab.count(".turn") == 2
                server.service.engine.draining = True
        assert key not in "".join(tab.asked)
        tab.page.reload()
        tab.shown("#key-form:not([hidden])")
