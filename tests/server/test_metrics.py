"""Metrics and traces of steps: every number is what it says, and the dashboard asks for what exists."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from remask.cli.serve import WARM_UP_STEPS, StepTrace
from remask.errors import ConfigError
from remask.request.result import Event, Result, Usage
from remask.server.metrics import VLLM, Metrics
from tests.engine.support import make_engine, request
from tests.server.serving import CHATS, Running, make_llm, serving

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"


def scrape(running: Running) -> dict[str, float]:
    """Samples by name; those of a reason by `name/reason`; buckets and the process' own left out."""
    response = running.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            if sample.name.endswith("_bucket") or sample.name.startswith("process_"):
                continue
            assert sample.labels["model_name"] == "bundled-transit"
            reason = sample.labels.get("finished_reason")
            found[sample.name.removeprefix("remask:") + (f"/{reason}" if reason else "")] = sample.value
    return found


def test_every_number_is_what_it_says() -> None:
    with serving(make_llm(depth=5)) as running:
        start = scrape(running)
        assert start["num_requests_running"] == start["num_requests_waiting"] == start["kv_cache_usage_perc"] == 0
        told = [running.ask(number).json() for number in (0, 0)]
        told.append(running.ask(0, cache="block-prefix", max_tokens=4, ignore_eos=True).json())
        assert running.ask(deadline_s=1e-9).status_code == 504
        running.settle()
        now, stats = scrape(running), running.service.llm.engine.stats
    usages = [each["usage"] for each in told]
    work = [each["remask"] for each in told]
    assert now["prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert now["generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert now["prefix_cache_hits_total"] == sum(cached) == cached[1] > 0
    assert now["prefix_cache_queries_total"] == now["prompt_tokens_total"]
    assert (now["prefix_store_hits_total"], now["prefix_store_misses_total"]) == (1, 1)
    assert (now["request_success_total/stop"], now["request_success_total/length"]) == (2, 1)
    assert now["request_success_total/timeout"] == 1
    assert now["prefix_passes_total"] == 1
    assert now["prefix_refreshes_total"] == 2, "the first step of each of both requests that lease"
    assert now["refreshes_total"] == 4, "and two blocks of the last"
    computed = sum(each["row_layers"] for each in work)
    assert now["row_layers_computed_total"] == computed + now["prefix_row_layers_total"]
    canvases = [usage["prompt_tokens"] + length for usage, length in zip(usages, (16, 16, 4), strict=True)]
    whole = sum(each["forwards"] * canvas * 10 for each, canvas in zip(work, canvases, strict=True))
    assert now["row_layers_saved_total"] == whole - computed > 0
    assert now["engine_steps_total"] == sum(each["forwards"] for each in work) + 1
    assert now["engine_step_cpu_seconds_total"] == stats.step_cpu_seconds > 0
    assert now["engine_step_seconds_total"] == stats.step_seconds > 0
    assert now["request_time_per_output_token_seconds_count"] == 3
    # Each of the eight steps of the first two, and of the two steps of the last, but the first of each request, which
    # settled something behind which nothing was open.
    assert 4 <= now["inter_token_latency_seconds_count"] <= 15
    assert now["inter_token_latency_seconds_sum"] > 0
    for own, theirs in VLLM.items():
        for ending in ("", "_total", "_count", "_sum", "_total/stop"):
            name = own.removeprefix("remask:") + ending
            assert (name in now) == (theirs + ending in now)
            assert now.get(theirs + ending) == now.get(name)
    assert now["vllm:time_to_first_token_seconds_count"] == 3
    for name in ("e2e_request_latency_seconds", "time_to_first_settled_token_seconds", "request_queue_time_seconds"):
        assert now[f"{name}_count"] == 3
        assert now[f"{name}_sum"] > 0
    assert now["request_denoising_steps_sum"] == sum(each["steps"] for each in work)
    depths = [each["prefix_depth"] for each in work]
    assert (now["request_prefix_depth_count"], now["request_prefix_depth_sum"]) == (3, sum(depths))
    assert depths[0] == depths[1] > depths[2] == 0
    assert now["kv_cache_usage_perc"] > 0, "a prefix is stored"


def test_the_process_tells_of_itself(server: Running) -> None:
    text = server.client.get("/metrics").text
    found = dict(re.findall(r"^(process_\w+) (\S+)$", text, re.MULTILINE))
    assert float(found["process_cpu_seconds_total"]) > 0
    assert float(found["process_resident_memory_bytes"]) > 1 << 20


def test_each_server_counts_for_itself() -> None:
    one, two = Metrics("one"), Metrics("two")
    result = Result("r", (1,), "length", Usage(3, 1, forwards=1, steps=1), (), 0.1, 0.2)
    one.observe(Event("r", queued_s=0.1))
    one.observe(Event("r", result=result))
    assert b'request_queue_time_seconds_count{model_name="one"} 1.0' in one.text()
    assert b'request_queue_time_seconds_count{model_name="two"} 0.0' in two.text()


def test_time_between_tokens_is_that_of_each_token() -> None:
    clock = iter([10.0, 12.0, 12.5])
    metrics = Metrics("one", lambda: next(clock))
    metrics.observe(Event("r", settled=(1, 2)))
    metrics.observe(Event("r", settled=(3, 4, 5, 6)))
    metrics.observe(Event("other", settled=(1,)))
    metrics.observe(Event("r", result=Result("r", (1,) * 6, "length", Usage(3, 6, forwards=1), (), 0.5, 3.0)))
    text = metrics.text().decode()
    for prefix in ("remask", "vllm"):
        assert f'{prefix}:inter_token_latency_seconds_sum{{model_name="one"}} 0.5\n' in text
        assert f'{prefix}:inter_token_latency_seconds_count{{model_name="one"}} 1.0\n' in text
        assert f'{prefix}:request_time_per_output_token_seconds_sum{{model_name="one"}} 0.5\n' in text
    assert "vllm:time_to_first_token_seconds_bucket" in text
    assert metrics._last_settled == {"other": 12.5}, "what has ended is forgotten"


def test_the_dashboard_asks_for_metrics_that_exist(server: Running) -> None:
    server.chat({"messages": CHATS[0]})
    names = set(re.findall(r"^(remask:\w+)", server.client.get("/metrics").text, flags=re.MULTILINE))
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = set(re.findall(r"remask:\w+", json.dumps(dashboard["panels"])))
    assert len(asked) >= 12
    assert asked <= names


@pytest.mark.few(2)
@pytest.mark.parametrize(("asked", "recorded"), [(2, 2), (100, 8 - WARM_UP_STEPS)])
def test_steps_are_recorded_after_the_first_few(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: int, recorded: int
) -> None:
    trace, engine = StepTrace(tmp_path / "deep" / "er", asked), make_engine()
    engine.add(request())
    with caplog.at_level("INFO"):
        while engine.busy:
            trace.before_step()
            engine.step()
            trace.after_step()
        trace.close()
        trace.close()
    events = json.loads(trace.file.read_text(encoding="utf-8"))["traceEvents"]
    assert any(event.get("name") == "aten::matmul" for event in events)
    assert [record.getMessage() for record in caplog.records if "trace of" in record.getMessage()] == [
        f"the trace of {recorded} steps is in {trace.file}"
    ]


def test_a_server_that_never_worked_writes_none_and_bad_settings_are_refused(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path, 3)
    trace.close()
    assert not trace.file.exists()
    file = tmp_path / "file"
    file.touch()
    for folder, steps, message in ((tmp_path, 0, "profile_steps"), (file / "under", 1, "--profile-dir")):
        with pytest.raises(ConfigError, match=message):
            StepTrace(folder, steps)
