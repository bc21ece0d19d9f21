"""Prometheus metrics under the prefix `remask:`, and those that vLLM's dashboards use under vLLM's names too."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from remask.engine.async_engine import AsyncEngine
from remask.policies.base import UnreadLabel
from remask.request.result import Event, Result

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_LAYERS = (0, 1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64)
_NATS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10)
_PER_FORWARD = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 16)

# Metrics that vLLM's dashboards use, by our names and vLLM's.
_COMMON_NAMES = (
    "inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds "
    "request_queue_time_seconds num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens "
    "generation_tokens prefix_cache_queries prefix_cache_hits request_success"
)
VLLM: Mapping[str, str] = {
    "remask:time_to_first_settled_token_seconds": "vllm:time_to_first_token_seconds",
    **{f"remask:{name}": f"vllm:{name}" for name in _COMMON_NAMES.split()},
}

_HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "request_queue_time_seconds": ("Waiting, until the request began.", _SECONDS),
    "time_to_first_settled_token_seconds": ("From arrival to the first final token of the response.", _SECONDS),
    "inter_token_latency_seconds": (
        "Between two steps that settled tokens of a request, for each token of the later one.",
        _SECONDS,
    ),
    "request_time_per_output_token_seconds": ("Of a request, after its first final token.", _SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the end.", _SECONDS),
    "request_denoising_steps": ("Denoising steps of a request.", _STEPS),
    "request_prefix_depth": ("Leading layers of a request that read its prefix from the store.", _LAYERS),
    "tokens_per_forward": ("Response tokens per forward pass of a request.", _PER_FORWARD),
}

REASONS = ("stop", "length", "cancelled", "timeout", "error")


class Metrics(Collector):
    """The metrics of one server, in a registry of its own. The engine calls `observe` with every event.

    `clock` returns seconds.
    """

    def __init__(self, model: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.registry = CollectorRegistry()
        self._vllm_registry = CollectorRegistry()
        self._vllm_registry.register(_VllmNames(self.registry))
        self._divergence = Histogram(
            "remask:audit_divergence_nats",
            "How far a cache moved predictions of audited requests, where they move most.",
            ["model_name", "cache"],
            buckets=_NATS,
            registry=self.registry,
        )
        self._last_settled: dict[str, float] = {}  # when each running request last had new settled tokens
        ProcessCollector(registry=self.registry)
        self._model = model
        self._totals = Counter[str]()
        self._finish_counts = dict.fromkeys(REASONS, 0)
        self._histograms = {
            name: Histogram(
                f"remask:{name}", text, ["model_name"], buckets=tuple(buckets), registry=self.registry
            ).labels(model)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }

    def watch(self, engine: AsyncEngine, adapters: int = 0) -> None:
        """Report the counters of `engine`, which serves this number of `adapters`. Call it once."""
        self._engine = engine
        self._adapters = adapters
        engine.engine.auditor.listener = lambda cache, nats: self._divergence.labels(self._model, cache).observe(nats)
        self.registry.register(self)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry) + generate_latest(self._vllm_registry)

    def observe(self, event: Event) -> None:
        """Count an event of a request."""
        if event.queued_s is not None:
            self._histograms["request_queue_time_seconds"].observe(event.queued_s)
        if event.settled:
            now = self._clock()
            previous = self._last_settled.get(event.id)
            if previous is not None:
                self._histograms["inter_token_latency_seconds"].observe((now - previous) / len(event.settled))
            self._last_settled[event.id] = now
        if event.result is not None:
            self._last_settled.pop(event.id, None)
            self._observe_result(event.result)

    def _observe_result(self, result: Result) -> None:
        """Count a request that has ended. Its tokens and most of its times count only if it was answered."""
        self._finish_counts[result.finish_reason] += 1
        if result.first_settled_s is not None:
            self._histograms["time_to_first_settled_token_seconds"].observe(result.first_settled_s)
        if result.finish_reason not in ("stop", "length"):
            return
        usage = result.usage
        self._totals["prompt"] += usage.prompt_tokens
        self._totals["generation"] += usage.completion_tokens
        self._totals["hit"] += usage.cached_tokens
        self._histograms["e2e_request_latency_seconds"].observe(result.elapsed_s)
        if result.first_settled_s is not None and usage.completion_tokens > 1:
            seconds_per_token = (result.elapsed_s - result.first_settled_s) / (usage.completion_tokens - 1)
            self._histograms["request_time_per_output_token_seconds"].observe(seconds_per_token)
        self._histograms["request_denoising_steps"].observe(usage.steps)
        self._histograms["request_prefix_depth"].observe(usage.prefix_depth)
        self._histograms["tokens_per_forward"].observe(usage.completion_tokens / max(usage.forwards, 1))

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics but the histograms. The engine's counters may be read in the middle of a step."""
        engine = self._engine
        inner = engine.engine
        pages = inner.allocator
        gauges = {
            "num_requests_running": ("Requests that have begun.", engine.running),
            "num_requests_waiting": ("Accepted requests that have not begun.", engine.waiting),
            "kv_cache_usage_perc": ("Share of K/V pages in use; 1 is all.", pages.used / pages.references.size),
        }
        for family, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, self._counters)):
            for name, (text, value) in values.items():
                metric = family(f"remask:{name}", text, labels=["model_name"])
                metric.add_metric([self._model], value)
                yield metric
        yield from self._info()
        depth = GaugeMetricFamily(
            "remask:prefix_earned_depth",
            "Layers that a prefix of this ratio in percent may read, as audits have proven.",
            labels=["model_name", "adapter", "ratio"],
        )
        for (adapter, ratio), record in sorted(inner.auditor.depths.records.items()):
            depth.add_metric([self._model, adapter, str(ratio)], record.common)
        yield depth
        unread_reasons = inner.store.stats.unread_reasons
        unread = {reason: unread_reasons[reason] for reason in get_args(UnreadLabel)}
        by_reason: dict[str, tuple[str, str, Mapping[str, int]]] = {
            "request_success": ("Requests that ended, by reason.", "finished_reason", self._finish_counts),
            "prefix_unread": ("Requests that read no shared prefix, by reason.", "reason", unread),
        }
        for name, (text, label, counts) in by_reason.items():
            counter = CounterMetricFamily(f"remask:{name}", text, labels=["model_name", label])
            for reason, count in counts.items():
                counter.add_metric([self._model, reason], count)
            yield counter

    @property
    def _counters(self) -> dict[str, tuple[str, float]]:
        """The help text and the value of each counter that has no label but the model."""
        engine = self._engine
        inner = engine.engine
        stats = inner.stats
        store = inner.store.stats
        graphs = inner.graphs
        return {
            "prompt_tokens": ("Prompt tokens of answered requests.", self._totals["prompt"]),
            "generation_tokens": ("Response tokens of answered requests.", self._totals["generation"]),
            "prefix_cache_queries": ("Prompt tokens of answered requests.", self._totals["prompt"]),
            "prefix_cache_hits": ("Those of them that were read from the prefix store.", self._totals["hit"]),
            "prefix_store_hits": ("Requests that leased a stored prefix.", store.hits),
            "prefix_store_misses": ("Requests that brought a new prefix.", store.misses),
            "prefix_store_found": ("Requests whose shared prefix was found, not named.", store.unnamed),
            "prefix_store_evictions": ("Prefixes that left the store.", store.evictions),
            "engine_steps": ("Forward passes of the engine, each over many requests.", stats.steps),
            "engine_step_seconds": ("Time that the engine's thread spent in steps.", stats.step_seconds),
            "engine_step_cpu_seconds": (
                "Of that, what the thread itself computed; the rest it waited.",
                stats.step_cpu_seconds,
            ),
            "engine_slow_steps": ("Steps that took longer than the limit of a step.", engine.slow_steps),
            "engine_queued_passes": ("Passes queued before the one before them was read.", stats.queued_passes),
            "engine_waited_passes": (
                "With overlap, passes that were read before the next one could be planned.",
                stats.waited_passes,
            ),
            "engine_discarded_passes": (
                "Requests' parts in queued passes that were not what came next.",
                stats.discarded_passes,
            ),
            "engine_repeated_stages": (
                "Layers over the same rows, one after another, that graphs repeated.",
                graphs.stage_count if graphs is not None else 0,
            ),
            "engine_captured_graphs": ("Graphs that were made.", graphs.capture_count if graphs is not None else 0),
            "audits": ("Requests whose predictions were compared with exact ones.", stats.audits),
            "audits_failed": ("Audits that failed, from which nothing is learned.", stats.failed_audits),
            "audits_skipped": (
                "Audits that were due, for which the queue or memory had no room.",
                inner.auditor.skipped,
            ),
            "audit_row_layers": ("Rows times layers computed in audits.", stats.audit_row_layers),
            "engine_recoveries": ("Times that the engine began again with empty memory.", stats.recoveries),
            "row_layers_computed": ("Rows times layers computed, prefix passes included.", stats.row_layers),
            "row_layers_saved": ("Rows times layers that passes left out of their canvases.", stats.row_layers_saved),
            "prefix_passes": ("Prefix-only passes.", stats.prefix_passes),
            "prefix_row_layers": ("Rows times layers computed in prefix-only passes.", stats.prefix_row_layers),
            "refreshes": ("Passes of requests that filled or renewed what their policies cache.", stats.refreshes),
            "prefix_refreshes": ("Passes that computed rows of a leased prefix anew.", stats.prefix_refreshes),
        }

    def _info(self) -> Iterator[Metric]:
        """Yield the metrics whose labels routers read, by vLLM's names: of the cache and of the requests' adapters."""
        inner = self._engine.engine
        cache = {
            "block_size": inner.allocator.page_size,
            "num_gpu_blocks": inner.allocator.references.shape[1],
            "cache_dtype": str(inner.model.kv_dtype).removeprefix("torch."),
            "enable_prefix_caching": inner.memory.store_budget > 0,
        }
        running: set[str] = set()
        waiting: set[str] = set()
        for name, pending in self._engine.open_requests.items():
            if pending.request.adapter:
                (running if name in self._engine.running_ids else waiting).add(pending.request.adapter)
        adapters = {
            "max_lora": self._adapters,
            "running_lora_adapters": ",".join(sorted(running)),
            "waiting_lora_adapters": ",".join(sorted(waiting)),
        }
        for name, text, labels, value in (
            ("cache_config_info", "The cache; always 1.", cache, 1.0),
            ("lora_requests_info", "When these adapters were run and waited for.", adapters, time.time()),
        ):
            metric = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name", *labels])
            metric.add_metric([self._model, *map(str, labels.values())], value)
            yield metric


class _VllmNames(Collector):
    """The metrics of another registry that vLLM has too, under vLLM's names."""

    def __init__(self, source: CollectorRegistry) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        for family in self._source.collect():
            if (name := VLLM.get(family.name)) is not None:
                renamed = Metric(name, family.documentation, family.type)
                renamed.samples = [
                    sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in family.samples
                ]
                yield renamed
