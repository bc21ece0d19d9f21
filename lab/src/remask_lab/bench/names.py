"""The names of the tasks that workloads are drawn from, and their usual sizes."""

from collections.abc import Mapping

from remask.checks import BUNDLED, BUNDLED_TARIFF, BUNDLED_TRANSIT, BUNDLED_UNIFORM, SMOLLM2, ModelKind

OWN_TASKS = {
    BUNDLED: "relay",
    BUNDLED_TARIFF: "tariff",
    BUNDLED_TRANSIT: "transit",
    BUNDLED_UNIFORM: "relay",
    SMOLLM2: "town",
}
"""The task that each bundled model is made for."""
TASKS = (*dict.fromkeys(OWN_TASKS.values()), "lookup", "gsm8k", "random")
PREFIXES = 4  # different shared prefixes of a workload
PREFIX_TOKENS, PROMPT_TOKENS = 230, 10  # lengths of a random shared prefix, and of the random tokens after it

METRICS = ("accuracy", "agreement")
"""The measures of a cache's quality. Agreement needs no right answers of the model."""

COMPARED_CACHES: Mapping[ModelKind, tuple[str, ...]] = {
    "masked": ("none", "reuse", "bicache"),
    "block_causal": ("none", "exact"),
    "uniform": ("none", "block-prefix", "uniform-cache"),
}
"""The policies that are compared by default, by the kind of model."""
