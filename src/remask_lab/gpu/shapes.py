"""The workloads that are timed: LLaDA-8B's, and smaller ones of the same form for less memory and for rehearsals."""

from dataclasses import dataclass, replace

import torch

from remask.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class Shape:
    """A preset with random weights, and requests for it.

    Attributes:
        name: of the shape.
        preset: the model's shape.
        dtype: of weights, activations and K/V.
        canvas: tokens of a request, its response included.
        prefix: of the prompt's tokens, those that all requests share.
        depth: of `bicache`.
        response: tokens that are denoised, in blocks of `block`.
        batches: numbers of requests that run at a time.
        memory: bytes that a GPU must have free for the largest of them.
    """

    name: str
    preset: str
    dtype: str
    canvas: int
    prefix: int
    depth: int
    response: int
    block: int
    batches: tuple[int, ...]
    memory: int

    @property
    def suffix(self) -> int:
        """Tokens of the prompt that a request does not share."""
        return self.canvas - self.response - self.prefix


# The shared prefix is 0.9 of the prompt, and the depth that of LLaDA-8B-Instruct's shipped table at this ratio.
_PAPER = Shape("llada-8b", "llada-8b", "bfloat16", 1280, 922, 18, 256, 32, (1, 8, 32), 60 << 30)
SHAPES = (
    _PAPER,
    replace(_PAPER, name="llada-8b-short", batches=(1, 4), memory=24 << 30),
    replace(_PAPER, name="llada-100m", preset="llada-100m", depth=6, memory=4 << 30),
    Shape("tiny", "llada-tiny", "float32", 72, 36, 1, 32, 8, (1, 2), 0),
)


def find_shape(name: str, device: torch.device) -> Shape:
    """The shape of that name. "auto" is the first one for which a GPU has the memory, and "tiny" on a CPU.

    Raises `UnknownNameError`.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    for each in SHAPES:
        if each.name == name or (name == "auto" and each.memory <= free):
            return each
    raise UnknownNameError("shape", name, ["auto", *(each.name for each in SHAPES)])
