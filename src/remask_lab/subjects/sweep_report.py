"""Rows of a sweep of tau or R, and what they show in words."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

Parameter: TypeAlias = Literal["tau", "refresh_interval"]
PARAMETERS: tuple[Parameter, ...] = ("tau", "refresh_interval")
NAMES: Mapping[Parameter, str] = {"tau": "tau", "refresh_interval": "R"}
Row: TypeAlias = Mapping[str, Any]  # cache, tau, refresh_interval, and what `run_bench` reports


def reading(rows: Mapping[Parameter, Sequence[Row]]) -> str:
    """What the sweeps show, in one paragraph."""
    parts = []
    for parameter in PARAMETERS:
        of_parameter = rows[parameter]
        for cache in dict.fromkeys(row["cache"] for row in of_parameter):
            own = sorted((row for row in of_parameter if row["cache"] == cache), key=lambda row: row[parameter])
            if len(own) > 1:
                parts.append(_sentence(cache, parameter, own))
    return " ".join(parts) or "A single point shows no trend."


def _sentence(cache: str, parameter: Parameter, rows: Sequence[Row]) -> str:
    name = NAMES[parameter]
    first, last = rows[0], rows[-1]
    speeds = [row["ratio_to_none"] for row in rows]
    text = (
        f"{cache}: as {name} grows from {first[parameter]:g} to {last[parameter]:g}, throughput goes from "
        f"{speeds[0]:.2f} to {speeds[-1]:.2f} times that without a cache ({min(speeds):.2f} to {max(speeds):.2f} over "
        f"all values), and the work saved from {first['work_ratio_to_none']:.2f}x to {last['work_ratio_to_none']:.2f}x"
    )
    depths = first["prefix_depth"], last["prefix_depth"]
    if depths[0] != depths[1]:
        text += f", as the depth goes from {depths[0]:.1f} to {depths[1]:.1f} layers"
    return f"{text}; {_quality(parameter, rows)}"


def _quality(parameter: Parameter, rows: Sequence[Row]) -> str:
    """Accuracy where the workload has answers, else agreement with `none`."""
    if rows[0]["accuracy"] is None:
        values = [row["agreement_with_none"] for row in rows]
        what = "agreement with no cache"
    else:
        values = [row["accuracy"] for row in rows]
        what = "accuracy"
    low, high = min(values), max(values)
    if low == high:
        return f"{what} is {100 * low:.1f} % throughout."
    best = ", ".join(f"{row[parameter]:g}" for row, value in zip(rows, values, strict=True) if value == high)
    text = f"{what} lies between {100 * low:.1f} % and {100 * high:.1f} %, highest at {NAMES[parameter]} = {best}"
    if rows[0]["accuracy"] is not None:
        overlap = max(row["accuracy_interval"][0] for row in rows) <= min(row["accuracy_interval"][1] for row in rows)
        text += ", with 95 % intervals that " + ("all overlap" if overlap else "do not all overlap")
    return text + "."
