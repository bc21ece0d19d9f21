"""What a device has room for: a model's weights, the tokens of K/V beside them, and the way out where it has not."""

from dataclasses import dataclass

import torch

from remask.errors import ConfigError
from remask.models.config import ModelConfig
from remask.models.quantised import Quantization
from remask.models.ranks import Shard
from remask.models.weights import empty_weights

MAX_LOGITS = 1 << 26  # that exist at a time, of whole rows: 0.25 GiB in float32
LOGIT_COPIES = 3  # of these: the logits, and what is made of them where tokens are drawn


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


def token_bytes(config: ModelConfig, item: int, ranks: int = 1) -> TokenBytes:
    """The memory of one token on each of `ranks`, with `item` bytes a number."""
    kv = 2 * config.layers * Shard(0, ranks).part(config).kv_heads * config.head_dim * item
    # Exact pages of block-causal models need no states, and uniform models store nothing.
    return TokenBytes(kv, (config.layers - 1) * config.hidden * item if config.kind == "masked" else 0)


def weight_bytes(
    config: ModelConfig, dtype: torch.dtype, ranks: int = 1, quantization: Quantization | None = None
) -> int:
    """The memory of the weights on each of `ranks`, in bytes. A tied matrix counts once; a router may be float32."""
    return empty_weights(config, dtype, torch.device("meta"), Shard(ranks - 1, ranks), quantization).nbytes


def logit_rows(config: ModelConfig) -> int:
    """Rows of logits that exist at a time, unless one request has more."""
    return MAX_LOGITS // config.vocab


def workspace_bytes(config: ModelConfig, rows: int, item: int, ranks: int = 1) -> int:
    """Bytes that a pass over `rows` rows takes beside weights and K/V, on each of `ranks`: an upper estimate.

    Hidden states and what is computed of them exist for one layer at a time, logits for a few rows.
    """
    part = Shard(0, ranks).part(config)
    mixture = part.mixture
    wide = 3 * part.intermediate
    if mixture is not None:  # a row is copied for each of its experts
        wide = max(wide, mixture.active * (2 * config.hidden + 3 * mixture.intermediate) + 3 * mixture.shared)
    heads = 3 * (part.heads + 2 * part.kv_heads) * part.head_dim
    logits = LOGIT_COPIES * min(rows, logit_rows(config)) * -(-config.vocab // ranks) * 4
    return rows * item * (4 * config.hidden + max(wide, heads)) + logits


def store_tokens(memory: DeviceMemory, token: TokenBytes, workspace: int, canvases: int, longest: int) -> int:
    """Tokens that the prefix store may hold where `canvases` canvases of `longest` tokens have their K/V.

    Raises `ConfigError`, with the numbers and what to change, where these have no room.
    """
    needed, room = canvases * longest * token.kv, memory.room - workspace
    if needed > room:
        fitting = max(0, room) // token.kv
        ways = [f"--max-num-seqs {fitting // longest}"] if fitting >= 2 * longest else []
        if fitting >= 2 * canvases:
            ways.append(f"--max-model-len {fitting // canvases}")
        raise ConfigError(
            f"K/V do not fit: {canvases} canvases of {longest} tokens need {gigabytes(needed)}, and beside the weights "
            f"and {gigabytes(workspace)} for a pass there are {gigabytes(max(0, room))}; everything may take {memory}. "
            f"Use {' or '.join([*ways, *_MORE])}"
        )
    return (room - needed) // (token.kv + token.state)


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


def gigabytes(size: float) -> str:
    """A size in words."""
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.3g} MB"


def _numbers(config: ModelConfig) -> list[int]:
    return [number for number in range(2, config.heads + 1) if Shard(0, number).fits(config)]


_MORE = ("--tensor-parallel with more devices", "a device with more memory")
