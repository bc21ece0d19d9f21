"""What plain reuse of a shared prefix gains and destroys, beside BiCache (BiCache figure 2, table 1)."""

from collections.abc import Mapping, Sequence
from typing import Any

from remask.evals.bench import run_bench
from remask.evals.contenders import contender
from remask.evals.workload import Workload
from remask.llm import LLM

Row = Mapping[str, Any]
_LOSS = 0.5  # share of what no cache gives below which the reading speaks of a collapse
_SHARES = {
    "accuracy": "accuracy",
    "rules": "responses that follow the rules",
    "format": "responses in the asked format",
}
_SUFFER = {"rules": "the rules suffer", "format": "the format suffers"}


def measure_collapse(
    llm: LLM, workload: Workload, bicache: Mapping[str, Any], rounds: int, progress: bool = False
) -> list[Row]:
    """`none`, `reuse` and `bicache` with these settings, side by side, as `run_bench` reports them.

    Where the workload has answers, `parts` says how many responses follow each part of the system prompt: its rules,
    and the format that it asks for. Raises `ConfigError` where a policy cannot run.
    """
    settings = {"none": {}, "reuse": {}, "bicache": bicache}
    rows = [contender(llm, name, own, workload) for name, own in settings.items()]
    results: list[Row] = run_bench(llm, workload, rows, rounds, llm.engine_config, progress).data["results"]
    return results


def shares(row: Row) -> dict[str, float]:
    """What a row says of quality, as shares: accuracy and the parts where there are answers, and agreement."""
    answered = {} if row["accuracy"] is None else {"accuracy": row["accuracy"], **row["parts"]}
    return {**answered, "agreement": row["agreement_with_none"]}


def reading(rows: Sequence[Row]) -> str:
    """What the rows show, in one paragraph."""
    none, *caches = rows
    return " ".join(_sentence(none, row) for row in caches)


def _sentence(none: Row, row: Row) -> str:
    text = f"{row['cache']} runs at {row['ratio_to_none']:.2f} times the speed of no cache"
    if row["accuracy"] is None:
        return f"{text}; {100 * row['agreement_with_none']:.1f} % of its tokens are those of no cache."
    before, after = shares(none), shares(row)
    told = [
        f"{what} goes from {100 * before[name]:.1f} % to {100 * after[name]:.1f} %" for name, what in _SHARES.items()
    ]
    text += f"; {', '.join(told)}: "
    if after["accuracy"] >= before["accuracy"]:
        return f"{text}no accuracy is lost."
    if after["accuracy"] >= none["accuracy_interval"][0]:
        return f"{text}a loss within the 95 % interval of no cache."
    if after["accuracy"] >= _LOSS * before["accuracy"]:
        return f"{text}a loss of {100 * (before['accuracy'] - after['accuracy']):.1f} points, beyond the 95 % interval."
    worse = min(_SUFFER, key=lambda name: after[name] - before[name])
    return f"{text}accuracy collapses, and of the two parts of the system prompt {_SUFFER[worse]} most."


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
