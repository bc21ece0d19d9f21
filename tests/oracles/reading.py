"""What one pass says of masks on a canvas, dense or under a leased prefix. Nothing is written."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.oracles import bicache
from tests.oracles.canvas import Canvas
from tests.oracles.dense import DenseModel


def logprobs(
    model: DenseModel,
    prompt: Sequence[int],
    answer: Sequence[int],
    masks: Sequence[int],
    prefix: int = 0,
    depth: int = 0,
) -> Tensor:
    """Log-probabilities at every place of `answer`, whose `masks` are masked, [answer, vocabulary].

    With `prefix` its K/V are those of a pass over the prefix alone in the first `depth` layers; the others compute it
    from that pass' state.
    """
    canvas = Canvas(prompt, len(answer), model.mask_id)
    given = [place for place in range(len(answer)) if place not in masks]
    canvas.tokens[[len(prompt) + place for place in given]] = torch.tensor([answer[place] for place in given]).long()
    if not prefix:
        out = model.forward(canvas.tokens)
    else:
        leased = bicache.lease(model, canvas, bicache.usable(model, canvas, prefix))
        suffix = ~leased.rows
        out = bicache.refresh_pass(model, canvas, leased, depth, suffix, model.empty_kv(canvas.length), "stored")
    return model.predictions(out.logits)[len(prompt) :].log_softmax(-1)
