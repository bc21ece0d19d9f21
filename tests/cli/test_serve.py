"""`remask serve` as a process: it starts as told, and SIGTERM under load loses nothing that was accepted."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from remask.cli import main
from remask.server.config import bind, url_of
from tests.checkpoint import checkpoints
from tests.server.serving import CHATS, LONG, URL
from tests.waiting import LONGEST_S, eventually

START = "import sys; from remask.cli import main; sys.exit(main())"
# As `START`, with an engine that runs its first step when its standard input ends.
HELD = f"""
import sys, threading
from remask.engine.engine import Engine
step, go = Engine.step, threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), go.set()), daemon=True).start()
Engine.step = lambda engine: go.wait() and step(engine)
{START}
"""


class Process:
    def __init__(self, *words: str, start: str = START, **environment: str) -> None:
        self.lines: list[str] = []
        command = [sys.executable, "-c", start, "serve", "--port", "0", "--dtype", "float32", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        eventually(lambda: self.process.poll() is not None or self._url() is not None)
        assert self.process.poll() is None, self.lines
        self.base = self._url() or ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def _url(self) -> str | None:
        found = re.search(r"running on (http://127\.0\.0\.1:\d+)", "".join(self.lines))
        return None if found is None else found.group(1)

    def announced(self) -> dict[str, Any]:
        """The line that tells every choice."""
        (line,) = [line for line in self.lines if "remask serve: {" in line]
        told: dict[str, Any] = json.loads(line.split("remask serve: ", 1)[1])
        return told

    def accepted(self) -> int:
        text = httpx.get(f"{self.base}/metrics", timeout=LONGEST_S).text
        counts = re.findall(r"^remask:num_requests_(?:running|waiting)\{.*?\} (\S+)", text, re.MULTILINE)
        return int(sum(map(float, counts)))

    def let_go(self) -> None:
        """Let the engine of a `HELD` process run."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self) -> int:
        """Its exit status, after SIGTERM if it still runs."""
        self.let_go()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(LONGEST_S)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


@contextmanager
def served(*words: str, start: str = START, **environment: str) -> Iterator[Process]:
    process = Process(*words, start=start, **environment)
    try:
        yield process
    finally:
        process.end()


@pytest.mark.thorough
def test_sigterm_under_load_loses_no_accepted_request(tmp_path: Path) -> None:
    """16 at a time, half of them waiting; what is accepted is answered in full, what comes later gets a 503."""
    words = ["bundled-transit", "--max-num-seqs", "4", "--drain-timeout", "600"]
    words += ["--profile-dir", str(tmp_path / "trace"), "--profile-steps", "4"]
    with served(*words, start=HELD) as process, ThreadPoolExecutor(17) as pool:
        with httpx.Client(base_url=process.base, timeout=LONGEST_S, limits=httpx.Limits(max_connections=40)) as client:
            bodies = [{"messages": CHATS[i], **LONG, "seed": i, "stream": i % 2 == 0} for i in range(16)]
            answers = [pool.submit(client.post, URL, json=body) for body in bodies]
            eventually(lambda: process.accepted() == 16)
            process.process.send_signal(signal.SIGTERM)
            eventually(lambda: client.get("/health").status_code == 503)
            late = client.post(URL, json={"messages": CHATS[0]})
            assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
            process.let_go()
            for answer, body in zip(answers, bodies, strict=True):
                response = answer.result()
                assert response.status_code == 200
                if body["stream"]:
                    assert response.text.endswith("data: [DONE]\n\n")
                    assert '"finish_reason":"length"' in response.text
                else:
                    assert response.json()["usage"]["completion_tokens"] == 48
        assert process.process.wait(LONGEST_S) == 0
    assert any("draining: 16 requests" in line for line in process.lines)
    trace = json.loads((tmp_path / "trace" / "steps.trace.json").read_text(encoding="utf-8"))
    assert any(event.get("name", "").startswith("aten::") for event in trace["traceEvents"])


class Clients:
    """Clients that send small requests one after the other, each again until it is answered."""

    def __init__(self, base: str) -> None:
        self.base, self.stopped = base, threading.Event()
        self.statuses: Counter[int] = Counter()
        self.unreached = 0  # requests that no server took
        self.answers: dict[int, set[str]] = {}
        self._lock = threading.Lock()

    def run(self, number: int) -> None:
        """One client. Its question is the same every time."""
        body = {"messages": CHATS[number], **LONG, "max_tokens": 16, "steps": 16}
        # Each request has a connection of its own, so that none is sent on one that is just being closed.
        with httpx.Client(timeout=LONGEST_S, limits=httpx.Limits(max_keepalive_connections=0)) as client:
            while not self.stopped.is_set():
                try:
                    self._note(number, client.post(f"{self.base}{URL}", json=body))
                except httpx.TransportError:
                    with self._lock:
                        self.unreached += 1
                    time.sleep(0.2)

    def _note(self, number: int, response: httpx.Response) -> None:
        with self._lock:
            self.statuses[response.status_code] += 1
            if response.status_code == 200:
                text = response.json()["choices"][0]["message"]["content"]
                self.answers.setdefault(number, set()).add(text)
        if response.status_code == 503:
            time.sleep(0.2)


def answered(process: Process) -> int:
    """The chats that a process has answered, by its access log."""
    return sum('"path": "/v1/chat/completions", "status": 200' in line for line in process.lines)


@pytest.mark.thorough
def test_a_server_is_restarted_on_its_port_under_load() -> None:
    """What the first process accepts it answers in full; what it refuses the second one answers, as the first would.

    Clients that hold connections open without a request keep neither from stopping.
    """
    with ThreadPoolExecutor(6) as pool, ExitStack() as stack:
        first = stack.enter_context(served("bundled-transit", "--max-num-seqs", "2", "--drain-timeout", "600"))
        port = int(first.base.rsplit(":", 1)[1])
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(20)]
        for each in idle[:10]:
            each.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
        clients = Clients(first.base)
        stack.callback(clients.stopped.set)
        running = [pool.submit(clients.run, number) for number in range(6)]
        eventually(lambda: clients.statuses[200] >= 12)
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(LONGEST_S) == 0
        first.end()
        by_first = answered(first)
        assert not any("are cancelled" in line for line in first.lines)
        second = stack.enter_context(served("bundled-transit", "--max-num-seqs", "2", "--port", str(port)))
        assert second.base == first.base
        before = clients.statuses[200]
        eventually(lambda: clients.statuses[200] >= before + 12)
        clients.stopped.set()
        for client in running:
            client.result()
        assert second.end() == 0
        assert set(clients.statuses) <= {200, 503}
        assert clients.unreached > 0, "between the two nobody listens"
        assert by_first + answered(second) == clients.statuses[200], "every answer has reached its client"
        assert all(len(texts) == 1 for texts in clients.answers.values()), "both give the same answers"


@pytest.mark.thorough
def test_flags_of_a_file_and_of_the_command_line(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")
    config = tmp_path / "serve.yaml"
    config.write_text(
        f"model: bundled-tariff\nserved-model-name: [one, two]\nmax_queue: 7\ncache: none\nseed: 3\nthreads: 2\n"
        f"chat_template: {template}\nsampling: {{max_tokens: 8, block_length: 2}}\n",
        encoding="utf-8",
    )
    words = ["--config", str(config), "--max-queue", "9", "--log-level", "debug"]
    with served(*words, REMASK_API_KEY="from-the-environment") as process:
        told = process.announced()
        assert told["names"] == ["one", "two"]
        assert told["threads"] == 2
        assert (told["max_queue"], told["cache"], told["seed"], told["api_keys"]) == (9, "none", 3, 1)
        assert told["sampling"] == {"max_tokens": 8, "block_length": 2, "steps": 8}, "the model's steps are kept"
        assert told["chat_template"] == str(template)
        assert httpx.get(f"{process.base}/v1/models", timeout=LONGEST_S).status_code == 401
        headers = {"Authorization": "Bearer from-the-environment"}
        names = httpx.get(f"{process.base}/v1/models", headers=headers, timeout=LONGEST_S).json()["data"]
        assert [name["id"] for name in names] == ["one", "two"]
        chat = {"messages": [{"role": "user", "content": "from abbey"}]}
        tokens = httpx.post(f"{process.base}/tokenize", json=chat, headers=headers, timeout=LONGEST_S).json()["tokens"]
        plain = httpx.post(
            f"{process.base}/tokenize", json={"prompt": "from abbey"}, headers=headers, timeout=LONGEST_S
        ).json()["tokens"]
        assert tokens == plain, "the template writes no roles"
    assert not any("from-the-environment" in line for line in process.lines)


@pytest.mark.thorough
def test_the_seed_of_the_server_makes_its_draws_reproducible() -> None:
    def draw() -> list[str]:
        body = {"messages": CHATS[0], "temperature": 2.0, "ignore_eos": True}
        with served("bundled-transit", "--seed", "11") as process:
            answers = [httpx.post(f"{process.base}{URL}", json=body, timeout=LONGEST_S).json() for _ in range(3)]
        return [answer["choices"][0]["message"]["content"] for answer in answers]

    first = draw()
    assert len(set(first)) > 1
    assert draw() == first


@pytest.mark.thorough
def test_random_weights_are_served_with_a_tokenizer_of_bytes() -> None:
    with served("llada-tiny", "--load-format", "dummy", "--quantization", "int8", "--log-level", "info") as process:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "ignore_eos": True}
        answer = httpx.post(f"{process.base}{URL}", json=body, timeout=LONGEST_S).json()
        ids = {"prompt": [65, 66, 67], "max_tokens": 8, "ignore_eos": True}
        completion = httpx.post(f"{process.base}/v1/completions", json=ids, timeout=LONGEST_S).json()
    assert answer["usage"]["completion_tokens"] == completion["usage"]["completion_tokens"] == 8
    assert completion["choices"][0]["text"]
    assert any("quantization=int8 (" in line and "tokens of K/V in bfloat16)" in line for line in process.lines)


@pytest.mark.thorough
def test_a_model_without_a_depth_table_is_served_at_once(tmp_path: Path) -> None:
    """Exactly, and the log says how to get a table."""
    words = ["llada-tiny", "--load-format", "dummy", "--audit", "off"]
    with served(*words, XDG_CACHE_HOME=str(tmp_path)) as process:
        assert httpx.get(f"{process.base}/get_model_info", timeout=LONGEST_S).json()["cache"] == "none"
        chat = {
            "messages": [{"role": "system", "content": "a" * 40}, {"role": "user", "content": "b"}],
            "max_tokens": 4,
        }
        work = httpx.post(f"{process.base}{URL}", json=chat, timeout=LONGEST_S).json()["remask"]
        assert work["prefix_note"] == "the cache policy reads no shared prefix"
        assert "approximation" not in work
    assert any(
        "'llada-tiny' has no depth table and audits earn none, so cache auto is none" in line for line in process.lines
    )
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_tokenizer_is_not_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints.write(tmp_path / "model", checkpoints.LLADA, checkpoints.random_tensors(checkpoints.LLADA))
    assert main(["--quiet", "serve", str(folder), "--dtype", "float32", "--port", "0"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[1]", "must hold an object of flags"),
        ("a: [", "cannot read"),
        ("[" * 10_000, "cannot read"),
        ("seed: 2001-99-99", "cannot read"),
        ("config: other.yaml", "names another file"),
        ("seed: null", "switched off by leaving it out"),
        ("force: false", "switched off by leaving it out"),
        ("prot: 8000", "Did you mean 'port'"),
        ("help: true", "Unknown flag in"),
        ("3: 4", "Unknown flag in"),
        (None, "cannot read"),
    ],
)
def test_bad_files_of_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, text: str) -> None:
    file = tmp_path / "flags.yaml"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    assert main(["serve", f"--config={file}"]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--sampling", '{"max_tokens": 16, "block_length": 2, "steps": 7}'], "steps=7"),
        (["--allowed-origins", "*"], "allowed_origins"),
        (["--threads", "0"], "threads"),
        (["--profile-dir", "/proc/none", "--profile-steps", "0"], "profile_steps"),
        (["--profile-dir", "/proc/none"], "--profile-dir"),
    ],
)
def test_bad_flags_end_the_command_before_it_listens(
    capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert main(["--quiet", "serve", "--dtype", "float32", *words]) == 2
    assert text in capsys.readouterr().err


def test_addresses_of_both_kinds() -> None:
    with bind("127.0.0.1", 0) as one:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url_of(one))
    if socket.has_ipv6:
        with bind("::1", 0) as other:
            assert re.fullmatch(r"http://\[::1\]:\d+", url_of(other))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    assert main(["serve"]) == 2
    said = capsys.readouterr().err
    assert "this needs uvicorn: pip install " in said
    assert "'uvicorn>=" in said
    assert "remask[" not in said, "pip would install a checkout anew"


@pytest.mark.thorough
@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)])
def test_a_second_signal_ends_it_while_a_step_hangs(signals: tuple[signal.Signals, signal.Signals]) -> None:
    words = ["bundled-transit", "--drain-timeout", "3600"]
    first, second = signals
    with served(*words, start=HELD) as process, ThreadPoolExecutor(1) as pool:
        body = {"messages": CHATS[0], **LONG, "max_tokens": 512, "steps": 512}
        answer = pool.submit(httpx.post, f"{process.base}{URL}", json=body, timeout=LONGEST_S)
        eventually(lambda: process.accepted() == 1)
        process.process.send_signal(first)
        eventually(lambda: httpx.get(f"{process.base}/health", timeout=LONGEST_S).status_code == 503)
        process.process.send_signal(second)
        assert process.process.wait(LONGEST_S) == -second, "the engine still stands in its step"
        with pytest.raises(httpx.TransportError):
            answer.result()
