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
from remask.machine.cpu import memory as cpu_memory
from remask.machine.device import trim_cuda_memory
from remask.model.graphs import graph_bytes
from remask.model.graphs import max_rows as max_graph_rows
from remask.model.transformer import Transformer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """How the memory of an engine is divided."""

    max_canvas: int  # tokens of the longest canvas
    running_tokens: int  # tokens of K/V for running canvases, in whole pages
    store_tokens: int  # tokens that the prefix store may hold
    max_rows: int | None = None  # largest number of rows of a pass in any layer; None if memory does not limit it
    spare_bytes: int | None = None  # bytes that are not planned for; None if unknown


def divide_memory(model: Transformer, config: EngineConfig, canvas_count: int, max_canvas: int, page_size: int) -> Room:
    """Divide the memory of `model`'s device among `canvas_count` canvases of `max_canvas` tokens, and the store.

    A canvas may take a page more than its length, as a lease splits it in two. Raises `ConfigError` if they do not fit.
    On a CPU canvases may become fewer or shorter instead, so that requests wait for pages.
    """
    budget, device = config.store_budget_tokens, model.device
    if device.type != "cuda":
        if config.gpu_memory_utilization is not None:
            raise ConfigError(
                f"gpu_memory_utilization={config.gpu_memory_utilization:g} is for CUDA devices, and the model is on "
                f"{device}: leave it out, as K/V take memory there page by page"
            )
        return _divide_cpu(model, config, canvas_count, max_canvas, page_size)
    total, free = model.ranks.run_on_all(smallest_memory, model)
    memory = DeviceMemory(total=total, free=free, share=config.gpu_memory_utilization or DEFAULT_UTILIZATION)
    ranks, model_config, itemsize = model.ranks.shard.size, model.config, model.dtype.itemsize
    token = token_bytes(model_config, itemsize, ranks)
    stored_bytes = token.kv + token.state  # of a token in the store
    min_store = 0 if budget == "auto" else budget
    slots = max_canvas + page_size
    running = canvas_count * slots
    graph_workspace = _graph_workspace(model, slots) if config.graphs else 0
    pass_room = memory.room - graph_workspace - running * token.kv - min_store * stored_bytes
    max_rows = running
    if config.max_row_layers is not None:  # a row is computed in one layer at least
        max_rows = min(max_rows, config.max_row_layers)

    def pass_workspace(row_count: int) -> int:
        return workspace_bytes(model_config, row_count, slots, itemsize, ranks, model.attention)

    rows = pass_rows(max_rows, slots, pass_room, pass_workspace)
    workspace = graph_workspace + pass_workspace(rows)
    max_store = store_tokens(memory, token, workspace, canvas_count, max_canvas, page_size)
    if min_store > max_store:
        raise ConfigError(
            f"store_budget_tokens={budget} needs {gigabytes(min_store * stored_bytes)} beside running canvases, and "
            f"there is room for {max_store} tokens; everything may take {memory}. Use {max_store}, 'auto', or a lower "
            "max_num_seqs or max_model_len"
        )
    if rows < max_rows:
        log.info("passes have at most %d rows, as %s are left for them", rows, gigabytes(pass_room))
    store = max_store if budget == "auto" else min_store
    planned = running * token.kv + store * stored_bytes
    spare = memory.room - workspace - planned
    return Room(max_canvas, running_tokens=running, store_tokens=store, max_rows=rows, spare_bytes=spare)


def _graph_workspace(model: Transformer, max_canvas: int) -> int:
    """Bytes that graphs take for passes, which have memory of their own there, on each rank."""
    model_config, itemsize, rows = model.config, model.dtype.itemsize, max_graph_rows(model.config)
    workspace = workspace_bytes(model_config, rows, max_canvas, itemsize, model.ranks.shard.size, model.attention)
    padded_lists = attention_bytes(model_config, rows, max_canvas, itemsize, model.attention, pad=True)
    return workspace + padded_lists + graph_bytes(model, model.dtype, rows)


def _divide_cpu(model: Transformer, config: EngineConfig, canvas_count: int, max_canvas: int, page_size: int) -> Room:
    """Divide the memory of a CPU as configured if that fits. Otherwise two canvases get their memory first.

    What remains is for the store and for more canvases. If the configuration names no length, canvases become shorter,
    so that the store holds at least one of them. Raises `ConfigError` if two canvases do not fit.
    """
    budget = DEFAULT_STORE_TOKENS if config.store_budget_tokens == "auto" else config.store_budget_tokens
    requested = Room(max_canvas, canvas_count * (max_canvas + page_size), budget)
    sizes = cpu_memory()
    if sizes is None:
        return requested
    _, free = sizes
    cpu = CpuMemory.beside_model(model, free, page_size)
    token = cpu.token
    stored_bytes = token.kv + token.state  # of a token in the store
    max_rows = config.max_row_layers or requested.running_tokens  # a row is computed in one layer at least
    requested_bytes = requested.running_tokens * token.kv + budget * stored_bytes
    requested_bytes += cpu.workspace(min(max_rows, requested.running_tokens), max_canvas + page_size)
    if requested_bytes <= cpu.available:
        return requested
    has_length = config.max_model_len is not None
    fitting_length = cpu.max_canvas(max_canvas, 0 if has_length else budget)
    if not fitting_length or (fitting_length < max_canvas and has_length):
        raise cpu.shortage_error(max_canvas, fitting_length)
    slots = fitting_length + page_size
    remaining_bytes = cpu.available - cpu.pair_bytes(fitting_length)
    store = min(budget, max(remaining_bytes // 2 // stored_bytes, 0 if has_length else fitting_length))
    running = min(canvas_count * slots, 2 * slots + (remaining_bytes - store * stored_bytes) // token.kv)
    planned = running * token.kv + store * stored_bytes
    rows = pass_rows(min(max_rows, running), slots, cpu.available - planned, lambda rows: cpu.workspace(rows, slots))
    log.warning(
        "%s of memory are left beside the weights: canvases have up to %d tokens (%d were asked for), running ones "
        "together %d of K/V (%d), and the prefix store has %d (%d); passes have at most %d rows",
        *(gigabytes(cpu.available), fitting_length, max_canvas, running, requested.running_tokens, store, budget, rows),
    )
    spare = (cpu.available - planned - cpu.workspace(rows, slots)) // cpu.ranks
    return Room(fitting_length, running_tokens=running, store_tokens=store, max_rows=rows, spare_bytes=spare)


def smallest_memory(model: Transformer) -> tuple[int, int]:
    """The least total and the least free bytes of any rank's CUDA device, after garbage collection; on every rank."""
    sizes = trim_cuda_memory(model.device)
    if not model.ranks.several:
        return sizes
    total, free = model.ranks.gather(torch.tensor(sizes, device=model.device)).amin(dim=0).tolist()
    return total, free
