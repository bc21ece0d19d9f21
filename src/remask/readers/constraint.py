"""Answers of a given form: what the sampler chooses lies on a path of an automaton that can still be completed.

The device reads the best token of each class of tokens; the host finds the path and hands its tokens to the rule, which
chooses positions as ever. All of a path can be completed by the rest of it, so any choice of positions can be.
"""

from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.errors import ConfigError, FormError
from remask.machine.transfers import send
from remask.plan.canvas import Canvas, Hole, Template
from remask.readers.base import Asked, Reader, ReadPass, Start
from remask.sampling.automaton import FREE, TokenAutomaton
from remask.sampling.block_causal import BlockCausalDecoding
from remask.sampling.decoder import Decoding, Predicted
from remask.sampling.filters import gumbel
from remask.sampling.rows import DeviceRead, Measured, RowGroup
from remask.sampling.score import confidence, distributions
from remask.sampling.vocabulary import WHOLE, Vocabulary

MAX_PATH_STEPS = 2**22
"""Transitions times positions that the search of one path may go over: some 30 ms."""

FILTERED = 1e4
"""The penalty of a token outside of top-k or top-p: it is taken only if no other one completes an answer."""


class ClassTable:
    """The class of each token, int64 [V], on whichever device asks, and the number of classes."""

    def __init__(self, classes: NDArray[np.int64], count: int) -> None:
        self.count = count
        self._classes = torch.from_numpy(classes)
        self._on: dict[torch.device, Tensor] = {}

    def best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of `scores` [rows, V] in each class and the token that has it, each [rows, C].

        Of equal ones the first token. Where all of a class are -inf, the token is 0.
        """
        rows, vocab = scores.shape
        if scores.device not in self._on:
            self._on[scores.device] = send(self._classes.numpy(), scores.device)
        classes = self._on[scores.device].expand(rows, vocab)
        best = scores.new_full((rows, self.count), -torch.inf).scatter_reduce_(1, classes, scores, "amax")
        ids = torch.arange(vocab, device=scores.device).expand(rows, vocab)
        wins = (scores == best.gather(1, classes)) & (scores > -torch.inf)
        first = torch.where(wins, ids, vocab)
        tokens = torch.full((rows, self.count), vocab, device=scores.device).scatter_reduce_(1, classes, first, "amin")
        return best, torch.where(tokens == vocab, 0, tokens)


class Constraint(Reader):
    """The form of responses."""

    name = "structured_outputs"
    foreseeable = False
    writes = True

    def __init__(self, automaton: TokenAutomaton) -> None:
        self.automaton = automaton
        self.table = ClassTable(automaton.classes, automaton.labels)

    def begun(self, state: int) -> "Constraint":
        """The form of the rest of an answer whose beginning is given, and leads to `state`."""
        rest = copy(self)
        rest.automaton = self.automaton.starting_at(state)
        return rest

    @property
    def formed(self) -> bool:
        return True

    def check(self, asked: Asked, decoding: Decoding) -> None:
        """The form of the response can be kept to its end."""
        if asked.shape.kind == "uniform" or (isinstance(decoding, BlockCausalDecoding) and decoding.rule.edits):
            raise FormError(
                ": tokens of a uniform model, and under a rule that edits, may change once they are "
                "chosen; use a masked or block-causal model, and another rule"
            )
        for name in ("stop", "stop_token_ids", "ignore_eos"):
            if getattr(asked.params, name):
                raise ConfigError(
                    f"{name}: a stop within an answer would break its form; leave it out of structured outputs"
                )
        if asked.params.min_tokens:
            raise ConfigError(
                "min_tokens: the form says how many tokens an answer takes; leave it out of structured outputs"
            )
        hole = _formed_hole(asked.response)
        length, automaton = hole.stop - hole.start, self.automaton
        transitions = automaton.transitions
        max_block = MAX_PATH_STEPS // max(1, transitions)
        block = max(map(len, decoding.block_ranges))
        if block > max_block:
            raise FormError(
                f": a step goes over {transitions} transitions a position, so blocks of at most "
                f"{max_block} positions are taken, and these have {block}; lower block_length, or ask for a "
                "simpler form"
            )
        if not automaton.live_states(length)[automaton.start]:
            short = automaton.min_length(length) is None
            why = "no answer of this form has so few tokens" if short else "none can be filled up to it"
            name = "max_tokens" if asked.template is None or asked.template.fill_only else "the hole's max"
            raise ConfigError(f"{name}={length} does not suit structured_outputs: {why}; raise {name}")

    def start(self, start: Start) -> Reader | None:
        """See `Reader`; None if another reader decides what is written."""
        if any(other.writes for other in start.readers if other is not self):
            return None
        (hole,) = start.response.holes
        first = start.canvas.prompt
        return ConstrainedHole(self, start.canvas, range(first + hole.start, first + hole.stop))


class ConstrainedHole(Reader):
    """A `Constraint` of one request that runs: the positions in `scope` of its canvas have the form."""

    name = Constraint.name

    def __init__(self, constraint: Constraint, canvas: Canvas, scope: range) -> None:
        self._automaton, self._read = constraint.automaton, Classes(constraint.table)
        self._canvas, self._scope = canvas, scope
        self._block = range(0)  # positions that the pass denoises

    def on_device(self, step: ReadPass) -> DeviceRead:
        self._block = step.decoder.block
        return self._read

    def choose(self, predictions: Predicted, numbers: NDArray[np.float32]) -> None:
        """Tokens in the scope and the block become those of the best path; others stay."""
        canvas, scope, block, positions = self._canvas, self._scope, self._block, predictions.positions
        count = self._read.table.count
        scores, tokens, confidences, logprobs = numbers.reshape(4, count, -1)
        begin, stop = max(block.start, scope.start), min(block.stop, scope.stop)
        if begin >= stop:
            return
        state = self._automaton.state_after(canvas.tokens[scope.start : begin])
        fixed = np.where(canvas.noisy[begin:stop], FREE, canvas.tokens[begin:stop])
        class_scores = np.zeros((stop - begin, count), dtype=np.float32)
        inside = np.flatnonzero((positions >= begin) & (positions < stop))
        class_scores[positions[inside] - begin] = scores[:, inside].T
        path = self._automaton.best_path(state, class_scores, fixed, scope.stop - stop)
        chosen = path[positions[inside] - begin]
        predictions.tokens, predictions.confidence = predictions.tokens.copy(), predictions.confidence.copy()
        predictions.tokens[inside] = tokens[chosen, inside].astype(np.int64)
        predictions.confidence[inside] = confidences[chosen, inside]
        predictions.logprobs = np.full(len(positions), np.nan, dtype=np.float32)
        predictions.logprobs[inside] = logprobs[chosen, inside]


@dataclass(frozen=True, slots=True)
class Classes(DeviceRead):
    """Score, token, confidence and log-probability of the best token of each class, [4 classes, rows]."""

    table: ClassTable

    @property
    def width(self) -> int:
        return 4 * self.table.count

    def measure(self, logits: Tensor, rows: RowGroup, mask_id: int, vocabulary: Vocabulary) -> Measured:  # noqa: ARG002
        """A model that runs in parts takes no forms, so all columns are here."""
        measured, unfiltered, filtered = distributions(logits, rows, mask_id, WHOLE)
        noise = gumbel(filtered, rows.draws) if rows.temperature > 0 else 0.0
        scores, tokens = self.table.best(torch.where(filtered > -torch.inf, filtered, unfiltered - FILTERED) + noise)
        if rows.measure is None:
            confidences = measured.gather(1, tokens).exp()
        else:  # which is of the row as a whole
            confidences = confidence(measured, tokens[:, 0], rows, WHOLE)[:, None].expand_as(scores)
        logprobs = logits.log_softmax(dim=-1).gather(1, tokens)
        numbers = torch.cat([part.T.float() for part in (scores, tokens, confidences, logprobs)])
        return lambda tokens: numbers  # noqa: ARG005


def _formed_hole(template: Template) -> Hole:
    """The hole whose text has a form. Raises `ConfigError` where there are several, or its length is fixed."""
    if len(template.holes) > 1:
        raise FormError(
            f": a form is that of one hole, and the canvas has {len(template.holes)}; leave it out, "
            "or fix the other parts"
        )
    (hole,) = template.holes
    if hole.min_length:
        raise FormError(
            f": the form says how many tokens the hole takes, and the canvas asks for {hole.min_length} "
            f'at least; send {{"mask": {{"max": {hole.stop - hole.start}}}}}'
        )
    return hole
