"""Picture of the sweeps of tau and R: speed and accuracy over both."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from remask_lab.drawing import K_COLOR, V_COLOR, new_figure, save_figures
from remask_lab.subjects.sweep_report import NAMES, Parameter, Row

_LABELS: Mapping[Parameter, str] = {"tau": "threshold tau", "refresh_interval": "refresh interval R (steps)"}
_COLORS = (K_COLOR, V_COLOR, "#2ca02c", "#9467bd", "#ff7f0e")


def plot_sweep(rows: Mapping[Parameter, Sequence[Row]], folder: str | Path, model: str) -> list[Path]:
    """Draw `sweep-tau.png` and `sweep-refresh-interval.png`, of the sweeps that have rows; returns their paths.

    Raises `ConfigError` where the folder cannot be made.
    """
    figures = {
        f"sweep-{parameter.replace('_', '-')}": _figure(parameter, own) for parameter, own in rows.items() if own
    }
    return save_figures(figures, folder, model)


def _figure(parameter: Parameter, rows: Sequence[Row]) -> Figure:
    held: Parameter = "refresh_interval" if parameter == "tau" else "tau"
    figure = new_figure(f"sweep of the {_LABELS[parameter]} ({NAMES[held]} = {rows[0][held]:g})")
    left, right = figure.subplots(1, 2)
    values = sorted({row[parameter] for row in rows})
    for index, cache in enumerate(dict.fromkeys(row["cache"] for row in rows)):
        own = sorted((row for row in rows if row["cache"] == cache), key=lambda row: row[parameter])
        # Lines that coincide are set apart a little.
        places = [values.index(row[parameter]) + 0.06 * index for row in own]
        color = _COLORS[index % len(_COLORS)]
        _speed(left, places, own, cache, color)
        _quality(right, places, own, cache, color)
    for axes in (left, right):
        axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        axes.set_xlabel(_LABELS[parameter])
        axes.grid(alpha=0.3)
    left.set_title("throughput, and work saved", fontsize="medium")
    left.set_ylabel("gain over no cache (bars: rounds)")
    left.set_ylim(bottom=0)
    right.set_title(_quality_name(rows), fontsize="medium")
    right.set_ylabel("share of answers (%)" if rows[0]["accuracy"] is not None else "share of tokens (%)")
    right.set_ylim(0, 105)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize="small", frameon=False)
    return figure


def _quality_name(rows: Sequence[Row]) -> str:
    return "agreement with no cache" if rows[0]["accuracy"] is None else "accuracy (bars: 95 % intervals)"


def _speed(axes: Axes, places: Sequence[float], rows: Sequence[Row], cache: str, color: str) -> None:
    speeds = [row["ratio_to_none"] for row in rows]
    spread = [[s - row["ratio_range"][0] for s, row in zip(speeds, rows, strict=True)]]
    spread.append([row["ratio_range"][1] - s for s, row in zip(speeds, rows, strict=True)])
    axes.errorbar(places, speeds, yerr=spread, fmt=".-", color=color, capsize=2, linewidth=1.2, label=cache)
    work = [row["work_ratio_to_none"] for row in rows]
    axes.plot(places, work, ":", color=color, linewidth=1.2, label=f"{cache}: row-layers")


def _quality(axes: Axes, places: Sequence[float], rows: Sequence[Row], cache: str, color: str) -> None:
    if rows[0]["accuracy"] is None:
        axes.plot(places, [100 * row["agreement_with_none"] for row in rows], ".-", color=color, label=cache)
        return
    shares = [100 * row["accuracy"] for row in rows]
    spread = [[share - 100 * row["accuracy_interval"][0] for share, row in zip(shares, rows, strict=True)]]
    spread.append([100 * row["accuracy_interval"][1] - share for share, row in zip(shares, rows, strict=True)])
    axes.errorbar(places, shares, yerr=spread, fmt=".-", color=color, capsize=2, linewidth=1.2, label=cache)
