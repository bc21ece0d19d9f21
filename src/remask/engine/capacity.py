"""What a device has room for: a model's weights, the tokens of K/V beside them, and the way out where it has not.

Which number format `--quantization auto` takes: the fastest that fits.
"""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from remask.checks import CPU_QUANTIZATIONS, Quantization, QuantizationChoice
from remask.checks.values import one_of
from remask.engine.config import AUTO, DEFAULT_STORE_TOKENS
from remask.errors import ConfigError
from remask.machine.device import BFLOAT16_PARAMETERS
from remask.model.attention import Attention, SizedAttention
from remask.model.attention_torch import GPU_SCORES
from remask.model.config import ModelConfig
from remask.model.cpu_kernels import TILE_BYTES, Speeds, average, dtype_speeds, int4_kernel, int8_kernel
from remask.model.quantised import MULTIPLIED, check_sizes
from remask.model.ranks import Shard
from remask.model.transformer import Transformer, cpu_kv_dtype
from remask.model.weights import empty_weights
from remask.model.work_list import WorkList, WorkListBuilder
from remask.sampling.score import DRAWN

MAX_LOGITS = 1 << 26  # that exist at a time, of whole rows: 0.25 GiB in float32
LOGIT_COPIES = 4  # of these: the logits, and what is made of them
INDICES = 32  # numbers that a pass sends for each of its rows: tokens, positions, slots, in each of its stages
FEW_ROWS = 64  # of a unit of attention
MAX_DEFAULT_LENGTH = 4096
DEFAULT_PAGE = 16
CPU_SHARE = 0.9  # of the memory that is left on a CPU: other programs need some too
MOST_LISTS = 8  # work lists of the last two passes that are on the device at a time


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device, in bytes.

    Attributes:
        total: all of it.
        free: what nobody has taken.
        share: the part of `total` that may be taken by everybody together.
    """

    total: int
    free: int
    share: float

    @property
    def room(self) -> int:
        """Bytes that may still be taken; negative where others have taken more than `share`."""
        return int(self.share * self.total) - (self.total - self.free)

    def __str__(self) -> str:
        return f"{gigabytes(self.share * self.total)} of {gigabytes(self.total)} ({gigabytes(max(0, self.room))} left)"


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Memory of one token on one rank, in bytes.

    Attributes:
        kv: K and V in all layers.
        state: the hidden states that a stored prefix keeps beside these.
    """

    kv: int
    state: int


def token_bytes(config: ModelConfig, item: int, ranks: int = 1, kv_item: int | None = None) -> TokenBytes:
    """The memory of one token on each of `ranks`, with `item` bytes a number, and `kv_item` bytes one of K and V."""
    part = Shard(0, ranks).part(config)
    kv = part.kv_numbers * (kv_item or item) + config.self_conditioning * config.hidden * item
    # Exact pages of block-causal models need no states, and uniform models store nothing.
    return TokenBytes(kv, (config.layers - 1) * config.hidden * item if config.kind == "masked" else 0)


def weight_bytes(
    config: ModelConfig, dtype: torch.dtype, ranks: int = 1, quantization: Quantization | None = None
) -> int:
    """The memory of the weights on each of `ranks`, in bytes. A tied matrix counts once; a router may be float32."""
    return empty_weights(config, dtype, torch.device("meta"), Shard(ranks - 1, ranks), quantization).nbytes


def logit_rows(config: ModelConfig) -> int:
    """Rows of logits that exist at a time where greedy ones are read. Others count as `DRAWN` of these."""
    return max(DRAWN, MAX_LOGITS // config.vocab)


def logit_bytes(config: ModelConfig, rows: int, ranks: int = 1) -> int:
    """Bytes that reading `rows` predicted rows takes on each of `ranks`: an upper estimate."""
    return LOGIT_COPIES * min(rows * DRAWN, logit_rows(config)) * -(-config.vocab // ranks) * 4


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
    """Bytes that attention takes beside queries and results: partial results, and the list as it is on the device.

    With `filled` lists are filled up to a few sizes, as in graphs.
    """
    if isinstance(attention, SizedAttention):
        lists = _largest_lists(rows, longest)
        sizes = [attention.size(work, part.heads, part.kv_heads, sink=part.sink) for work in lists]
        if filled:
            sizes = [size.rounded_up(size.rows) for size in sizes]
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
        own = builder.slots(np.arange(longest))
        if longest > 1:
            builder.add(0, canvases * longest, own, 1, None)
        for number in range(canvases):
            builder.add(number * longest, longest, own, max(1, longest - 1), None)
        yield builder.list()
    few = min(rows, FEW_ROWS)
    builder = WorkListBuilder()
    own = builder.slots(np.arange(longest))
    builder.add(0, rows, own, 1, None)
    builder.add(0, few, own, longest, None)
    if rows > few:
        builder.add(few, rows - few, own, 1, None)
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
    return MULTIPLIED * (13 * inner + 12 * outer) + TILE_BYTES


def pass_rows(
    config: ModelConfig,
    most: int,
    longest: int,
    item: int,
    room: int,
    ranks: int = 1,
    attention: Attention | None = None,
) -> int:
    """Rows that a pass may have in any layer so that it fits in `room` bytes: `most` of them, or fewer.

    Where not even the pass of one request of `longest` tokens fits, the rows of one request.
    """
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
    each = longest + page
    needed, room = canvases * each * token.kv, memory.room - workspace
    if needed > room:
        fitting = max(0, room) // token.kv
        ways = [f"--max-num-seqs {fitting // each}"] if fitting >= 2 * each else []
        if (shorter := fitting // canvases - page) > 1:
            ways.append(f"--max-model-len {shorter}")
        raise ConfigError(
            f"K/V do not fit: {canvases} canvases of {longest} tokens need {gigabytes(needed)}, and beside the weights "
            f"and {gigabytes(workspace)} for a pass there are {gigabytes(max(0, room))}; everything may take {memory}. "
            f"Use {' or '.join([*ways, *_MORE])}"
        )
    return (room - needed) // (token.kv + token.state)


@dataclass(frozen=True, slots=True)
class CpuMemory:
    """What is left on a CPU beside a model's weights, and what is to have room there, in bytes of all ranks together.

    Attributes:
        config: the model's shape.
        dtype, kv_dtype: of hidden states, and of K/V.
        quantised: whether the matrices are quantized.
        ranks: processes that the model is spread over.
        attention: how it attends; None: by PyTorch.
        left: bytes that may be taken; negative where the weights alone are too large.
        page: tokens of a page. A canvas may take one more than its length says.
    """

    config: ModelConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    quantised: bool
    ranks: int
    attention: Attention | None
    left: int
    page: int

    @classmethod
    def beside(cls, model: Transformer, free: int, page: int) -> "CpuMemory":
        """Beside a `model` that is loaded, on a machine with `free` bytes of memory."""
        left = int(CPU_SHARE * free)
        ranks = model.ranks.shard.size
        return cls(model.config, model.dtype, model.kv_dtype, model.quantised, ranks, model.attention, left, page)

    @classmethod
    def before(
        cls, config: ModelConfig, dtype: torch.dtype, quantization: Quantization | None, free: int, ranks: int = 1
    ) -> "CpuMemory":
        """As it will be once such a model is loaded, on a machine with `free` bytes of memory now."""
        left = int(CPU_SHARE * (free - ranks * weight_bytes(config, dtype, ranks, quantization)))
        quantised = quantization is not None
        kv_dtype, page = cpu_kv_dtype(dtype, quantised), page_size(None, config)
        return cls(config, dtype, kv_dtype, quantised, ranks, None, left, page)

    @property
    def token(self) -> TokenBytes:
        """The memory of a token on all ranks."""
        one = token_bytes(self.config, self.dtype.itemsize, self.ranks, self.kv_dtype.itemsize)
        return TokenBytes(self.ranks * one.kv, self.ranks * one.state)

    def workspace(self, rows: int, length: int) -> int:
        """What a pass over `rows` rows of canvases of `length` tokens takes."""
        one = workspace_bytes(self.config, rows, length, self.dtype.itemsize, self.ranks, self.attention)
        part = Shard(0, self.ranks).part(self.config)
        return self.ranks * (one + (product_bytes(part) if self.quantised else 0))

    def pair(self, length: int, store: int = 0) -> int:
        """What a guided request of `length` tokens takes, whose two canvases run together, and `store` stored ones."""
        long, token = length + self.page, self.token
        return 2 * long * token.kv + self.workspace(2 * long, long) + store * (token.kv + token.state)

    def longest(self, length: int, store: int) -> int:
        """The most tokens up to `length` of which a pair has room, beside as many of `store`: whole pages, or all."""

        def needed(tokens: int) -> int:
            return self.pair(tokens, min(tokens, store))

        if needed(length) <= self.left:
            return length
        counts = range(1, length // self.page + 1)
        return bisect_right(counts, self.left, key=lambda count: needed(count * self.page)) * self.page

    def default_length(self) -> int:
        """Tokens of the longest canvas of an engine that is made by default; 0 where it would be refused."""
        return self.longest(default_length(self.config), DEFAULT_STORE_TOKENS)

    def tokens(self) -> int | None:
        """Tokens of K/V that have room beside a pass over the longest default canvas; None: no canvas has."""
        long = self.default_length() + self.page
        return (self.left - self.workspace(2 * long, long)) // self.token.kv if long > self.page else None

    def rows(self, most: int, length: int, taken: int) -> int:
        """Rows of a pass that has room beside `taken` bytes: `most`, or fewer."""
        while most > 2 * length and self.workspace(most, length) > self.left - taken:
            most = max(2 * length, most // 2)
        return most

    def no_room(self, longest: int, fitting: int) -> ConfigError:
        """The error where two canvases of `longest` tokens do not fit, and those of `fitting` do; 0: none."""
        ways = [f"--max-model-len {fitting}"] if fitting else []
        ways += [] if self.quantised else ["--quantization int8"]
        return ConfigError(
            f"K/V do not fit: a request with guidance takes two canvases of up to {longest} tokens and a pass over "
            f"them, {gigabytes(self.pair(longest))}, and {gigabytes(max(0, self.left))} of memory are left beside the "
            f"weights. Use {' or '.join([*ways, 'a smaller model', 'a machine with more memory'])}"
        )


def check_weights_fit(
    config: ModelConfig,
    dtype: torch.dtype,
    memory: DeviceMemory,
    ranks: int,
    *,
    apart: bool,
    quantization: Quantization | None = None,
) -> None:
    """Raise `ConfigError` where the weights have no room, with the numbers and what to change.

    `apart`: each of `ranks` has a device of its own with this memory; else they share it.
    """

    def needed(number: int, kind: Quantization | None = quantization) -> int:
        return weight_bytes(config, dtype, number, kind) * (1 if apart else number)

    if needed(ranks) <= memory.room:
        return
    name = str(dtype).removeprefix("torch.")
    ways = []
    if apart:
        more = [number for number in _numbers(config) if number > ranks and needed(number) <= memory.room]
        ways = [f"--tensor-parallel {more[0]}"] if more else []
    if dtype.itemsize > 2:
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
    """Token slots a page: as asked, or the least whole number of blocks that is at least 16.

    Raises `ConfigError` where pages of `size` hold no whole number of the model's blocks.
    """
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


NONE: Final = "none"
_GAIN = 1.1  # by how much narrower numbers must be faster to be taken


def resolve_quantization(
    asked: QuantizationChoice,
    stored: Quantization | None,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    memory: DeviceMemory | None,
    processes: int = 1,
    usual: str | None = None,
) -> tuple[Quantization | None, str]:
    """How a model's matrices are kept, and the reason for it in words.

    On a CPU `auto` is the fastest of the dtype, int8 and int4 beside which an engine has room (`CpuMemory`), by short
    measurements; the wider one where they are as fast. Where none fits it is the narrowest. Files that are quantised
    stay as they are. `memory` is None where it is not known, and `processes` share it. `usual` is what the model's
    files name for CPUs, and holds where nothing is asked. Raises `ConfigError` where it is none of these, or where
    `none` is asked of files that are quantized.
    """
    if asked is None and stored is None and usual is not None and device.type == "cpu":
        one_of("'quantization' in remask.json", usual, (AUTO, NONE, *CPU_QUANTIZATIONS))
        kind, why = resolve_quantization(usual, None, config, dtype, device, memory, processes)  # type: ignore[arg-type]
        return kind, why if usual == AUTO else "as the model's files advise"
    if asked == NONE:
        if stored is not None:
            raise ConfigError(f"quantization 'none': the model's files hold {stored}; load the model they were made of")
        return None, "as asked"
    if asked != AUTO:
        return asked or stored, "as asked" if asked else "as in the files" if stored else "by default"
    if stored is not None:
        return stored, "auto: as in the files"
    if device.type != "cpu":
        return None, f"auto: device {device}"
    if config.parameters < BFLOAT16_PARAMETERS:
        return None, f"auto: {config.parameters / 1e6:.3g} million parameters gain nothing"

    def fits(kind: Quantization | None) -> bool:
        return memory is None or CpuMemory.before(config, dtype, kind, memory.room, processes).default_length() > 0

    kinds: list[Quantization | None] = [None, "int8"]
    with suppress(ConfigError):
        check_sizes("int4", Shard(processes - 1, processes).part(config))
        kinds.append("int4")
    fitting = [kind for kind in kinds if fits(kind)]
    if len(fitting) < 2:
        return (fitting or kinds)[-1], "auto: no other fits" if fitting else "auto: nothing fits"
    speed = {kind: average(_speeds(kind, dtype)) for kind in fitting}
    taken = fitting[0]
    for kind in fitting[1:]:
        taken = kind if speed[kind] > _GAIN * speed[taken] else taken
    names = {None: str(dtype).removeprefix("torch.")} | {kind: kind for kind in CPU_QUANTIZATIONS}
    found = ", ".join(f"{names[kind]} {own:.1f}" for kind, own in speed.items())
    return taken, f"auto: of what fits, times as fast as float32: {found}"


def _speeds(kind: Quantization | None, dtype: torch.dtype) -> Speeds:
    if kind is None:
        return dtype_speeds(dtype)
    return (int4_kernel() if kind == "int4" else int8_kernel()).speed
