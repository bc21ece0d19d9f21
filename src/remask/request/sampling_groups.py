"""Groups of sampling parameters: of remasking rules, of blocks, and of uniform models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remask.checks.fields import check, declare, documented, optional, parse
from remask.checks.values import LIST, POSITIONS, Choice, Flag, ListOf, Real, Settings, Whole
from remask.denoising.rules import RULES
from remask.errors import ConfigError

# Limits for all models. The engine checks the tighter ones of its model and its operator.
COUNT = Whole(1, POSITIONS)
TOKEN = Whole(0, POSITIONS)
TEMPERATURE = Real(0, 1000)
TEMPERED = Real(1e-3, 1000)
MARGINAL = "ancestral_marginal"
"""The ancestral sampler whose reverse step averages the posteriors over the predicted clean tokens."""
GREEDY = "greedy"
"""The sampler that writes the most probable token at every position in every step."""
ANCESTRAL = ("ancestral", MARGINAL)
"""Samplers that draw every position of a block in every step, from a reverse step of the noise process."""
UNIFORM_PRESETS = {
    # The two settings of the Uniform-Cache thesis (section 5.5). Its n is 3, and its r = 4 is the policy's default.
    "s32/b32": {"steps_per_block": 32, "block_length": 32, "uniform.tokens_per_step": 3},
    "s512/b512": {"steps_per_block": 512, "block_length": 512, "uniform.tokens_per_step": 3},
}
"""Sampling parameters by path, as a preset sets them."""
PRESET_FIELDS = ("steps_per_block", "block_length", "uniform.tokens_per_step")


@documented
@dataclass(frozen=True, slots=True)
class RemaskingParams:
    """How the positions are chosen that become final in a step. `None` leaves a choice to the model family."""

    rule: str | None = declare(
        None,
        Choice(RULES),
        "The rule that chooses which noisy positions become final in a step; by default `entropy` for Dream, "
        "`low_confidence` for all others.",
        kinds=("masked", "block_causal"),
        choice="rule",
    )
    config: Mapping[str, Any] | None = declare(
        None,
        Settings("parameters of the rule", 64),
        "Parameters of a rule that has some of its own, as rules of other packages may.",
        kinds=("masked", "block_causal"),
        choice="rule",
    )
    eps: float | None = optional(
        "masked",
        Real(0, 1, above=True),
        "End of Dream's time schedule; setting it selects that schedule.",
        choice="rule",
    )
    factor: float | None = optional(
        "masked", Real(0, 1e6), "Fast-dLLM's factor rule in place of a threshold.", choice="rule"
    )
    order: Sequence[Sequence[int]] | None = optional(
        "masked",
        ListOf(
            ListOf(Whole(0, POSITIONS), "canvas positions", LIST),
            "lists of canvas positions, one per block",
            LIST,
            total_limit=LIST,
        ),
        "For remasking `order`: per block, its positions on the canvas in decoding order.",
    )
    fallback: str | None = optional(
        "block_causal",
        Choice(("confidence", "leftmost")),
        "Which positions are transferred where too few reach the threshold; by default the most confident.",
    )
    eb_threshold: float | None = optional(
        "block_causal",
        Real(0, 1e6),
        "For remasking `entropy_bounded`: bound of the summed entropies in nats; by default 0.35.",
    )
    edit_threshold: float | None = optional(
        "block_causal",
        Real(0, 1),
        "For rules that edit: tokens of the block are replaced by others that are more probable than this; by default "
        "0.9 of `joint_threshold` and 0 of others, and 1 never edits.",
        choice="rule",
    )
    max_post_steps: int | None = optional(
        "block_causal",
        Whole(0, 2**30),
        "For rules that edit: at most so many steps edit a block that has no masks left, or none that it began with; "
        "by default 16.",
        choice="rule",
    )
    max_steps_per_block: int | None = optional(
        "block_causal",
        COUNT,
        "For remasking `levenshtein`: steps of a block at most, the last of which fills all masks; by default 1000, or "
        "the block's share of the steps that a request may take.",
        choice="rule",
    )
    min_transfer: int | None = optional(
        "block_causal",
        COUNT,
        "For remasking `joint_threshold`: masks that a step fills at least; by default 1.",
        choice="rule",
    )
    penalty_lambda: float | None = optional(
        "block_causal",
        Real(0, 1e6),
        "For remasking `joint_threshold`: what the token now to the left, within the block, loses on its logit; by "
        "default 0.",
        choice="rule",
    )

    def __post_init__(self) -> None:
        check(self, "remasking.")
        if self.rule is not None or self.config is not None:
            _ = self.rule_config  # raises ConfigError on parameters that the rule does not take

    @property
    def rule_config(self) -> Any:
        """The rule's own parameters, an object of its `Remasking.config`; None if the rule has none.

        Raises `ConfigError` on parameters that the rule does not take.
        """
        config_class = None if self.rule is None else RULES.get(self.rule).config
        if config_class is None:
            if self.config is not None:
                rule = "" if self.rule is None else f", and {self.rule!r} has none"
                raise ConfigError(f"remasking.config holds parameters of a rule that has some of its own{rule}")
            return None
        item = f"parameter of remasking {self.rule!r}"
        return parse(config_class, self.config or {}, "remasking.config", item, "remasking.config.")


@documented
@dataclass(frozen=True, slots=True)
class BlockParams:
    """How blocks follow each other, and end. `None` leaves a choice to the model family."""

    growing_canvas: bool | None = optional(
        "masked",
        Flag(),
        "The canvas is the prompt, what is decoded and one block of masks; the next block is appended once this one is "
        "done, up to `max_tokens`. By default so for iLLaDA, and not for all others.",
    )
    sub_block_length: int | None = optional(
        "block_causal", COUNT, "Length of the parts of a block that are completed from left to right (Fast-dLLM v2)."
    )
    early_stop: bool | None = optional(
        "block_causal",
        Flag(),
        "After a step that writes an end token, end the response within the block if all before the first one is "
        "final; the tokens stay the same. By default on Nemotron-Labs-Diffusion alone.",
    )

    def __post_init__(self) -> None:
        check(self, "blocks.")


@documented
@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """How mode `linear_speculation` drafts."""

    draft_window: int | None = optional(
        "block_causal", COUNT, "Tokens of a block that is drafted, at first and at least; by default 8."
    )
    max_draft_window: int | None = optional(
        "block_causal",
        COUNT,
        "The most: the block doubles if all of it was written, and halves if at most half was; by default 32.",
    )
    lora: bool | None = optional(
        "block_causal",
        Flag(),
        "Drafts are computed with the adapter that lies in the model's folder for it; by default where there is one.",
    )

    def __post_init__(self) -> None:
        check(self, "speculation.")


@documented
@dataclass(frozen=True, slots=True)
class RenoisingParams:
    """How a canvas of noise is denoised by a model that writes one after the other (DiffusionGemma)."""

    entropy_bound: float | None = optional(
        "block_causal",
        Real(0, 1e6),
        "A step keeps the most certain tokens up to this sum of entropies in nats; by default 0.1.",
    )
    t_max: float | None = optional(
        "block_causal", TEMPERED, "Temperature of the first step where `temperature` is 0; by default 0.8."
    )
    t_min: float | None = optional("block_causal", TEMPERED, "What it falls towards; by default 0.4.")
    stability_threshold: int | None = optional(
        "block_causal",
        Whole(0, 2**30),
        "A canvas is done once its most probable tokens have stayed the same for so many steps; by default 1,",
    )
    confidence_threshold: float | None = optional(
        "block_causal",
        Real(0, 1e6),
        "and the mean entropy is below this; by default 0.005, and 0 never ends a canvas early.",
    )

    def __post_init__(self) -> None:
        check(self, "renoising.")


@documented
@dataclass(frozen=True, slots=True)
class UniformParams:
    """How uniform models, whose tokens may change again, are sampled. `None` leaves a choice to the model family."""

    preset: str | None = optional(
        "uniform",
        Choice(tuple(UNIFORM_PRESETS)),
        "Settings of the Uniform-Cache thesis: sets `steps_per_block`, `block_length` and, for the adaptive sampler, "
        "`tokens_per_step`.",
    )
    sampler: str | None = optional(
        "uniform",
        Choice(("adaptive", *ANCESTRAL, GREEDY)),
        "`adaptive`, GIDD's default, changes the `tokens_per_step` positions that gain most. `ancestral`, Sumi's, "
        "draws every position of the block anew, from the posterior with the predicted distribution in the clean "
        "token's place; `ancestral_marginal` from the posteriors of all clean tokens, weighed by their prediction "
        "(equation 2.4 of the Uniform-Cache thesis). `greedy`, of Sumi alone, gives every position its most probable "
        "token.",
    )
    tokens_per_step: int | None = optional(
        "uniform", COUNT, "Positions that a step of the adaptive sampler may change; by default 1."
    )
    schedule: str | None = optional(
        "uniform",
        Choice(("cosine", "linear")),
        "How noise falls over a block, or over Sumi's canvas; by default `cosine`, and `linear` of Sumi.",
    )
    min_log_snr: float | None = optional(
        "uniform", Real(-100, 100), "Log-SNR of Sumi's noisiest step; by default the checkpoint's, -9,"
    )
    max_log_snr: float | None = optional("uniform", Real(-100, 100), "and of its cleanest; by default 9.")
    canvas_length: int | None = optional(
        "uniform",
        COUNT,
        "Positions of the canvas, prompt included; by default the model's, and of Sumi 2048 or as many as there are. "
        "What stands after the response is noise that is attended to and, but on Sumi, never changed.",
    )
    anchor: bool | None = optional(
        "uniform",
        Flag(),
        "Close Sumi's answer by an end and a begin token behind its `max_tokens` places; by default so. Without them "
        "the answer goes on to the first end token of the canvas, or to its end.",
    )
    trim: bool | None = optional(
        "uniform",
        Flag(),
        "Cut Sumi's answer before its first end token; by default so. Without that it is the rest of the canvas.",
    )
    frozen: Sequence[Sequence[int]] | None = optional(
        "uniform",
        ListOf(
            ListOf(Whole(0, POSITIONS), "a canvas position and a token id", 2),
            "pairs of a canvas position and a token id",
            LIST,
            total_limit=2 * LIST,
        ),
        "Tokens that stand on Sumi's canvas from the start, in place of those of `anchor`.",
    )
    denoise_end: int | None = optional(
        "uniform", Whole(0, POSITIONS), "Positions of Sumi's canvas from this one on keep their noise."
    )
    initial_canvas: Sequence[int] | None = optional(
        "uniform", ListOf(TOKEN, "token ids", LIST), "Token ids of the canvas after the prompt; null draws them."
    )
    correction_steps: int | None = optional(
        "uniform",
        Whole(0, 2**30),
        "Once the response is complete, at most so many further steps replace tokens that the model judges unlikely "
        "(GIDD's self-correction); by default none.",
    )
    correction_temperature: float | None = optional(
        "uniform", TEMPERATURE, "Temperature of the draw of replacements; by default 0.1, and 0 is greedy."
    )
    correction_tokens: int | None = optional(
        "uniform", COUNT, "Positions that one correction step may change; by default 1."
    )
    correction_patience: int | None = optional(
        "uniform",
        Whole(0, 2**30),
        "End the correction once the share of tokens that are the most probable ones has not grown for so many steps; "
        "by default 32, and 0 never.",
    )
    revision_tokens: int | None = optional(
        "uniform",
        Whole(0, POSITIONS),
        "Tokens of completed blocks that the first step of each later block may replace; by default 0. Models without "
        "structured attention only.",
    )

    def __post_init__(self) -> None:
        check(self, "uniform.")
