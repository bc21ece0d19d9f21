"""Tables 6.3 to 6.8 of the thesis on Uniform-Cache, of `remask analyze drift` on three models and samplers.

A result file is called CONFIGURATION.COLUMN.json. The published numbers stand in brackets behind ours.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from remask.errors import RecordError
from remask_lab.records.markdown import markdown_table
from remask_lab.records.record import Record, read_record

SUBJECT = "analyze drift"
Cells: TypeAlias = Mapping[str, Mapping[str, str]]

COLUMNS: Mapping[str, tuple[str, str]] = {
    "masked": ("bundled", "none"),
    "uniform": ("bundled-uniform", "none"),
    "cached": ("bundled-uniform", "uniform-cache"),
}
"""The thesis's columns: the model, and its cache."""
BLOCKS, BLOCKS_ANCESTRAL, WHOLE, WHOLE_ANCESTRAL = NAMES = ("s32", "s32-ancestral", "s512", "s512-ancestral")
CALLED = {
    BLOCKS: "s32 adaptive",
    BLOCKS_ANCESTRAL: "s32 ancestral",
    WHOLE: "s512 adaptive",
    WHOLE_ANCESTRAL: "s512 ancestral",
}
ANCESTRAL = {"temperature": 0.0, "uniform": {"sampler": "ancestral"}}
SAMPLING: Mapping[str, Mapping[str, Any]] = {
    BLOCKS: {"block_length": 3, "steps_per_block": 6},
    BLOCKS_ANCESTRAL: {"block_length": 3, "steps_per_block": 32, **ANCESTRAL},
    WHOLE: {},
    WHOLE_ANCESTRAL: {"block_length": 6, "steps_per_block": 128, **ANCESTRAL},
}
"""Blocks of 3 stand for the thesis's of 32, one block of 6 for its of 512."""
MASKED: Mapping[str, Mapping[str, Any]] = {
    name: {**({"block_length": 3} if name in (BLOCKS, BLOCKS_ANCESTRAL) else {}), **more}
    for name, more in zip(NAMES, ({}, {"remasking": "random"}) * 2, strict=True)
}
"""On a masked model ancestral sampling is a random order."""

REGIONS = {
    "bias": "bias token",
    "prompt": "prompt",
    "rest_past": "rest past",
    "previous": "previous block",
    "current": "current block",
    "next": "next block",
    "rest_future": "rest future",
    "trailing": "padding",
}
# The thesis's numbers, by row and column.
ENTROPY = {
    WHOLE: {"masked": "7.21 to 2.63", "uniform": "7.27 to 0.48", "cached": "7.27 to 0.43"},
    WHOLE_ANCESTRAL: {"masked": "7.21 to 2.89", "uniform": "7.27 to 2.21", "cached": "7.27 to 2.20"},
}
DRIFT = {
    BLOCKS: {"masked": "5e-4, 1.2e-3", "uniform": "7e-4, 2.3e-3", "cached": "5e-4, 1.3e-3"},
    BLOCKS_ANCESTRAL: {"masked": "5e-4, 1.4e-3", "uniform": "8e-4, 2.4e-3", "cached": "7e-4, 1.8e-3"},
    WHOLE: {"masked": "5e-4, 1.2e-3", "uniform": "7e-4, 2.1e-3", "cached": "6e-4, 2.0e-3"},
    WHOLE_ANCESTRAL: {"masked": "5e-4, 1.3e-3", "uniform": "1.0e-3, 2.9e-3", "cached": "9e-4, 2.5e-3"},
}
TOGETHER = {BLOCKS: {"masked": "0.94", "uniform": "0.93", "cached": "0.87"}}
# By region, of a model that the thesis does not name; taken as the uniform one without a cache.
MOVED = {
    BLOCKS: dict(zip(REGIONS, ("", "4.2e-5", "1.6e-4", "2.0e-3", "5.0e-2", "7.5e-3", "1.2e-3", "6.3e-4"), strict=True)),
    BLOCKS_ANCESTRAL: dict(zip(REGIONS, ("", "5e-5", "2e-4", "3e-3", "6.3e-2", "3e-3", "7e-4", ""), strict=True)),
}
ATTENDED = {
    BLOCKS: dict(zip(REGIONS, ("11.1", "10.2", "16.6", "9.8", "32.9", "3.1", "4.3", "11.9"), strict=True)),
    WHOLE: dict(zip(REGIONS, ("11.0", "8.6", "", "", "68.0", "", "", "12.3"), strict=True)),
}
LAYERS = {
    BLOCKS: {"masked": "0.90, 0.90", "uniform": "0.81, 0.79", "cached": "0.83, 0.85"},
    WHOLE: {"masked": "0.94, 0.94", "uniform": "0.79, 0.80", "cached": "0.83, 0.86"},
    WHOLE_ANCESTRAL: {"masked": "0.90, 0.90", "uniform": "0.73, 0.76", "cached": "0.75, 0.76"},
}


def commands() -> Iterator[tuple[str, list[str]]]:
    """The name of each result file, and the words of the command that measures it, without `--output`."""
    for name in NAMES:
        for column, (model, cache) in COLUMNS.items():
            sampling = json.dumps({**(MASKED if column == "masked" else SAMPLING)[name], "seed": 0})
            words = ["--model", model, "--dtype", "float32", "--input", "examples/relay.jsonl", "--cache", cache]
            yield f"{name}.{column}.json", ["remask", "analyze", "drift", *words, "--sampling", sampling]


def read_drift(folder: Path) -> dict[str, Record]:
    """The records of `folder` by CONFIGURATION.COLUMN. Raises `RecordError` where one is missing, or is of no drift."""
    found = {name.removesuffix(".json"): folder / name for name, _ in commands()}
    if missing := [path.name for path in found.values() if not path.exists()]:
        raise RecordError(
            f"{str(folder)!r} lacks {', '.join(missing)}; 'python -m remask_lab pages results --commands' prints what "
            "makes them"
        )
    return {name: read_record(path, SUBJECT) for name, path in found.items()}


def tables(records: Mapping[str, Record]) -> list[tuple[str, str]]:
    """A title and a table for each of the thesis's tables."""
    data = {name: record.data for name, record in records.items()}

    def every(published: Cells, ours: Any) -> str:
        rows = [
            [CALLED[name], *(_cell(ours(data[f"{name}.{column}"]), own.get(column, "")) for column in COLUMNS)]
            for name, own in published.items()
        ]
        return markdown_table(["", *COLUMNS], rows)

    def by_region(published: Cells, ours: Any) -> str:
        shown = [(name, column) for name in published for column in ("uniform", "cached")]
        rows = []
        for region, called in REGIONS.items():
            cells = [
                _cell(
                    ours(data[f"{name}.{column}"]["regions"].get(region)),
                    published[name].get(region, "") if column == "uniform" else "",
                )
                for name, column in shown
            ]
            rows.append([called, *cells])
        return markdown_table(["", *(f"{CALLED[name]}, {column}" for name, column in shown)], rows)

    return [
        ("6.3: entropy of the first and the last pass, nats", every(ENTROPY, lambda own: _from_to(own["entropy"]))),
        (
            "6.4: drift a pass of K and V, over all positions",
            every(DRIFT, lambda own: f"{own['k_mean']:.1e}, {own['v_mean']:.1e}"),
        ),
        ("6.5: correlation of K's and V's drift", every(TOGETHER, lambda own: f"{own['kv_correlation']:.2f}")),
        ("6.6: drift a pass by region, mean of K and V", by_region(MOVED, _moved)),
        ("6.7: attention of the current block by region, %", by_region(ATTENDED, _attended)),
        (
            "6.8: correlation between layers, K and V",
            every(LAYERS, lambda own: f"{own['k_layers_mean']:.2f}, {own['v_layers_mean']:.2f}"),
        ),
    ]


def _cell(ours: str, published: str) -> str:
    return f"{ours} ({published})" if published else ours


def _from_to(series: list[float]) -> str:
    return f"{series[0]:.2f} to {series[-1]:.2f}"


def _moved(region: Mapping[str, float | None] | None) -> str:
    if region is None or region["k_drift"] is None or region["v_drift"] is None:
        return "-"
    mean = (region["k_drift"] + region["v_drift"]) / 2
    return f"{mean:.1e}" if mean else "0"


def _attended(region: Mapping[str, float] | None) -> str:
    return "-" if region is None else f"{100 * region['attention']:.1f}"
