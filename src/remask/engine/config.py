"""Engine settings, each declared once: its values, its default and its meaning, of which its flag is made."""

from dataclasses import dataclass
from typing import Final, Literal

from remask.checks import ATTENTIONS, AttentionName
from remask.checks.fields import check, declare, documented
from remask.checks.values import Choice, Flag, OrWord, Real, Share, Whole
from remask.errors import ConfigError
from remask.store import EVICTIONS, PREFIX_MATCHES, PREFIX_SHARINGS, Eviction, PrefixMatch, PrefixSharing

AUTO: Final = "auto"  # in place of a value that is then chosen for the model and the device
DEFAULT_STORE_TOKENS: Final = 8192
DEFAULT_UTILIZATION: Final = 0.9
AUDIT_SHARE: Final = 1 / 32
AUDIT_WORK: Final = 0.02
"""Of the row-layers of requests, what audits by the usual share may compute; those that prove a depth come on top."""
AUDIT_BOUND: Final = 0.1


@documented
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine. Raises `ConfigError` on values that are not allowed, alone or together."""

    max_num_seqs: int = declare(
        8, Whole(1), "Canvases that run at a time. A guided request takes two, and runs alone if that is too many."
    )
    max_model_len: int | None = declare(
        None, Whole(1), "Longest canvas: prompt and response, in tokens. By default the model's, 4096 at most."
    )
    max_row_layers: int | None = declare(
        None, Whole(1), "Row-layers that one step may compute; a single request may exceed it. By default any number."
    )
    max_client_row_layers: int | None = declare(
        None,
        Whole(1),
        "Row-layers of one step that the requests of one client may compute while requests of other clients run too; "
        "one request of each client may exceed it. By default those of the longest canvas.",
    )
    max_refreshes: int | None = declare(
        None,
        Whole(1),
        "Requests that may refresh in one step, so that not all refreshes fall on the same step. By default any "
        "number.",
    )
    page_size: int | None = declare(
        None, Whole(1), "Token slots of a page. By default 16, or the next multiple of a block-causal model's block."
    )
    store_budget_tokens: int | Literal["auto"] = declare(
        DEFAULT_STORE_TOKENS,
        OrWord(Whole(0), AUTO),
        "Tokens that the prefix store may hold; auto: on CUDA as many as have room beside weights, K/V of running "
        f"canvases and a pass, else {DEFAULT_STORE_TOKENS}.",
    )
    gpu_memory_utilization: float | None = declare(
        None,
        Real(0, 1, above=True),
        "Share of a CUDA device's memory that may be used in total; if K/V do not fit, the engine is not created. By "
        f"default {DEFAULT_UTILIZATION}.",
    )
    eviction: Eviction = declare(
        "fifo",
        Choice(EVICTIONS),
        "Which entry leaves a full store: the oldest, as in the paper, or the one that was read longest ago.",
    )
    prefix_sharing: PrefixSharing = declare(
        "exact",
        Choice(PREFIX_SHARINGS),
        "Which leading part of a prompt is shared on bidirectional models: off none, exact what the request says, auto "
        "also, where it says nothing, what recent prompts of its cache_salt begin with, so that what it is answered "
        "depends on what came before.",
    )
    prefix_min: int = declare(64, Whole(1), "Tokens of the shortest part that prefix_sharing auto shares.")
    prefix_match: PrefixMatch = declare(
        "exact",
        Choice(PREFIX_MATCHES),
        "What a request may read whose shared prefix is not stored: exact nothing, so it runs a pass of its own; "
        "longest the longest stored beginning, so that what it is answered depends on what came before.",
    )
    prefix_cover: float = declare(
        0.5, Real(0, 1), "Share of a prefix that its beginning must cover to be read instead, also under auto."
    )
    max_steps: int | None = declare(
        None,
        Whole(1),
        "Denoising steps that one request may ask for, those of a correction included. By default four times "
        "max_model_len.",
    )
    max_request_row_layers: int | None = declare(
        None,
        Whole(1),
        "Row-layers that one request may cause, as its sampling parameters say before it runs. By default any number.",
    )
    batch_invariant: bool = declare(
        False,
        Flag(),
        "Compute so that the bits of an answer do not depend on what else runs. It costs time, and needs prefix_match "
        "exact and no prefix_sharing auto.",
    )
    attention: AttentionName = declare(
        AUTO,
        Choice(ATTENTIONS),
        "What computes attention: torch, triton (needs a CUDA device), numpy (in float64, slow, to compare with), or "
        "auto, which is triton on CUDA devices where it is installed, and else torch.",
    )
    overlap: bool | None = declare(
        None,
        Flag(),
        "Queue the next pass before the last one is read, if its plans repeat; answers are the same. It gains on "
        "devices that compute for longer than the host launches. By default on CUDA devices with graphs, where the "
        "model's layers have 100 MB of weights at least. Not together with batch_invariant.",
    )
    graphs: bool | None = declare(
        None,
        Flag(),
        "Repeat layers as device graphs, which saves launches; of dense models on one CUDA device. By default where "
        "they can be and agree with PyTorch at the start. Not together with batch_invariant.",
    )
    audit: float | None = declare(
        None,
        Share(),
        "Share of requests for which what a cache approximates is computed as well, in passes of their own, and "
        "predictions are compared; off: none, and no depth is earned. One that is earned is audited more often until "
        "it is proven. By default 1/32, as far as that takes at most 2 % of the work.",
    )
    audit_bound: float = declare(
        AUDIT_BOUND,
        Real(0, above=True),
        "Nats by which predictions may move, where they move most, in the mean over requests: the bound of depths that "
        "are earned, and of warnings.",
    )

    @property
    def audit_share(self) -> float:
        """Share of requests that are audited."""
        return AUDIT_SHARE if self.audit is None else self.audit

    @property
    def audit_work(self) -> float | None:
        """What audits by the share may compute, as a share of the row-layers of requests; None does not limit it."""
        return AUDIT_WORK if self.audit is None else None

    @property
    def earns(self) -> bool:
        """Whether audits may earn depths: with batch invariance no answer depends on requests before it."""
        return self.audit_share > 0 and not self.batch_invariant

    def __post_init__(self) -> None:
        check(self)
        for name, why in (
            ("overlap", "queued passes compute rows that have become final meanwhile"),
            ("graphs", "rows are filled up to a few sizes"),
        ):
            if self.batch_invariant and getattr(self, name):
                raise ConfigError(
                    f"{name}=True cannot be combined with batch_invariant: {why}, so the shapes of products depend on "
                    "other requests; leave one of the two out"
                )
        for name, wrong in (("prefix_match", "longest"), ("prefix_sharing", "auto")):
            if self.batch_invariant and getattr(self, name) == wrong:
                raise ConfigError(
                    f"batch_invariant=True needs {name}='exact', got {wrong!r}: with it an answer depends on the "
                    "prefixes that earlier requests left in the store"
                )
