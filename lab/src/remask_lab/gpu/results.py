"""What the parts of a run leave in its folder: one JSON file each, which a later run of the same commit keeps.

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
    """What a part has come to: its figures so far, whether it ran to its end, and why not.

    `error` is None while it runs, too; `commit` is that of the checkout that ran it.
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
        """What stands in the part's file; None where there is none. Raises `RecordError` on another file."""
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


def kept(results: Mapping[str, Result | None]) -> dict[str, Any] | None:
    """The machine and the rows of the part `speed`; None where there is no GPU, or one of these parts has not run."""
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
    """The kept files of `folder`, in order of their names."""
    return [json_object(str(path), path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def speed_table(gpus: Sequence[Mapping[str, Any]]) -> str:
    """Tokens a second of every cache on all `gpus`, each at its fastest settings, and the conditions."""
    shape, requests = gpus[0]["shape"], gpus[0]["shape"]["batches"]
    header, rows = ["cache"], [[cache] for cache in CACHES]
    for gpu in gpus:
        first, *others = requests
        name = gpu["gpu"].removeprefix("NVIDIA ").split()[0]
        header += [f"{name}, {first} at a time", *map(str, others), f"roof, {requests[1]}"]
        for row in rows:
            found = [_fastest(gpu["rows"], row[0], count) for count in requests]
            row += [f"{best['tok_s']:.0f}{_mark(best, gpu)}" if best else "-" for best in found]
            share = None if found[1] is None else found[1].get("share_of_roof")
            row.append("-" if share is None else f"{100 * share:.0f} %")
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
    """Minutes that a benchmark would take: its questions, in batches, times the steps of an answer as measured."""
    shape, batches = gpu["shape"], gpu["shape"]["batches"]
    rows = []
    for cache in CACHES:
        found = [_fastest(gpu["rows"], cache, count) for count in batches]
        times = [
            best and questions / count * steps * best["ms_per_step"] / 60_000
            for best, count in zip(found, batches, strict=True)
        ]
        marks = [_mark(best, gpu) if best else "" for best in found]
        cells = ("-" if each is None else f"{each:.0f}{mark}" for each, mark in zip(times, marks, strict=True))
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
    """The fastest row of `cache` with so many requests; None where none was measured."""
    found = [
        row for row in rows if (row["cache"], row["requests"], row["tokens_per_step"]) == (cache, requests, TOKENS)
    ]
    return max(found, key=lambda row: float(row["tok_s"]), default=None)


def _mark(best: Mapping[str, Any], gpu: Mapping[str, Any]) -> str:
    """A star where a cache ran on `gpu` without graphs alone, and another one with them: they do not compare."""
    bare = best["cache"] in CACHES[2:] and not best["settings"].get("graphs")
    return "*" if bare and any(row["settings"].get("graphs") for row in gpu["rows"]) else ""


def _note(rows: Sequence[Sequence[str]]) -> str:
    return " * Without graphs." if any(cell.endswith("*") for row in rows for cell in row) else ""
