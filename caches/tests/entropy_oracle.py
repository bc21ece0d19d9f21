"""EntropyCache on a dense model (methods' description; arXiv 2603.18489), with the choices of `docs/lab/methods.md`."""

import torch

from tests.oracles.canvas import Canvas
from tests.oracles.dense import DenseModel
from tests.oracles.sampling import Sampler


def entropy_cache(
    model: DenseModel, canvas: Canvas, sampler: Sampler, threshold: float, recent: int, whole: bool
) -> None:
    """A pass is full at first and after a step that decoded a token of more entropy than `threshold`.

    Else it computes masks (`whole`: of the response; else of the sampler's block) and the `recent` tokens decoded last.
    """
    cached, uncertain = None, True
    decoded: list[list[int]] = []  # positions by step
    while not sampler.done:
        if uncertain or cached is None:
            out = model.forward(canvas.tokens)
        else:
            wanted = canvas.noisy if whole else canvas.candidates & _block(canvas, sampler)
            masks = wanted.nonzero()[:, 0]
            latest = [place for step in reversed(decoded) for place in step][:recent]
            rows = torch.zeros_like(canvas.noisy)
            rows[masks] = True
            rows[masks - int(model.dream)] = True
            rows[latest] = True
            out = model.forward(canvas.tokens, rows, cached)
        cached = out.kv
        canvas.ran(out.rows)
        before, logits = canvas.noisy.clone(), model.predictions(out.logits)
        sampler.commit(logits)
        now = (before & ~canvas.noisy).nonzero()[:, 0]
        if len(now):
            logs = logits[now].log_softmax(-1)
            entropies = -(logs.exp() * logs).sum(-1)
            uncertain = bool((entropies > threshold).any())
            canvas.decided(float((entropies - threshold).abs().min()))
            decoded.append(now.tolist())
        else:
            uncertain = False


def _block(canvas: Canvas, sampler: Sampler) -> torch.Tensor:
    start, stop = getattr(sampler, "start", canvas.prompt_length), getattr(sampler, "stop", canvas.length)
    return canvas.span(start, stop)
