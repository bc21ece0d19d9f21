"""How an engine's memory is divided when it is made: pages for running canvases, the stores, and room for passes."""

import logging
from bisect import bisect_right
from dataclasses import dataclass

import torch

from remask.engine.capacity import (
    DeviceMemory,
    TokenBytes,
    attention_bytes,
    gigabytes,
    pass_rows,
    product_bytes,
    store_tokens,
    token_bytes,
    workspace_bytes,
)
from remask.engine.config import DEFAULT_STORE_TOKENS, DEFAULT_UTILIZATION, EngineConfig
from remask.errors import ConfigError
from remask.machine.cpu import memory
from remask.machine.device import free_memory
from remask.model.config import ModelConfig
from remask.model.graphs import graph_bytes, most_rows
from remask.model.transformer import Transformer

DEFAULT_PAGE = 16
CPU_SHARE = 0.9  # of the memory that is left on a CPU: other programs need some too

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """How the memory of an engine is divided.

    Attributes:
        longest: tokens of the longest canvas.
        running: tokens of K/V for running canvases, those of pages that end beyond their canvas included.
        store: tokens that the prefix store may hold.
        rows: largest number of rows of a pass in any layer; None: any number, as memory is allocated when needed.
        spare: bytes that are not planned for; None: unknown.
    """

    longest: int
    running: int
    store: int
    rows: int | None = None
    spare: int | None = None


def share_out(model: Transformer, config: EngineConfig, canvases: int, longest: int, page: int) -> Room:
    """Divide the memory of `model`'s device among `canvases` of `longest` tokens in pages of `page`, and the store.

    A canvas may take one page more than its length says. Raises `ConfigError` where they do not fit. On a CPU there may
    be fewer tokens of K/V than all canvases would take together; requests then wait for pages.
    """
    asked, device = config.store_budget_tokens, model.device
    if device.type != "cuda":
        if config.gpu_memory_utilization is not None:
            raise ConfigError(
                f"gpu_memory_utilization={config.gpu_memory_utilization:g} is for CUDA devices, and the model is on "
                f"{device}: leave it out, as K/V take memory there page by page"
            )
        return _share_out_cpu(model, config, canvases, longest, page)
    named, longest = longest, longest + page
    free, total = model.ranks.everywhere(device_memory, model)
    memory = DeviceMemory(total, free, config.gpu_memory_utilization or DEFAULT_UTILIZATION)
    ranks, shape, item = model.ranks.shard.size, model.config, model.dtype.itemsize
    token, stored = token_bytes(shape, item, ranks), 0 if asked == "auto" else asked
    extra = 0
    if config.graphs:  # which have memory of their own for a pass
        rows = most_rows(shape)
        extra = workspace_bytes(shape, rows, longest, item, ranks, model.attention) + graph_bytes(shape, item)
        extra += attention_bytes(shape, rows, longest, item, model.attention, filled=True)
    left = memory.room - extra - canvases * longest * token.kv - stored * (token.kv + token.state)
    most = canvases * longest
    if config.max_row_layers is not None:  # a row has a layer at least
        most = min(most, config.max_row_layers)
    rows = pass_rows(shape, most, longest, item, left, ranks, model.attention)
    workspace = extra + workspace_bytes(shape, rows, longest, item, ranks, model.attention)
    room = store_tokens(memory, token, workspace, canvases, named, page)
    if stored > room:
        raise ConfigError(
            f"store_budget_tokens={asked} needs {gigabytes(stored * (token.kv + token.state))} beside running "
            f"canvases, and there is room for {room} tokens; everything may take {memory}. Use {room}, 'auto', or "
            "a lower max_num_seqs or max_model_len"
        )
    if rows < most:
        log.info("passes have at most %d rows, as %s are left for them", rows, gigabytes(left))
    store = room if asked == "auto" else stored
    taken = canvases * longest * token.kv + store * (token.kv + token.state)
    return Room(named, canvases * longest, store, rows, memory.room - workspace - taken)


@dataclass(frozen=True, slots=True)
class _CpuMemory:
    """What is left on a CPU beside the weights, and what is to have room there, in bytes of all ranks together.

    Attributes:
        left: bytes that may be taken.
        page: tokens of a page. A canvas may take one more than its length says.
    """

    model: Transformer
    left: int
    page: int

    @property
    def token(self) -> TokenBytes:
        """The memory of a token on all ranks."""
        ranks = self.model.ranks.shard.size
        one = token_bytes(self.model.config, self.model.dtype.itemsize, ranks, self.model.kv_dtype.itemsize)
        return TokenBytes(ranks * one.kv, ranks * one.state)

    def workspace(self, rows: int, length: int) -> int:
        """What a pass over `rows` rows of canvases of `length` tokens takes."""
        model, ranks = self.model, self.model.ranks.shard.size
        one = workspace_bytes(model.config, rows, length, model.dtype.itemsize, ranks, model.attention)
        return ranks * (one + (product_bytes(model.part) if model.quantised else 0))

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

    def rows(self, most: int, length: int, taken: int) -> int:
        """Rows of a pass that has room beside `taken` bytes: `most`, or fewer."""
        while most > 2 * length and self.workspace(most, length) > self.left - taken:
            most = max(2 * length, most // 2)
        return most


def _share_out_cpu(model: Transformer, config: EngineConfig, canvases: int, longest: int, page: int) -> Room:
    """As `share_out`: what was asked for where it fits.

    Else two canvases have room first. What is left is for the store and for more canvases. A length that nobody asked
    for gives way, so that the store holds one canvas at least.
    """
    asked = DEFAULT_STORE_TOKENS if config.store_budget_tokens == "auto" else config.store_budget_tokens
    wanted = Room(longest, canvases * (longest + page), asked)
    if (there := memory()) is None:
        return wanted
    cpu = _CpuMemory(model, int(CPU_SHARE * there[1]), page)
    token, most = cpu.token, config.max_row_layers or wanted.running  # a row has a layer at least
    needed = wanted.running * token.kv + asked * (token.kv + token.state)
    if needed + cpu.workspace(min(most, wanted.running), longest + page) <= cpu.left:
        return wanted
    fitting = cpu.longest(longest, asked if config.max_model_len is None else 0)
    if not fitting or (fitting < longest and config.max_model_len is not None):
        raise _no_room(cpu, longest, fitting)
    spare = cpu.left - cpu.pair(fitting)
    store = min(asked, max(spare // 2 // (token.kv + token.state), fitting if config.max_model_len is None else 0))
    stored = store * (token.kv + token.state)
    running = min(canvases * (fitting + page), 2 * (fitting + page) + (spare - stored) // token.kv)
    taken = running * token.kv + stored
    rows = cpu.rows(min(most, running), fitting + page, taken)
    log.warning(
        "%s of memory are left beside the weights: canvases have up to %d tokens (%d were asked for), running ones "
        "together %d of K/V (%d), and the prefix store has %d (%d); passes have at most %d rows",
        *(gigabytes(cpu.left), fitting, longest, running, wanted.running, store, asked, rows),
    )
    spare = (cpu.left - taken - cpu.workspace(rows, fitting + page)) // model.ranks.shard.size
    return Room(fitting, running, store, rows, spare)


def _no_room(cpu: _CpuMemory, longest: int, fitting: int) -> ConfigError:
    """The error where two canvases of `longest` tokens do not fit, and those of `fitting` do; 0: none."""
    ways = [f"--max-model-len {fitting}"] if fitting else []
    ways += [] if cpu.model.quantised else ["--quantization int8"]
    return ConfigError(
        f"K/V do not fit: a request with guidance takes two canvases of up to {longest} tokens and a pass over them, "
        f"{gigabytes(cpu.pair(longest))}, and {gigabytes(cpu.left)} of memory are left beside the weights. Use "
        f"{' or '.join([*ways, 'a smaller model', 'a machine with more memory'])}"
    )


def device_memory(model: Transformer) -> tuple[int, int]:
    """Free and total bytes of the device of the rank that has the least."""
    own = free_memory(model.device)
    if not model.ranks.several:
        return own
    free, total = model.ranks.gather(torch.tensor(own, device=model.device)).amin(dim=0).tolist()
    return free, total


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
