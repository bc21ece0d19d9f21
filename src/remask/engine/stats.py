"""Counters of an engine."""

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made."""

    steps: int = 0
    step_seconds: float = 0.0  # within `step`
    step_cpu_seconds: float = 0.0  # CPU time of the calling thread within `step`, without helper threads
    row_layers: int = 0
    row_layers_saved: int = 0  # row-layers of canvases in passes that were not computed
    prefix_passes: int = 0
    prefix_row_layers: int = 0
    refreshes: int = 0  # passes that filled or renewed the cache of their policy
    prefix_refreshes: int = 0  # passes in which rows of a leased prefix were computed anew
    peak_memory_bytes: int = 0  # most K/V pages in use and hidden states held at the end of any step
    recoveries: int = 0  # restarts with empty memory
    queued_passes: int = 0  # passes that were queued before the one before them was read
    waited_passes: int = 0  # with `overlap`, passes that were read before the next one could be planned
    discarded_passes: int = 0  # speculative steps of requests that were not committed
