"""`remask bench serve` against running servers."""

import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from remask.cli import main
from tests.server.serving import Running, make_llm, serving

VLLM_KEYS = {
    "date",
    "model_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}


def requests_counted(server: Running) -> float:
    counted = re.findall(
        r"^remask:request_success_total\{.*\} (\S+)$", server.client.get("/metrics").text, re.MULTILINE
    )
    return sum(map(float, counted))


def bench(base: str, *words: str) -> int:
    return main(["--quiet", "bench", "serve", "--base-url", base, *words])


def test_the_bundled_task_under_load(server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.client.delete("/v1/cache")
    target = tmp_path / "load.json"
    words = ["--num-prompts", "12", "--prefixes", "2", "--max-concurrency", "4", "--num-warmups", "1"]
    assert bench(f"{server.base}/v1", *words, "--json", str(target), "--save-detailed") == 0
    told = json.loads(target.read_text(encoding="utf-8"))
    assert set(told) >= VLLM_KEYS
    assert (told["completed"], told["failed"], told["errors_by_status"]) == (12, 0, {})
    assert told["dataset"] == "transit"
    assert told["accuracy"] == 1
    assert told["max_concurrent_requests"] == 4
    assert told["prefix_hits"] >= 12 - 2 * 4
    assert 0 < told["prefix_hit_ratio"] < 1
    assert told["cached_tokens"] == sum(told["cached_lens"])
    assert told["tokens_per_forward"] == pytest.approx(2, rel=0.2), "blocks of 2 in one step each"
    assert 0 < told["median_ttft_ms"] < told["median_e2el_ms"]
    assert len(told["generated_texts"]) == 12
    assert "hit ratio" in capsys.readouterr().out


def test_a_rate_a_length_and_fields_of_the_body(server: Running, tmp_path: Path) -> None:
    target = tmp_path / "load.json"
    words = ["--num-prompts", "4", "--request-rate", "50", "--max-tokens", "6", "--ignore-eos"]
    extra = ["--extra-body", '{"cache": "none"}', "--model", "another-name", "--prefix-share", "0.5"]
    assert bench(server.base, *words, *extra, "--json", str(target)) == 0
    told = json.loads(target.read_text(encoding="utf-8"))
    assert (told["total_output_tokens"], told["cached_tokens"], told["model_id"]) == (24, 0, "another-name")
    assert (told["request_rate"], told["prefix_share"]) == (50, 0.5)


def test_random_tokens_are_shared_too(server: Running, tmp_path: Path) -> None:
    target = tmp_path / "load.json"
    words = ["--dataset", "random", "--num-prompts", "4", "--prefixes", "1", "--max-concurrency", "1"]
    words += ["--num-warmups", "6"]
    server.client.delete("/v1/cache")
    before = requests_counted(server)
    sizes = ["--prefix-tokens", "64", "--prompt-tokens", "5", "--max-tokens", "4", "--ignore-eos"]
    assert bench(server.base, *words, *sizes, "--json", str(target)) == 0
    told = json.loads(target.read_text(encoding="utf-8"))
    assert (told["total_input_tokens"], told["cached_tokens"]) == (4 * 69, 4 * 64), "warmed up"
    assert requests_counted(server) == before + 6 + 4


def test_errors_are_counted_by_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "load.json"
    with serving(make_llm(max_num_seqs=1), max_queue=1, api_keys=["key"]) as running:
        words = ["--num-prompts", "12", "--api-key", "key", "--json", str(target)]
        assert bench(running.base, *words) == 0
        told = json.loads(target.read_text(encoding="utf-8"))
        assert told["completed"] + told["errors_by_status"]["429"] == 12
        assert told["completed"] >= 2
        assert bench(running.base, *words, "--extra-body", '{"tools": [1]}') == 1
        assert json.loads(target.read_text(encoding="utf-8"))["errors_by_status"] == {"400": 12}
        capsys.readouterr()
        assert bench(running.base) == 2
        assert "GET /v1/models gives status 401" in capsys.readouterr().err


@pytest.fixture
def empty() -> Iterator[str]:
    """A server that serves no model."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": []}')

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


def test_a_server_without_models(empty: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(empty) == 2
    assert "name one with --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--num-prompts", "0"], "num_prompts"),
        (["--request-rate", "-1"], "request_rate"),
        (["--num-warmups", "-1"], "--num-warmups"),
        (["--prefix-tokens", "9"], "add --dataset random"),
        (["--json", "nowhere/at/all.json"], "--json: there is no folder"),
        (["--save-detailed"], "--save-detailed writes into"),
        (["--extra-body", "[]"], "--extra-body must be a JSON object"),
    ],
)
def test_bad_options(server: Running, capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    assert bench(server.base, *words) == 2
    assert text in capsys.readouterr().err


def test_the_other_bench_goes_on_working(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--caches", "none", "serve", "--model", "bundled-transit"])
    assert "'serve' cannot be used here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "serve"])
    assert "--base-url" in capsys.readouterr().err
