"""What answers have taken, in one line for people: tokens and passes, tokens a second, and what a cache has saved."""

from collections.abc import Sequence

from remask.engine.request import Request
from remask.llm import Output
from remask.model.config import ModelConfig
from remask.request.result import Usage

_LEAST = 0.005  # share of the work from which on it is told that it was saved


def summary(config: ModelConfig, answered: Sequence[tuple[Request, Output]], seconds: float) -> str:
    """The line of requests with their outputs, which took so many `seconds` together, loading left out."""
    usage = Usage.total([output.usage for _, output in answered])
    tokens, passes = usage.completion_tokens, usage.forwards
    parts = [f"{_count(tokens, 'token')} in {_count(passes, 'pass')}"]
    # A speed of one step says how long a pass takes, and not how fast a model writes.
    parts.append(f"{seconds:.1f} s" if tokens < 2 or passes < 2 else f"{tokens / seconds:.1f} tokens/s")
    if passes and tokens > passes:
        parts.append(f"{tokens / passes:.1f} tokens a pass")
    saved = saved_share(config, answered)
    if saved is not None and saved > _LEAST:
        named = f" by {usage.approximation}" if usage.approximation else ""
        parts.append(f"{100 * saved:.0f} % of the work saved{named}")
    return ", ".join(parts)


def saved_share(config: ModelConfig, answered: Sequence[tuple[Request, Output]]) -> float | None:
    """Which share of the row-layers that the same passes over whole canvases compute was not computed.

    Prefixes that were computed for a request count as its work. None where a pass without a cache is no pass over a
    whole canvas: on models that are not masked, and where canvases grow or have two of a kind.
    """
    if config.kind != "masked":
        return None
    whole = done = 0
    for request, output in answered:
        own, params = output.usage, request.params
        grows = params.blocks.growing_canvas
        if params.cfg_scale or (config.sampling.growing_canvas if grows is None else grows):
            return None
        canvas = len(request.prompt_token_ids) + params.max_tokens
        whole += own.forwards * config.layers * canvas
        done += own.row_layers + own.prefix_row_layers
    return None if not whole or done > whole else 1 - done / whole


def _count(number: int, what: str) -> str:
    plural = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number} {what}{plural}"
