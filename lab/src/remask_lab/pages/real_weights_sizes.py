"""How much of pretrained weights is measured, and on what."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

from remask.checks import SMOLLM2
from remask.engine.config import EngineConfig
from remask.llm import LLM
from remask_lab.bench.lookup import BY_HAND, GENERATED

NumberFormat: TypeAlias = Literal["none", "int8", "int4"]

SEED: Final = 31337


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        profiled: requests at each prefix ratio, and tokens of their canvases.
        held_out, published: answers of GSM8K whose loss is read, those of the package and of the file `published`.
        solved: questions of GSM8K under every cache, by worked examples of their system prompt; two share a prompt.
        solved_tokens, solved_steps: of their responses, and of as much of a reference answer.
        town: questions and pages under `none`, `reuse` and `bicache`.
        town_depths: questions and pages under `none`, `reuse` and `bicache` at `depths`, or at `REFRESHED`.
        town_caches: questions and pages under every cache.
        lookups: questions and pages of the look-up task, by who wrote them.
        shops: of a page.
        outputs: questions whose first predictions are compared by depth, each about a page of its own.
        documents: how many are continued at each of `SHARES`, tokens of each, and how many of them are written.
        answers: of `PROMPTS`, and the tokens of a response.
        depths: of `bicache`, in layers, where answers are compared; every other one where losses are.
        first_depths: depths at which first predictions are compared.
        passes: tokens before the 64 masks of a pass.
        at_once: requests at a time.
    """

    profiled: tuple[int, int]
    held_out: int
    published: int
    solved: Mapping[int, int]
    solved_tokens: int
    solved_steps: int
    town: tuple[int, int]
    town_depths: tuple[int, int]
    town_caches: tuple[int, int]
    shops: int
    outputs: int
    documents: tuple[int, int, int]
    answers: tuple[int, int]
    depths: tuple[int, ...] = (1, 5, 10, 20)
    first_depths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30)
    passes: tuple[int, ...] = (128, 512, 1024)
    at_once: int = 1
    lookups: Mapping[str, tuple[int, int]] = field(default_factory=lambda: {GENERATED: (100, 50), BY_HAND: (100, 25)})


_FEW: Final = {GENERATED: (2, 1), BY_HAND: (2, 1)}
_USUAL: Final = Size(
    (8, 512), 200, 1000, {0: 24, 4: 12, 8: 6}, 64, 8, (200, 40), (200, 40), (30, 30), 16, 40, (30, 640, 48), (30, 128)
)
SIZES: Final[Mapping[str, Size]] = {
    "tiny": Size(
        (1, 128), 2, 2, {0: 2}, 8, 2, (4, 2), (2, 1), (2, 2), 4, 2, (2, 60, 4), (2, 8), (2,), (1, 30), (16,), 1, _FEW
    ),
    "small": Size(
        (4, 512), 150, 512, {0: 12, 4: 3, 8: 2}, 32, 4, (160, 40), (60, 60), (10, 10), 8, 12, (12, 320, 24), (30, 48)
    ),
    "usual": _USUAL,
    "large": replace(
        _USUAL,
        solved={0: 64, 4: 64, 8: 32},
        solved_steps=32,
        town=(400, 200),
        town_depths=(400, 200),
        town_caches=(400, 200),
        shops=8,
        outputs=24,
        documents=(96, 640, 48),
        depths=(1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25),
        at_once=64,
    ),
}
"""By name. `small` takes some forty minutes of two idle cores, `usual` about an hour; `tiny` shows that all runs.

`large` is for a GPU, on which a part takes a minute or two.
"""


@dataclass(frozen=True, slots=True)
class Source:
    """What is measured, and on what.

    Attributes:
        model: its name.
        device: on a CPU numbers are float32, and what takes long has weights in int8; elsewhere all is bfloat16.
        published: GSM8K's test split as it is published.
        documents: folders of HTML in English that the model was not trained on.
    """

    model: str = SMOLLM2
    device: str = "cpu"
    published: Path | None = None
    documents: tuple[Path, ...] = ()


def open_model(source: Source, quantization: NumberFormat = "none", model: str | None = None) -> LLM:
    """The model. Losses are read in float32 on a CPU, and what takes long with weights in int8."""
    cpu, engine = source.device == "cpu", EngineConfig(max_num_seqs=1)
    return LLM(
        model or source.model,
        dtype="float32" if cpu else "bfloat16",
        quantization=quantization if cpu else "none",
        device=source.device,
        engine=engine,
        progress=False,
    )
