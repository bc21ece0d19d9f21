"""`measure`: the depth table of a model, by how far first predictions of requests move at each depth of reuse."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from remask.checkpoint.loaded import LoadedModel
from remask.depth.table import DepthTable, Nats
from remask.engine.audit_passes import changing
from remask.engine.engine import Engine
from remask.engine.pack import pack_uncached
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.machine.progress import Progress
from remask.model.pool import Pool
from remask.model.transformer import Transformer
from remask.plan.canvas import Canvas
from remask.policies.bicache import percent
from remask.policies.earned import BOUND, BUCKET, Audited, Estimate, Record
from remask.sampling.divergence import divergence
from remask.store.entries import prefix_hash


class Subject(Protocol):
    """The parts of a session that measuring needs."""

    @property
    def loaded(self) -> LoadedModel: ...

    @property
    def model(self) -> Transformer: ...

    @property
    def engine(self) -> Engine: ...


def measure(
    session: Subject, requests: Sequence[Request], source: str, bound: float = BOUND, progress: bool = False
) -> DepthTable:
    """Audit `requests` until nothing is open, and return the depths that they prove by prefix ratio.

    Requests of `BUCKET` percent of the ratio are judged together, by `Record`. `source` says what they are. Raises
    `ConfigError`, before anything runs, where the model is not a masked one, and where a request cannot run, has no
    shared prefix, or asks for guidance.
    """
    model, buckets = session.model.unrounded(), dict[int, Record]()
    layers, count = model.config.layers, 0
    canvases = [_canvas(session, request) for request in requests]
    asked = zip(requests, canvases, strict=True)
    for request, canvas in Progress("measuring", len(canvases), "requests", shown=progress).over(asked):
        length = _prefix(session, request)
        ratio, prefix = percent(length, len(canvas)) // BUCKET * BUCKET, prefix_hash(request.prompt_token_ids[:length])
        record = buckets.setdefault(ratio, Record(layers, bound))
        depths = record.wanted(prefix)
        if depths:
            exact, *moved = first_predictions(model, canvas, length, (0, *depths))
            record.add([Audited(prefix, depth, _nats(exact[1], found)) for depth, found in moved])
            count += 1
    shape = session.loaded.config
    return DepthTable(
        model=session.loaded.name,
        fingerprint=session.loaded.fingerprint,
        family=shape.family,
        layers=layers,
        bound=bound,
        samples=count,
        source=source,
        entries=_entries(buckets),
        nats={ratio: _told(record) for ratio, record in sorted(buckets.items())},
    )


def _canvas(session: Subject, request: Request) -> Canvas:
    """The canvas with which a request begins."""
    shape = session.loaded.config
    if shape.kind != "masked":
        raise ConfigError(
            f"a depth table is for bicache, which runs on masked models; {session.loaded.name!r} ({shape.family}) is "
            f"{shape.kind}: profile a masked model"
        )
    if _prefix(session, request) < 1:
        raise ConfigError(
            f"request {request.id!r} has no shared prefix to measure: give messages before its last user turn, or "
            "prefix_length"
        )
    if request.params.cfg_scale > 0:
        raise ConfigError(f"cfg_scale={request.params.cfg_scale:g}: a guided request has two canvases; leave it out")
    return session.engine.check(request).decoding.canvas()


def _prefix(session: Subject, request: Request) -> int:
    """Tokens of a request's shared prefix that can be leased: rows which predict the response must stay live."""
    return min(request.prefix_length, len(request.prompt_token_ids) - session.loaded.config.shift)


@torch.inference_mode()
def first_predictions(
    model: Transformer, canvas: Canvas, prefix: int, depths: Iterable[int]
) -> Iterator[tuple[int, Tensor]]:
    """What a pass over `canvas` predicts under `bicache` at each of `depths`, one after the other.

    Yields a depth and logits [noisy positions, vocabulary]. Below the depth a row of the first `prefix` positions
    attends to these alone, as in the pass that fills a store; from there on it attends to all and goes on from that
    state, as a refresh with a stored boundary does. At depth 0 that is `none`, and at all layers `reuse`.
    """
    layers, alone = model.config.layers, np.full(len(canvas), len(canvas))
    alone[:prefix] = prefix
    whole, apart = (pack_uncached(model, [canvas], [canvas.noisy], [sees]) for sees in (None, alone))
    pool = Pool(model.config, len(canvas), 1, model.dtype, model.device)
    for depth in depths:
        yield depth, model.head(model.forward(changing(apart, whole, depth, layers), pool))


def _nats(exact: Tensor, found: Tensor) -> float:
    """How far the prediction moves that moves most."""
    return float(divergence(exact, found).max())


def _proven(record: Record) -> int:
    """The depth that several prefixes have proven, else the one that each of the few that there are has proven."""
    return record.proven(None) or min((record.proven(prefix) for prefix in _prefixes(record)), default=0)


def _prefixes(record: Record) -> set[int]:
    return {audit.prefix for audit in record.audits}


def _entries(buckets: dict[int, Record]) -> dict[int, int]:
    """Proven depths by ratio, those alone that are deeper than all before.

    A depth that some ratio contradicts holds for no ratio below it, as a table is read upwards.
    """
    deepest, depths = max((record.layers for record in buckets.values()), default=0), {}
    for ratio, record in sorted(buckets.items(), reverse=True):
        deepest = min(deepest, _proven(record) or record.depth(_NO_PREFIX, record.layers))
        depths[ratio] = min(deepest, _proven(record))
    entries: dict[int, int] = {}
    for ratio, depth in sorted(depths.items()):
        if depth > max(entries.values(), default=0):
            entries[ratio] = depth
    return entries


_NO_PREFIX = -1
"""No hash of a prefix is negative."""


def _told(record: Record) -> dict[int, Nats]:
    """Nats by depth, over prefixes; over the requests of the only one."""
    prefixes = _prefixes(record)
    of = None if len(prefixes) > 1 else next(iter(prefixes), None)
    return {depth: _interval(estimate) for depth, estimate in record.estimates(of).items() if estimate.count > 1}


def _interval(estimate: Estimate) -> Nats:
    return round(estimate.mean, 6), round(max(estimate.low, 0.0), 6), round(estimate.high, 6)
