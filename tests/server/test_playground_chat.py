"""The chat in a browser: stop, regenerate, edit, history, settings, and the request as curl and Python."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remask.checkpoint.source import resolve_model
from remask.llm import LLM
from remask.tasks.cards import card
from tests.server.browser import DONE, Tab, opened, sync_api
from tests.server.serving import Running, held, serving

pytestmark = pytest.mark.thorough


def kept(tab: Tab) -> list[dict[str, Any]]:
    values = tab.page.evaluate(
        "Object.entries(localStorage).filter(([k]) => k.startsWith('remask.chat.')).map(([, v]) => v)"
    )
    return [json.loads(value) for value in values]


def test_an_answer_is_watched_and_a_stopped_one_keeps_what_was_settled(browser: Any) -> None:
    """On a model that settles names here and there, where nothing can be said from left to right yet."""
    llm = LLM("bundled-tariff", cache="none", dtype="float32", device="cpu")
    with serving(llm, sampling={}) as server, opened(browser, server.base) as tab:
        with held(server, steps=4) as hold:
            tab.page.click("#offers button >> nth=0")
            hold.wait()
            tab.says(".of-model .about", "4 of 8 positions settled")
            assert tab.count(".forming .settled") == 4
            assert tab.count(".forming .draft") == 4
            settled = [text.strip() for text in tab.page.locator(".forming .settled").all_inner_texts()]
            tab.page.keyboard.press("Escape")
            tab.says(".of-model .about", "Stopped: 4 of 8 positions settled")
        assert tab.text(".of-model .said").replace("…", " ").split() == settled
        assert "…" in tab.text(".of-model .said"), "what is left open is seen"
        assert kept(tab)[0]["messages"][1]["versions"][0]["content"].replace("…", " ").split() == settled
        server.settle()
        tab.page.click(".of-model [aria-label^=Regenerate]")
        tab.says("#chat-status", "Answer:")
        known = card("bundled-tariff")
        assert known is not None
        assert tab.text(".of-model .said") == known.questions[0].answer
        assert "2/2" in tab.text(".of-model .acts")
        tab.page.click(".of-model .before")
        assert tab.text(".of-model .said").replace("…", " ").split() == settled, "the version before is kept too"
        assert tab.said == []


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def test_regenerating_uses_another_seed(tab: Tab, server: Running) -> None:
    sent = tab.sent()
    tab.page.fill("#chat-temperature", "2")
    tab.page.fill("#chat-length", "16")
    tab.say("where am i ?")
    for _ in range(3):
        tab.page.click(".of-model [aria-label^=Regenerate]")
        tab.idle()
    assert len({body["seed"] for body in sent}) == 4
    assert all(body["temperature"] == 2 and body["max_tokens"] == 16 for body in sent)
    texts = []
    for body in sent:
        asked = {name: value for name, value in body.items() if not name.startswith("stream")}
        texts.append(server.chat(asked).json()["choices"][0]["message"]["content"].strip())
    assert len(set(texts)) > 1
    for text in reversed(texts):
        # What a drawn text begins with may be Markdown's, such as a quotation's mark: all words are seen, and in order.
        assert words(tab.text(".of-model .said")) == words(text or "An empty answer.")
        tab.page.click(".of-model .before")
    tab.page.click("#reset-settings")
    tab.page.fill("#message", "and now ?")
    tab.page.press("#message", "Enter")
    tab.idle()
    tab.page.locator(".of-model [aria-label^=Regenerate]").last.click()
    tab.idle()
    assert "temperature" not in sent[-1]
    assert sent[-1]["seed"] != sent[-2]["seed"]
    assert "no seed changes the answer" in tab.page.locator(".about").last.inner_text()


def test_a_typed_seed_gives_the_same_answer_and_moves_where_it_is_regenerated(tab: Tab) -> None:
    sent = tab.sent()
    tab.page.click("#more-settings summary")
    tab.page.fill("#chat-settings [name=seed]", "7")
    tab.page.select_option("#chat-settings [name=cache]", "none")
    tab.say("a")
    tab.page.click(".of-model [aria-label^=Regenerate]")
    tab.idle()
    assert [(body["seed"], body["cache"]) for body in sent] == [(7, "none"), (8, "none")]


def test_the_turns_before_are_sent_where_that_is_set(tab: Tab) -> None:
    sent = tab.sent()
    tab.page.fill("#chat-settings [name=system]", "")
    assert tab.page.is_visible("#alone")
    tab.page.check("#chat-settings [name=turns]")
    assert not tab.page.is_visible("#alone")
    for text in ("one", "two"):
        tab.say(text)
    first = tab.text(".of-model .said >> nth=0")
    (first,) = [turn["versions"][0]["content"] for turn in kept(tab)[0]["messages"][1:2]]
    assert sent[1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "two"},
    ]
    tab.page.reload()
    tab.shown("#tabs:not([hidden])")
    assert tab.page.is_checked("#chat-settings [name=turns]"), "settings are kept"


def test_a_message_is_edited_and_what_follows_is_replaced(tab: Tab) -> None:
    for text in ("one", "two"):
        tab.say(text)
    edit = tab.page.locator(".of-user [aria-label='Edit this message']")
    tab.page.locator(".of-user").first.hover()
    edit.first.click()
    assert tab.page.input_value("#message") == "one"
    tab.focused("#message")
    tab.page.keyboard.press("Escape")
    assert tab.page.input_value("#message") == ""
    assert tab.count(".turn") == 4
    tab.page.locator(".of-user").first.hover()
    edit.first.click()
    tab.say("three")
    assert tab.page.locator(".of-user .said").all_inner_texts() == ["three"]
    assert [turn.get("content") for turn in kept(tab)[0]["messages"][::2]] == ["three"]


def test_an_answer_that_ended_by_its_length_goes_on(tab: Tab, server: Running) -> None:
    """As another version of it, whose beginning is what stood there."""
    known = card("bundled-transit")
    assert known is not None
    begun, sent = str(known.questions[0].answer).split(), tab.sent()
    tab.page.fill("#chat-length", "2")
    tab.page.click("#offers button >> nth=0")
    tab.says("#chat-status", "Answer:")
    assert tab.text(".of-model .said") == " ".join(begun[:2])
    tab.page.fill("#chat-length", "8")
    tab.page.click(".of-model [aria-label^='Go on']")
    tab.says(".of-model .acts", "2/2")
    tab.focused("#message")
    assert tab.text(".of-model .said") == " ".join(begun)
    assert sent[1]["messages"] == [*sent[0]["messages"], {"role": "assistant", "content": " ".join(begun[:2])}]
    assert (sent[1]["add_generation_prompt"], sent[1]["continue_final_message"]) == (False, True)
    assert tab.count(".of-model [aria-label^='Go on']") == 0, "it has come to its end"
    tab.page.click(".of-model [aria-label^=Regenerate]")
    tab.says(".of-model .acts", "3/3")
    assert sent[2]["messages"] == sent[1]["messages"]
    assert tab.text(".of-model .said") == " ".join(begun)
    tab.page.click(".of-model [aria-label*=curl]")
    assert '"continue_final_message": true' in tab.text("#as-curl")
    told = server.chat({name: value for name, value in sent[2].items() if not name.startswith("stream")}).json()
    assert tab.text(".of-model .said").endswith(told["choices"][0]["message"]["content"])


def test_an_answer_is_edited_and_goes_on_from_there(tab: Tab) -> None:
    """What follows it is replaced; where nothing comes, all is as it was and the text is still there."""
    sent = tab.sent()
    for text in ("one", "two"):
        tab.say(text)
    before = kept(tab)[0]["messages"]
    edit = tab.page.locator(".of-model [aria-label^='Edit this answer']").first
    edit.click()
    assert tab.page.input_value("#message") == before[1]["versions"][0]["content"]
    assert "goes on from your text" in tab.text("#editing")
    tab.page.click("#more-settings summary")
    tab.page.fill("#chat-settings [name=top_p]", "3")
    tab.say("  bluff > ")
    tab.says("#chat-problem", "refuses the field top_p")
    assert tab.page.input_value("#message") == "  bluff > "
    assert kept(tab)[0]["messages"] == before
    assert tab.count(".turn") == 4
    tab.forgive(400)
    tab.page.fill("#chat-settings [name=top_p]", "")
    tab.page.press("#message", "Enter")
    tab.idle()
    assert sent[-1]["messages"][-1] == {"role": "assistant", "content": "  bluff > "}
    asked, answered = kept(tab)[0]["messages"]
    assert asked == before[0]
    assert answered["shown"] == 1
    assert answered["versions"][1]["content"].startswith("  bluff > ")
    assert not tab.page.is_visible("#editing")
    tab.say("three")
    assert tab.count(".turn") == 4


def test_conversations_are_searched_renamed_and_deleted(tab: Tab) -> None:
    names = tab.page.locator("#conversations button:not(.act)")
    for text in ("the first", "the second", "the third"):
        tab.say(text)
        tab.page.keyboard.press("Control+Shift+O")
        tab.focused("#message")
        assert tab.count(".turn") == 0
    assert names.all_inner_texts() == ["the third", "the second", "the first"]
    tab.page.fill("#search", "SECOND")
    assert names.all_inner_texts() == ["the second"]
    names.first.click()
    assert tab.text("#chat-title") == "the second"
    tab.page.click("#rename")
    tab.page.keyboard.type("Renamed")
    tab.page.keyboard.press("Enter")
    tab.focused("#rename")
    assert tab.text("#chat-title") == "Renamed"
    tab.page.fill("#search", "")
    assert sorted(one["title"] for one in kept(tab)) == ["Renamed", "the first", "the third"]
    with tab.page.expect_download() as saved:
        tab.page.click("#export")
    with open(saved.value.path(), encoding="utf-8") as file:
        assert json.load(file)["title"] == "Renamed"
    tab.page.focus("#conversations li:first-child .act")
    tab.page.keyboard.press("Enter")
    assert tab.page.evaluate("document.activeElement.classList.contains('act')"), "the focus goes to a neighbour"
    assert len(kept(tab)) == 2
    tab.page.once("dialog", lambda dialog: dialog.dismiss())
    tab.page.click("#clear-history")
    assert len(kept(tab)) == 2
    tab.page.once("dialog", lambda dialog: dialog.accept())
    tab.page.click("#clear-history")
    assert kept(tab) == []
    tab.shown("#no-conversations")


def test_what_another_program_left_in_the_browser_is_no_conversation(tab: Tab) -> None:
    tab.say("mine")
    tab.page.evaluate(
        """() => {
            localStorage.setItem("remask.chat.x", "{");
            const other = { id: "y", title: "y", system: "", changed: 1, messages: [{ role: "assistant" }] };
            localStorage.setItem("remask.chat.y", JSON.stringify(other));
            localStorage.setItem("remask.settings", "[");
        }"""
    )
    tab.page.reload()
    tab.shown("#tabs:not([hidden])")
    assert tab.page.locator("#conversations button:not(.act)").all_inner_texts() == ["mine"]


def test_a_browser_that_keeps_nothing_says_so(browser: Any, server: Running) -> None:
    with opened(browser, server.base) as tab:
        tab.page.add_init_script(
            "Object.defineProperty(window, 'localStorage', { get() { throw new Error('refused') } })"
        )
        tab.page.reload()
        tab.shown("#tabs:not([hidden])")
        tab.say("where am i ?")
        assert tab.count(".of-model .about") == 1
        assert "keeps no more conversations" in tab.text("#chat-problem")
        assert tab.said == []


def test_the_shown_requests_give_the_same_answer(tab: Tab, server: Running) -> None:
    tab.page.fill("#chat-temperature", "0.5")
    tab.page.click("#more-settings summary")
    tab.page.fill("#chat-settings [name=block_length]", "4")
    tab.page.fill("#chat-settings [name=steps]", "8")
    tab.page.fill("#chat-length", "16")
    tab.say('it\'s "quoted" $HOME `x` \\ \n where am i ?')
    answer = kept(tab)[0]["messages"][1]["versions"][0]["content"]
    tab.page.click(".of-model [aria-label*=curl]")
    curl, python = tab.text("#as-curl"), tab.text("#as-python")
    tab.page.click("#copy-curl")
    tab.says("#copy-curl", "Cop")
    told = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=True).stdout
    assert json.loads(told)["choices"][0]["message"]["content"] == answer
    environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
    run = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{answer}\n"


def test_a_model_without_conversations_goes_on_with_a_text(browser: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(resolve_model("bundled-uniform"), tmp_path / "model"))
    words = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**words, "chat_template": None}))
    llm = LLM(str(folder), dtype="float32", device="cpu")
    with serving(llm, sampling={"max_tokens": 8}) as server, opened(browser, server.base) as tab:
        sent = tab.sent()
        assert "goes on with a text" in tab.text("#greeting")
        assert not tab.page.is_visible("#chat-settings [name=system]")
        assert tab.page.get_attribute("#message", "placeholder") == "A text to go on with"
        tab.say("The sky is")
        assert [body["prompt"] for body in sent] == ["The sky is"]
        tab.open("compare")
        assert not tab.page.is_visible("#ask [name=system]")
        tab.page.fill("#ask [name=user]", "The sky is")
        tab.page.click("#run")
        tab.shown("#side-by-side:not([hidden])")
        assert tab.said == []


def test_a_uniform_model_answers_the_questions_of_its_card(browser: Any) -> None:
    known = card("bundled-uniform")
    assert known is not None
    llm = LLM("bundled-uniform", dtype="float32", device="cpu")
    with serving(llm, sampling={}) as server, opened(browser, server.base) as tab:
        assert tab.text("#known-line") == known.answers
        for number in (0, 1):
            if number:
                tab.page.click("#new-chat")
            tab.page.locator("#offers button").nth(number).click()
            tab.says("#chat-status", "Answer:")
            assert tab.text(".of-model .said").split() == known.questions[number].answer.split()
            assert "The right answer" in tab.text(".of-model .about")
        tab.open("compare")
        tab.page.click("#run")
        tab.shown("#side-by-side:not([hidden])")
        assert tab.text("#answer-a") == tab.text("#answer-b") == known.questions[0].answer
        tab.open("fill")
        tab.page.click("#fill-run")
        tab.says("#fill-status", known.questions[0].answer)
        assert tab.said == []


def test_a_refused_setting_is_named_and_marked(tab: Tab) -> None:
    tab.page.click("#more-settings summary")
    tab.page.fill("#chat-settings [name=top_p]", "3")
    tab.page.click("#more-settings summary")
    tab.say("one")
    tab.says("#chat-problem", "refuses the field top_p")
    tab.focused("#chat-settings [name=top_p]")
    assert tab.page.input_value("#message") == "one"
    assert tab.count(".turn") == 0
    assert kept(tab) == []
    tab.forgive(400)
    tab.page.fill("#chat-settings [name=top_p]", "")
    tab.page.press("#message", "Enter")
    tab.idle()
    assert tab.count(".turn") == 2
    assert not tab.page.is_visible("#chat-problem")


def test_an_answer_goes_on_while_another_conversation_is_looked_at(tab: Tab, server: Running) -> None:
    tab.say("the first")
    with held(server):
        tab.page.click("#new-chat")
        tab.page.fill("#message", "the second")
        tab.page.press("#message", "Enter")
        sync_api.expect(tab.page.locator("#send")).to_have_attribute("aria-label", "Stop", timeout=DONE)
        tab.focused("#message")
        tab.page.locator("#conversations button", has_text="the first").click()
        assert tab.text(".of-user .said") == "the first"
    tab.idle()
    assert tab.text(".of-user .said") == "the first"
    tab.page.locator("#conversations button", has_text="the second").click()
    assert tab.text(".of-user .said") == "the second"
    assert tab.count(".of-model .about") == 1


def test_an_answer_of_a_page_that_was_closed_is_marked_and_a_deleted_one_stays_away(tab: Tab, server: Running) -> None:
    with held(server):
        tab.page.fill("#message", "where am i ?")
        tab.page.press("#message", "Enter")
        tab.says("#conversations", "where am i ?")
        tab.page.goto(f"{tab.base}/version")
    server.settle()
    tab.page.goto(f"{tab.base}/")
    tab.forgive(404)  # of /favicon.ico, as that page names no picture
    tab.page.click("#conversations button >> nth=0")
    assert "Not finished" in tab.text(".of-model .about")
    tab.page.click(".of-model [aria-label^=Regenerate]")
    tab.says(".of-model .acts", "2/2")
    assert "Not finished" not in tab.text(".of-model .about")
    with held(server, steps=2) as hold:
        tab.page.click(".of-model [aria-label^=Regenerate]")
        hold.wait()
        tab.says(".of-model .about", "positions settled")
        tab.page.click("#conversations .act")
        tab.idle()
    assert kept(tab) == []
    assert tab.count("#conversations li") == tab.count(".turn") == 0


def test_smollm2_answers_in_english_and_goes_on(browser: Any) -> None:
    known = card("smollm2")
    assert known is not None
    llm = LLM("smollm2", device="cpu")
    with (
        serving(llm, model_names=["smollm2"], sampling={"max_tokens": 32}) as server,
        opened(browser, server.base) as tab,
    ):
        assert tab.text("#known-line") == known.answers
        assert tab.text("#page-text") == known.system
        sent = tab.sent()
        tab.page.click(f"#offers button:has-text('{known.questions[1].question}')")
        tab.says("#chat-status", "Answer:")
        assert tab.text(".of-model .said") == known.questions[1].answer
        assert "The right answer" in tab.text(".of-model")
        tab.page.fill("#message", "Thank you!")
        tab.page.keyboard.press("Enter")
        tab.says(".of-model >> nth=1", "tokens/s")
        assert [each["role"] for each in sent[-1]["messages"]] == ["system", "user", "assistant", "user"]
        assert tab.said == []
