"""What a device has room for: a model's weights, tokens of K/V, and passes; and errors with advice if it has not.

Nothing here imports PyTorch: `remask models` says what fits before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from remask.checks import Quantization
from remask.denoising.select import DRAW_WEIGHT
from remask.errors import ConfigError
from remask.model import weights
from remask.model.config import ModelConfig
from remask.model.ranks import Shard
from remask.model.sizes import FORMATS, GPU_SCORES, PRODUCT_ROWS, TILE_BYTES, NumberFormat
from remask.model.work_list import WorkList, WorkListBuilder

if TYPE_CHECKING:
    from remask.model.attention import Attention, SizedAttention

MAX_LOGITS = 2**26  # that exist at a time, in whole rows: 0.25 GiB in float32
LOGIT_COPIES = 4  # tensors of their size that exist at a time: the logits, and what is computed from them
INDICES = 32  # numbers that a pass sends for each of its rows: tokens, positions, slots, in each of its stages
UNIT_ROWS = 64  # rows of a unit of attention in the list with the longest unit
MAX_DEFAULT_LENGTH = 4096
DEFAULT_PAGE_SIZE = 16
MAX_LISTS = 8  # work lists of the last two passes that are on the device at a time
_MORE_DEVICES, _LARGER_DEVICE = "--tensor-parallel with more devices", "a device with more memory"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device, in bytes."""

    total: int
    free: int  # that no program has allocated
    share: float  # of `total` that all programs together may allocate

    @property
    def room(self) -> int:
        """Bytes that may still be allocated; negative if more than `share` is allocated."""
        return int(self.share * self.total) - (self.total - self.free)

    def __str__(self) -> str:
        return f"{gigabytes(self.share * self.total)} of {gigabytes(self.total)} ({gigabytes(max(0, self.room))} left)"


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Memory of one token on one rank, in bytes."""

    kv: int  # K and V in all layers
    state: int  # the hidden states that a stored prefix has in addition


def token_bytes(config: ModelConfig, itemsize: int, ranks: int = 1, kv_itemsize: int | None = None) -> TokenBytes:
    """The memory of one token on each of `ranks`, with `itemsize` bytes a number; `kv_itemsize` in K and V if given."""
    part = Shard(0, ranks).part(config)
    kv = part.kv_numbers * (kv_itemsize or itemsize) + config.self_conditioning * config.hidden * itemsize
    # Exact pages of block-causal models need no states, and uniform models store nothing.
    return TokenBytes(kv, (config.layers - 1) * config.hidden * itemsize if config.kind == "masked" else 0)


def weight_bytes(
    config: ModelConfig, dtype: NumberFormat, ranks: int = 1, quantization: Quantization | None = None
) -> int:
    """Bytes of the weights on each of `ranks`. A tied matrix counts once; a router may be float32."""
    return weights.weight_bytes(config, dtype, Shard(ranks - 1, ranks), quantization)


def logit_rows(config: ModelConfig) -> int:
    """Rows of logits that exist at a time. A row that is not read greedily counts as `DRAW_WEIGHT` rows."""
    return max(DRAW_WEIGHT, MAX_LOGITS // config.vocab)


def logit_bytes(config: ModelConfig, row_count: int, ranks: int = 1) -> int:
    """Upper estimate of the bytes that scoring `row_count` predicted rows takes on each of `ranks`."""
    return LOGIT_COPIES * min(row_count * DRAW_WEIGHT, logit_rows(config)) * -(-config.vocab // ranks) * 4


def layer_bytes(
    part: ModelConfig, row_count: int, max_canvas: int, itemsize: int, attention: Attention | None = None
) -> int:
    """Upper estimate of the bytes that `row_count` rows of canvases of up to `max_canvas` tokens take in a layer.

    What a layer computes exists for one layer at a time. Whole factors count the tensors of a width that exist
    together. `part` is the shape that a rank computes. `attention` is that of the model; None is PyTorch's.
    """
    queries, keys = _max_widths(part)
    hidden = part.hidden
    float_itemsize = 4 * max(1, itemsize // 4)  # bytes of a number in float32, or in the model's dtype if that is wider
    angle_itemsize = max(itemsize, 4) if part.rope_float32 else itemsize
    # All through the layer: hidden states of this stage and the one before, cos and sin, and indices.
    resident = itemsize * 2 * hidden + angle_itemsize * (part.rotary_dim or part.head_dim) + INDICES * 8
    norm = 3 * float_itemsize * max(hidden, queries)
    rope = 2 * angle_itemsize * (queries + keys) if angle_itemsize > itemsize else 0
    projections = itemsize * (hidden + 2 * queries + 3 * keys) + max(norm, rope)
    selection = itemsize * (2 * hidden + 2 * keys) + 5 * float_itemsize * keys
    mlp_width = (3 if part.gated else 1) * part.intermediate
    mixture = part.mixture
    if mixture is not None:  # a row is copied for each of its experts
        mlp_width = max(mlp_width, mixture.active * (3 * hidden + 3 * mixture.intermediate) + 3 * mixture.shared)
        mlp_width += mixture.experts * 3 * float_itemsize // itemsize + hidden
    mlp = itemsize * (3 * hidden + queries + mlp_width)
    attention_total = itemsize * (2 * queries + keys) * row_count
    attention_total += attention_bytes(part, row_count, max_canvas, itemsize, attention)
    return row_count * resident + max(row_count * max(projections, selection, mlp), attention_total)


def _max_widths(part: ModelConfig) -> tuple[int, int]:
    """The largest width of any layer of all query heads, and of all K heads."""
    queries = max(shape.heads * shape.head_dim for shape in part.shapes)
    keys = max(shape.kv_heads * shape.head_dim for shape in part.shapes)
    return queries, keys


def attention_bytes(
    part: ModelConfig, row_count: int, max_canvas: int, itemsize: int, attention: Attention | None, *, pad: bool = False
) -> int:
    """Upper estimate of the bytes that attention takes beside queries and results; parameters as in `layer_bytes`.

    If `pad`, work lists are padded to the sizes of graphs.
    """
    if attention is not None:
        from remask.model.attention import SizedAttention  # imports PyTorch, as `attention` already has

        if isinstance(attention, SizedAttention):
            return _sized_attention_bytes(attention, part, _largest_lists(row_count, max_canvas), pad=pad)
    # Queries and results in float32, those of a unit, its gathered K and V, and a tile of scores.
    float_itemsize = 4 * max(1, itemsize // 4)
    queries, keys = _max_widths(part)
    scores = 2 * float_itemsize * min(GPU_SCORES, part.heads * row_count * max_canvas)
    return (
        row_count * float_itemsize * (5 * queries + 4 * part.heads)
        + 2 * max_canvas * keys * (itemsize + float_itemsize)
        + scores
    )


def _sized_attention_bytes(
    attention: SizedAttention, part: ModelConfig, lists: Iterator[WorkList], *, pad: bool
) -> int:
    """The largest bytes of any of the work `lists` on the device, and of its partial results in float32."""
    sizes = [attention.size(work, part.heads, part.kv_heads, sink=part.sink is not None) for work in lists]
    if pad:
        sizes = [size.round_up(size.row_count) for size in sizes]
    list_bytes = max(sum(size.lengths) for size in sizes) * 4
    output_bytes = max(size.output_count for size in sizes) * part.heads * (part.head_dim + 1) * 4
    return MAX_LISTS * list_bytes + output_bytes


def _largest_lists(row_count: int, max_canvas: int) -> Iterator[WorkList]:
    """Yield the work lists of at most `row_count` rows for which attention needs the most memory.

    Memory grows with partial results, which a row has for each of its units and for each part into which a unit is
    cut. So all canvases share their first slot, which puts each row into two units, one of them with nearly all slots.
    As short lists are cut into more parts, full passes of 1, 2, 4, ... canvases are listed, and one in which only
    `UNIT_ROWS` rows see many slots.
    """
    max_canvases = max(1, row_count // max_canvas)
    counts = {max_canvases}
    count = 1
    while count < max_canvases:
        counts.add(count)
        count *= 2
    for canvas_count in sorted(counts):
        builder, first_slot = _list_builder(max_canvas)
        if max_canvas > 1:
            builder.add(0, canvas_count * max_canvas, first_slot, slots=1)
        for canvas in range(canvas_count):
            builder.add(canvas * max_canvas, max_canvas, first_slot, slots=max(1, max_canvas - 1))
        yield builder.build()
    unit_rows = min(row_count, UNIT_ROWS)
    builder, first_slot = _list_builder(max_canvas)
    builder.add(0, row_count, first_slot, slots=1)
    builder.add(0, unit_rows, first_slot, slots=max_canvas)
    if row_count > unit_rows:
        builder.add(unit_rows, row_count - unit_rows, first_slot, slots=1)
    yield builder.build()


def _list_builder(slots: int) -> tuple[WorkListBuilder, int]:
    """A builder with `slots` slots, and its index of the first of them."""
    builder = WorkListBuilder()
    return builder, builder.add_slots(np.arange(slots))


def workspace_bytes(
    config: ModelConfig,
    row_count: int,
    max_canvas: int,
    itemsize: int,
    ranks: int = 1,
    attention: Attention | None = None,
) -> int:
    """Upper estimate of the bytes that a pass over `row_count` rows takes beside weights and K/V, on each of `ranks`.

    `max_canvas` and `attention` are as in `layer_bytes`. The memory of layers and that of logits are added although
    they are not used at the same time, because PyTorch's allocator does not merge all freed memory.
    """
    part = Shard(0, ranks).part(config)
    return layer_bytes(part, row_count, max_canvas, itemsize, attention) + logit_bytes(config, row_count, ranks)


def product_bytes(part: ModelConfig) -> int:
    """Upper estimate of the bytes that a product with a quantized matrix takes beside its input and output."""
    head_dim, mixture = part.head_dim, part.mixture
    inner = max(part.hidden, part.heads * head_dim, part.intermediate, 0 if mixture is None else mixture.shared)
    outer = max(2 * inner, (part.heads + 2 * part.kv_heads) * head_dim)
    # Inputs twice in float32 and once in integers; outputs twice in integers and once in float32. Numbers of four bits
    # are unpacked one tile at a time.
    return PRODUCT_ROWS * (13 * inner + 12 * outer) + TILE_BYTES


def pass_rows(max_rows: int, max_canvas: int, room: int, workspace: Callable[[int], int]) -> int:
    """Rows that a pass may have in any layer to fit into `room` bytes: `max_rows`, halved if needed.

    A pass has at least the rows of two canvases of `max_canvas` tokens, even if these do not fit. `workspace` returns
    the bytes of a pass over a number of rows.
    """
    min_rows = 2 * max_canvas  # as classifier-free guidance runs two canvases together
    row_count = max(min_rows, max_rows)
    while row_count > min_rows and workspace(row_count) > room:
        row_count = max(min_rows, row_count // 2)
    return row_count


def store_tokens(
    memory: DeviceMemory, token: TokenBytes, workspace: int, canvas_count: int, max_canvas: int, page_size: int
) -> int:
    """Tokens that the prefix store may hold beside the K/V of `canvas_count` canvases of `max_canvas` tokens.

    A canvas may take a page more than its length. Raises `ConfigError`, with advice, if the canvases do not fit.
    """
    slots = max_canvas + page_size
    required = canvas_count * slots * token.kv
    room = memory.room - workspace
    if required > room:
        fitting = max(0, room) // token.kv
        ways = [f"--max-num-seqs {fitting // slots}"] if fitting >= 2 * slots else []
        shorter = fitting // canvas_count - page_size
        if shorter > 1:
            ways.append(f"--max-model-len {shorter}")
        raise ConfigError(
            f"K/V do not fit: {canvas_count} canvases of {max_canvas} tokens need {gigabytes(required)}, and beside "
            f"the weights and {gigabytes(workspace)} for a pass there are {gigabytes(max(0, room))}; everything may "
            f"take {memory}. Use {' or '.join([*ways, _MORE_DEVICES, _LARGER_DEVICE])}"
        )
    return (room - required) // (token.kv + token.state)


def check_weights_fit(
    config: ModelConfig,
    dtype: NumberFormat,
    memory: DeviceMemory,
    ranks: int,
    *,
    apart: bool,
    quantization: Quantization | None = None,
    bfloat16: bool = True,
) -> None:
    """Raise `ConfigError`, with advice, if the weights do not fit.

    If `apart`, each of `ranks` has a device of its own with this memory; otherwise they share it. `bfloat16` says
    whether the device computes in it, so that it may be advised.
    """

    def required_bytes(ranks: int, choice: Quantization | None = quantization, number: NumberFormat = dtype) -> int:
        return weight_bytes(config, number, ranks, choice) * (1 if apart else ranks)

    if required_bytes(ranks) <= memory.room:
        return
    name = str(dtype).removeprefix("torch.")
    ways = []
    if apart:
        counts = [count for count in range(ranks + 1, config.heads + 1) if Shard(0, count).fits(config)]
        ways = [f"--tensor-parallel {count}" for count in counts if required_bytes(count) <= memory.room][:1]
    if dtype.itemsize > 2 and bfloat16 and required_bytes(ranks, number=FORMATS["bfloat16"]) <= memory.room:
        ways.append("--dtype bfloat16")
    if quantization is None:
        choices: tuple[Quantization, ...] = ("fp8",) if apart else ("int8", "int4")
        ways += [f"--quantization {choice}" for choice in choices if required_bytes(ranks, choice) <= memory.room][:1]
    raise ConfigError(
        f"the weights do not fit: {config.parameters / 1e9:.3g} billion parameters need "
        f"{gigabytes(required_bytes(ranks))} as {quantization or name}"
        f"{' on each device' if apart and ranks > 1 else ''}, and everything may take {memory}. "
        f"Use {' or '.join([*ways, 'a smaller model', _LARGER_DEVICE])}"
    )


def resolve_page_size(size: int | None, config: ModelConfig) -> int:
    """Token slots of a page: `size`, or by default at least 16. Raises `ConfigError` unless they are whole blocks."""
    block_length = 1 if config.causal_prefix or config.self_conditioning else config.block_length or 1
    if size is None:
        return -(-DEFAULT_PAGE_SIZE // block_length) * block_length
    if size % block_length:
        next_multiple = -(-size // block_length) * block_length
        raise ConfigError(
            f"page_size={size} is not a multiple of the model's block of {block_length}; use {next_multiple}, or "
            "leave it"
        )
    return size


def default_length(config: ModelConfig) -> int:
    """Tokens of the longest canvas of an engine without a `max_model_len`."""
    return min(config.max_length, MAX_DEFAULT_LENGTH)


def gigabytes(size: float) -> str:
    """A number of bytes as text, in GB or MB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.3g} MB"
