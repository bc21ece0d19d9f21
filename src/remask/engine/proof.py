"""The proof at the start: small passes of each kind are compared with those by PyTorch's own operations.

Kernels may fail to compile for a device, or compute wrong results. Both are detected before the first request. If the
engine made the choice, it falls back to PyTorch's operations; if the user did, the start ends with an error.
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
from remask.engine.stage_work import add_windows
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
PassOutcome: TypeAlias = Tensor | str  # results of a pass, [rows, any], or the error that it raised

LENGTH = 560  # tokens of the longer canvas: long enough that its K/V are split, and within the sizes of graphs
LAYERS = 2  # that are run; the first may be of another kind than the others
PAGE_SIZE = 16
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Allowed relative error of a row, by norm. The error of a wrong kernel is as large as the row itself."""
QUANTIZED_TOLERANCE = 0.2
"""Allowed relative error if products round rows to eight bits.

A difference in a row's last bit may decide which of two codes a number gets, and codes of fp8 are 1/8 apart. So two
correct passes may differ as if each rounded on its own: by 3.75 % in a product, and after the eight products of two
layers by 13 % on average and 15 % at most (2,048 channels; Triton's attention differs from PyTorch's by half of that).
"""
MAX_ROUTED = 1 / 16  # share of the rows of a mixture that may differ, because rounding sends them to other experts
READING, CHOOSING = "reading", "choosing"
MIN_LAYER_BYTES = 100 * 10**6
"""Smallest layers of a model with `overlap` by default. An H100 reads them in 34 us, in which its host launches once.

If the device finishes a layer sooner, the host is the limit, and a queued pass costs it more (`docs/lab/log.md`).
"""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """How an engine's passes are computed, and why."""

    executor: Executor  # computes attention, and the operations between matrix products
    graphs: bool  # whether layers are repeated as device graphs
    overlap: bool  # whether passes are queued ahead
    why: str  # the reason for `graphs` and `overlap`, in words


def prepare(model: Transformer, config: EngineConfig) -> tuple[Transformer, EngineConfig, DeviceChoice]:
    """Choose how passes are computed (see `choose`), and set the executor on all ranks.

    Returns the model with that executor, `config` with the chosen `graphs` and `overlap`, and the choice.
    """
    choice = choose(model, config)
    config = replace(config, graphs=choice.graphs, overlap=choice.overlap)
    if choice.executor.name != "torch":  # the default of a model
        model = copy(model)
        set_executor(model, choice.executor)
    if model.ranks.several:  # the models of other ranks may have another executor from an earlier engine
        model.ranks.run_on_all(set_executor, model, choice.executor)
    return batch_invariant(model) if config.batch_invariant else model, config, choice


def choose(model: Transformer, config: EngineConfig) -> DeviceChoice:
    """Choose how the passes of `model` are computed. On a GPU the choice is proven first.

    Graphs and overlap that `config` leaves open are on if they can run on a CUDA device and gain something; on a CPU
    nothing runs beside the host. Raises `ConfigError` if a setting of `config` cannot run, or fails its proof.
    """
    executor = resolve_executor(config.attention, model.config, model.device, batch_invariant=config.batch_invariant)
    default = model.device.type == "cuda" and not config.batch_invariant
    why = "auto: batch_invariant=True" if config.batch_invariant else f"auto: device {model.device.type}"
    graphs = default if config.graphs is None else config.graphs
    if graphs and config.graphs is None and (obstacle := graphs_obstacle(model)) is not None:
        graphs, why = False, f"{why}; no graphs: {obstacle}"
    if config.overlap is not None and config.graphs is not None:
        why = "as asked"
    choice = DeviceChoice(executor, graphs, False, why)
    if model.device.type == "cuda":
        choice = _prove_choice(model, config, choice)
    if config.overlap is not None:
        return replace(choice, overlap=config.overlap)
    if not default:
        return choice
    obstacle = _overlap_obstacle(model, graphs=choice.graphs)
    if obstacle is None:
        return replace(choice, overlap=True)
    return replace(choice, why=f"{choice.why}; no overlap: {obstacle}")


def _overlap_obstacle(model: Transformer, *, graphs: bool) -> str | None:
    """Why queueing passes ahead gains nothing on a CUDA device; None if it gains something."""
    if not graphs:
        return "without graphs the host launches for as long as the device computes"
    layers = model.weights.layers
    size = sum(tensor.nbytes for layer in layers for tensor in layer.named_tensors().values()) // len(layers)
    if size < MIN_LAYER_BYTES:
        return f"layers of {size / 1e6:.3g} MB are computed before the host has the next pass ready"
    return None


def _prove_choice(model: Transformer, config: EngineConfig, choice: DeviceChoice) -> DeviceChoice:
    """Prove `choice`. If its passes are wrong, graphs, then the executor are replaced where `config` leaves them open.

    Returns the choice that was proven. Raises `ConfigError` if a setting of `config` fails.
    """
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
            return _prove_choice(model, config, replace(choice, graphs=False, why=why))
        failed = f"attention={executor.name!r}"
        faults = alone
    reason = "; ".join(faults)
    if config.attention == "auto" and executor.name != "torch":
        log.warning("%s failed at the start, so PyTorch computes attention: %s", failed, reason)
        torch_path = Executor("torch", f"auto: {executor.name} failed at the start: {reason}")
        return _prove_choice(model, config, replace(choice, executor=torch_path))
    # Settings of the user are never replaced.
    raise ConfigError(
        f"{failed} was asked for, and differs from PyTorch's own operations on {model.device}, or fails: {reason}. Use "
        f"{'graphs=False' if executor.name == 'torch' else 'attention=auto or torch'}"
    )


def prove(model: Transformer, executor: Executor, *, graphs: bool, length: int = LENGTH) -> list[str]:
    """Try passes of `model` by `executor`. Returns their faults in words; empty if there are none.

    Runs the first layers in memory of their own, which is freed again: a full pass over two canvases of at most
    `length` tokens, a pass of a few rows that reads its K/V, and one in which both canvases read one prefix. With
    `graphs` each is captured and repeated. Raises `ConfigError` if PyTorch's own operations fail, and the error of a
    lost device.
    """
    part = _first_layers(model)
    reference = part.ranks.run_on_all(_outcomes, part, Executor("torch", ""), False, length)
    expected = {name: outcome for name, outcome in reference.items() if isinstance(outcome, Tensor)}
    errors = [f"{name}: {outcome}" for name, outcome in reference.items() if isinstance(outcome, str)]
    if errors:
        raise ConfigError(f"PyTorch's own operations fail on {model.device}: {'; '.join(errors)}")
    outcomes = part.ranks.run_on_all(_outcomes, part, executor, graphs, length)
    torch.ones(1, device=_device(model)).item()  # raises if a kernel has broken the device
    max_share = MAX_ROUTED if model.config.mixture is not None else 0.0
    faults = dict[str, str | None]()
    for name, outcome in outcomes.items():
        if isinstance(outcome, str):
            faults[name] = outcome
            continue
        expected_outcome = expected[name.split(",")[0]]  # names of repeats end with ", captured" or ", repeated"
        rounds_rows = model.quantized and name not in (READING, CHOOSING)
        tolerance = QUANTIZED_TOLERANCE if rounds_rows else TOLERANCE[expected_outcome.dtype]
        faults[name] = _difference(outcome, expected_outcome, tolerance, max_share)
    if _device(model).type == "cuda":
        torch.cuda.empty_cache()
    return [f"{name}: {fault}" for name, fault in faults.items() if fault is not None]


def _device(model: Transformer) -> torch.device:
    return model.weights.embed.device


def _first_layers(model: Transformer) -> Transformer:
    """The first layers of `model`, with its head."""
    count = min(LAYERS, len(model.weights.layers))
    part = copy(model)
    part.config = replace(model.config, layers=count)
    part.rank_config = replace(model.rank_config, layers=count)
    part.graphs = None
    return part


def _outcomes(model: Transformer, executor: Executor, graphs: bool, length: int) -> dict[str, PassOutcome]:
    """Run the passes of a proof. Returns their results by name, up to the first pass that fails.

    With `graphs` each pass has two results: of the pass that captures, and of a repeat.
    """
    part = _first_layers(model)  # ranks other than the first get the full model
    outcomes: dict[str, PassOutcome] = {}
    try:
        set_executor(part, executor)
        pool = Pool(part.rank_config, sum(_page_counts(part, length)), PAGE_SIZE, part.dtype, _device(part))
        variants = {"": part}
        if graphs:
            graph_model = part.with_graphs(make_graphs(part, pool))
            variants = {", captured": graph_model, ", repeated": graph_model}
    except Exception as error:
        return {"start": _error_text(error)}
    for name, batch in _passes(part, length):
        for suffix, variant in variants.items():
            outcome = _attempt(_run, variant, batch, pool)
            outcomes[name + suffix] = outcome
            if isinstance(outcome, str):
                return outcomes  # later passes read what this one should have written
    outcomes[READING] = _attempt(_read, part)
    outcomes[CHOOSING] = _attempt(_choose, part)
    return outcomes


def _attempt(function: Callable[..., Tensor], *args: object) -> PassOutcome:
    """The result of `function`, or the text of any error: compilers, launches and graphs raise many kinds."""
    try:
        return function(*args)
    except Exception as error:
        return _error_text(error)


def _error_text(error: Exception) -> str:
    return " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:1]])


def _run(model: Transformer, batch: StepBatch, pool: Pool) -> Tensor:
    hidden: Tensor = model.forward(batch, pool)
    return hidden.clone()  # graphs overwrite their output


@torch.inference_mode()
def _read(model: Transformer) -> Tensor:
    """Score some rows: their confidences, then 1 plus the distance of each token's logit from the best one, [2 n, 1].

    If logits are equal either token is correct, so tokens themselves are not compared. On several ranks only
    confidences are returned, [n, 1].
    """
    hidden = model.embed(send(_tokens(model, 8), _device(model)))
    group = RowGroup(slice(0, len(hidden)))
    scores: Tensor = score_rows(model, hidden, [group], 0)
    tokens, confidences = scores.unbind()
    if model.ranks.several:  # a rank has some columns of the logits only
        return confidences[:, None]
    logits = model.head(hidden).float()
    logits[:, model.config.mask_id] = -torch.inf
    distance = logits.amax(dim=1) - logits.gather(1, tokens.long()[:, None])[:, 0]
    return torch.cat([confidences, 1 + distance])[:, None]


def _choose(model: Transformer) -> Tensor:
    """Choose positions of three requests: 1 plus whether each is transferred, then the token buffer, [n, 1]."""
    rng = np.random.default_rng(0)
    rows = 40
    values = rng.integers(2, 40, 4 * rows)
    buffer = TokenBuffer(len(values), _device(model))
    buffer.values[:-1] = send(values, _device(model))
    slots = list(rng.permutation(len(values)).reshape(-1, rows))
    positions = np.arange(rows)
    scores = np.stack([rng.integers(1, 20, 3 * rows), rng.integers(0, 10, 3 * rows) / 10]).astype(np.float32)
    requests = [
        Candidates(RankRule(7), positions, range(rows), slots[:2]),
        Candidates(RankRule.above(0.8), positions, range(3, 20), slots[2:3]),
        Candidates(RankRule(1, factor=0.5, changes=True), positions, range(rows), slots[3:]),
    ]
    result = buffer.transfer(send(scores, _device(model)), requests, kernels=model.kernels is not None)
    return torch.cat([1 + result[2], buffer.values[:-1].float()])[:, None]


def _tokens(model: Transformer, count: int) -> Ints:
    return np.random.default_rng(0).integers(0, model.config.vocab, count)


def _lengths(model: Transformer, length: int) -> tuple[int, int]:
    """Tokens of the two canvases, in whole routing blocks. The second one is shorter, by about three eighths."""
    block = model.config.routing_block
    longer = min(length, model.config.max_length) // block * block
    return longer, max(4, block, longer * 5 // 8 // block * block)


def _page_counts(model: Transformer, length: int) -> list[int]:
    return [-(-count // PAGE_SIZE) for count in _lengths(model, length)]


def _passes(model: Transformer, length: int) -> Iterator[tuple[str, StepBatch]]:
    """Yield the passes by name, in the order in which they must run. The pages of both canvases are shuffled.

    The first writes all K/V, the second computes a sixteenth of the rows, and in the third both canvases read one
    prefix of about half the shorter canvas.
    """
    lengths = _lengths(model, length)
    page_counts = _page_counts(model, length)
    page_slots = np.random.default_rng(1).permutation(sum(page_counts))[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)
    first_pages, second_pages = np.split(page_slots, page_counts[:1])
    slots = first_pages.ravel()[: lengths[0]], second_pages.ravel()[: lengths[1]]
    block = model.config.routing_block
    all_rows = [np.arange(count) for count in lengths]
    yield "full pass", _batch(model, all_rows, slots, limited=model.config.kind != "masked")
    some_rows = []
    for count in lengths:
        start = count // 3 // block * block
        some_rows.append(np.arange(start, start + -(-max(2, count // 16) // block) * block))
    yield "cached pass", _batch(model, some_rows, slots, frozen=True)
    lead = lengths[1] // 2 // block * block
    shared_slots = slots[0], np.concatenate([slots[0][:lead], slots[1][lead:]])
    rows_after_lead = [np.arange(lead, count) for count in lengths]
    yield "merged pass", _batch(model, rows_after_lead, shared_slots, lead=lead)


def _batch(
    model: Transformer,
    rows: list[Ints],
    slots: tuple[Ints, Ints],
    *,
    lead: int | None = None,
    limited: bool = False,
    frozen: bool = False,
) -> StepBatch:
    """A pass over `rows` of two canvases, whose positions have `slots`.

    With `lead` both read the first `lead` slots of the first canvas, as one unit. If `limited`, rows attend up to the
    end of their block. If `frozen`, the first row of each canvas writes nothing.
    """
    work, sliding_work = WorkListBuilder(), WorkListBuilder()
    sliding, device = model.config.sliding, _device(model)
    block = model.config.block_length or PAGE_SIZE
    count = sum(map(len, rows))
    first = 0
    if lead is not None:
        work.add(0, count, work.add_slots(slots[0][:lead]), slots=lead)
    for canvas_rows, canvas_slots in zip(rows, slots, strict=True):
        private_slots = canvas_slots[lead or 0 :]
        reach = np.minimum((canvas_rows // block + 1) * block, len(canvas_slots)) if limited else None
        work.add(first, len(canvas_rows), work.add_slots(private_slots), len(private_slots), reach=reach)
        if sliding is not None:
            block_starts = np.where(limited, canvas_rows // block * block, 0) if sliding.behind else None
            add_windows(sliding_work, first, canvas_rows, canvas_slots, reach, sliding.reach, block_starts)
        first += len(canvas_rows)
    positions = np.concatenate(rows)
    targets = np.concatenate([canvas_slots[indices] for indices, canvas_slots in zip(rows, slots, strict=True)])
    written = None
    if frozen:
        written = np.delete(np.arange(count), [0, len(rows[0])])
        targets = targets[written]
    stage = Stage(
        layers=range(len(model.weights.layers[:LAYERS])),
        positions=send(positions, device),
        slots=send(targets, device),
        written_rows=None if written is None else send(written, device),
        carry=None,
        work=work.build(),
        sliding_work=None if sliding is None else sliding_work.build(),
    )
    tokens = _tokens(model, count + len(positions))[len(positions) :]
    return StepBatch(send(tokens, device), (stage,), predict=send(np.arange(count), device), row_layers=0)


def _difference(results: Tensor, expected: Tensor, tolerance: float, max_share: float) -> str | None:
    """How much the rows of `results` [N, any] differ from `expected` [N, any], in words.

    Returns None if at most the share `max_share` of the rows has a larger relative error than `tolerance`.
    """
    dtype = torch.promote_types(expected.dtype, torch.float32)
    results, expected = results.to(dtype), expected.to(dtype)
    if not torch.isfinite(results).all():
        return "its results are not finite"
    error = (results - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-6)
    count = int((error > tolerance).sum())
    if count <= max_share * len(error):
        return None
    return f"{count} of {len(error)} rows differ, by {error.max().item():.3g} of their size; {tolerance:g} is allowed"
