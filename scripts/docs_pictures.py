"""Draws docs/images/how-*.svg, what each cache computes in some steps: `python scripts/docs_pictures.py`.

Nothing is drawn by hand. A small model with random weights answers a request under the policy, and every pass is
observed: which rows each layer computed, which it read from the store, and whose K or V changed in the cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from remask.checkpoint.loaded import dummy_weights
from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.families import preset
from remask.model.transformer import Transformer
from remask.policies import DepthLookup, parse, policy_names
from remask.request.sampling_params import SamplingParams
from remask_lab.observe import ObservedPass, observe_passes

IMAGES = Path(__file__).parents[1] / "docs" / "images"
LAYERS, PREFIX, COMMON, PROMPT, RESPONSE, BLOCK = 6, 10, 12, 14, 12, 6  # `COMMON`: see `Scene.before`
# Pixels: a cell, the margin at the left, the space between panels and above one, a line of the legend
CELL, LEFT, GAP, HEAD, LINE = 9, 64, 22, 60, 22
COLUMNS = 2  # of panels
SHARPER = 8  # times the usual random weights, so that some predictions are surer than others
COMPUTED, RENEWED, CACHED, STORED, ABSENT = range(5)
LEGEND = {
    COMPUTED: "computed",
    RENEWED: "only its V computed",
    CACHED: "K/V read from its own cache",
    STORED: "K/V read from the store",
}
DECODED, GIVEN, MASK, NEW = range(4)  # of a position: decoded before, given, a mask, and decoded by this step
# The order in which the masks of both blocks are decoded.
ORDER = [[14, 16, 15, 18, 17, 19], [20, 21, 24, 22, 25, 23]]
STYLE = """
svg { color-scheme: light dark }
.card { fill: #ffffff; stroke: #d0d4dc }
text { font: 17px system-ui, sans-serif; fill: #1f2430 }
.small { font-size: 15px; fill: #4a5160 }
.s0 { fill: #2456c8 } .s1 { fill: #f0a020 } .s2 { fill: #cfd9ee } .s3 { fill: url(#stored) }
.t0 { fill: #4a5160 } .t1 { fill: #a6adba } .t2 { fill: none; stroke: #4a5160 } .t3 { fill: #c22f5c }
.line { stroke: #4a5160; stroke-dasharray: 2 2 }
.ground { fill: #d5efe0 } .stripe { stroke: #17804a }
@media (prefers-color-scheme: dark) {
  .card { fill: #171a21; stroke: #3a4150 }
  text { fill: #e8ebf2 } .small { fill: #b6bdca }
  .s0 { fill: #6d9bff } .s1 { fill: #f5b648 } .s2 { fill: #364058 }
  .t0 { fill: #c3c9d6 } .t1 { fill: #687080 } .t2 { stroke: #c3c9d6 } .t3 { fill: #ff7099 }
  .line { stroke: #9aa2b1 }
  .ground { fill: #173a29 } .stripe { stroke: #58c78d }
}
"""


@dataclass(frozen=True)
class Scene:
    """A policy, a request under it, and the passes that are shown."""

    cache: str
    settings: Mapping[str, Any]
    passes: Sequence[int]
    preset: str = "llada-tiny"
    sampling: Mapping[str, Any] = field(
        default_factory=lambda: {"block_length": BLOCK, "remasking": {"rule": "order", "order": ORDER}}
    )
    prefix: int = 0
    before: bool = False  # another request ran before, whose prompt has the same first `COMMON` tokens
    limits: Mapping[str, Any] = field(default_factory=dict)


ONE_BLOCK = {"remasking": {"rule": "order", "order": [[*ORDER[0], *ORDER[1]]]}}
SCENES = {
    "how-none": Scene("none", {}, (0, 1)),
    "how-reuse": Scene("reuse", {}, (0, 1), prefix=PREFIX),
    "how-bicache": Scene("bicache", {"depth": 3, "refresh_interval": 4}, (0, 1, 3, 4), prefix=PREFIX),
    "how-block-prefix": Scene("block-prefix", {}, (0, 1, 6, 7)),
    "how-block-dual": Scene("block-dual", {}, (0, 1, 6, 7)),
    "how-dkv-cache": Scene("dkv-decode", {"refresh_interval": 6}, (0, 1, 2, 4, 5, 6), sampling=ONE_BLOCK),
    "how-dllm-cache": Scene(
        "dllm-cache",
        {"prompt_interval": 8, "response_interval": 4, "ratio": 0.25},
        (0, 1, 2, 4, 5, 8),
        sampling=ONE_BLOCK,
    ),
    "how-uniform-cache": Scene(
        "uniform-cache",
        {"refresh_next": 3},
        (0, 1, 2, 3, 6, 7),
        preset="gidd-tiny",
        sampling={
            "block_length": BLOCK,
            "uniform": {"canvas_length": PROMPT + RESPONSE + 4},
            "ignore_eos": True,
            "seed": 1,
        },
    ),
    "how-exact-pages": Scene(
        "exact",
        {},
        (0, 1, 2, 3),
        preset="sdar-tiny",
        sampling={"remasking": "sequential"},
        before=True,
        limits={"page_size": 4},
    ),
}
# Scenes of caches of the package remask-caches, drawn if it is installed.
PACKAGE_SCENES = {
    "package-elastic-cache": Scene("elastic-cache", {"window": 4, "threshold": 0.8}, (0, 1, 2, 3, 7, 9), sampling={}),
    "package-entropy-cache": Scene("entropy-cache", {"threshold": 4.7, "recent": 2}, (0, 5, 6, 7), sampling=ONE_BLOCK),
}


@dataclass
class Panel:
    """One pass: the state of each position, and of each row in each layer."""

    step: int
    tokens: NDArray[np.int64]
    cells: NDArray[np.int64]  # [layers, positions]
    cost: int  # row-layers, as the engine counts them


def panels(scene: Scene) -> list[Panel]:
    """Run the scene's request, and return the passes that are shown."""
    config = replace(preset(scene.preset), layers=LAYERS)
    weights = dummy_weights(config, torch.float32, torch.device("cpu"))
    for name, _, tensor in weights.named_tensors():
        tensor *= SHARPER if "norm" not in name else 1
    model = Transformer(config, weights)
    engine = Engine(model, EngineConfig(max_num_seqs=1, **scene.limits), scene.preset)
    prompt = list(range(1, PROMPT + 1))
    params = SamplingParams(max_tokens=RESPONSE, **{"ignore_eos": True, **scene.sampling})
    policy = parse(scene.cache, scene.settings, lambda: DepthLookup({}))
    request = Request("shown", prompt, params, scene.prefix, policy=policy)
    if scene.before:
        run(engine, replace(request, id="before", prompt_token_ids=[*prompt[:COMMON], *reversed(prompt[COMMON:])]))
    all_panels: list[Panel] = []
    last_kv: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    written = np.zeros((LAYERS, engine.max_model_len), dtype=np.bool_)

    def watch(passes: Sequence[ObservedPass]) -> None:
        nonlocal last_kv
        for observed in passes:
            all_panels.append(
                panel_of(observed, last_kv, written, mask=config.mask_id, uniform=config.kind == "uniform")
            )
            last_kv = observed.kv(slice(None))

    observer = observe_passes(engine, watch)
    run(engine, request)
    engine.detach(observer)
    for current, following in pairwise(all_panels):
        current.tokens[(current.tokens == MASK) & (following.tokens != MASK)] = NEW
    return [all_panels[number] for number in scene.passes]


def run(engine: Engine, request: Request) -> None:
    """Answer a request, which must not fail."""
    engine.add(request)
    while engine.busy:
        for event in engine.step():
            assert event.result is None or event.result.error is None


def panel_of(
    observed: ObservedPass, last_kv: list[Any] | None, written: NDArray[np.bool_], *, mask: int, uniform: bool
) -> Panel:
    """Return the panel of one pass, and add the rows that it computed to `written`, bool [layers, positions].

    `last_kv` are K and V by layer as the last pass left them; None in the first pass. `mask` is the mask token's id.
    """
    length = len(observed.tokens)
    states = np.full((LAYERS, length), ABSENT)
    kv = observed.kv(slice(None))
    for layer, span in ((layer, stage) for stage in observed.plan.spans for layer in stage.layers):
        row = states[layer]
        row[written[layer, :length]] = CACHED
        if observed.prefix is not None and layer < observed.prefix.layers:
            row[observed.prefix.rows(length)] = STORED
        row[span.computed] = COMPUTED
        if span.pick is not None:
            assert last_kv is not None
            candidates = span.pick.candidates
            # K of a picked row is written, and V of all candidates.
            is_picked = (kv[layer][0] != last_kv[layer][0]).flatten(1).any(1).numpy()
            row[candidates] = np.where(is_picked, COMPUTED, RENEWED)[candidates]
        written[layer, :length] |= row == COMPUTED
    positions = np.arange(length)
    is_noisy = positions >= observed.block.start if uniform else observed.tokens == mask
    tokens = np.where(positions < observed.prompt, GIVEN, np.where(is_noisy, MASK, DECODED))
    return Panel(step=observed.step, tokens=tokens, cells=states, cost=observed.cost)


def svg(scene: Scene, shown: Sequence[Panel]) -> str:
    """Return the picture of the panels, with a legend of the states that they have."""
    length = max(len(panel.tokens) for panel in shown)
    panel_width, panel_height = length * CELL, (LAYERS + 2) * CELL + HEAD
    width = LEFT + COLUMNS * (panel_width + GAP)
    rows = -(-len(shown) // COLUMNS)
    used = [state for state in LEGEND if any((panel.cells == state).any() for panel in shown)]
    uniform = "gidd" in scene.preset
    words = {
        GIVEN: "given",
        MASK: "noise" if uniform else "mask",
        DECODED: "decoded before",
        NEW: "decoded by this step",
    }
    if uniform:  # any token of the block may change in any step
        del words[NEW]
    legend = [(cells(state, [(0, 0)]), LEGEND[state]) for state in used]
    legend += [(circle(state, CELL / 2, CELL / 2), word) for state, word in words.items()]
    height = rows * panel_height + 12 + LINE * -(-len(legend) // 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>What {scene.cache} computes in each layer, step by step</title>",
        f"<style>{STYLE}</style>",
        '<defs><pattern id="stored" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">',
        '<path class="ground" d="M0 0h4v4h-4z"/><path class="stripe" d="M0 0v4" stroke-width="3"/></pattern></defs>',
        f'<rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
    ]
    for number, panel in enumerate(shown):
        left, top = LEFT + number % COLUMNS * (panel_width + GAP), 8 + number // COLUMNS * panel_height
        parts += panel_parts(scene, panel, left, top, first=number % COLUMNS == 0)
    for number, (mark, word) in enumerate(legend):
        x, y = LEFT + number % 2 * (panel_width + GAP), rows * panel_height + 16 + number // 2 * LINE
        parts.append(
            f'<g transform="translate({x} {y - CELL})">{mark}<text class="small" x="16" y="{CELL}">{word}</text></g>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def panel_parts(scene: Scene, panel: Panel, left: int, top: int, *, first: bool) -> list[str]:
    """Return the elements of a panel whose upper left corner is there; the `first` of a row names its layers."""
    count = f"{(panel.cells == COMPUTED).sum()} of {panel.cells.size} row-layers"
    parts = [f'<text x="{left}" y="{top + 16}">step {panel.step + 1}</text>']
    parts.append(f'<text class="small" x="{left + 72}" y="{top + 16}">{count}</text>')
    strip = top + 24
    parts += [
        circle(state, left + CELL * (position + 0.5), strip + CELL / 2) for position, state in enumerate(panel.tokens)
    ]
    grid = strip + CELL + 4
    for state in LEGEND:  # the first layer stands at the bottom
        corners = [
            (left + position * CELL, grid + (LAYERS - 1 - layer) * CELL)
            for layer, position in np.argwhere(panel.cells == state)
        ]
        parts += [cells(state, corners)] if corners else []
    bottom = grid + LAYERS * CELL
    for position in sorted({scene.prefix, PROMPT} - {0}):
        parts.append(f'<path class="line" d="M{left + position * CELL - 0.5} {strip - 2}V{bottom + 3}"/>')
    if first:
        parts.append(f'<text class="small" x="8" y="{bottom}">layer 1</text>')
        parts.append(f'<text class="small" x="8" y="{grid + CELL + 1}">layer {LAYERS}</text>')
    words = {0: "prefix" if scene.prefix else "prompt", PROMPT: "response"}
    for position, word in words.items():
        parts.append(f'<text class="small" x="{left + position * CELL}" y="{bottom + 16}">{word}</text>')
    return parts


def cells(state: int, corners: Sequence[tuple[int, int]]) -> str:
    """Return the element of cells of one state, by their upper left corners."""
    size = CELL - 1
    return f'<path class="s{state}" d="{"".join(f"M{x} {y}h{size}v{size}h-{size}z" for x, y in corners)}"/>'


def circle(state: int, x: float, y: float) -> str:
    """Return the element of a position of the canvas."""
    return f'<circle class="t{state}" cx="{x:g}" cy="{y:g}" r="{3 if state == MASK else 3.5}"/>'


def pictures() -> dict[Path, str]:
    """Return the text of every picture by its file. Sets PyTorch to one thread, so that sums are the same anywhere."""
    torch.set_num_threads(1)
    scenes = SCENES | {name: scene for name, scene in PACKAGE_SCENES.items() if scene.cache in policy_names()}
    return {IMAGES / f"{name}.svg": svg(scene, panels(scene)) for name, scene in scenes.items()}


if __name__ == "__main__":
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")
