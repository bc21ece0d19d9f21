"""One line about answers: tokens and forward passes, tokens a second, and the work that a cache saved."""

from collections.abc import Sequence

from remask.engine.request import Request
from remask.llm import Output
from remask.model.config import ModelConfig
from remask.request.result import Usage

_MIN_SAVED_SHARE = 0.005  # of the work; less is not reported


def summary(config: ModelConfig, answers: Sequence[tuple[Request, Output]], seconds: float) -> str:
    """Return the line about requests with their outputs, which took `seconds` together, not counting loading."""
    usage = Usage.total([output.usage for _, output in answers])
    tokens = usage.completion_tokens
    passes = usage.forwards
    parts = [f"{_count(tokens, 'token')} in {_count(passes, 'pass')}"]
    # One token or one pass is too little to measure a speed.
    parts.append(f"{seconds:.1f} s" if tokens < 2 or passes < 2 else f"{tokens / seconds:.1f} tokens/s")
    if passes and tokens > passes:
        parts.append(f"{tokens / passes:.1f} tokens a pass")
    saved = saved_share(config, answers)
    if saved is not None and saved > _MIN_SAVED_SHARE:
        method = f" by {usage.approximation}" if usage.approximation else ""
        parts.append(f"{100 * saved:.0f} % of the work saved{method}")
    return ", ".join(parts)


def saved_share(config: ModelConfig, answers: Sequence[tuple[Request, Output]]) -> float | None:
    """Return the share of row-layers that a cache saved, from 0 to 1, against the same passes over full canvases.

    Passes that compute a shared prefix count as work. Returns None if a pass without a cache would not compute one full
    canvas: if the model is not a masked one, a canvas grows, or a request is guided.
    """
    if config.kind != "masked":
        return None
    full_work = 0
    computed_work = 0
    for request, output in answers:
        usage = output.usage
        params = request.params
        grows = params.blocks.growing_canvas
        if params.cfg_scale or (config.sampling.growing_canvas if grows is None else grows):
            return None
        canvas_length = len(request.prompt_token_ids) + params.max_tokens
        full_work += usage.forwards * config.layers * canvas_length
        computed_work += usage.row_layers + usage.prefix_row_layers
    return None if not full_work or computed_work > full_work else 1 - computed_work / full_work


def _count(number: int, noun: str) -> str:
    plural = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{plural}"
