"""A start that proves itself: small passes of each kind, by what is to run and by PyTorch's own operations.

Kernels may not compile for a device, and may compute something else than they should. Both show before the first
request: where the choice was left to the engine PyTorch's path is taken, and where it was not the start ends.
"""

import logging
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.denoising.select import RankRule
from remask.engine.canvas_state import TokenBuffer
from remask.engine.config import EngineConfig
from remask.engine.runner import score_rows
from remask.engine.stage_work import add_near
from remask.errors import ConfigError
from remask.machine.transfers import send
from remask.model.executors import Executor, graphs_obstacle, make_graphs, resolve_executor, set_executor
from remask.model.invariant import batch_invariant
from remask.model.pool import Pool
from remask.model.stage import Stage, StepBatch
from remask.model.transformer import Transformer
from remask.model.work_list import WorkListBuilder
from remask.sampling.choice import Candidates
from remask.sampling.rows import RowGroup

log = logging.getLogger(__name__)

Ints: TypeAlias = NDArray[np.int64]
Outcome: TypeAlias = Tensor | str  # numbers of a pass, [rows, any], or the error that it ended with

LENGTH = 560  # tokens of the longer canvas: its K/V are cut into pieces, and graphs take its rows
LAYERS = 2  # that are run; the first may be of another kind than the others
PAGE = 16
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""By how much a row may differ, as a share of its size. A wrong kernel is off by as much as the row itself."""
FEW_BITS = 0.2
"""The same where products round rows to eight bits.

Bits that differ in a row's last place decide there which of two codes a number gets, and codes of fp8 are 1/8 apart. So
two right passes may differ as if each rounded on its own: by 3.75 % in a product, and after the eight of two layers by
13 % in the mean and 15 % at most (of 2,048 channels; Triton's attention differs from PyTorch's by half of that).
"""
ROUTED = 1 / 16  # of the rows of a mixture may differ: near the edge of a choice, other experts compute them
READING, CHOOSING = "reading", "choosing"
LEAST_LAYER_BYTES = 100 * 10**6
"""Of a model whose passes are queued ahead: an H100 reads so many in 34 us, in which the host beside it launches once.

Where the device is done with a layer sooner the host is the limit, and a queued pass costs it more (`docs/lab/log.md`).
"""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """How an engine's passes are computed, and why."""

    executor: Executor  # computes attention, and the operations between matrix products
    graphs: bool  # whether layers are repeated as device graphs
    overlap: bool  # whether passes are queued ahead
    why: str  # the reason for `graphs` and `overlap`, in words


def prepare(model: Transformer, config: EngineConfig) -> tuple[Transformer, EngineConfig, DeviceChoice]:
    """`model` as its passes are computed, `config` with nothing left open, and the choice; see `choose`."""
    choice = choose(model, config)
    config = replace(config, graphs=choice.graphs, overlap=choice.overlap)
    if choice.executor.name != "torch":  # the default of a model
        set_executor(model := copy(model), choice.executor)
    if model.ranks.several:  # the other ranks' models may have had another engine before
        model.ranks.everywhere(set_executor, model, choice.executor)
    return batch_invariant(model) if config.batch_invariant else model, config, choice


def choose(model: Transformer, config: EngineConfig) -> DeviceChoice:
    """Choose how the passes of `model` are computed. On a GPU the choice is proven first.

    What `config` leaves open is on where it can run on a CUDA device and gains something: on a CPU nothing runs beside
    the host. Raises `ConfigError` where what it asks for by name cannot run, or fails its proof.
    """
    executor = resolve_executor(config.attention, model.config, model.device, batch_invariant=config.batch_invariant)
    usual, why = model.device.type == "cuda", f"auto: device {model.device.type}"
    if config.batch_invariant:
        usual, why = False, "auto: batch_invariant=True"
    graphs = usual if config.graphs is None else config.graphs
    if graphs and config.graphs is None and (hindrance := graphs_obstacle(model)) is not None:
        graphs, why = False, f"{why}; no graphs: {hindrance}"
    if config.overlap is not None and config.graphs is not None:
        why = "as asked"
    choice = DeviceChoice(executor, graphs, False, why)
    if model.device.type == "cuda":
        choice = _proven(model, config, choice)
    if config.overlap is not None:
        return replace(choice, overlap=config.overlap)
    hindrance = _no_overlap(model, graphs=choice.graphs) if usual else ""
    why = f"{choice.why}; no overlap: {hindrance}" if hindrance else choice.why
    return replace(choice, overlap=hindrance is None, why=why)


def _no_overlap(model: Transformer, *, graphs: bool) -> str | None:
    """Why queueing passes ahead gains nothing on a CUDA device; None: it does."""
    if not graphs:
        return "without graphs the host launches for as long as the device computes"
    size = model.weights.nbytes // len(model.weights.layers)
    if size < LEAST_LAYER_BYTES:
        return f"layers of {size / 1e6:.3g} MB are computed before the host has the next pass ready"
    return None


def _proven(model: Transformer, config: EngineConfig, choice: DeviceChoice) -> DeviceChoice:
    """`choice` if its passes are right. Otherwise parts of it are turned off, as far as nobody asked for them."""
    executor, graphs = choice.executor, choice.graphs
    if executor.name == "torch" and not graphs:
        return choice
    faults = prove(model, executor, graphs=graphs)
    if not faults:
        if executor.name == "torch":
            return choice
        return replace(choice, executor=Executor(executor.name, f"{executor.why}; agrees with torch"))
    failed = f"attention={executor.name!r}{', graphs=True' if graphs else ''}"
    if graphs and config.graphs is None:
        alone = prove(model, executor, graphs=False)
        if not alone:
            reason = "; ".join(faults)
            log.warning("%s failed at the start, so graphs are off: %s", failed, reason)
            why = f"{choice.why}; graphs failed at the start: {reason}"
            return _proven(model, config, replace(choice, graphs=False, why=why))
        failed, faults = f"attention={executor.name!r}", alone
    reason = "; ".join(faults)
    if config.attention == "auto" and executor.name != "torch":
        log.warning("%s failed at the start, so PyTorch computes attention: %s", failed, reason)
        torch_path = Executor("torch", f"auto: {executor.name} failed at the start: {reason}")
        return _proven(model, config, replace(choice, executor=torch_path))
    # Settings that were asked for by name are never replaced.
    raise ConfigError(
        f"{failed} was asked for, and differs from PyTorch's own operations on {model.device}, or fails: {reason}. Use "
        f"{'graphs=False' if executor.name == 'torch' else 'attention=auto or torch'}"
    )


def prove(model: Transformer, executor: Executor, *, graphs: bool, length: int = LENGTH) -> list[str]:
    """What is wrong with passes of `model` by `executor`, in words; empty if nothing is.

    Runs the first layers in memory of their own, which is freed again: full passes over two canvases of at most
    `length` tokens, a pass of a few rows that reads K/V of these, and one in which both canvases read one prefix. With
    `graphs` each is repeated. Raises the error of a device that is lost.
    """
    part = _beginning(model)
    reference = part.ranks.everywhere(_outcomes, part, Executor("torch", ""), False, length)
    expected = {name: outcome for name, outcome in reference.items() if isinstance(outcome, Tensor)}
    wrong = [f"{name}: {outcome}" for name, outcome in reference.items() if isinstance(outcome, str)]
    if wrong:
        raise ConfigError(f"PyTorch's own operations fail on {model.device}: {'; '.join(wrong)}")
    outcomes = part.ranks.everywhere(_outcomes, part, executor, graphs, length)
    torch.ones(1, device=_device(model)).item()  # raises where a kernel has broken the device
    rows = ROUTED if model.config.mixture is not None else 0.0
    faults = dict[str, str | None]()
    for name, outcome in outcomes.items():
        if isinstance(outcome, str):
            faults[name] = outcome
            continue
        right = expected[name.split(",")[0]]
        few_bits = model.quantised and name not in (READING, CHOOSING)
        faults[name] = _difference(outcome, right, FEW_BITS if few_bits else TOLERANCE[right.dtype], rows)
    if _device(model).type == "cuda":
        torch.cuda.empty_cache()
    return [f"{name}: {fault}" for name, fault in faults.items() if fault is not None]


def _device(model: Transformer) -> torch.device:
    return model.weights.embed.device


def _beginning(model: Transformer) -> Transformer:
    """The first layers of `model`, with its head."""
    count = min(LAYERS, len(model.weights.layers))
    part = copy(model)
    part.config = replace(model.config, layers=count)
    part.part = replace(model.part, layers=count)
    part.graphs = None
    return part


def _outcomes(model: Transformer, executor: Executor, graphs: bool, length: int) -> dict[str, Outcome]:
    """Results of the passes by name. Repeats of a graph have names of their own."""
    model = _beginning(model)  # on other ranks it is whole
    outcomes: dict[str, Outcome] = {}
    try:
        set_executor(model, executor)
        pool = Pool(model.part, sum(_pages(model, length)), PAGE, model.dtype, _device(model))
        runs = {"": model}
        if graphs:
            repeated = model.with_graphs(make_graphs(model, pool))
            runs = {", captured": repeated, ", repeated": repeated}
    except Exception as error:
        return {"start": _said(error)}
    for name, batch in _passes(model, length):
        for suffix, variant in runs.items():
            outcomes[name + suffix] = _tried(_run, variant, batch, pool)
            if isinstance(outcomes[name + suffix], str):
                return outcomes  # later passes read what this one should have written
    outcomes[READING] = _tried(_read, model)
    outcomes[CHOOSING] = _tried(_choose, model)
    return outcomes


def _tried(act: Callable[..., Tensor], *args: object) -> Outcome:
    try:
        return act(*args)
    # Compilers, launches and graphs raise errors of any kind, and each is an answer.
    except Exception as error:
        return _said(error)


def _said(error: Exception) -> str:
    return " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:1]])


def _run(model: Transformer, batch: StepBatch, pool: Pool) -> Tensor:
    """The hidden states of a pass, [M, D], in memory of their own."""
    hidden: Tensor = model.forward(batch, pool)
    return hidden.clone()


@torch.inference_mode()
def _read(model: Transformer) -> Tensor:
    """Confidences [2 n, 1] of the best tokens of some rows, and how far their logits are from the best ones.

    Equal logits may be read as either token, so tokens themselves are not compared.
    """
    hidden = model.embed(send(_tokens(model, 8), _device(model)))
    group = RowGroup(slice(0, len(hidden)), None, "logits", 0.0, None, None, seed=0)
    scores: Tensor = score_rows(model, hidden, [group], 0)
    tokens, confidences = scores.unbind()
    if model.ranks.several:  # logits of one rank are a part
        return confidences[:, None]
    logits = model.head(hidden).float()
    logits[:, model.config.mask_id] = -torch.inf
    below = logits.amax(dim=1) - logits.gather(1, tokens.long()[:, None])[:, 0]
    return torch.cat([confidences, 1 + below])[:, None]


def _choose(model: Transformer) -> Tensor:
    """Which positions of three requests are transferred, and what the token buffer holds then, [n, 1], all above 0."""
    rng, rows = np.random.default_rng(0), 40
    values = rng.integers(2, 40, 4 * rows)
    buffer = TokenBuffer(len(values), _device(model))
    buffer.values[:-1] = send(values, _device(model))
    places, positions = list(rng.permutation(len(values)).reshape(-1, rows)), np.arange(rows)
    scores = np.stack([rng.integers(1, 20, 3 * rows), rng.integers(0, 10, 3 * rows) / 10]).astype(np.float32)
    requests = [
        Candidates(RankRule(7), positions, range(rows), places[:2]),
        Candidates(RankRule.above(0.8), positions, range(3, 20), places[2:3]),
        Candidates(RankRule(1, factor=0.5, changes=True), positions, range(rows), places[3:]),
    ]
    answer = buffer.transfer(send(scores, _device(model)), requests, kernels=model.kernels is not None)
    return torch.cat([1 + answer[2], buffer.values[:-1].float()])[:, None]


def _tokens(model: Transformer, count: int) -> Ints:
    return np.random.default_rng(0).integers(0, model.config.vocab, count)


def _lengths(model: Transformer, length: int) -> tuple[int, int]:
    """Tokens of the two canvases, whole blocks of rows that choose experts together."""
    block = model.config.routing_block
    longer = min(length, model.config.max_length) // block * block
    return longer, max(4, block, longer * 5 // 8 // block * block)


def _pages(model: Transformer, length: int) -> list[int]:
    return [-(-count // PAGE) for count in _lengths(model, length)]


def _passes(model: Transformer, length: int) -> Iterator[tuple[str, StepBatch]]:
    """The passes, in order. The pages of both canvases are shuffled."""
    lengths, pages = _lengths(model, length), _pages(model, length)
    places = np.random.default_rng(1).permutation(sum(pages))[:, None] * PAGE + np.arange(PAGE)
    slots = places[: pages[0]].ravel()[: lengths[0]], places[pages[0] :].ravel()[: lengths[1]]
    every, block = [np.arange(count) for count in lengths], model.config.routing_block
    yield "full pass", _batch(model, every, slots, None, limited=model.config.kind != "masked")
    starts = [count // 3 // block * block for count in lengths]
    few = [np.arange(at, at + _whole(max(2, count // 16), block)) for at, count in zip(starts, lengths, strict=True)]
    yield "cached pass", _batch(model, few, slots, None, frozen=True)
    lead = lengths[1] // 2 // block * block
    shared = slots[0], np.concatenate([slots[0][:lead], slots[1][lead:]])
    late = [np.arange(lead, count) for count in lengths]
    yield "merged pass", _batch(model, late, shared, lead)


def _whole(rows: int, block: int) -> int:
    """`rows`, and as many more as fill up a block whose rows choose experts together."""
    return -(-rows // block) * block


def _batch(
    model: Transformer,
    rows: list[Ints],
    slots: tuple[Ints, Ints],
    lead: int | None,
    *,
    limited: bool = False,
    frozen: bool = False,
) -> StepBatch:
    """A pass over `rows` of two canvases, whose positions have `slots`.

    Both read the first `lead` slots. With `limited` rows attend up to the end of their block; with `frozen` the first
    row of each canvas writes nothing.
    """
    work, near, sliding, device = WorkListBuilder(), WorkListBuilder(), model.config.sliding, _device(model)
    count, first, block = sum(map(len, rows)), 0, model.config.block_length or PAGE
    if lead is not None:
        work.add(0, count, work.slots(slots[0][:lead]), lead, None)
    for indices, places in zip(rows, slots, strict=True):
        rest = places[lead or 0 :]
        reach = np.minimum((indices // block + 1) * block, len(places)) if limited else None
        work.add(first, len(indices), work.slots(rest), len(rest), reach)
        if sliding is not None:
            starts = np.where(limited, indices // block * block, 0) if sliding.behind else None
            add_near(near, first, indices, places, reach, sliding.reach, starts)
        first += len(indices)
    positions = np.concatenate(rows)
    targets = np.concatenate([places[indices] for indices, places in zip(rows, slots, strict=True)])
    written = None
    if frozen:
        written = np.delete(np.arange(count), [0, len(rows[0])])
        targets = targets[written]
    stage = Stage(
        range(len(model.weights.layers[:LAYERS])),
        send(positions, device),
        send(targets, device),
        None if written is None else send(written, device),
        None,
        work.list(),
        None if sliding is None else near.list(),
    )
    tokens = _tokens(model, count + len(positions))[len(positions) :]
    return StepBatch(send(tokens, device), (stage,), send(np.arange(count), device), 0)


def _difference(results: Tensor, expected: Tensor, limit: float, few: float) -> str | None:
    """How far rows of `results` [N, any] are off, where more than a share `few` is by `limit` of their size."""
    wide = torch.promote_types(expected.dtype, torch.float32)
    one, other = results.to(wide), expected.to(wide)
    if not torch.isfinite(one).all():
        return "its results are not finite"
    error = (one - other).norm(dim=1) / other.norm(dim=1).clamp_min(1e-6)
    wrong = int((error > limit).sum())
    if wrong <= few * len(error):
        return None
    return f"{wrong} of {len(error)} rows differ, by {error.max().item():.3g} of their size; {limit:g} is allowed"
