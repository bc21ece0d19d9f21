"""The result files of a run, one for each part, which a later run of the same commit does not measure again.

`benchmarks/results/gpu` holds a file a GPU: the `kept.json` that `scripts/gpu` leaves, which pages show a table of.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from remask.checks.values import json_object
from remask.errors import RecordError
from remask.machine.disk import write_whole
from remask_lab.records.machine import commit
from remask_lab.records.markdown import markdown_table


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a part.

    Attributes:
        found: its figures so far.
        done: whether it ran to its end.
        error: why it did not; None while it runs, too.
        commit: the commit of the checkout that ran it.
    """

    part: str
    found: Mapping[str, Any]
    done: bool = False
    error: str | None = None
    commit: str | None = field(default_factory=commit)

    def save(self, folder: Path) -> None:
        """Write the part's file. Raises `OutputError`."""
        write_whole("the part's result", _file(folder, self.part), json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path, part: str) -> "Result | None":
        """Read the part's file; None without one. Raises `RecordError` where it holds no result."""
        file = _file(folder, part)
        if not file.exists():
            return None
        try:
            return cls(**json_object(str(file), file.read_text(encoding="utf-8")))
        except (TypeError, ValueError, OSError) as error:
            raise RecordError(f"{file} is no result of this command ({error}); remove it") from error


def _file(folder: Path, part: str) -> Path:
    return folder / f"{part}.json"


CELL: Final = ("cache", "requests", "tokens_per_step", "settings", "attention", "tok_s", "ms_per_step", "share_of_roof")
TOKENS = 2  # a step, of the rows that the table shows
CACHES = ("plain PyTorch", "none", "bicache", "block-dual", "bicache+block-dual")


def summarize(results: Mapping[str, Result | None]) -> dict[str, Any] | None:
    """The facts of the GPU and the rows of the part `speed`, for a file of `benchmarks/results/gpu`.

    None without a GPU, and where `machine` or `speed` has no result.
    """
    machine, speed = results["machine"], results["speed"]
    if machine is None or speed is None or "gpu" not in machine.found or not speed.found.get("rows"):
        return None
    return {
        "gpu": machine.found["gpu"]["name"],
        "versions": machine.found["versions"],
        "peaks": machine.found["peaks"],
        "commit": speed.commit,
        "date": datetime.now(UTC).date().isoformat(),
        "shape": speed.found["shape"],
        "rows": [{name: row[name] for name in CELL if name in row} for row in speed.found["rows"]],
    }


def read_kept(folder: Path) -> list[dict[str, Any]]:
    """Read the files that `summarize` made, sorted by name."""
    return [json_object(str(path), path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def speed_table(gpus: Sequence[Mapping[str, Any]]) -> str:
    """A table of the tokens/s of every cache on each GPU at its fastest settings, and the conditions in words.

    `gpus` are as `read_kept` returns them.
    """
    shape, batches = gpus[0]["shape"], gpus[0]["shape"]["batches"]
    header, rows = ["cache"], [[cache] for cache in CACHES]
    for gpu in gpus:
        first_batch, *other_batches = batches
        name = gpu["gpu"].removeprefix("NVIDIA ").split()[0]
        header += [f"{name}, {first_batch} at a time", *map(str, other_batches), f"roof, {batches[1]}"]
        for row in rows:
            best_rows = [_fastest(gpu["rows"], row[0], count) for count in batches]
            row += [f"{best['tok_s']:.0f}{_mark(best, gpu)}" if best else "-" for best in best_rows]
            roof_share = None if best_rows[1] is None else best_rows[1].get("share_of_roof")
            row.append("-" if roof_share is None else f"{100 * roof_share:.0f} %")
    machines = "; ".join(
        f"{gpu['gpu']}, commit {gpu['commit'][:8]}, {gpu['date']}, PyTorch {gpu['versions']['torch']}, Triton "
        f"{gpu['versions']['triton']}"
        for gpu in gpus
    )
    return (
        f"{markdown_table(header, rows)}\n\nTokens a second of all requests together, {TOKENS} a step, at the fastest "
        f"settings: the shape of {shape['preset']} with random weights, {shape['dtype']}, canvas of {shape['canvas']}, "
        f"{shape['response']} new tokens in blocks of {shape['block']}, a shared prefix of {shape['prefix']}, depth "
        f"{shape['depth']}, a refresh every 16 steps. `roof` is the share of the speed that the card's measured peaks "
        f"allow. The cells of `scripts/gpu OUTPUT`, on {machines}.{_note(rows)}"
    )


def benchmark_table(gpu: Mapping[str, Any], questions: int, steps: int) -> str:
    """A table of the minutes that a benchmark of `questions` answers would take, of `steps` steps each, on `gpu`."""
    shape, batches = gpu["shape"], gpu["shape"]["batches"]
    rows = []
    for cache in CACHES:
        best_rows = [_fastest(gpu["rows"], cache, count) for count in batches]
        minutes = [
            best and questions / count * steps * best["ms_per_step"] / 60_000
            for best, count in zip(best_rows, batches, strict=True)
        ]
        marks = [_mark(best, gpu) if best else "" for best in best_rows]
        cells = ("-" if time is None else f"{time:.0f}{mark}" for time, mark in zip(minutes, marks, strict=True))
        rows.append([cache, *cells])
    header = ["cache", f"{batches[0]} at a time", *map(str, batches[1:])]
    prompt = shape["canvas"] - shape["response"]
    return (
        f"{markdown_table(header, rows)}\n\nMinutes, **computed** from steps that were measured with random weights: "
        f"{questions} times {steps} steps of {TOKENS} tokens; at a token a step twice as many. {shape['preset']}, "
        f"{prompt} tokens of prompt, {shape['prefix']} of them shared, {shape['response']} of answer; {gpu['gpu']}, "
        f"commit {gpu['commit'][:8]}, {gpu['date']}.{_note(rows)}"
    )


def _fastest(rows: Sequence[Mapping[str, Any]], cache: str, requests: int) -> Mapping[str, Any] | None:
    """The row of `cache` with that number of requests which has the most tokens/s; None without such rows."""
    candidates = [
        row for row in rows if (row["cache"], row["requests"], row["tokens_per_step"]) == (cache, requests, TOKENS)
    ]
    return max(candidates, key=lambda row: float(row["tok_s"]), default=None)


def _mark(best: Mapping[str, Any], gpu: Mapping[str, Any]) -> str:
    """A star where `best` is a cache that ran without graphs, and other caches of `gpu` ran with them."""
    without_graphs = best["cache"] in CACHES[2:] and not best["settings"].get("graphs")
    return "*" if without_graphs and any(row["settings"].get("graphs") for row in gpu["rows"]) else ""


def _note(rows: Sequence[Sequence[str]]) -> str:
    """What the star of `_mark` says, if a cell has one."""
    return " * Without graphs." if any(cell.endswith("*") for row in rows for cell in row) else ""
