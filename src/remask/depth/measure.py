"""`measure`: makes the depth table of a model, by how far first predictions move at each depth of reuse."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from remask.checkpoint.loaded import LoadedModel
from remask.depth.table import DepthTable, Nats
from remask.engine.audit_passes import AuditPasses, PassInput
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.machine.progress import Progress
from remask.policies.bicache import percent
from remask.policies.earned import BOUND, BUCKET, Audit, Estimate, Record
from remask.store.entries import prefix_hash


class Subject(Protocol):
    """The parts of a session that measuring needs."""

    @property
    def loaded(self) -> LoadedModel: ...

    @property
    def engine(self) -> Engine: ...


def measure(
    session: Subject, requests: Sequence[Request], source: str, bound: float = BOUND, progress: bool = False
) -> DepthTable:
    """Audit `requests` at the depths that are undecided, and return the proven depths by prefix ratio.

    Prefix ratios are rounded down to `BUCKET` percent; a `Record` judges all requests of one ratio. `source` describes
    the requests for people, and `bound` is in nats. Raises `ConfigError`, before anything runs, if the model is not a
    masked one, or if a request cannot run, has no shared prefix, or asks for guidance.
    """
    buckets = dict[int, Record]()
    audit_count = 0
    config = session.loaded.config
    pass_inputs = [first_pass(session, request) for request in requests]
    pairs = zip(requests, pass_inputs, strict=True)
    for request, pass_input in Progress("measuring", len(requests), "requests", enabled=progress).track(pairs):
        length = readable_prefix_length(session, request)
        ratio = percent(length, len(pass_input.canvas)) // BUCKET * BUCKET
        prefix = prefix_hash(request.prompt_token_ids[:length])
        record = buckets.setdefault(ratio, Record(config.layers, bound))
        depths = record.audit_depths(prefix)
        if depths:
            divergences = divergence_by_depth(session.engine.auditor.passes, pass_input, length, depths)
            record.add([Audit(prefix, depth, nats) for depth, nats in divergences])
            audit_count += 1
    return DepthTable(
        model=session.loaded.name,
        fingerprint=session.loaded.fingerprint,
        family=config.family,
        layers=config.layers,
        bound=bound,
        samples=audit_count,
        source=source,
        entries=_entries(buckets),
        nats={ratio: _nats(record) for ratio, record in sorted(buckets.items())},
    )


def first_pass(session: Subject, request: Request) -> PassInput:
    """The input of the first pass of a request. Raises `ConfigError` if it cannot be audited (see `measure`)."""
    config = session.loaded.config
    if config.kind != "masked":
        raise ConfigError(
            f"a depth table is for bicache, which runs on masked models; {session.loaded.name!r} ({config.family}) is "
            f"{config.kind}: profile a masked model"
        )
    if readable_prefix_length(session, request) < 1:
        raise ConfigError(
            f"request {request.id!r} has no shared prefix to measure: give messages before its last user turn, or "
            "prefix_length"
        )
    if request.params.cfg_scale > 0:
        raise ConfigError(f"cfg_scale={request.params.cfg_scale:g}: a guided request has two canvases; leave it out")
    return PassInput.first_pass(session.engine.check(request).decoding, config.shift, request.adapter)


def readable_prefix_length(session: Subject, request: Request) -> int:
    """Number of tokens of a request's prefix that can be read from the store: rows that predict must stay live."""
    return min(request.prefix_length, len(request.prompt_token_ids) - session.loaded.config.shift)


def divergence_by_depth(
    passes: AuditPasses, pass_input: PassInput, prefix_length: int, depths: Sequence[int]
) -> Iterator[tuple[int, float]]:
    """Run the exact pass, then one pass a depth, of which each yields the depth and its largest divergence in nats.

    Raises `ConfigError`, at the first depth, if the pool has no room for the canvas.
    """
    exact = passes.run_exact(pass_input, rounded=False)
    for depth in depths:
        predicted = None if exact is None else passes.run_reusing(pass_input, prefix_length, depth)
        if exact is None or predicted is None:
            raise ConfigError(
                f"a canvas of {len(pass_input.canvas)} tokens finds no room beside the requests that run; measure "
                "while none does, or give the pool more memory"
            )
        yield depth, passes.max_divergence(exact, predicted)


_NO_PREFIX = -1  # no hash of a prefix is negative


def _prefixes(record: Record) -> set[int]:
    return {audit.prefix_key for audit in record.audits}


def _proven_depth(record: Record) -> int:
    """The depth that prefixes have proven together, else the least of those that they have proven alone."""
    return record.proven_depth(None) or min(map(record.proven_depth, _prefixes(record)), default=0)


def _entries(buckets: dict[int, Record]) -> dict[int, int]:
    """Depths of a table by ratio in percent, from the audits by ratio.

    An entry holds for all larger ratios up to the next entry. So each ratio limits the entries of all smaller ones: to
    the depth that it has proven, or, if its requests were too few to prove one, to the depths that they do not refute.
    Ratios that get no deeper than a smaller one have no entry.
    """
    max_depth = max((record.layers for record in buckets.values()), default=0)
    depths: dict[int, int] = {}
    for ratio, record in sorted(buckets.items(), reverse=True):
        proven = _proven_depth(record)
        max_depth = min(max_depth, proven or record.depth(_NO_PREFIX, record.layers))
        depths[ratio] = min(max_depth, proven)
    entries: dict[int, int] = {}
    for ratio, depth in sorted(depths.items()):
        if depth > max(entries.values(), default=0):
            entries[ratio] = depth
    return entries


def _nats(record: Record) -> dict[int, Nats]:
    """Nats by depth, over the means of prefixes, or over the requests if all have one prefix."""
    prefixes = _prefixes(record)
    # One prefix alone has no spread over prefixes, so its requests are the sample then.
    only_prefix = None if len(prefixes) > 1 else next(iter(prefixes), None)
    estimates = record.estimates(only_prefix)
    return {depth: _interval(estimate) for depth, estimate in estimates.items() if estimate.count > 1}


def _interval(estimate: Estimate) -> Nats:
    """The mean and its interval in nats, rounded for the file. No end is negative, as no divergence is."""
    return round(estimate.mean, 6), round(max(estimate.low, 0.0), 6), round(estimate.high, 6)
