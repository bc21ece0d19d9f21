"""What a device has room for: a model's weights, the tokens of K/V beside them, and the way out where it has not.

Nothing here imports PyTorch: `remask models` says what fits before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    from remask.model.attention import Attention

MAX_LOGITS = 1 << 26  # that exist at a time, of whole rows: 0.25 GiB in float32
LOGIT_COPIES = 4  # of these: the logits, and what is made of them
INDICES = 32  # numbers that a pass sends for each of its rows: tokens, positions, slots, in each of its stages
FEW_ROWS = 64  # of a unit of attention
MAX_DEFAULT_LENGTH = 4096
DEFAULT_PAGE = 16
MOST_LISTS = 8  # work lists of the last two passes that are on the device at a time


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device, in bytes."""

    total: int  # all of it
    free: int  # what nobody has taken
    share: float  # the part of `total` that may be taken by everybody together

    @property
    def room(self) -> int:
        """Bytes that may still be taken; negative where others have taken more than `share`."""
        return int(self.share * self.total) - (self.total - self.free)

    def __str__(self) -> str:
        return f"{gigabytes(self.share * self.total)} of {gigabytes(self.total)} ({gigabytes(max(0, self.room))} left)"


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Memory of one token on one rank, in bytes."""

    kv: int  # K and V in all layers
    state: int  # the hidden states that a stored prefix keeps beside these


def token_bytes(config: ModelConfig, item: int, ranks: int = 1, kv_item: int | None = None) -> TokenBytes:
    """The memory of one token on each of `ranks`, with `item` bytes a number, and `kv_item` bytes one of K and V."""
    part = Shard(0, ranks).part(config)
    kv = part.kv_numbers * (kv_item or item) + config.self_conditioning * config.hidden * item
    # Exact pages of block-causal models need no states, and uniform models store nothing.
    return TokenBytes(kv, (config.layers - 1) * config.hidden * item if config.kind == "masked" else 0)


def weight_bytes(
    config: ModelConfig, dtype: NumberFormat, ranks: int = 1, quantization: Quantization | None = None
) -> int:
    """Bytes of the weights on each of `ranks`. A tied matrix counts once; a router may be float32."""
    return weights.weight_bytes(config, dtype, Shard(ranks - 1, ranks), quantization)


def logit_rows(config: ModelConfig) -> int:
    """Rows of logits that exist at a time where greedy ones are read. Others count as `DRAW_WEIGHT` of these."""
    return max(DRAW_WEIGHT, MAX_LOGITS // config.vocab)


def logit_bytes(config: ModelConfig, rows: int, ranks: int = 1) -> int:
    """Bytes that reading `rows` predicted rows takes on each of `ranks`: an upper estimate."""
    return LOGIT_COPIES * min(rows * DRAW_WEIGHT, logit_rows(config)) * -(-config.vocab // ranks) * 4


def layer_bytes(part: ModelConfig, rows: int, longest: int, item: int, attention: Attention | None = None) -> int:
    """Bytes that `rows` rows of canvases of up to `longest` tokens take in a layer: an upper estimate.

    Hidden states and what is computed of them exist for one layer at a time. `part` is the shape that a rank computes
    with, whose model attends by `attention`; None: by PyTorch.
    """
    (queries, keys), hidden = _widest(part), part.hidden
    # What stays: the stage before's hidden states and these, cos and sin, and indices.
    angle = max(item, 4) if part.rope_float32 else item
    stays = item * 2 * hidden + angle * (part.rotary_dim or part.head_dim) + INDICES * 8
    single = 4 * max(1, item // 4)  # bytes of a number of float32, or wider where the model is
    normed = 3 * single * max(hidden, queries)
    turned = 2 * angle * (queries + keys) if angle > item else 0
    projected = item * (hidden + 2 * queries + 3 * keys) + max(normed, turned)
    compared = item * (2 * hidden + 2 * keys) + 5 * single * keys
    wide = (3 if part.gated else 1) * part.intermediate
    mixture = part.mixture
    if mixture is not None:  # a row is copied for each of its experts
        wide = max(wide, mixture.active * (3 * hidden + 3 * mixture.intermediate) + 3 * mixture.shared)
        wide += mixture.experts * 3 * single // item + hidden
    fed = item * (3 * hidden + queries + wide)
    attended = item * (2 * queries + keys) * rows + attention_bytes(part, rows, longest, item, attention)
    return rows * stays + max(rows * max(projected, compared, fed), attended)


def _widest(part: ModelConfig) -> tuple[int, int]:
    """Channels of all heads of queries, and of all of K, in the layers that have most."""
    shapes = part.shapes
    return max(one.heads * one.head_dim for one in shapes), max(one.kv_heads * one.head_dim for one in shapes)


def attention_bytes(
    part: ModelConfig, rows: int, longest: int, item: int, attention: Attention | None, *, filled: bool = False
) -> int:
    """Bytes that attention takes beside queries and results; with `filled` lists are filled up, as in graphs."""
    if attention is not None:
        from remask.model.attention import SizedAttention  # needs PyTorch, which whatever attends has imported

        if isinstance(attention, SizedAttention):
            lists = _largest_lists(rows, longest)
            sizes = [attention.size(work, part.heads, part.kv_heads, sink=part.sink is not None) for work in lists]
            if filled:
                sizes = [size.round_up(size.rows) for size in sizes]
            numbers = max(sum(size.lengths) for size in sizes) * 4
            return MOST_LISTS * numbers + max(size.outputs for size in sizes) * part.heads * (part.head_dim + 1) * 4
    # Queries and results in float32, those of a unit, its K and V where they are gathered, and a tile of scores.
    single = 4 * max(1, item // 4)
    queries, keys = _widest(part)
    scores = 2 * single * min(GPU_SCORES, part.heads * rows * longest)
    return rows * single * (5 * queries + 4 * part.heads) + 2 * longest * keys * (item + single) + scores


def _largest_lists(rows: int, longest: int) -> Iterator[WorkList]:
    """Work lists of passes over `rows` rows that leave the most partial results: all canvases read one leading slot.

    So each row stands in two units, of which the second has nearly all slots. The passes are full ones of 1, 2, 4, ...
    canvases, as a list may be cut finer where it is short, and one in which a few rows alone see more than two slots.
    """
    most = max(1, rows // longest)
    for canvases in sorted({min(most, 1 << power) for power in range(most.bit_length() + 1)}):
        builder = WorkListBuilder()
        slots = builder.slots(np.arange(longest))
        if longest > 1:
            builder.add(0, canvases * longest, slots, 1, None)
        for number in range(canvases):
            builder.add(number * longest, longest, slots, max(1, longest - 1), None)
        yield builder.list()
    few = min(rows, FEW_ROWS)
    builder = WorkListBuilder()
    slots = builder.slots(np.arange(longest))
    builder.add(0, rows, slots, 1, None)
    builder.add(0, few, slots, longest, None)
    if rows > few:
        builder.add(few, rows - few, slots, 1, None)
    yield builder.list()


def workspace_bytes(
    config: ModelConfig, rows: int, longest: int, item: int, ranks: int = 1, attention: Attention | None = None
) -> int:
    """Bytes that a pass over `rows` rows takes beside weights and K/V, on each of `ranks`: an upper estimate.

    `longest` and `attention` are as in `layer_bytes`. What layers take and what logits take do not exist at the same
    time, and are added all the same: PyTorch's allocator keeps pieces of memory as they were cut.
    """
    part = Shard(0, ranks).part(config)
    return layer_bytes(part, rows, longest, item, attention) + logit_bytes(config, rows, ranks)


def product_bytes(part: ModelConfig) -> int:
    """Bytes that a product of quantized matrices takes beside rows and results: an upper estimate."""
    dim, mixture = part.head_dim, part.mixture
    inner = max(part.hidden, part.heads * dim, part.intermediate, 0 if mixture is None else mixture.shared)
    outer = max(2 * inner, (part.heads + 2 * part.kv_heads) * dim)
    # Rows in float32 twice, and in whole numbers; results in whole numbers twice, and in float32. Numbers of four bits
    # are unpacked a tile at a time.
    return PRODUCT_ROWS * (13 * inner + 12 * outer) + TILE_BYTES


def pass_rows(
    config: ModelConfig,
    most: int,
    longest: int,
    item: int,
    room: int,
    ranks: int = 1,
    attention: Attention | None = None,
) -> int:
    """Rows that a pass may have in any layer to fit in `room` bytes: `most`, or fewer, but those of one request."""
    least = 2 * longest  # as classifier-free guidance runs two canvases together
    rows = max(least, most)
    while rows > least and workspace_bytes(config, rows, longest, item, ranks, attention) > room:
        rows = max(least, rows // 2)
    return rows


def store_tokens(
    memory: DeviceMemory, token: TokenBytes, workspace: int, canvases: int, longest: int, page: int
) -> int:
    """Tokens that the prefix store may hold where `canvases` canvases of `longest` tokens have their K/V.

    A canvas may take a `page` more than its length says. Raises `ConfigError`, with the numbers and what to change,
    where these have no room.
    """
    extent = longest + page
    needed, room = canvases * extent * token.kv, memory.room - workspace
    if needed > room:
        fitting = max(0, room) // token.kv
        ways = [f"--max-num-seqs {fitting // extent}"] if fitting >= 2 * extent else []
        if (shorter := fitting // canvases - page) > 1:
            ways.append(f"--max-model-len {shorter}")
        raise ConfigError(
            f"K/V do not fit: {canvases} canvases of {longest} tokens need {gigabytes(needed)}, and beside the weights "
            f"and {gigabytes(workspace)} for a pass there are {gigabytes(max(0, room))}; everything may take {memory}. "
            f"Use {' or '.join([*ways, *_MORE])}"
        )
    return (room - needed) // (token.kv + token.state)


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
    """Raise `ConfigError` where the weights have no room, with the numbers and what to change.

    `apart`: each of `ranks` has a device of its own with this memory; else they share it. `bfloat16`: the device
    computes in it, so that it may be advised.
    """

    def needed(number: int, kind: Quantization | None = quantization, item: NumberFormat = dtype) -> int:
        return weight_bytes(config, item, number, kind) * (1 if apart else number)

    if needed(ranks) <= memory.room:
        return
    name = str(dtype).removeprefix("torch.")
    ways = []
    if apart:
        more = [number for number in _numbers(config) if number > ranks and needed(number) <= memory.room]
        ways = [f"--tensor-parallel {more[0]}"] if more else []
    if dtype.itemsize > 2 and bfloat16 and needed(ranks, item=FORMATS["bfloat16"]) <= memory.room:
        ways.append("--dtype bfloat16")
    if quantization is None:
        kinds: tuple[Quantization, ...] = ("fp8",) if apart else ("int8", "int4")
        ways += [f"--quantization {kind}" for kind in kinds if needed(ranks, kind) <= memory.room][:1]
    raise ConfigError(
        f"the weights do not fit: {config.parameters / 1e9:.3g} billion parameters need {gigabytes(needed(ranks))} as "
        f"{quantization or name}{' on each device' if apart and ranks > 1 else ''}, and everything may take {memory}. "
        f"Use {' or '.join([*ways, 'a smaller model', *_MORE[1:]])}"
    )


def page_size(size: int | None, shape: ModelConfig) -> int:
    """Token slots a page: as asked, or at least 16. Raises `ConfigError` unless they are whole blocks."""
    block = 1 if shape.causal_prefix or shape.self_conditioning else shape.block_length or 1
    if size is None:
        return -(-DEFAULT_PAGE // block) * block
    if size % block:
        near = -(-size // block) * block
        raise ConfigError(
            f"page_size={size} is not a multiple of the model's block of {block}; use {near}, or leave it"
        )
    return size


def default_length(shape: ModelConfig) -> int:
    """Tokens of the longest canvas where nobody names a length."""
    return min(shape.max_length, MAX_DEFAULT_LENGTH)


def gigabytes(size: float) -> str:
    """A size in words."""
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.3g} MB"


def _numbers(config: ModelConfig) -> list[int]:
    return [number for number in range(2, config.heads + 1) if Shard(0, number).fits(config)]


_MORE = ("--tensor-parallel with more devices", "a device with more memory")
