"""The work of a pass on its shared prefix, layer by layer: rows reused, restored and refreshed."""

from dataclasses import dataclass

import numpy as np

from remask.plan.plan import Plan, PrefixHit
from remask.plan.spans import Mask


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One pass in one run of layers. A prefix row is either reused or refreshed there.

    Attributes:
        layers: layers that do the same.
        rows: rows computed in each of them, of the prefix or not. Stored parts count like a prefix.
        reused: prefix rows whose K/V are read as an earlier pass left them.
        leased: rows of `reused` that are read from the prefix store.
        restored: prefix rows that restart at `layers.start` from a hidden state: the store's boundary state, or one
            that the request kept itself. They are refreshed too, or leased where that state decides their K/V.
        refreshed: prefix rows whose K/V this pass computes.
    """

    layers: range
    rows: int
    reused: int
    leased: int
    restored: int
    refreshed: int


def layer_work(plan: Plan, prefix: Mask, hit: PrefixHit | None) -> tuple[LayerWork, ...]:
    """The work of `plan` on a canvas whose positions `prefix` [T] are shared.

    `hit` is the part of them that is read from the store. `TopRho` chooses rows on the device, so the host does not
    know which: they count in `rows`, and those of the prefix count as reused.
    """
    if hit is not None:
        plan = plan.cut(hit.boundary).cut(hit.layers)
    leased = None if hit is None or hit.copied else hit  # copies may have been computed anew
    work = []
    live: Mask = np.ones_like(plan.predict)  # before layer 0 every row can be embedded
    for span in plan.spans:
        written = span.computed if span.frozen is None else span.computed & ~span.frozen
        refreshed = int((written & prefix).sum())
        reused = int(prefix.sum()) - refreshed
        work.append(
            LayerWork(
                layers=span.layers,
                rows=span.cost // len(span.layers),
                reused=reused,
                leased=min(reused, leased.length) if leased is not None and span.layers.start < leased.layers else 0,
                restored=int((span.rows & ~live & prefix).sum()),
                refreshed=refreshed,
            )
        )
        live = span.rows
    return tuple(work)
