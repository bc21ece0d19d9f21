"""Decoding by masked diffusion on a canvas that grows: it ends with the block that is denoised.

It is how iLLaDA's authors decode (announcement and files, read second-hand). No row sees masks of later blocks, and the
cost of a response depends on its length, not on its limit.
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
    """Masked diffusion of one block, the last one of the canvas. All tokens before it are final.

    To a cache policy each block is a request of its own, on whose canvas the decoded tokens are fixed. `blocks` and
    their steps are those of the longest response.

    Attributes:
        number: index of the block.
        first_step: steps that the blocks before it took.
    """

    number: int = 0
    first_step: int = 0

    growing: ClassVar[bool] = True

    @property
    def length(self) -> int:
        return self.block_ranges[self.number].stop

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.params.max_tokens

    @property
    def can_grow(self) -> bool:
        return self.number + 1 < self.blocks.count

    def grow(self, canvases: Sequence[Canvas], step: int) -> "GrowingDecoding":
        decoding = replace(self, number=self.number + 1, first_step=step)
        for canvas in canvases:
            canvas.grow(decoding.length - len(canvas), self.mask_id)
        return decoding

    @property
    def last_block(self) -> "GrowingDecoding":
        """The decoding of the last block, if all are needed."""
        return replace(self, number=self.blocks.count - 1)

    @property
    def scheduled_steps(self) -> int | None:
        return None if self.has_no_schedule else self.blocks.steps[self.number]

    def canvas(self) -> Canvas:
        return Canvas.masked(self.prompt, len(self.blocks.ranges[0]), self.mask_id)

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> "GrowingDecoder":
        return GrowingDecoder(self, canvas, idle, first_block=self.number, step=self.first_step)


class GrowingDecoder(MaskedDecoder):
    """The decoding of one block, the last of its canvas."""

    @property
    def finished(self) -> bool:
        return self.block_index > self.first_block


def canvas_grows(params: SamplingParams, defaults: SamplingDefaults, template: Template | None) -> bool:
    """Whether the canvas grows, by the request or else by its model family's `defaults`.

    A canvas with a `template` never grows. Raises `ConfigError` if the request asks for both.
    """
    if template is None:
        return defaults.growing_canvas if params.blocks.growing_canvas is None else params.blocks.growing_canvas
    if params.blocks.growing_canvas:
        raise ConfigError(
            "growing_canvas: a canvas that grows has nothing behind what is decoded, and the parts of this one have "
            "their places; leave growing_canvas out, or canvas and suffix"
        )
    return False
