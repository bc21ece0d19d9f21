"""A step as data: what a policy is shown and what it answers, what that costs, and the ledger that replays it.

NumPy only. Whoever writes a cache policy needs the names below, and those of `remask.policies`.
"""

from remask.plan.cost import OperationCost, Widths
from remask.plan.hooks import HookCost, LayerHook, RowMeasure
from remask.plan.plan import NEVER, LastPass, Plan, PrefixHit, StepFacts, View
from remask.plan.spans import Mask, Positions, Span, Spans, TopRho, rows_of

__all__ = [
    "NEVER",
    "HookCost",
    "LastPass",
    "LayerHook",
    "Mask",
    "OperationCost",
    "Plan",
    "Positions",
    "PrefixHit",
    "RowMeasure",
    "Span",
    "Spans",
    "StepFacts",
    "TopRho",
    "View",
    "Widths",
    "rows_of",
]
