"""Decoding by masked diffusion on a canvas that grows: it ends with the block that is denoised, and later ones follow.

So iLLaDA's authors decode it (announcement and files, read second-hand). A row never sees masks of the future, and a
response costs what it needs, whatever its limit is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from remask.errors import ConfigError
from remask.plan.canvas import Canvas, Template
from remask.policies.base import IdlePasses
from remask.request.sampling_params import SamplingDefaults, SamplingParams
from remask.sampling.masked import MaskedDecoder, MaskedDecoding


@dataclass(frozen=True, slots=True)
class GrowingDecoding(MaskedDecoding):
    """Masked diffusion of one block, the last of the canvas as it is. All before it is final.

    To a cache policy each block is a request of its own, whose canvas has what is decoded as fixed tokens. Blocks and
    steps are those of the response as far as it may go.

    Attributes:
        number: of the block, from 0 on.
        first_step: steps that the blocks before it have taken.
    """

    number: int = 0
    first_step: int = 0

    growing: ClassVar[bool] = True

    @property
    def length(self) -> int:
        return self.block_ranges[self.number].stop

    @property
    def longest(self) -> int:
        return len(self.prompt) + self.params.max_tokens

    @property
    def grows(self) -> bool:
        return self.number + 1 < self.blocks.count

    def grown(self, canvases: Sequence[Canvas], step: int) -> "GrowingDecoding":
        after = replace(self, number=self.number + 1, first_step=step)
        for canvas in canvases:
            canvas.grow(after.length - len(canvas), self.mask_id)
        return after

    @property
    def last(self) -> "GrowingDecoding":
        """That of the last block, if all are needed."""
        return replace(self, number=self.blocks.count - 1)

    @property
    def scheduled_steps(self) -> int | None:
        return None if self.unscheduled else self.blocks.steps[self.number]

    def canvas(self) -> Canvas:
        return Canvas.masked(self.prompt, len(self.blocks.ranges[0]), self.mask_id)

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> "GrowingDecoder":
        return GrowingDecoder(self, canvas, idle, first=self.number, step=self.first_step)


class GrowingDecoder(MaskedDecoder):
    """The decoding of one block, the last of its canvas."""

    @property
    def finished(self) -> bool:
        return self.block_index > self.first


def canvas_grows(params: SamplingParams, defaults: SamplingDefaults, template: Template | None) -> bool:
    """Whether the request, or else its model's family by `defaults`, asks for a canvas that grows.

    One with a `template` has its length, whatever the family does. Raises `ConfigError` where its request contradicts.
    """
    if template is None:
        return defaults.growing_canvas if params.blocks.growing_canvas is None else params.blocks.growing_canvas
    if params.blocks.growing_canvas:
        raise ConfigError(
            "growing_canvas: a canvas that grows has nothing behind what is decoded, and the parts of this one have "
            "their places; leave growing_canvas out, or canvas and suffix"
        )
    return False
