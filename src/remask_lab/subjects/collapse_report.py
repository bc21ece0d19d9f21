"""Rows of plain reuse beside BiCache, and what they show in words."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Row: TypeAlias = Mapping[str, Any]  # what `run_bench` reports of one policy
_LOSS = 0.5  # share of what no cache gives below which the reading speaks of a collapse
_SHARES = {
    "accuracy": "accuracy",
    "rules": "the share that follows the rules",
    "format": "the share in the asked format",
}
_SUFFER = {"rules": "the rules suffer", "format": "the format suffers"}


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
    told = [f"{what} {_change(before[name], after[name])}" for name, what in _SHARES.items() if name in before]
    text += f"; {', '.join(told)}: "
    if after["accuracy"] >= before["accuracy"]:
        return f"{text}no accuracy is lost."
    if after["accuracy"] >= none["accuracy_interval"][0]:
        return f"{text}a loss within the 95 % interval of no cache."
    if after["accuracy"] >= _LOSS * before["accuracy"]:
        return f"{text}a loss of {100 * (before['accuracy'] - after['accuracy']):.1f} points, beyond the 95 % interval."
    if not row["parts"]:
        return f"{text}accuracy collapses."
    worse = min(_SUFFER, key=lambda name: after[name] - before[name])
    return f"{text}accuracy collapses, and of the two parts of the system prompt {_SUFFER[worse]} most."


def _change(before: float, after: float) -> str:
    if before == after:
        return f"stays at {100 * before:.1f} %"
    return f"goes from {100 * before:.1f} % to {100 * after:.1f} %"
