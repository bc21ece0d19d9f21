"""What a run shows to be right and fast on its device, as the defaults of every start there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

from remask_lab.gpu.results import Result

GAIN = 1.02  # by how much a setting must be faster: less may be chance
PROOFS = ("kernels", "goldens")


@dataclass(frozen=True, slots=True)
class Decision:
    """The defaults of a device, and what they follow from.

    Attributes:
        attention: what "auto" means there.
        overlap: whether passes are queued ahead.
        graphs: whether layers are repeated as graphs.
        why: a sentence on each.
    """

    attention: str
    overlap: bool
    graphs: bool
    why: tuple[str, ...]


def decide(results: Mapping[str, Result | None]) -> Decision | None:
    """What follows from the `results` of a run's parts; None where it did not prove or time anything.

    A default is on where all that proves it was run and is right, and where it is faster.
    """
    proof, timed = results.get("proof"), results.get("policies")
    if proof is None or not proof.found or timed is None or not timed.found.get("rows"):
        return None
    against = [*_open("compile", results), *proof.found["faults"]]
    for name in PROOFS:
        against += _open(name, results)
    attention = "torch" if against else "triton"
    told = [
        f"attention={attention}: {'; '.join(against) if against else 'all its kernels compile and agree with torch'}"
    ]
    if proof.found["executor"] != "triton":
        attention = "torch"
        told = [f"attention=torch: {proof.found['executor']} was proven here, as this is a rehearsal without a GPU"]
    allowed = {
        "overlap": _open("overlap", results),
        "graphs": [*proof.found["graph_faults"], *_open("graphs", results)],
    }
    told += [f"{name} is off: {'; '.join(why)}" for name, why in allowed.items() if why]
    best, gain = (False, False), GAIN
    for overlap, graphs in ((True, False), (False, True), (True, True)):
        if (overlap and allowed["overlap"]) or (graphs and allowed["graphs"]):
            continue
        ratio = _ratio(timed.found["rows"], attention, overlap, graphs)
        if ratio is None:
            continue
        told.append(f"{_named(overlap, graphs)}: {ratio:.2f} times the speed without, over all cells")
        if ratio > gain:
            best, gain = (overlap, graphs), ratio
    return Decision(attention, *best, tuple(told))


def _open(name: str, results: Mapping[str, Result | None]) -> list[str]:
    """Why the part does not speak for what it proves; empty where it does."""
    result = results.get(name)
    if result is None:
        return [f"the part {name!r} was not run"]
    return [] if result.done else [f"the part {name!r}: {result.error}"]


def _ratio(rows: Sequence[Mapping[str, Any]], attention: str, overlap: bool, graphs: bool) -> float | None:
    """How many times as fast cells are with a setting as without: the geometric mean. None where none was measured."""
    plain = {_cell(row): row["tok_s"] for row in rows if _engine(row) == (attention, False, False)}
    found = [row for row in rows if _engine(row) == (attention, overlap, graphs) and _cell(row) in plain]
    if not found:
        return None
    return exp(sum(log(row["tok_s"] / plain[_cell(row)]) for row in found) / len(found))


def _engine(row: Mapping[str, Any]) -> tuple[str, bool, bool]:
    settings = row["settings"]
    return row["attention"], bool(settings.get("overlap")), bool(settings.get("graphs"))


def _cell(row: Mapping[str, Any]) -> tuple[object, ...]:
    """What is measured, whatever the engine."""
    settings = {name: value for name, value in row["settings"].items() if name not in ("overlap", "graphs")}
    return row["cache"], row["requests"], row["tokens_per_step"], tuple(sorted(settings.items(), key=str))


def _named(overlap: bool, graphs: bool) -> str:
    return " and ".join(name for name, on in (("overlap", overlap), ("graphs", graphs)) if on)
