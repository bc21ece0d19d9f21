"""Conversations that the base writes itself: it makes up questions, or is asked given ones, and answers them.

Given ones are put as a chat puts them, behind the template's own system prompt. Those that are made up follow an empty
one: behind its own SmolLM2 writes long texts, few of which are a question of at most `QUESTION` tokens.
"""

import time
from collections.abc import Sequence
from typing import Any, Final

import torch

from training.adapt.corpus import PIECES
from training.adapt.ragged import Ragged

QUESTION: Final = 48  # tokens at most
ANSWER: Final = 176
QUESTION_TEMPERATURE: Final = 0.9  # questions shall differ; answers are greedy, so that they agree with one another


@torch.no_grad()
def write_conversations(
    model: Any, pieces: Ragged, asked: Sequence[Sequence[int]], seconds: float, batch: int, most: int
) -> Ragged:
    """Questions and answers in turn, `batch` of them side by side, until `seconds` have passed or there are `most`.

    `asked` are put first, each once, and the base makes up the others. Answers are the most probable tokens. One that
    ended keeps its end token. Pairs whose question did not end or whose answer turns in a circle are dropped. Works in
    bfloat16 on CUDA devices.
    """
    device = next(model.parameters()).device
    start, found, given = time.monotonic(), list[list[int]](), list(asked)
    while time.monotonic() - start < seconds and len(found) < 2 * most:
        now, given = given[:batch], given[batch:]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            texts = _round(model, pieces, now, batch, device)
        for question, answer in texts:
            if len(question) >= 2 and len(answer) >= 2 and not circles(answer):
                found += [question, answer]
        print(f"{len(found) // 2} conversations, {time.monotonic() - start:.1f} s", flush=True)
    return Ragged.of(found)


def circles(answer: Sequence[int]) -> bool:
    """Whether more than a third of its stretches of four tokens were there before."""
    stretches = [tuple(answer[at : at + 4]) for at in range(len(answer) - 3)]
    return len(set(stretches)) < 2 / 3 * len(stretches)


def _round(
    model: Any, pieces: Ragged, asked: Sequence[Sequence[int]], batch: int, device: torch.device
) -> list[tuple[list[int], list[int]]]:
    """All rows move in step, so nothing is padded: each is in its question, in the turn's header, or in its answer."""
    names = ("first" if asked else "empty_system", "assistant", "mask", "end")
    head, header, (mask,), (end,) = (pieces[PIECES.index(name)].tolist() for name in names)
    # The tokens that a row must take: a given question and the header. The others are -1.
    forced = torch.full((batch, QUESTION + len(header)), -1, dtype=torch.long)
    for number, question in enumerate(asked):
        told = [*question[:QUESTION], *header]
        forced[number, : len(told)] = torch.tensor(told)
    forced = forced.to(device)
    ends = torch.tensor(header, device=device)
    opened = torch.tensor([len(question[:QUESTION]) for question in asked] + [0] * (batch - len(asked)), device=device)
    # Where the header begins; -1 while the question goes on. A given question's header is known.
    begins = torch.where(opened > 0, opened, -1)
    done = torch.zeros(batch, dtype=torch.bool, device=device)
    steps = QUESTION + len(header) + ANSWER
    out = torch.full((batch, steps), end, dtype=torch.long, device=device)
    current, cache = torch.tensor([head] * batch, device=device), None
    for step in range(steps):
        passed = model(input_ids=current, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = passed.past_key_values
        logits = passed.logits[:, -1].float()
        logits[:, mask] = -torch.inf
        answering = (begins >= 0) & (step >= begins + len(header))
        token = logits.argmax(-1)
        if step < QUESTION:
            probabilities = (logits / QUESTION_TEMPERATURE).softmax(-1)
            token = torch.where(answering, token, (probabilities / torch.empty_like(logits).exponential_()).argmax(-1))
        if step >= QUESTION:  # a question that goes on for so long is given up
            done |= begins < 0
        asking = (begins < 0) & ~done
        begins = torch.where(asking & (token == header[0]), step, begins)
        at = step - begins
        inside = (begins >= 0) & (at >= 0) & (at < len(header))
        token = torch.where(inside, ends[at.clamp(0, len(header) - 1)], token)
        if step < forced.shape[1]:
            token = torch.where(forced[:, step] >= 0, forced[:, step], token)
        token = torch.where(done, end, token)
        out[:, step] = token
        done |= (begins >= 0) & (at >= len(header)) & (token == end)
        current = token[:, None]
        if step % 16 == 15 and bool(done.all()):
            break
    return _read(out.tolist(), begins.tolist(), len(header), end)


def _read(rows: list[list[int]], begins: list[int], header: int, end: int) -> list[tuple[list[int], list[int]]]:
    texts = []
    for row, begin in zip(rows, begins, strict=True):
        if begin >= 0:
            answer = row[begin + header : begin + header + ANSWER]
            if end in answer:
                answer = answer[: answer.index(end) + 1]
            texts.append((row[:begin], answer))
    return texts
