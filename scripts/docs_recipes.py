"""Writes the tables of the recipe pages, docs/recipe*.md: `python scripts/docs_recipes.py`.

Memory is what `remask inspect model` reports of a preset. Speed is computed: a pass takes at least the FLOPs and the
bytes of its operations by the data sheet (`remask.plan.pass_cost`), or by the CPU time that was measured for LLaDA-8B.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from remask.checkpoint.presets import preset
from remask.cli.inspect_model import ModelReport, inspect_model
from remask.engine.capacity import token_bytes
from remask.model.config import ModelConfig
from remask.plan import Plan, Span
from remask.plan.cost import PassCost
from remask.plan.pass_cost import ExecutedPlan, pass_cost
from remask_lab.speed.speculation import DATA_SHEETS

DOCS = Path(__file__).parents[1] / "docs"
RECIPES = {
    "recipe-llada": ("llada-8b", "llada-1.5"),
    "recipe-llada-moe": ("llada-moe-7b-a1b",),
    "recipe-dream": ("dream-7b", "diffucoder-7b"),
    "recipe-illada": ("illada-8b",),
    "recipe-gidd": ("gidd-unif-3b", "gidd-mask-3b", "gidd-unif-10b"),
    "recipe-sdar": ("sdar-1.7b", "sdar-4b", "sdar-8b", "sdar-30b-a3b"),
    "recipe-llada2": ("llada2-mini", "llada2-flash"),
    "recipe-fast-dllm-v2": ("fast-dllm-v2-7b",),
}
BLOCK = re.compile(r"(?<=<!-- generated: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
KINDS = ("bfloat16", "int8", "int4")
GGUF_BITS = (8.5, 4.5)  # a number, with its share of the scales
GGUF = ("llada", "llada-moe", "dream")  # families that have a GGUF architecture
CACHES = {"masked": "block-dual", "uniform": "uniform-cache", "block_causal": "exact"}
DEVICES = (16, 24, 80)  # GB
CANVAS, BLOCK_LENGTH = 1024, 32
MEASURED = "llada-8b", 1.77  # seconds of CPU for a pass of one block as int8: docs/laptop.md
CORES, MEMORY_S = 8, 40e9  # of the CPU that is computed for; bytes a second


def pages() -> dict[Path, str]:
    """Every page with tables, as it should be."""
    found = {DOCS / f"{name}.md": names for name, names in RECIPES.items()}
    found[DOCS / "recipes.md"] = tuple(each for names in RECIPES.values() for each in names)
    return {page: written(page.read_text(encoding="utf-8"), names) for page, names in found.items()}


def written(text: str, names: Sequence[str]) -> str:
    """The page `text` about the presets `names`, with its tables as they should be."""
    tables = {"sizes": sizes, "room": room, "speed": speed, "overview": overview}
    return BLOCK.sub(lambda found: f"{found[1]}{found[2]}{tables[found[1]](shapes(names))}", text)


def shapes(names: Sequence[str]) -> dict[str, str]:
    """One preset of each shape, and all names of that shape as they are shown."""
    alike: dict[ModelConfig, list[str]] = {}
    for name in names:
        alike.setdefault(preset(name), []).append(name)
    return {each[0]: ", ".join(f"`{name}`" for name in each) for each in alike.values()}


def sizes(names: Mapping[str, str]) -> str:
    """What each model takes on disk and in memory."""
    gguf = any(preset(name).family in GGUF for name in names)
    head = ["preset", "parameters", "to download", *(["GGUF, `Q8_0` or `Q4_0`"] if gguf else [])]
    head += [f"weights as {kind}" for kind in KINDS]
    rows = [[*head, f"K/V of {CANVAS:,} tokens", "the same, stored"]]
    for name, shown in names.items():
        config, report = preset(name), report_of(name, DEVICES[0])
        taken = token_bytes(config, 2)
        active = f", {report.active_parameters / 1e9:.1f} B active" if config.mixture else ""
        files = " or ".join(f"{report.parameters * bits / 8e9:.1f}" for bits in GGUF_BITS)
        rows.append(
            [
                shown,
                f"{report.parameters / 1e9:.1f} B{active}",
                f"{report.weight_bytes['bfloat16'] / 1e9:.1f} GB",
                *([f"{files} GB"] if gguf else []),
                *(f"{report.weight_bytes[kind] / 1e9:.1f} GB" for kind in KINDS),
                f"{CANVAS * taken.kv / 1e9:.2f} GB",
                "-" if config.kind == "uniform" else f"{CANVAS * (taken.kv + taken.state) / 1e9:.2f} GB",
            ]
        )
    return table(rows)


def room(names: Mapping[str, str]) -> str:
    """For how many tokens there is room beside the weights, on devices of several sizes."""
    rows = [["preset, weights as", *(f"{size} GB" for size in DEVICES)]]
    for name, shown in names.items():
        for kind in KINDS:
            tokens = [report_of(name, size).kv_tokens[kind] for size in DEVICES]
            rows.append([f"{shown}, {kind}", *("no" if each is None else f"{each:,}" for each in tokens)])
    return table(rows)


@cache
def report_of(name: str, size: int) -> ModelReport:
    """What `remask inspect model` says of a preset on a device of `size` GB."""
    return inspect_model(name, size * 10**9)


def speed(names: Mapping[str, str]) -> str:
    """What a pass takes at least, and how many tokens a second come of it at one token a step."""
    cpu = f"{CORES} cores, int8"
    rows = [["preset", "cache", "H100: a full pass", "a cached one", "tokens/s", f"{cpu}: a cached pass", "tokens/s"]]
    for name, shown in names.items():
        config = preset(name)
        for policy in ("none", CACHES[config.kind]):
            full, least, rate = answer(config, policy, "h100")
            _, slow, slow_rate = answer(config, policy, "cpu")
            cached = policy != "none"
            rows.append(
                [
                    shown,
                    f"`{policy}`",
                    f"{1e3 * full:.1f} ms",
                    f"{1e3 * least:.1f} ms" if cached else "-",
                    f"{rate:,.0f}",
                    f"{slow:.2f} s" if cached else "-",
                    f"{slow_rate:.2g}",
                ]
            )
    return table(rows)


def overview(names: Mapping[str, str]) -> str:
    """All models in one table."""
    owners = {each: page for page, owned in RECIPES.items() for each in owned}
    rows = [["preset", "recipe", *(f"weights as {kind}" for kind in KINDS), "tokens/s at most, one H100"]]
    for name, shown in names.items():
        config, report = preset(name), report_of(name, DEVICES[0])
        policy = CACHES[config.kind]
        weights = (f"{report.weight_bytes[kind] / 1e9:.1f} GB" for kind in KINDS)
        rate = f"{answer(config, policy, 'h100')[2]:,.0f} (`{policy}`)"
        rows.append([shown, f"[{config.family}]({owners[name]}.md)", *weights, rate])
    return table(rows)


@cache
def answer(config: ModelConfig, policy: str, device: str) -> tuple[float, float, float]:
    """Least seconds of a full and of a cached pass, and tokens a second, of one request at one token a step."""
    canvas = config.max_length if config.kind == "uniform" else CANVAS
    block = config.block_length or BLOCK_LENGTH
    full, least = seconds(config, canvas, canvas, device), seconds(config, block, canvas, device)
    if policy == "none":
        return full, full, 1 / full
    return full, least, block / sum(seconds(config, rows, canvas, device) for rows in rows_of(policy, canvas, block))


def rows_of(policy: str, canvas: int, block: int) -> Iterator[int]:
    """Rows that each step of a block computes, at one token a step."""
    for step in range(block):
        if step == 0:
            yield 2 * block if policy == "exact" else canvas
        else:  # by default every fourth step of `uniform-cache` computes the next block too
            yield 2 * block if policy == "uniform-cache" and (step + 1) % 4 == 0 else block


@cache
def seconds(config: ModelConfig, rows: int, canvas: int, device: str) -> float:
    """The least time of a pass over the last `rows` rows of a canvas."""
    if device == "cpu":
        name, measured = MEASURED
        rate = cost(preset(name), BLOCK_LENGTH, CANVAS, 1).total.flops / (measured / CORES)
        found = cost(config, rows, canvas, 1).total
        return max(found.flops / rate, found.weights / MEMORY_S)
    flops, moved = DATA_SHEETS[device]
    operations = cost(config, rows, canvas, 2).operations.values()
    return sum(max(each.flops / flops, each.bytes / moved) for each in operations)


def cost(config: ModelConfig, rows: int, canvas: int, item: int) -> PassCost:
    """The cost of a pass over the last `rows` rows, of which those of one block predict."""
    places = np.arange(canvas)
    predicted = places >= canvas - min(rows, config.block_length or BLOCK_LENGTH)
    plan = Plan([Span(range(config.layers), places >= canvas - rows)], predicted)
    return pass_cost(config.widths(item), [ExecutedPlan(plan)])


def table(rows: list[list[str]]) -> str:
    """Rows, the first of which is the head, as Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
