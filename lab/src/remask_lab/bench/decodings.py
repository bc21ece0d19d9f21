"""Caches under each way of decoding: accuracy, tokens a step and work of every pair, on a bundled model's own task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remask.checks import BUNDLED_TARIFF, BUNDLED_TRANSIT, BUNDLED_UNIFORM
from remask.checks.values import one_of
from remask.errors import ConfigError
from remask.llm import LLM
from remask_lab.bench.bench import run_bench
from remask_lab.bench.contenders import Contender, LeftOut, contender, described
from remask_lab.bench.workload import Workload, usual_workload
from remask_lab.records.record import Record

SUBJECT = "caches by decoding"
BASELINE = "baseline"  # the name of the row that all are compared with
Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured on one model.

    Attributes:
        sampling: of the task, on top of its usual parameters; it has as many steps as tokens.
        decodings: what each way of decoding changes in it, the first one nothing.
        caches: names and settings.
        only: of a decoding, the caches that are measured there. All, where it is left out.
    """

    sampling: Settings
    decodings: Mapping[str, Settings]
    caches: Sequence[tuple[str, Settings]]
    only: Mapping[str, Sequence[str]]


RANDOM_ORDER = "random order"


def _masked(tokens: int, block: int, window: int) -> Grid:
    """A masked model's: `window` is that of `elastic-cache`, whose default is longer than these responses."""
    few: Mapping[str, Settings] = {f"{tokens // n} steps": {"steps": tokens // n} for n in (2, 4)}
    return Grid(
        {"max_tokens": tokens, "block_length": block, "steps": tokens},
        {
            f"{tokens} steps": {},
            **few,
            "threshold 0.9": {"steps": None, "threshold": 0.9},
            "factor 1": {"steps": None, "remasking": {"factor": 1.0}},
            "slowfast": {"steps": None, "remasking": "slowfast"},
            RANDOM_ORDER: {"remasking": "random"},
        },
        (
            ("none", {}),
            ("block-prefix", {}),
            ("block-dual", {}),
            ("dkv-decode", {}),
            ("dkv-greedy", {}),
            ("dkv-prefill", {}),
            ("dkv-pd", {}),
            ("dllm-cache", {}),
            ("dllm-cache", {"response_interval": 2, "ratio": 0.5}),
            ("elastic-cache", {"window": window}),
            ("entropy-cache", {}),
            ("entropy-cache", {"threshold": 0.1}),
            ("bicache", {}),
            ("bicache+block-dual", {}),
        ),
        {RANDOM_ORDER: ("none", "dkv-greedy")},
    )


GRIDS: Mapping[str, Grid] = {
    BUNDLED_TARIFF: _masked(8, 8, 4),
    BUNDLED_TRANSIT: _masked(16, 8, 8),
    BUNDLED_UNIFORM: Grid(
        {"max_tokens": 6, "block_length": 6, "steps_per_block": 12},
        {
            "1 token a step": {},
            "the same in half the steps": {"steps_per_block": 6},
            "3 tokens in each of 6 steps": {"steps_per_block": 6, "uniform": {"tokens_per_step": 3}},
            "blocks of 3": {"block_length": 3, "steps_per_block": 6},
            "ancestral in 32 steps, temperature 0": {
                "uniform": {"sampler": "ancestral"},
                "steps_per_block": 32,
                "temperature": 0.0,
            },
        },
        (
            ("none", {}),
            ("block-prefix", {}),
            ("uniform-cache", {}),
            ("uniform-cache", {"border": "neighbours"}),
            *(("uniform-cache", {"drift": drift}) for drift in (0.003, 0.03, 0.3, 2.0)),
        ),
        {},
    ),
}
"""By the bundled model's name."""


def measure(llm: LLM, decoding: str, requests: int, seed: int) -> Record:
    """Run every cache under `decoding` in one run, beside `none` under the model's first one, with which all compare.

    `left_out` of the record's data says which caches cannot run there, and why. Raises `ConfigError` on a model or a
    decoding that is not in `GRIDS`.
    """
    grid = GRIDS.get(llm.loaded.name)
    if grid is None:
        raise ConfigError(f"{llm.loaded.name!r} has no task of its own; known models: {', '.join(GRIDS)}")
    one_of("decoding", decoding, tuple(grid.decodings))
    # Two questions share a prefix: prefixes count as independent, and BiCache needs to find one again.
    prefixes = None if llm.loaded.config.kind == "uniform" else -(-requests // 2)
    workload = usual_workload(llm, requests, seed, grid.sampling, prefixes=prefixes).seeded
    rows, left_out = _contenders(llm, grid, decoding, workload)
    record = run_bench(llm, workload, rows, 1, llm.session.engine_config, llm.session.progress)
    about = {**record.about, "settings": {**record.about["settings"], "decoding": decoding}}
    data = {**record.data, "left_out": {each.name: each.reason for each in left_out}}
    return Record(SUBJECT, about, data)


def _contenders(llm: LLM, grid: Grid, decoding: str, workload: Workload) -> tuple[list[Contender], list[LeftOut]]:
    rows = [replace(contender(llm, "none", None, workload), name=BASELINE, baseline=BASELINE)]
    left_out: list[LeftOut] = []
    changed = grid.decodings[decoding]
    asked = workload.under(replace(workload.tasks[0].request.params, seed=None, **changed)).seeded
    for cache, settings in grid.caches:
        if cache not in grid.only.get(decoding, (cache,)):
            continue
        name = " ".join(filter(None, (cache, described(settings))))
        try:
            row = contender(llm, cache, settings, asked)
        except ConfigError as error:
            left_out.append(LeftOut(name, str(error)))
            continue
        rows.append(replace(row, name=name, workload=asked, baseline=BASELINE))
    return rows, left_out
