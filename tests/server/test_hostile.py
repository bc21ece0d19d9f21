"""What a hostile client or template does spoils its own answers only."""

import json
import logging
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from remask.cli import main
from remask.engine.request import PendingRequest
from remask.engine.runner import Runner
from remask.llm import LLM
from remask.sampling.masked import MaskedDecoder
from remask.server.config import ServerConfig
from remask.server.intake import Intake
from remask.server.protocol.generation import ChatBody, CompletionBody
from remask.text.tokenizer import Tokenizer
from tests.goldens import model_dir
from tests.server.serving import CHATS, LONG, SLOW, URL, Running, at_once, bundled, make_llm, serving
from tests.server.test_kinds_served import sdar
from tests.text.test_chat_template import BILLIONS, ENDLESS
from tests.waiting import LONGEST_S, Clock, eventually

COMPLETIONS = "/v1/completions"
SEED = 4711  # of the request that is to blame


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    uniform = bundled("uniform", "auto")
    causal = sdar(tmp_path_factory.mktemp("models") / "sdar")
    with (
        serving() as masked,
        serving(uniform, model_names=["uniform"], sampling={"max_tokens": 32}) as other,
        serving(causal, model_names=["sdar"], sampling={}) as third,
    ):
        yield {"masked": masked, "uniform": other, "block_causal": third}


PROMPTS: dict[str, Any] = {
    "masked": "from ivy",
    "uniform": "In winter: route from Cairo?",
    "block_causal": list(range(10, 40)),
}
HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("masked", {"max_tokens": 8, "block_length": 8, "steps": 20_000_000}, "steps"),
    ("masked", {"max_tokens": 8, "steps": 2**62}, "steps"),
    ("masked", {"max_tokens": 2**62}, "max_tokens"),
    ("masked", {"max_tokens": 8, "stop": ["x"] * 350_000}, "stop"),
    ("masked", {"max_tokens": 8, "stop": "y" * 3_000_000}, "stop"),
    ("masked", {"max_tokens": 8, "stop_token_ids": [1] * 300_000}, "stop_token_ids"),
    ("uniform", {"max_tokens": 8, "block_length": 2**24, "steps_per_block": 2**24}, "steps_per_block"),
    ("uniform", {"steps_per_block": 2**40}, "steps_per_block"),
    ("uniform", {"uniform": {"correction_steps": 10**9}}, "uniform.correction_steps"),
    ("uniform", {"uniform": {"canvas_length": 2**62}}, "uniform.canvas_length"),
    ("block_causal", {"block_length": 2**62}, "block_length"),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("kind", "fields", "param"), HOSTILE, ids=[f"{k} {json.dumps(f)[:60]}" for k, f, _ in HOSTILE])
def test_numbers_and_lists_out_of_range_are_a_400_at_once(
    hosts: dict[str, Running], kind: str, fields: dict[str, Any], param: str
) -> None:
    host, ordinary = hosts[kind], {"prompt": PROMPTS[kind], "max_tokens": 8, "seed": 1}
    before = host.client.post(COMPLETIONS, json=ordinary)
    assert before.status_code == 200, before.text
    host.settle()
    steps = host.service.llm.engine.stats.steps
    response = host.client.post(COMPLETIONS, json={"prompt": PROMPTS[kind], **fields})
    assert host.service.llm.engine.stats.steps == steps
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert len(response.text) < 1000
    after = host.client.post(COMPLETIONS, json=ordinary)
    assert after.json()["choices"] == before.json()["choices"]
    host.settle()


def test_steps_beyond_the_tokens_are_legal_up_to_the_bound(hosts: dict[str, Running]) -> None:
    host = hosts["masked"]
    body = {"prompt": "from ivy", "max_tokens": 8, "block_length": 8, "ignore_eos": True, "cache": "none"}
    most = host.client.get("/get_model_info").json()["max_steps"]
    assert most == 4 * host.client.get("/get_model_info").json()["max_model_len"]
    usual, many = (host.client.post(COMPLETIONS, json={**body, "steps": steps}).json() for steps in (8, most))
    assert many["choices"][0]["text"] == usual["choices"][0]["text"]
    assert (many["remask"]["steps"], many["remask"]["forwards"]) == (most, 8)
    assert host.client.post(COMPLETIONS, json={**body, "steps": most + 1}).status_code == 400


def test_operators_widen_and_tighten_the_bounds() -> None:
    limits: dict[str, Any] = {
        "max_steps": 20_000_000,
        "max_request_row_layers": 2500,
    }
    with serving(make_llm(**limits)) as running:
        body = {"prompt": "from ivy", "max_tokens": 8, "block_length": 8, "ignore_eos": True, "cache": "none"}
        many = running.client.post(COMPLETIONS, json={**body, "steps": 20_000_000})
        assert many.status_code == 200, "idle steps take no time"
        assert many.json()["remask"]["steps"] == 20_000_000
        for fields, text in (
            ({"max_tokens": 64, "steps": 64, "block_length": 64}, "row-layers, and a request may take 2500"),
            ({"cache": "bicache", "cache_config": {"depth": 1}, "steps": 16, "max_tokens": 16}, "row-layers"),
        ):
            assert text in running.refusal(COMPLETIONS, {**body, **fields})["message"]


def blamed(pending: PendingRequest) -> bool:
    return pending.request.params.seed == SEED


def break_scoring(patch: pytest.MonkeyPatch) -> None:
    read = Runner.launch_scores

    def reads(self: Runner, hidden: Any, turns: Any) -> Any:
        if any(blamed(turn.member.pending) for turn in turns):
            raise RuntimeError("value cannot be converted without overflow")
        return read(self, hidden, turns)

    patch.setattr(Runner, "launch_scores", reads)


def break_choice(patch: pytest.MonkeyPatch) -> None:
    choose = MaskedDecoder.choose

    def chooses(self: MaskedDecoder, *args: Any) -> Any:
        if self._seed == SEED and self.step == 3:
            raise IndexError("out of range")
        return choose(self, *args)

    patch.setattr(MaskedDecoder, "choose", chooses)


@pytest.mark.thorough
@pytest.mark.parametrize("broken", [break_scoring, break_choice], ids=lambda each: str(each.__name__))
@pytest.mark.parametrize("stream", [False, True])
def test_what_raises_for_one_request_ends_it_alone(
    hosts: dict[str, Running], broken: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = hosts["masked"]
    asked = [{"messages": chat, **LONG} for chat in CHATS[:3]]
    expected = [host.chat(body).json()["choices"] for body in asked]
    bad = {"messages": CHATS[7], **LONG, "seed": SEED, "stream": stream}
    with monkeypatch.context() as patch:
        broken(patch)
        *answers, response = at_once(*(partial(host.chat, body) for body in (*asked, bad)))
    if stream and broken is break_choice:
        assert response.status_code == 200
        events = [line for line in response.text.splitlines() if line]
        assert events[-1] == "data: [DONE]"
        assert "could not be settled" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
    else:
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
    assert [answer.json()["choices"] for answer in answers] == expected
    assert host.client.get("/health").status_code == 200
    host.settle()


def test_a_lost_device_pass_is_survived(hosts: dict[str, Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """What had reported nothing is answered all the same, a stream that had gets an error event, and all goes on."""
    host = hosts["masked"]
    run_pass, failed = Runner.run, threading.Event()

    def runs(self: Runner, items: Any) -> Any:
        if not failed.is_set() and any(branch.ledger.step >= 5 for branch, _ in items):
            failed.set()
            raise torch.OutOfMemoryError("out of memory")
        return run_pass(self, items)

    monkeypatch.setattr(Runner, "run", runs)
    with host.client.stream(
        "POST", "/v1/chat/completions", json={"messages": CHATS[0], **LONG, "stream": True}
    ) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert failed.is_set()
    assert lines[-1] == "data: [DONE]"
    assert "the engine failed while it ran" in json.loads(lines[-2].removeprefix("data: "))["error"]["message"]
    assert host.ask().status_code == 200
    assert host.client.get("/health").status_code == 200
    assert "remask:engine_recoveries_total" in host.client.get("/metrics").text
    host.settle()


def test_a_step_that_takes_too_long_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go, begun, run_pass, clock = threading.Event(), threading.Event(), Runner.run, Clock()

    def runs(self: Runner, items: Any) -> Any:
        begun.set()
        assert go.wait(LONGEST_S)
        return run_pass(self, items)

    with serving(clock=clock, step_limit=4.0) as running, caplog.at_level(logging.ERROR, "remask.engine.async_engine"):
        monkeypatch.setattr(Runner, "run", runs)
        statuses: list[int] = []
        thread = threading.Thread(target=lambda: statuses.append(running.ask().status_code))
        thread.start()
        assert begun.wait(LONGEST_S)
        clock.now += 4.0
        assert running.client.get("/health").status_code == 200, "it has all of its limit"
        clock.now += 0.5
        refused = running.client.get("/health")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "step_overdue")
        assert [running.client.get(path).status_code for path in ("/ready", "/live")] == [503, 200]
        eventually(lambda: "a step has taken 4.5 s, and 4 s are allowed" in caplog.text)
        assert "chatcmpl-" in caplog.text or "-0" in caplog.text
        go.set()
        thread.join()
        assert statuses == [200]
        assert running.client.get("/health").status_code == 200
        counted = [
            line for line in running.client.get("/metrics").text.splitlines() if "engine_slow_steps_total{" in line
        ]
        assert [line.rsplit(" ", 1)[1] for line in counted] == ["1.0"]


def test_choices_of_one_seed_have_seeds_of_their_own(hosts: dict[str, Running]) -> None:
    service = hosts["masked"].service
    intake = service.intake
    chat = ChatBody.model_validate({"messages": CHATS[0], "n": 3, "seed": 5})
    assert [each.params.seed for each in intake.chat(chat, "x")] == [5, 6, 7]
    text = CompletionBody.model_validate({"prompt": ["from ivy", "from birch"], "n": 2, "seed": 2**63 - 1})
    assert [each.params.seed for each in intake.completion(text, "x")] == [2**63 - 1, 1, 2**63 - 1, 1]
    usual = Intake(service.llm, ServerConfig(model_names=["a"], sampling={"seed": 5}))
    plain = ChatBody.model_validate({"messages": CHATS[0], "n": 3})
    assert [each.params.seed for each in usual.chat(plain, "x")] == [5, 6, 7]


LLADA = str(model_dir("llada"))
GOOD = {"prompt_token_ids": [1, 2, 3], "sampling": {"max_tokens": 8}}


def test_generate_keeps_the_answers_beside_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_scoring(monkeypatch)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bad = {**GOOD, "sampling": {"max_tokens": 8, "seed": SEED}}
    source.write_text("\n".join(map(json.dumps, [GOOD, bad, GOOD])) + "\n", encoding="utf-8")
    files = ["--input", str(source), "--output", str(target)]
    assert main(["--quiet", "generate", "--model", LLADA, *files, "--dtype", "float32"]) == 1
    answers = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert ["error" in answer for answer in answers] == [False, True, False]
    assert "line 2: its pass failed: value cannot be converted" in capsys.readouterr().err


def test_a_tokenizer_that_fails_on_one_answer_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("bundled-transit", dtype="float32", device="cpu")
    usual = [output.text for output in llm.generate(["from ivy", "from birch"])]
    decode, calls = Tokenizer.decode, 0

    def decodes(self: Tokenizer, *args: Any, **more: Any) -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("no such piece")
        return decode(self, *args, **more)

    monkeypatch.setattr(Tokenizer, "decode", decodes)
    outputs = llm.generate(["from ivy", "from birch"])
    failed = [output.error is not None for output in outputs]
    assert sorted(failed) == [False, True]
    assert all(output.text == text for output, text in zip(outputs, usual, strict=True) if output.error is None)


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


@pytest.mark.thorough
def test_what_a_template_may_not_do_is_a_400() -> None:
    with serving(bundled("transit", "bicache", TEMPLATE)) as server:
        for word, reason in REASONS.items():
            error = server.refusal(URL, {"messages": [{"role": "user", "content": word}], **SHORT})
            assert error["type"] == "invalid_request_error"
            assert "The model's chat template fails on these messages: " in error["message"]
            assert reason in error["message"]
            server.answer(URL, {"messages": [{"role": "user", "content": "from ivy"}], **SHORT})
        server.settle()


@pytest.mark.thorough
def test_a_template_that_loops_stops_neither_the_event_loop_nor_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remask.text.chat_template.MAX_SECONDS", 10 * LONGEST_S)  # it loops until it is ended
    llm = bundled("transit", "bicache", TEMPLATE)
    assert llm.tokenizer is not None
    with serving(llm) as server:
        asked = {"messages": [{"role": "user", "content": "from ivy"}], **SLOW, "stream": True}
        with server.client.stream("POST", "/v1/chat/completions", json=asked) as stream:
            chunks = (line for line in stream.iter_lines() if line)
            next(chunks)
            statuses: list[int] = []

            def loop() -> None:
                body = {"messages": [{"role": "user", "content": "loop"}], **SHORT}
                statuses.append(server.client.post("/v1/chat/completions", json=body).status_code)

            template = llm.tokenizer._compiled_template
            assert template is not None
            idle = template._helpers.idle
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
