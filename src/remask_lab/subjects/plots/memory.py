"""A picture of what cache policies keep between passes."""

from collections.abc import Sequence
from pathlib import Path

from remask_lab.drawing import K_COLOR, new_figure, save_figures
from remask_lab.subjects.memory_report import MemoryUse

_PARTS = {
    "kv": ("K and V", K_COLOR),
    "outputs": ("attention and FFN outputs", "#c0392b"),
    "states": ("hidden states of requests", "#e67e22"),
    "store": ("K and V of the shared prefix", "#5dade2"),
    "boundary": ("hidden states of the shared prefix", "#f5b041"),
    "unused": ("slots without a token", "#bfbfbf"),
}


def plot_memory(uses: Sequence[MemoryUse], model: str, folder: str | Path) -> list[Path]:
    """Draw a bar a policy into `memory.png` in `folder`, which is made if it is not there; its path is returned.

    Raises `ConfigError` where the folder cannot be made.
    """
    figure = new_figure("memory of cache policies", 1.6 + 0.32 * len(uses))
    axes = figure.subplots()
    names = [use.cache for use in uses]
    left = [0.0] * len(uses)
    for part, (label, color) in _PARTS.items():
        sizes = [use.formula.parts.get(part, use.unused) / 1e6 for use in uses]
        if any(sizes):
            axes.barh(names, sizes, left=left, color=color, label=label)
        left = [begin + size for begin, size in zip(left, sizes, strict=True)]
    for at, use in enumerate(uses):
        axes.text(left[at], at, f" {100 * use.share:.1f} %", va="center", fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(left))
    axes.set_xlabel("MB; in percent: of the weights")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return save_figures({"memory": figure}, folder, model)
