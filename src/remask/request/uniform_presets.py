"""Names of samplers and settings of block-wise denoising on uniform models."""

from dataclasses import dataclass

MARGINAL = "ancestral_marginal"
"""The sampler whose reverse step is the mean of the posteriors over what the model predicts."""
ANCESTRAL = ("ancestral", MARGINAL)
"""Samplers that draw every position of a block in every step, from a reverse step of the noise process."""


@dataclass(frozen=True, slots=True)
class UniformPreset:
    """How a response is cut into blocks, and how a block is denoised; names are those of the sampling parameters."""

    steps_per_block: int
    block_length: int
    tokens_per_step: int


PRESETS = {
    # The two settings of the Uniform-Cache thesis (section 5.5). Its n is 3, and its r = 4 is the policy's default.
    "s32/b32": UniformPreset(steps_per_block=32, block_length=32, tokens_per_step=3),
    "s512/b512": UniformPreset(steps_per_block=512, block_length=512, tokens_per_step=3),
}
PRESET_FIELDS = tuple(UniformPreset.__dataclass_fields__)
"""Sampling parameters that a preset sets."""
