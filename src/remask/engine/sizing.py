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
from remask.engine.fitting import CpuMemory
from remask.errors import ConfigError
from remask.machine.cpu import memory
from remask.machine.device import free_memory
from remask.model.graphs import graph_bytes, max_rows
from remask.model.transformer import Transformer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """How the memory of an engine is divided."""

    longest: int  # tokens of the longest canvas
    running: int  # tokens of K/V for running canvases, those of pages that end beyond their canvas included
    store: int  # tokens that the prefix store may hold
    # Largest number of rows of a pass in any layer; None: any number, as memory is allocated when needed
    rows: int | None = None
    spare: int | None = None  # bytes that are not planned for; None: unknown


def share_out(model: Transformer, config: EngineConfig, canvases: int, longest: int, page: int) -> Room:
    """Divide the memory of `model`'s device among `canvases` of `longest` tokens in pages of `page`, and the store.

    A canvas may take one page more than its length says. Raises `ConfigError` where they do not fit. On a CPU requests
    may have to wait for pages.
    """
    budget, device = config.store_budget_tokens, model.device
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
    token, stored = token_bytes(shape, item, ranks), 0 if budget == "auto" else budget
    extra = 0
    if config.graphs:  # which have memory of their own for a pass
        rows = max_rows(shape)
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
            f"store_budget_tokens={budget} needs {gigabytes(stored * (token.kv + token.state))} beside running "
            f"canvases, and there is room for {room} tokens; everything may take {memory}. Use {room}, 'auto', or "
            "a lower max_num_seqs or max_model_len"
        )
    if rows < most:
        log.info("passes have at most %d rows, as %s are left for them", rows, gigabytes(left))
    store = room if budget == "auto" else stored
    needed = canvases * longest * token.kv + store * (token.kv + token.state)
    return Room(named, canvases * longest, store, rows, memory.room - workspace - needed)


def _share_out_cpu(model: Transformer, config: EngineConfig, canvases: int, longest: int, page: int) -> Room:
    """As `share_out`: what was asked for where it fits, and else two canvases first.

    What is left is for the store and for more canvases. A length that nobody asked for gives way, so that the store
    holds one canvas at least.
    """
    budget = DEFAULT_STORE_TOKENS if config.store_budget_tokens == "auto" else config.store_budget_tokens
    wanted = Room(longest, canvases * (longest + page), budget)
    if (there := memory()) is None:
        return wanted
    cpu = CpuMemory.beside(model, there[1], page)
    token, most = cpu.token, config.max_row_layers or wanted.running  # a row has a layer at least
    needed = wanted.running * token.kv + budget * (token.kv + token.state)
    if needed + cpu.workspace(min(most, wanted.running), longest + page) <= cpu.left:
        return wanted
    fitting = cpu.longest(longest, budget if config.max_model_len is None else 0)
    if not fitting or (fitting < longest and config.max_model_len is not None):
        raise cpu.no_room(longest, fitting)
    spare = cpu.left - cpu.pair(fitting)
    store = min(budget, max(spare // 2 // (token.kv + token.state), fitting if config.max_model_len is None else 0))
    stored = store * (token.kv + token.state)
    running = min(canvases * (fitting + page), 2 * (fitting + page) + (spare - stored) // token.kv)
    planned = running * token.kv + stored
    rows = cpu.rows(min(most, running), fitting + page, planned)
    log.warning(
        "%s of memory are left beside the weights: canvases have up to %d tokens (%d were asked for), running ones "
        "together %d of K/V (%d), and the prefix store has %d (%d); passes have at most %d rows",
        *(gigabytes(cpu.left), fitting, longest, running, wanted.running, store, budget, rows),
    )
    spare = (cpu.left - planned - cpu.workspace(rows, fitting + page)) // cpu.ranks
    return Room(fitting, running, store, rows, spare)


def device_memory(model: Transformer) -> tuple[int, int]:
    """Free and total bytes of the device of the rank that has the least."""
    sizes = free_memory(model.device)
    if not model.ranks.several:
        return sizes
    free, total = model.ranks.gather(torch.tensor(sizes, device=model.device)).amin(dim=0).tolist()
    return free, total
