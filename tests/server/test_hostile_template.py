"""A chat template that goes beyond its limits is a 400 for who caused it, and nobody else waits for it."""

import threading

import pytest

from tests.server.serving import SLOW, make_llm, serving
from tests.text.test_chat_template import BILLIONS, ENDLESS
from tests.waiting import LONGEST_S, eventually

TEMPLATE = (
    "{% set said = messages[-1].content %}"
    f"{{% if said == 'loop' %}}{BILLIONS}{{% elif said == 'divide' %}}{{{{ 1 / 0 }}}}"
    f"{{% elif said == 'recurse' %}}{ENDLESS}{{% elif said == 'memory' %}}{{{{ 'x' * 10 ** 12 }}}}"
    "{% elif said == 'write' %}{% for a in range(90000) %}{{ 'x' * 1000 }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.content }} {% endfor %}"
)
REASONS = {
    "loop": "takes more than 1 s of processor time",
    "divide": "ZeroDivisionError: division by zero",
    "recurse": "calls itself too often",
    "memory": "needs more than 512 MiB of memory",
    "write": "writes more than 8388608 characters",
}
SHORT = {"max_tokens": 2, "block_length": 2, "steps": 1}


def test_what_a_template_may_not_do_is_a_400() -> None:
    llm = make_llm()
    assert llm.tokenizer is not None
    llm.tokenizer.use_chat_template(TEMPLATE)
    with serving(llm) as server:
        for word, reason in REASONS.items():
            answer = server.chat({"messages": [{"role": "user", "content": word}], **SHORT})
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert "The model's chat template fails on these messages: " in error["message"]
            assert reason in error["message"]
            answer = server.chat({"messages": [{"role": "user", "content": "from ivy"}], **SHORT})
            assert answer.status_code == 200, answer.text
        server.settle()


@pytest.mark.thorough
def test_a_template_that_loops_stops_neither_the_event_loop_nor_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remask.text.chat_template.MAX_SECONDS", 10 * LONGEST_S)  # it loops until it is ended
    llm = make_llm()
    assert llm.tokenizer is not None
    llm.tokenizer.use_chat_template(TEMPLATE)
    with serving(llm) as server:
        asked = {"messages": [{"role": "user", "content": "from ivy"}], **SLOW, "stream": True}
        with server.client.stream("POST", "/v1/chat/completions", json=asked) as stream:
            chunks = (line for line in stream.iter_lines() if line)
            next(chunks)
            statuses: list[int] = []

            def loop() -> None:
                body = {"messages": [{"role": "user", "content": "loop"}], **SHORT}
                statuses.append(server.client.post("/v1/chat/completions", json=body).status_code)

            template = llm.tokenizer._template
            assert template is not None
            idle = template._workers.idle
            (worker,) = idle
            looping = threading.Thread(target=loop)
            looping.start()
            try:
                eventually(lambda: not idle)
                for _ in range(6):
                    assert server.client.get("/health").status_code == 200
                    assert next(chunks), "the stream goes on meanwhile"
                assert not statuses
            finally:
                worker.kill()
                looping.join()
        assert statuses == [400]
        server.settle()
