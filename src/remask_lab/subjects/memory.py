"""Memory of a cache policy: what its formula says, and what the engine holds at the peak."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.engine.running import RunningRequest
from remask.errors import ConfigError
from remask.llm import LLM
from remask.models.config import ModelConfig
from remask.policies import CachePolicy
from remask_lab.subjects.memory_report import Footprint, MemoryUse

TRACKED = 4  # bytes of a tracked probability, float32
STORES = ("prefixes", "pages")  # how a memory report names what the store holds


@dataclass(frozen=True, slots=True)
class Crowd:
    """Requests of one shape that run together under one policy.

    Attributes:
        requests: how many.
        canvas: T, positions of each canvas.
        prefix: P, leading tokens that all of them share, and that the store has room for.
        guided: each has a second, unconditional canvas, which shares nothing.
    """

    requests: int
    canvas: int
    prefix: int = 0
    guided: bool = False


def formula(config: ModelConfig, item: int, policy: CachePolicy, crowd: Crowd, page: int) -> Footprint:
    """Bytes that `crowd` keeps under `policy`, with numbers of `item` bytes and pages of `page` slots.

    `docs/analysis.md` has it in words. Slots that hold no token, at the ends of pages, are not counted.
    """
    w, c, traits = config.widths(item), crowd, policy.traits
    depth = policy.boundary(c.prefix, c.canvas, w.layers) if c.prefix else 0
    # Position-layers that the store holds for all, in which the requests have no slots of their own.
    leased = c.prefix // page * page * w.layers if traits.sharing == "pages" else c.prefix * depth
    stored = leased if traits.sharing == "pages" else c.prefix * w.layers * (depth > 0)
    canvases = c.requests * (2 if c.guided else 1)
    own = canvases * c.canvas * w.layers - c.requests * leased
    between = w.layers - 1
    return Footprint(
        kv=w.item * 2 * w.keys * own,
        outputs=w.item * 2 * w.hidden * (own + stored) * ("outputs" in traits.keeps),
        states=canvases * c.canvas * between * (w.item * w.hidden + TRACKED) * ("attention" in traits.keeps),
        store=w.item * 2 * w.keys * stored,
        boundary=w.item * w.hidden * c.prefix * between * (depth > 0),
    )


def measure_memory(llm: LLM, cache: str, work: Sequence[Request]) -> MemoryUse:
    """Memory of the requests of `work`, which are alike and under one policy, once all of them have begun.

    They run on an engine of their own until then, and are cancelled. `cache` is the policy's name. Raises `ConfigError`
    where one cannot run, or where the limits of `llm` do not let all of them run together.
    """
    engine = llm.new_engine()
    for item in work:
        engine.add(item)
    peak = _Peak(engine)
    while engine.waiting and engine.busy:
        engine.step()
    for item in work:
        engine.cancel(item.id)
    while engine.busy:
        engine.step()
    if peak.together < len(work):
        raise ConfigError(
            f"{len(work)} requests never ran together: raise max_num_seqs={llm.engine_config.max_num_seqs}, or lengthen"
            " the responses"
        )
    first, policy = work[0], work[0].policy
    guided = first.params.cfg_scale > 0
    crowd = Crowd(len(work), peak.tokens // (2 if guided else 1), first.prefix_length, guided)
    expected = formula(llm.loaded.config, llm.model.dtype.itemsize, policy, crowd, engine.pool.page_size)
    return MemoryUse(cache, expected, peak.measured, peak.unused, llm.loaded.weights.nbytes)


class _Peak:
    """The memory of an engine in the pass in which most is held.

    Attributes:
        measured, unused: bytes held, and those of them in slots without a token.
        together: requests in memory then.
        tokens: positions of one request's canvases.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.measured = self.unused = self.together = self.tokens = 0
        engine.probe = self._look

    def _look(self, requests: Sequence[RunningRequest], hidden: Tensor) -> None:  # noqa: ARG002
        report = self.engine.memory_report()
        if report.bytes <= self.measured:
            return
        running = [holder for holder in report.holders if holder.name not in STORES]
        self.measured, self.unused = report.bytes, report.wasted * self.engine.pool.bytes_per_token
        self.together, self.tokens = len(running), running[0].tokens
