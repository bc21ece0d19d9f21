"""Chat templates run with limits, and give what transformers gives."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from remask.errors import ConfigError
from remask.text.chat_template import MAX_CHARACTERS, ChatTemplate
from tests.leftovers import children
from tests.text.test_tokenizer import dream_folder, tokenizer, turn
from tests.waiting import LONGEST_S, ended, eventually

CHAT = [turn("system", "be brief"), turn("user", "  Grüße, 你好 \U0001f600\u2028 \ud800 "), turn("assistant", "a\n\nb")]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
BILLIONS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
ENDLESS = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"


@pytest.fixture(autouse=True)
def _no_process_stays() -> Iterator[None]:
    before = children(os.getpid())
    yield
    gc.collect()
    assert children(os.getpid()) <= before


@pytest.mark.thorough
@pytest.mark.parametrize(
    "text",
    [
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
        "{% for m in messages %}\n  {% if loop.first %}first{% endif %}\n{{ m | tojson }}{% endfor %}\n",
        "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ loop.index }}{% endfor %}",
        "{% set n = namespace(seen=0) %}{% for m in messages %}{% set n.seen = n.seen + 1 %}{% endfor %}{{ n.seen }}",
        "{% macro turn(m) %}<{{ m.role }}>{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{{ strftime_now('%Y') }}{{ messages[1:] | length }}{{ tools is none }}{{ documents is none }}{{ absent }}",
        "{{ dict(a=1) | tojson(indent=2) }}{{ messages | map(attribute='role') | join(',') }}{{ 'x' * 3 }}",
        "{{ add_generation_prompt }}{{ messages[0].absent is defined }}{{ messages[0].none is defined }}",
    ],
)
def test_a_template_gives_what_transformers_gives(text: str) -> None:
    chat = [{**message, "none": None} for message in CHAT]
    plain: Any = [{key: value for key, value in message.items() if value is not None} for message in chat]
    tokens: dict[str, Any] = dict(TOKENS)
    for prompt in (True, False):
        rendered: Any = render_jinja_template([plain], chat_template=text, add_generation_prompt=prompt, **tokens)
        assert ChatTemplate(text, TOKENS).render(chat, add_generation_prompt=prompt) == rendered[0][0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ 1 / 0 }}", "fails on these messages: ZeroDivisionError: division by zero"),
        ("{{ messages[0].content + 1 }}", "fails on these messages: TypeError"),
        ("{{ 'a' | int(base=99) }}{{ [] | first | length }}{{ {}.pop }}{{ 'x'.index('y') }}", "fails on .* ValueError"),
        (ENDLESS, "fails on these messages: it calls itself too often"),
        ("{% for a in range(10) recursive %}{{ loop([a]) }}{% endfor %}", "calls itself too often"),
        (BILLIONS, r"fails on these messages: it takes more than 1 s of processor time"),
        ("{{ 10 ** (10 ** 8) }}", "takes more than 1 s of processor time"),
        ("{{ range(10 ** 9) }}", "fails on these messages: OverflowError: Range too big"),
        ("{{ 'x' * 10 ** 12 }}", "needs more than 512 MiB of memory"),
        ("{{ '%1000000000d' % 7 }}", "needs more than 512 MiB of memory"),
        ("{{ 'x' * 9000000 }}", f"it writes more than {MAX_CHARACTERS} characters"),
        ("{% for a in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", "writes more than 8388608 characters"),
        ("{{ raise_exception('system turns first') }}", "refuses these messages: system turns first$"),
        ("{{ raise_exception('x' * 10000) }}", "refuses these messages: x{500}$"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages: access to attribute '__class__'"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "refuses these messages: a namespace takes no name"),
        ("{{ messages.append(1) }}", "refuses these messages: access to attribute 'append'"),
        ("{% include '/etc/passwd' %}", "fails on these messages: TypeError: no loader"),
        ("{% for %}", "refuses these messages: "),
        ("(" * 3 + "{{" + "(" * 3000 + "}}", "these messages: "),
    ],
)
def test_what_a_template_may_not_do_is_an_error_of_ours(text: str, reason: str) -> None:
    template = ChatTemplate(text, {})
    for _ in range(2):  # it is as usable after an error as before it
        with pytest.raises(ConfigError, match=rf"The model's chat template .*{reason}"):
            template.render(CHAT, add_generation_prompt=True)


def test_a_process_is_kept_and_replaced_once_it_is_gone() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    before = children(os.getpid())
    assert template.render(CHAT, add_generation_prompt=True) == "be brief"
    (first,) = children(os.getpid()) - before
    assert template.render(CHAT, add_generation_prompt=True) == "be brief"
    assert children(os.getpid()) - before == {first}
    os.kill(first, signal.SIGKILL)
    eventually(lambda: ended(first))
    assert template.render(CHAT, add_generation_prompt=True) == "be brief"
    assert first not in children(os.getpid())


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(3)",
        "import sys\nsys.stdout.buffer.write(b'A' + (99).to_bytes(8, 'little') + b'half')\nraise SystemExit(3)",
    ],
)
def test_a_process_that_ends_early_is_an_error_of_ours(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a broken pipe nor a part of the text gets out."""
    monkeypatch.setattr("remask.machine.helper._PROGRAM", program)
    template = ChatTemplate("x" * 1_000_000, {})
    before = children(os.getpid())
    for _ in range(2):
        with pytest.raises(ConfigError, match="its process ended with status 3"):
            template.render(CHAT, add_generation_prompt=True)
    assert children(os.getpid()) == before


@pytest.mark.thorough
def test_threads_render_at_the_same_time_and_get_their_own() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    before = children(os.getpid())

    def own(number: int) -> bool:
        text = f"{number} " * (number % 7) * 3000
        return template.render([turn("user", text)], add_generation_prompt=True) == text

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(own, range(200)))
    assert len(children(os.getpid()) - before) <= 4


def test_a_template_that_runs_long_holds_up_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remask.text.chat_template.MAX_SECONDS", 10 * LONGEST_S)  # it loops until it is ended
    template = ChatTemplate(f"{{% if messages[0].content == 'loop' %}}{BILLIONS}{{% endif %}}ok", {})

    def loop() -> None:
        with pytest.raises(ConfigError, match="its process ended with status -9"):
            template.render([turn("user", "loop")], add_generation_prompt=True)

    before = looping = children(os.getpid())
    slow = threading.Thread(target=loop)
    slow.start()
    try:
        eventually(lambda: children(os.getpid()) - before)
        looping = children(os.getpid())
        for _ in range(20):
            assert template.render([turn("user", "a")], add_generation_prompt=True) == "ok"
        assert slow.is_alive()
    finally:
        for each in looping - before:
            os.kill(each, signal.SIGKILL)
        slow.join()


def test_values_that_cannot_be_sent_are_refused() -> None:
    template = ChatTemplate("ok", {})
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (object(), deep):
        with pytest.raises(ConfigError, match="must hold texts, numbers, lists and objects only"):
            template.render([{"role": "user", "content": "a", "more": value}], add_generation_prompt=True)


def test_its_process_ends_with_the_one_that_made_it() -> None:
    program = (
        "import os, signal\n"
        "from remask.text.chat_template import ChatTemplate\n"
        "template = ChatTemplate('ok', {})\n"
        "template.render([{'role': 'user', 'content': 'a'}], add_generation_prompt=True)\n"
        "print(template._helpers.idle[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    eventually(lambda: ended(int(done.stdout)))


def test_a_tokenizer_takes_another_template(tmp_path: Path) -> None:
    found = tokenizer(dream_folder(tmp_path, chat_template="{{ eos_token }}one"))
    assert found.render_chat(CHAT) == "<|endoftext|>one"
    found.use_chat_template("two")
    assert found.render_chat(CHAT) == "two"
    found = tokenizer(dream_folder(tmp_path, chat_template=[{"name": "a", "template": "x"}]))
    with pytest.raises(ConfigError, match="several chat templates and no default"):
        found.render_chat(CHAT)
