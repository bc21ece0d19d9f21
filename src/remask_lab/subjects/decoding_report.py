"""How K and V moved around the step at which a token was decoded. Plain numbers."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

SIDES = ("k", "v")
MEASURES = ("cosine", "euclidean")

Table: TypeAlias = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Aligned:
    """A distance from each pass to the next, aligned at the pass that decoded the token.

    Attributes:
        mean: over tokens and layers, by offset.
        layers: over tokens, [layers][offsets].
    """

    mean: tuple[float, ...]
    layers: Table


@dataclass(frozen=True, slots=True)
class DecodingReport:
    """K/V dynamics of response tokens around their decoding (dKV-Cache, figure 2).

    A token is decoded by the pass at whose end its position gets its final token; on uniform models that may be the
    last of several changes. What stands at offset 0 leads from this pass, which saw a mask or noise, to the next one,
    which is the first to see the token.

    Attributes:
        model, layers, requests: what was measured.
        passes: of all requests.
        tokens: decoded tokens with a pass after the one that decoded them.
        offsets: passes from the one that decoded a token.
        counts: tokens that a mean at each offset is over.
        aligned: by "k" or "v" and "cosine" or "euclidean", as "k cosine".
        steps: pairs of the first request's passes: their numbers, from 1, for `similarity`.
        similarity: by "k" and "v": mean cosine similarity of response positions between two passes, [passes][passes].
        order: response positions of the first request in the order in which they were decoded, from 0.
        decoded: the pass, from 1, that decoded each of `order`.
        moves: by "k" and "v": Euclidean distance of each of `order` from pass to pass, mean over layers,
            [positions][pairs of passes]; NaN where a position was not computed in both.
    """

    model: str
    layers: int
    requests: int
    passes: int
    tokens: int
    offsets: tuple[int, ...]
    counts: tuple[int, ...]
    aligned: dict[str, Aligned]
    steps: tuple[int, ...]
    similarity: dict[str, Table]
    order: tuple[int, ...]
    decoded: tuple[int, ...]
    moves: dict[str, Table]

    def around(self, name: str) -> tuple[float, float, float]:
        """The mean before a token's decoding, at it and after it, over all tokens and offsets; NaN for none."""
        values, counts = np.array(self.aligned[name].mean), np.array(self.counts)
        offsets = np.array(self.offsets)
        parts = (offsets < 0, offsets == 0, offsets > 0)
        before, at, after = (
            float(np.average(values[part & (counts > 0)], weights=counts[part & (counts > 0)]))
            if counts[part].sum()
            else float("nan")
            for part in parts
        )
        return before, at, after


def reading(report: DecodingReport) -> str:
    """The report in a paragraph."""
    if not report.tokens:
        return (
            f"No pass follows the one that decodes a token ({report.passes} passes of {report.requests} requests): "
            "there is nothing to align."
        )
    parts = [f"{report.tokens} tokens of {report.requests} requests."]
    for side in SIDES:
        before, at, after = report.around(f"{side} cosine")
        peak = report.offsets[int(np.nanargmax(report.aligned[f"{side} cosine"].mean))]
        told = f"{side.upper()} moves by a mean cosine distance of {at:.2e} when its token appears"
        if not np.isnan(before):
            told += f", {before:.2e} from pass to pass before it"
        if not np.isnan(after):
            told += f", {after:.2e} after it"
            if at > after > 0:
                told += f" ({at / after:.1f} times less)"
        where = "when it appears" if peak == 0 else f"at offset {peak:+d}"
        parts.append(f"{told}. It moves most {where}.")
    cosine = np.array([row[report.offsets.index(0)] for row in report.aligned["v cosine"].layers])
    parts.append(
        f"By layer, V's move at decoding is largest in layer {int(cosine.argmax()) + 1} ({cosine.max():.2e}) and "
        f"smallest in layer {int(cosine.argmin()) + 1} ({cosine.min():.2e})."
    )
    return " ".join(parts)
