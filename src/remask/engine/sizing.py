"""How an engine's memory is divided when it is made: pages for running canvases, the stores, and room for passes."""

import logging
from dataclasses import dataclass

import torch

from remask.engine.capacity import (
    DeviceMemory,
    attention_bytes,
    gigabytes,
    pass_rows,
    store_tokens,
    token_bytes,
    workspace_bytes,
)
from remask.engine.config import DEFAULT_STORE_TOKENS, DEFAULT_UTILIZATION, EngineConfig
from remask.errors import ConfigError
from remask.model.config import ModelConfig
from remask.model.graphs import MOST_ROWS, graph_bytes
from remask.model.transformer import Transformer

DEFAULT_PAGE = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """How the memory of an engine is divided.

    Attributes:
        store: tokens that the prefix store may hold.
        rows: largest number of rows of a pass in any layer; None: any number, as memory is allocated when needed.
        spare: bytes that are not planned for; None: unknown.
    """

    store: int
    rows: int | None = None
    spare: int | None = None


def share_out(model: Transformer, config: EngineConfig, canvases: int, longest: int) -> Room:
    """Divide the memory of `model`'s device. Raises `ConfigError` where canvases of `longest` tokens do not fit."""
    asked, device = config.store_budget_tokens, model.device
    if device.type != "cuda":
        if config.gpu_memory_utilization is not None:
            raise ConfigError(
                f"gpu_memory_utilization={config.gpu_memory_utilization:g} is for CUDA devices, and the model is on "
                f"{device}: leave it out, as K/V take memory there page by page"
            )
        return Room(DEFAULT_STORE_TOKENS if asked == "auto" else asked)
    free, total = model.ranks.everywhere(device_memory, model)
    memory = DeviceMemory(total, free, config.gpu_memory_utilization or DEFAULT_UTILIZATION)
    ranks, shape, item = model.ranks.shard.size, model.config, model.dtype.itemsize
    token, stored = token_bytes(shape, item, ranks), 0 if asked == "auto" else asked
    extra = 0
    if config.graphs:  # which have memory of their own for a pass
        extra = workspace_bytes(shape, MOST_ROWS, longest, item, ranks, model.attention) + graph_bytes(shape, item)
        extra += attention_bytes(shape, MOST_ROWS, longest, item, model.attention, filled=True)
    left = memory.room - extra - canvases * longest * token.kv - stored * (token.kv + token.state)
    most = canvases * longest
    if config.max_row_layers is not None:  # a row has a layer at least
        most = min(most, config.max_row_layers)
    rows = pass_rows(shape, most, longest, item, left, ranks, model.attention)
    workspace = extra + workspace_bytes(shape, rows, longest, item, ranks, model.attention)
    room = store_tokens(memory, token, workspace, canvases, longest)
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
    return Room(store, rows, memory.room - workspace - taken)


def device_memory(model: Transformer) -> tuple[int, int]:
    """Free and total bytes of the device of the rank that has the least."""
    found = torch.tensor(torch.cuda.mem_get_info(model.device), device=model.device)
    free, total = model.ranks.gather(found).amin(dim=0).tolist()
    return free, total


def page_size(size: int | None, shape: ModelConfig) -> int:
    """Token slots a page: as asked, or the least whole number of blocks that is at least 16.

    Raises `ConfigError` where pages of `size` hold no whole number of the model's blocks.
    """
    block = shape.block_length or 1
    if size is None:
        return -(-DEFAULT_PAGE // block) * block
    if size % block:
        near = -(-size // block) * block
        raise ConfigError(
            f"page_size={size} is not a multiple of the model's block of {block}; use {near}, or leave it"
        )
    return size
