"""Answers of a prescribed form: the tokens of a step lie on a path through an automaton that can still be completed.

The device reads the best token of each class of tokens. The host finds the best path and gives its tokens to the
remasking rule, which chooses positions as without a form: the rest of the path completes any choice of positions.
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
from remask.readers.base import Reader, ReadPass, RequestView, Start
from remask.sampling.automaton import FREE, TokenAutomaton
from remask.sampling.block_causal import BlockCausalDecoding
from remask.sampling.decoder import Decoding, Predictions
from remask.sampling.filters import gumbel
from remask.sampling.rows import DeviceRead, NumberFunction, RowGroup
from remask.sampling.score import confidence, distributions
from remask.sampling.vocabulary import WHOLE, Vocabulary

MAX_PATH_STEPS = 2**22
"""Most transitions times positions that the search for one path goes over, which takes some 30 ms."""

FILTERED_PENALTY = 1e4
"""Lowers the score of a token outside of top-k or top-p: it is taken only if no other one completes an answer."""


class ClassTable:
    """The class of each token, `classes` int64 [V], and the `count` of classes. Copied once to each device."""

    def __init__(self, classes: NDArray[np.int64], count: int) -> None:
        self.count = count
        self._classes = torch.from_numpy(classes)
        self._copies: dict[torch.device, Tensor] = {}

    def best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of `scores` [rows, V] in each class, and the first token with that score; [rows, classes] each.

        The token is 0 if all scores of a class are -inf.
        """
        rows, vocab = scores.shape
        if scores.device not in self._copies:
            self._copies[scores.device] = send(self._classes.numpy(), scores.device)
        classes = self._copies[scores.device].expand(rows, vocab)
        best = scores.new_full((rows, self.count), -torch.inf).scatter_reduce_(1, classes, scores, "amax")
        ids = torch.arange(vocab, device=scores.device).expand(rows, vocab)
        is_best = (scores == best.gather(1, classes)) & (scores > -torch.inf)
        best_ids = torch.where(is_best, ids, vocab)  # `vocab` stands for no token
        tokens = torch.full((rows, self.count), vocab, device=scores.device)
        tokens.scatter_reduce_(1, classes, best_ids, "amin")
        return best, torch.where(tokens == vocab, 0, tokens)


class Constraint(Reader):
    """Gives responses the form of an automaton over tokens."""

    name = "structured_outputs"
    foreseeable = False
    writes = True

    def __init__(self, automaton: TokenAutomaton) -> None:
        self.automaton = automaton
        self.table = ClassTable(automaton.classes, automaton.class_count)

    def continued_from(self, state: int) -> "Constraint":
        """The constraint for the rest of an answer whose beginning has led the automaton to `state`."""
        constraint = copy(self)
        constraint.automaton = self.automaton.starting_at(state)
        return constraint

    @property
    def has_form(self) -> bool:
        return True

    def check(self, request: RequestView, decoding: Decoding) -> None:
        """Raise `ConfigError` if the model or the parameters could break the form, or no answer fits into the hole."""
        if request.shape.kind == "uniform" or (isinstance(decoding, BlockCausalDecoding) and decoding.rule.edits):
            raise FormError(
                ": tokens of a uniform model, and under a rule that edits, may change once they are "
                "chosen; use a masked or block-causal model, and another rule"
            )
        for name in ("stop", "stop_token_ids", "ignore_eos"):
            if getattr(request.params, name):
                raise ConfigError(
                    f"{name}: a stop within an answer would break its form; leave it out of structured outputs"
                )
        if request.params.min_tokens:
            raise ConfigError(
                "min_tokens: the form says how many tokens an answer takes; leave it out of structured outputs"
            )
        hole = _only_hole(request.response)
        length = hole.stop - hole.start
        transition_count = self.automaton.transition_count
        max_block_length = MAX_PATH_STEPS // max(1, transition_count)
        block_length = max(map(len, decoding.block_ranges))
        if block_length > max_block_length:
            raise FormError(
                f": a step goes over {transition_count} transitions a position, so blocks of at most "
                f"{max_block_length} positions are taken, and these have {block_length}; lower block_length, or ask "
                "for a simpler form"
            )
        if not self.automaton.live_states(length)[self.automaton.start]:
            is_too_short = self.automaton.min_length(length) is None
            why = "no answer of this form has so few tokens" if is_too_short else "none can be filled up to it"
            name = "max_tokens" if request.template is None or request.template.fill_only else "the hole's max"
            raise FormError(f": {name}={length} does not suit it: {why}; raise {name}")

    def start(self, start: Start) -> Reader | None:
        """See `Reader`; None if another reader decides what is written."""
        if any(other.writes for other in start.readers if other is not self):
            return None
        (hole,) = start.response.holes
        first = start.canvas.prompt
        return ConstrainedHole(self, start.canvas, range(first + hole.start, first + hole.stop))


class ConstrainedHole(Reader):
    """A `Constraint` with the state of one request: the positions in `scope` of its `canvas` have the form."""

    name = Constraint.name

    def __init__(self, constraint: Constraint, canvas: Canvas, scope: range) -> None:
        self._automaton = constraint.automaton
        self._read = BestOfClasses(constraint.table)
        self._canvas = canvas
        self._scope = scope
        self._block = range(0)  # positions that the pass denoises

    def on_device(self, read_pass: ReadPass) -> DeviceRead:
        self._block = read_pass.decoder.block
        return self._read

    def choose(self, predictions: Predictions, numbers: NDArray[np.float32]) -> None:
        """See `Reader`. Predictions in the scope and the block become those of the best path; others stay."""
        scope = self._scope
        positions = predictions.positions
        scores, tokens, confidences, logprobs = numbers.reshape(4, self._read.table.count, -1)
        begin, stop = max(self._block.start, scope.start), min(self._block.stop, scope.stop)
        if begin >= stop:
            return
        state = self._automaton.state_after(self._canvas.tokens[scope.start : begin])
        fixed = np.where(self._canvas.noisy[begin:stop], FREE, self._canvas.tokens[begin:stop])
        class_scores = np.zeros((stop - begin, len(scores)), dtype=np.float32)
        inside = np.flatnonzero((positions >= begin) & (positions < stop))
        class_scores[positions[inside] - begin] = scores[:, inside].T
        path = self._automaton.best_path(state, class_scores, fixed, scope.stop - stop)
        classes = path[positions[inside] - begin]
        predictions.tokens = predictions.tokens.copy()
        predictions.confidence = predictions.confidence.copy()
        predictions.tokens[inside] = tokens[classes, inside].astype(np.int64)
        predictions.confidence[inside] = confidences[classes, inside]
        predictions.logprobs = np.full(len(positions), np.nan, dtype=np.float32)
        predictions.logprobs[inside] = logprobs[classes, inside]


@dataclass(frozen=True, slots=True)
class BestOfClasses(DeviceRead):
    """Score, token, confidence and log-probability of the best token of each class, [4 * classes, rows]."""

    table: ClassTable

    @property
    def width(self) -> int:
        return 4 * self.table.count

    def measure(self, logits: Tensor, rows: RowGroup, mask_id: int, vocabulary: Vocabulary) -> NumberFunction:  # noqa: ARG002
        """See `DeviceRead`. All columns are on this rank, as forms are refused on models in several processes."""
        measured, unfiltered, filtered = distributions(logits, rows, mask_id, WHOLE)
        noise = gumbel(filtered, rows.draws) if rows.temperature > 0 else 0.0
        penalized = torch.where(filtered > -torch.inf, filtered, unfiltered - FILTERED_PENALTY)
        scores, tokens = self.table.best(penalized + noise)
        if rows.row_measure is None:
            confidences = measured.gather(1, tokens).exp()
        else:  # a row measure is one number a row, so all tokens of the row have the same confidence
            confidences = confidence(measured, tokens[:, 0], rows, WHOLE)[:, None].expand_as(scores)
        logprobs = logits.log_softmax(dim=-1).gather(1, tokens)
        numbers = torch.cat([values.T.float() for values in (scores, tokens, confidences, logprobs)])
        return lambda tokens: numbers  # noqa: ARG005


def _only_hole(template: Template) -> Hole:
    """The single hole of `template`. Raises `FormError` if there are several, or if it has a minimum length."""
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
