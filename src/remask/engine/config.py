"""Engine settings, checked as they are made."""

from dataclasses import dataclass
from typing import Final, Literal

from remask.checks import ATTENTIONS, AttentionName
from remask.checks.values import flag, one_of, real, whole
from remask.errors import ConfigError
from remask.store import EVICTIONS, PREFIX_MATCHES, PREFIX_SHARINGS, Eviction, PrefixMatch, PrefixSharing

AUTO: Final = "auto"  # in place of a value that is then chosen for the model and the device
DEFAULT_STORE_TOKENS: Final = 8192
DEFAULT_UTILIZATION: Final = 0.9
AUDIT_SHARE: Final = 1 / 64
AUDIT_BOUND: Final = 0.1


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine.

    Attributes:
        max_num_seqs: canvases that run at a time. A guided request takes two, and runs alone if that is too many.
        max_model_len: longest canvas (prompt and response) in tokens; None takes the model's, at most 4096.
        max_row_layers: row-layers that one step may compute; None does not limit it. A single request may exceed it.
        max_client_row_layers: row-layers of one step that the requests of one client may compute while requests of
            other clients run too; None takes those of the longest canvas. One request of each client may exceed it.
        max_refreshes: requests that may refresh in one step, so that not all refreshes fall on the same step; None does
            not limit it.
        page_size: token slots per page; None takes 16, or the next multiple of a block-causal model's block.
        store_budget_tokens: tokens that the prefix store may hold. "auto": on CUDA as many as have room beside weights,
            K/V of running canvases and a pass, else 8,192.
        gpu_memory_utilization: share of a CUDA device's memory that may be used in total; None takes 0.9. If K/V do not
            fit, the engine is not created.
        eviction: which entry leaves a full store, "fifo" (the paper) or "lru".
        prefix_sharing: which leading part of a prompt is shared on bidirectional models: "off" none; "exact" the part
            that the request says; "auto" also, where it says nothing, the part that recent prompts of its
            `cache_salt` begin with too, so that what it is answered depends on what came before.
        prefix_min: tokens of the shortest part that "auto" shares.
        prefix_match: what a request may read whose shared prefix is not stored: "exact" nothing, so it runs a pass of
            its own; "longest" the longest stored level of it, so that what it is answered depends on what came before.
        prefix_cover: share of a prefix, from 0 to 1, that a level must cover to be read in its place, also
            under "auto".
        max_steps: denoising steps that one request may ask for, those of a correction included; None takes four times
            `max_model_len`.
        max_request_row_layers: row-layers that one request may cause, as its sampling parameters say before it runs;
            None does not limit it.
        batch_invariant: compute so that the bits of an answer do not depend on what else runs. It costs time, and
            needs `prefix_match="exact"` and no `prefix_sharing="auto"`.
        attention: what computes attention: "torch", "triton" (needs a CUDA device), "numpy" (in float64, slow, to
            compare with), or "auto", which is "triton" on CUDA devices where it is installed, and else "torch".
        overlap: queue the next pass before the last one is read, if its plans repeat. Answers are the same. It gains
            on devices that compute for longer than the host launches. None: on CUDA devices on with graphs, where the
            model's layers have 100 MB of weights at least. Refused together with `batch_invariant`: a queued pass may
            compute rows that have become final meanwhile, so the shapes of products depend on other requests.
        audit: share of requests for which what a cache approximates is computed as well, in passes of their own, and
            predictions are compared; 0 audits none, None takes 1/64. A depth that is earned is audited more often until
            it is proven.
        audit_bound: nats by which predictions may move, where they move most, in the mean over requests: the bound of
            depths that are earned, and of warnings.
        graphs: repeat layers as device graphs, which saves launches. It needs a dense model on one CUDA device. None:
            on where they can be and agree with PyTorch at the start. Refused together with `batch_invariant`: rows are
            filled up to a few sizes, so the shapes of products depend on other requests.
    """

    max_num_seqs: int = 8
    max_model_len: int | None = None
    max_row_layers: int | None = None
    max_client_row_layers: int | None = None
    max_refreshes: int | None = None
    page_size: int | None = None
    store_budget_tokens: int | Literal["auto"] = DEFAULT_STORE_TOKENS
    gpu_memory_utilization: float | None = None
    eviction: Eviction = "fifo"
    prefix_sharing: PrefixSharing = "exact"
    prefix_min: int = 64
    prefix_match: PrefixMatch = "exact"
    prefix_cover: float = 0.5
    max_steps: int | None = None
    max_request_row_layers: int | None = None
    batch_invariant: bool = False
    attention: AttentionName = "auto"
    overlap: bool | None = None
    graphs: bool | None = None
    audit: float | None = None
    audit_bound: float = AUDIT_BOUND

    @property
    def audit_share(self) -> float:
        """Share of requests that are audited."""
        return AUDIT_SHARE if self.audit is None else self.audit

    @property
    def earns(self) -> bool:
        """Whether audits may earn depths: with batch invariance no answer depends on requests before it."""
        return self.audit_share > 0 and not self.batch_invariant

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "max_row_layers", "max_refreshes", "page_size"):
            whole(name, getattr(self, name), low=1, optional=name != "max_num_seqs")
        for name in ("max_client_row_layers", "max_steps", "max_request_row_layers"):
            whole(name, getattr(self, name), low=1, optional=True)
        if self.store_budget_tokens != "auto":
            whole("store_budget_tokens", self.store_budget_tokens, low=0)
        real("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, above=True, optional=True)
        one_of("eviction", self.eviction, EVICTIONS)
        one_of("prefix_sharing", self.prefix_sharing, PREFIX_SHARINGS)
        whole("prefix_min", self.prefix_min, low=1)
        one_of("prefix_match", self.prefix_match, PREFIX_MATCHES)
        real("prefix_cover", self.prefix_cover, 0, 1)
        flag("batch_invariant", self.batch_invariant)
        real("audit", self.audit, 0, 1, optional=True)
        real("audit_bound", self.audit_bound, 0, above=True)
        one_of("attention", self.attention, ATTENTIONS)
        for name, why in (
            ("overlap", "queued passes compute rows that have become final meanwhile"),
            ("graphs", "rows are filled up to a few sizes"),
        ):
            if getattr(self, name) is not None:
                flag(name, getattr(self, name))
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
