"""The settings of the uniform thesis's tables, what it published, and settings of the same shape for a small model.

"Block-Wise KV Caching for Uniform Diffusion Language Models": gidd-unif-3b in bfloat16 on one A100, WikiText-103
prompts, generative perplexity under Minitron-4B-Base, the adaptive sampler (sections 5.1 to 5.5).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

NONE: Final = "none"
PREFIX: Final = "block-prefix"
CACHED: Final = "uniform-cache"

CANVAS: Final = 2048
"""Positions of every canvas of the thesis, noise after the response included."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of a table: lengths in tokens, `per_step` None for the ancestral sampler."""

    label: str
    prompt: int = 128
    response: int = 512
    block: int = 32
    steps: int = 32
    per_step: int | None = 3
    refresh: int = 4
    batch: int = 8
    temperature: float = 0.0
    corrections: int = 0

    @property
    def blocks(self) -> int:
        """How many blocks the response has."""
        return -(-self.response // self.block)


@dataclass(frozen=True, slots=True)
class Row:
    """The thesis's setting, what it published for each cache, and the setting that stands for it on `bundled-uniform`.

    The prompts of the bundled model's task have 12 tokens. A row of ours alone has no setting of the thesis.
    """

    thesis: Setting | None
    published: Mapping[str, str]
    bundled: Setting


@dataclass(frozen=True, slots=True)
class Table:
    """What one command measures: where it is from, the caches, and its rows."""

    source: str
    caches: tuple[str, ...]
    rows: tuple[Row, ...]


_SMALL: Final = Setting("s16/b16", prompt=12, response=32, block=16, steps=16)


_POOR: Final[Mapping[str, dict[str, Any]]] = {
    "half of the steps": {"steps": 8, "per_step": 1},
    "ancestral, temperature 3": {"steps": 4, "per_step": None, "temperature": 3.0},
}
"""How samples with errors are made on a model that makes none in its usual setting."""


def _row(label: str, published: tuple[str, ...], changed: Mapping[str, Any], small: Mapping[str, Any]) -> Row:
    """Of a setting that differs from the usual one in `changed`; numbers of none, (block-prefix,) uniform-cache."""
    names = (NONE, PREFIX, CACHED) if len(published) == 3 else (NONE, CACHED)
    shown = dict(zip(names, published, strict=False))
    return Row(Setting(label, **changed), shown, replace(_SMALL, **{"label": label, **small}))


def _sweep(name: str, values: Mapping[Any, tuple[str, ...]], field: str, small: Mapping[str, Any]) -> tuple[Row, ...]:
    """Rows that differ in one field."""
    return tuple(
        _row(f"{name}{value}", shown, {field: value}, {field: value, **small}) for value, shown in values.items()
    )


TABLES: Final[Mapping[str, Table]] = {
    "6.1": Table(
        "thesis, table 6.1 (section 6.1)",
        (NONE, PREFIX, CACHED),
        (
            _row(
                "s32/b32, r512",
                ("5310 s, PPL 5.33", "1.24x, PPL 5.03", "12.0x, PPL 4.86"),
                {},
                {"label": "s16/b16, r32"},
            ),
            _row(
                "s512/b512",
                ("5311 s, PPL 10.20", "1.07x, PPL 8.16", "2.8x, PPL 5.79"),
                {"block": 512, "steps": 512},
                {"label": "s32/b32, r32", "block": 32, "steps": 32},
            ),
            _row(
                "s32/b32, r1536",
                ("1465 s, PPL 3.74", "2.42x, PPL 3.91", "11.6x, PPL 2.98"),
                {"prompt": 512, "response": 1536},
                {"label": "s16/b16, r64", "response": 64},
            ),
        ),
    ),
    "6.9": Table(
        "thesis, table 6.9 (section 6.7.1)",
        (NONE, CACHED),
        tuple(
            _row(f"b{block}", shown, {"block": block, "steps": block}, {"label": f"b{own}", "block": own, "steps": own})
            for block, own, shown in (
                (16, 2, ("PPL 6.09", "9.5x, PPL 6.19")),
                (32, 4, ("PPL 5.33", "12.0x, PPL 4.86")),
                (64, 8, ("PPL 3.54", "11.3x, PPL 3.84")),
                (128, 16, ("PPL 4.51", "8.4x, PPL 3.73")),
                (256, 32, ("PPL 6.27", "5.1x, PPL 4.11")),
            )
        ),
    ),
    "6.10": Table(
        "thesis, table 6.10 (section 6.7.2)",
        (NONE, CACHED),
        _sweep(
            "r=",
            {
                1: ("PPL 5.42", "10.6x, PPL 4.26"),
                4: ("PPL 5.42", "11.9x, PPL 4.69"),
                0: ("PPL 5.42", "12.2x, PPL 4.79"),
            },
            "refresh",
            {"block": 8, "steps": 8},
        ),
    ),
    "6.11": Table(
        "thesis, table 6.11 (section 6.7.3)",
        (NONE, CACHED),
        _sweep(
            "k=",
            {
                1: ("PPL 234.2", "PPL 371.3"),
                3: ("PPL 5.42", "11.8x, PPL 4.69"),
                5: ("PPL 4.88", "11.8x, PPL 5.93"),
                10: ("PPL 7.27", "11.8x, PPL 8.21"),
            },
            "per_step",
            {},
        ),
    ),
    "figure-6.4": Table(
        "thesis, figure 6.4 (section 6.3)",
        (NONE, CACHED),
        _sweep(
            "batch ",
            {1: (), 2: (), 4: (), 8: (), 16: ("flat", "2.4x its tok/s at batch 1")},
            "batch",
            {},
        ),
    ),
    "correction": Table(
        "the thesis's future work (section 7.3): poor samples, then correction steps",
        (NONE, CACHED),
        tuple(
            Row(None, {}, replace(_SMALL, label=f"{kind}, +{more}", corrections=more, **changed))
            for kind, changed in _POOR.items()
            for more in (0, 8, 16, 32)
        ),
    ),
}
