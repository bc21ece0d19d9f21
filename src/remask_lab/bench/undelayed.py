"""dKV-Cache without its delay: an ablation that shows what the delay is worth. No command serves it."""

from dataclasses import dataclass

from remask.checks.values import whole
from remask.errors import ConfigError
from remask.plan.plan import Plan, View
from remask.plan.spans import Span
from remask.policies.base import CachePolicy, RequestFacts


@dataclass(frozen=True, slots=True)
class UndelayedDecode(CachePolicy):
    """Computes the noisy rows only, and all rows at a block's first step and every `refresh_interval` steps after it.

    This is the ablation of dKV-Cache (arXiv 2505.15781, section 3 and figure 3) with M_t in place of M_(t-1). The K/V
    of a decoded token are those of its noisy position until the next refresh. `dkv-decode` computes a decoded token
    once more before it keeps the K/V.
    """

    refresh_interval: int | None = 8

    def __post_init__(self) -> None:
        whole("refresh_interval", self.refresh_interval, low=1, optional=True)

    def check(self, facts: RequestFacts) -> None:
        """Refuses rows that predict another position: the paper's ablation is of LLaDA."""
        if facts.shift:
            raise ConfigError(
                "the ablation of dkv-decode's delay is defined for models whose rows predict their own position "
                "(LLaDA), not Dream"
            )

    def plan(self, view: View) -> Plan:
        """One span over the rows that are not cached."""
        interval = self.refresh_interval
        due = view.block_step == 0 or (interval is not None and view.block_step % interval == 0)
        return Plan((Span(range(view.layers), view.everything if due else view.noisy.copy()),), view.candidates)
