"""Sizes of the measurements of pretrained weights, and the model and the files that they read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from remask.checks import SMOLLM2
from remask.engine.config import EngineConfig
from remask.llm import LLM
from remask_lab.bench.lookup import BY_HAND, GENERATED

NumberFormat: TypeAlias = Literal["none", "int8", "int4"]

SEED: Final = 31337


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of each part of the measurements, by default the usual one.

    Attributes:
        profile: requests at each prefix ratio, and tokens of their canvases.
        held_out, published: answers of GSM8K whose loss is computed, of the package's and of the file `published`.
        gsm8k: questions of GSM8K under every cache, by the worked examples of their system prompt; two share a prompt.
        gsm8k_tokens, gsm8k_steps: length and steps of their responses, and the length of their reference answers.
        town: questions and pages under `none`, `reuse` and `bicache`.
        town_depths: questions and pages under `none`, `reuse` and `bicache` at `depths`, or at `REFRESHED`.
        town_caches: questions and pages under every cache.
        shops: shops of a page.
        first_steps: questions whose first predictions are compared by depth, each about a page of its own.
        documents: documents at each of `SHARES`, tokens of a canvas, and those of them that are written.
        answers: number of `PROMPTS` that are answered, and tokens of a response.
        depths: layers of `bicache` for comparisons of answers; every other one for comparisons of losses.
        first_step_depths: depths at which first predictions are compared.
        passes: tokens before the 64 masks of a pass.
        concurrency: requests at a time.
        lookups: questions and pages of the look-up task, by how they were written.
    """

    profile: tuple[int, int] = (8, 512)
    held_out: int = 200
    published: int = 1000
    gsm8k: Mapping[int, int] = field(default_factory=lambda: {0: 24, 4: 12, 8: 6})
    gsm8k_tokens: int = 64
    gsm8k_steps: int = 8
    town: tuple[int, int] = (200, 40)
    town_depths: tuple[int, int] = (200, 40)
    town_caches: tuple[int, int] = (30, 30)
    shops: int = 16
    first_steps: int = 40
    documents: tuple[int, int, int] = (30, 640, 48)
    answers: tuple[int, int] = (30, 128)
    depths: tuple[int, ...] = (1, 5, 10, 20)
    first_step_depths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30)
    passes: tuple[int, ...] = (128, 512, 1024)
    concurrency: int = 1
    lookups: Mapping[str, tuple[int, int]] = field(default_factory=lambda: {GENERATED: (100, 50), BY_HAND: (100, 25)})


SIZES: Final[Mapping[str, Size]] = {
    "tiny": Size(
        profile=(1, 128), held_out=2, published=2, gsm8k={0: 2}, gsm8k_tokens=8, gsm8k_steps=2, town=(4, 2),
        town_depths=(2, 1), town_caches=(2, 2), shops=4, first_steps=2, documents=(2, 60, 4), answers=(2, 8),
        depths=(2,), first_step_depths=(1, 30), passes=(16,), lookups={GENERATED: (2, 1), BY_HAND: (2, 1)},
    ),
    "small": Size(
        profile=(4, 512), held_out=150, published=512, gsm8k={0: 12, 4: 3, 8: 2}, gsm8k_tokens=32, gsm8k_steps=4,
        town=(160, 40), town_depths=(60, 60), town_caches=(10, 10), shops=8, first_steps=12, documents=(12, 320, 24),
        answers=(30, 48),
    ),
    "usual": Size(),
    "large": Size(
        gsm8k={0: 64, 4: 64, 8: 32}, gsm8k_steps=32, town=(400, 200), town_depths=(400, 200), town_caches=(400, 200),
        shops=8, first_steps=24, documents=(96, 640, 48), depths=(1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25),
        concurrency=64,
    ),
}  # fmt: skip
"""Sizes by name. `small` takes some forty minutes of two idle cores, `usual` about an hour; `tiny` tests that all runs.

`large` is for a GPU, on which a part takes a minute or two.
"""


@dataclass(frozen=True, slots=True)
class Source:
    """The model, its device, and the files that measurements read.

    Attributes:
        model: its name.
        device: where the model runs, in the number formats of `open_model`.
        published: the file of GSM8K's test split as it is published; None leaves its part out.
        documents: folders of HTML in English that the model was not trained on; none leave their parts out.
    """

    model: str = SMOLLM2
    device: str = "cpu"
    published: Path | None = None
    documents: tuple[Path, ...] = ()


def open_model(source: Source, quantization: NumberFormat = "none", model: str | None = None) -> LLM:
    """The model of `source`, or another `model`: in float32 with quantized weights on a CPU, else in bfloat16.

    Benches, which take long, use weights in int8 on a CPU, and losses float32.
    """
    cpu = source.device == "cpu"
    return LLM(
        model or source.model,
        dtype="float32" if cpu else "bfloat16",
        quantization=quantization if cpu else "none",
        device=source.device,
        engine=EngineConfig(max_num_seqs=1),
        progress=False,
    )
