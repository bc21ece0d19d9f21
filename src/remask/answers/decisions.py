"""Plans the canvases that are read for decisions, and makes decisions of what was read.

The labels of a question are put into the answer one after another, and the whole is tokenized: what differs are the
tokens that a pass reads. The question is the last turn of the conversation that it is about, rendered by the chat
template.

Labels of as many tokens each (few) are read where they stand: what follows them is seen, and a label's probability is
that of its tokens from left to right, with masks for those still to come. Labels of different lengths leave it open
where the answer ends: masks stand for the longest of them and for what follows it, and a label's probability is that
of its beginning, from left to right, up to the token that no other label has there. What follows a label, such as the
end of the turn, counts as its last token.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, TypeAlias

from remask.answers.decided import Decision
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.policies.base import CachePolicy
from remask.policies.bicache import BiCache
from remask.readers.decision import Reading
from remask.request.questions import ANSWER, MASK, MAX_LABEL_TOKENS, Decisions, Question
from remask.request.sampling_params import SamplingParams
from remask.request.transcripts import Transcript, without_tools
from remask.text.tokenizer import Tokenizer

CONTENT_FREE = Transcript.of_text("N/A")
"""The state of a pass that calibrates (contextual calibration, arXiv 2102.09690)."""

Reads = Mapping[int, tuple[float, ...]]
"""What `Result.reads` holds of a `Reading`."""


class _LabelsError(ConfigError):
    """The labels of a question cannot be told apart by their tokens. Other labels may be."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One canvas that is read.

    Attributes:
        prompt_end: token ids between the state and the answer.
        content_free: the state is `CONTENT_FREE`.
    """

    prompt_end: tuple[int, ...]
    reading: Reading
    content_free: bool = False


LogprobIndex: TypeAlias = tuple[int, int, int]
"""Address of a log-probability: the number of an ask, a position of its reading, and one of the tokens read there."""


@dataclass(frozen=True, slots=True)
class QuestionPlan:
    """A question with its labels, and the log-probabilities whose sum is that of each label."""

    question: Question
    labels: tuple[str, ...]
    summands: tuple[tuple[LogprobIndex, ...], ...]


@dataclass(frozen=True, slots=True)
class DecisionPlan:
    """What is read for some decisions.

    Attributes:
        shared: token ids of the state, with which all canvases begin.
        content_free: token ids of the content-free state, with which the canvases for calibration begin.
        shareable_length: how many of `shared` other requests may share.
        asks: the canvases. With calibration the second half repeats the first one over the content-free state.
    """

    shared: tuple[int, ...]
    content_free: tuple[int, ...]
    shareable_length: int
    asks: tuple[Ask, ...]
    questions: Mapping[str, QuestionPlan]
    calibrated: bool

    @classmethod
    def of(
        cls, decisions: Decisions, tokenizer: Tokenizer, mask_id: int, max_canvases: int | None = None
    ) -> "DecisionPlan":
        """The plan of some decisions.

        Raises `ConfigError` if labels cannot be told apart, and if more than `max_canvases` are needed.
        """
        layout = _Layout.of(decisions, decisions.transcript, tokenizer)
        canvas_factor = 2 if decisions.calibrate else 1
        builder = _Builder(layout, mask_id, max_canvases, canvas_factor)
        builder.add_all(decisions)
        asks = builder.asks
        base_layout = layout
        if decisions.calibrate:
            base_layout = _Layout.of(decisions, CONTENT_FREE, tokenizer)
            base_builder = builder
            # Without a text that is tokenized with both the state and the question, the same asks serve.
            if layout.frame != base_layout.frame or layout.head or base_layout.head:
                base_builder = _Builder(base_layout, mask_id, max_canvases, canvas_factor)
                base_builder.add_all(decisions)
            if base_builder.questions != builder.questions:
                raise ConfigError("calibrate: without the state the labels are other tokens; leave calibrate out")
            asks = [*asks, *(replace(ask, content_free=True) for ask in base_builder.asks)]
        return cls(
            shared=tuple(layout.shared),
            content_free=tuple(base_layout.shared),
            shareable_length=layout.count_shareable(decisions),
            asks=tuple(asks),
            questions=builder.questions,
            calibrated=decisions.calibrate,
        )

    def request(self, number: int, name: str, *, policy: CachePolicy, **terms: Any) -> Request:
        """Return the request with the id `name` for the ask with this `number`; `terms` are further fields of it.

        The request does not use depths that audits earn: probabilities would depend on what else runs.
        """
        ask = self.asks[number]
        state = self.content_free if ask.content_free else self.shared
        return Request(
            id=name,
            prompt_token_ids=[*state, *ask.prompt_end],
            params=SamplingParams(max_tokens=len(ask.reading.token_ids)),
            prefix_length=len(state) if ask.content_free else self.shareable_length,
            policy=policy.at_start_depth if isinstance(policy, BiCache) else policy,
            readers=(ask.reading,),
            **terms,
        )

    def answers(self, reads: Sequence[Reads]) -> dict[str, Decision]:
        """Return the decisions by the ids of their questions, from the log-probabilities that each ask has read."""

        def logprobs(plan: QuestionPlan, offset: int) -> list[float]:
            """The log-probability of each label, in the asks from `offset` on."""
            return [sum(reads[offset + ask][place][token] for ask, place, token in sums) for sums in plan.summands]

        decisions = {}
        for name, plan in self.questions.items():
            base = logprobs(plan, len(self.asks) // 2) if self.calibrated else None
            decisions[name] = Decision.of(plan.question, logprobs(plan, 0), plan.labels, base)
        return decisions


@dataclass(frozen=True, slots=True)
class _Layout:
    """The tokens and texts of a conversation about a state, around a question and its answer.

    Texts are tokenized separately if a special token separates them, and if that gives the same tokens for a probe as
    tokenizing the whole.
    """

    shared: list[int]  # token ids of the state
    frame: tuple[str, str, str]  # texts before the question, between question and answer, behind the answer
    tokenizer: Tokenizer
    head: str = ""  # text of the state, if it is tokenized with the question
    opening_length: int = 0  # characters behind the question that are tokenized with it

    @classmethod
    def of(cls, decisions: Decisions, state: Transcript, tokenizer: Tokenizer) -> "_Layout":
        """The layout for a state. Raises `ConfigError` if the chat template changes the question or the answer."""
        conversation = _template_turns(state.messages, tokenizer)
        head = _render_opening(conversation, tokenizer)
        beginning, middle, last = _render_around(conversation, head, tokenizer)
        if not beginning.startswith(head):
            head = ""
        frame = beginning[len(head) :], middle, last if decisions.end_turn else ""
        unsplit = cls([], frame, tokenizer, head)
        (whole_tokens,) = unsplit.tokens("question", ["answer"])
        # A fixed text follows the state, so that the question does not change its last token.
        shared = tokenizer.encode_quoted(head) if head and frame[0] else []
        special_texts = [tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.special_ids]
        ends = [middle.rindex(text) + len(text) for text in special_texts if text and text in middle]
        for opening_length in (max(ends, default=0), 0):
            layout = cls(shared, frame, tokenizer, "" if shared else head, opening_length)
            if shared + layout.tokens("question", ["answer"])[0] == whole_tokens:
                return layout
        return unsplit

    def count_shareable(self, decisions: Decisions) -> int:
        """How many of the shared tokens other requests may share."""
        messages = decisions.shared_messages
        if not messages:
            return 0
        if messages is decisions.transcript.messages:  # all of them, so that they need not be tokenized again
            return len(self.shared)
        opening = _render_opening(_template_turns(messages, self.tokenizer), self.tokenizer)
        return _common_prefix_length(self.shared, self.tokenizer.encode_quoted(opening))

    def tokens(self, question: str, answers: Sequence[str]) -> list[list[int]]:
        """The token ids behind the shared ones, for each answer."""
        encode = self.tokenizer.encode_quoted
        before_question, middle, last = self.frame
        beginning = f"{self.head}{before_question}{question}{middle[: self.opening_length]}"
        ending = middle[self.opening_length :]
        if not self.opening_length:
            return [encode(f"{beginning}{ending}{answer}{last}") for answer in answers]
        tokens = encode(beginning)
        return [tokens + encode(f"{ending}{answer}{last}") for answer in answers]

    def mask_texts(self, mask_id: int) -> tuple[str, str]:
        """The texts of the mask token and of another special token. Raises `ConfigError` if there are none."""
        for other_id in sorted(self.tokenizer.special_ids - {mask_id}):
            texts = [self.tokenizer.decode([token], skip_special_tokens=False) for token in (mask_id, other_id)]
            if [self.tokenizer.encode(text, add_special_tokens=False) for text in texts] == [[mask_id], [other_id]]:
                return texts[0], texts[1]
        raise ConfigError(f"template: the tokenizer has no text for the mask token, so {MASK} cannot stand in it")


class _Builder:
    """Collects the asks of questions. Each counts as `canvas_factor` canvases, of which there may be `max_canvases`."""

    def __init__(self, layout: _Layout, mask_id: int, max_canvases: int | None, canvas_factor: int) -> None:
        self.layout = layout
        self.mask_id = mask_id
        self._max_canvases = max_canvases
        self._canvas_factor = canvas_factor
        self.asks: list[Ask] = []
        self.questions: dict[str, QuestionPlan] = {}
        self._codes: list[str] | None = None  # labels for questions of many alternatives, the shortest first

    def add_all(self, decisions: Decisions) -> None:
        """Plan all questions. Raises `ConfigError` if labels cannot be told apart."""
        for name, question in decisions.readable_questions.items():
            self.add(name, question, together=decisions.together)
        if decisions.together and self.questions:
            self.add_joint_canvas()

    def add(self, name: str, question: Question, *, together: bool) -> None:
        """Plan one question on canvases of its own. If `together`, only choose its labels, of one token each.

        Raises `ConfigError` if its labels cannot be told apart.
        """
        candidates: list[tuple[tuple[str, ...], _LabelTokens]] = []
        problem = ""
        max_lengths = (1,) if together else (MAX_LABEL_TOKENS, None)
        for group, max_length in product(question.labellings, max_lengths):
            for pool in group:
                labels = self._shortest_labels(question, pool)
                try:
                    tokens = self._label_tokens(question.prompt(labels), question.template, labels, max_length)
                    candidates.append((labels, tokens))
                except _LabelsError as error:
                    # The last length asks the least of labels, so that its error is the reason.
                    problem = problem or (str(error) if max_length == max_lengths[-1] else "")
                if candidates and candidates[-1][1].canvas_count == 1:
                    break
            if candidates:
                break
        if not candidates:
            raise ConfigError(f"questions.{name[:64]}: {problem}; send other labels")
        labels, best = min(candidates, key=lambda candidate: candidate[1].canvas_count)
        self.questions[name] = QuestionPlan(question, labels, () if together else self._add_canvases(best))

    def _shortest_labels(self, question: Question, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return a label for each alternative: all `labels`, or if there are more, those with the fewest tokens."""
        count = len(question.alternatives)
        if len(labels) == count:
            return labels
        if self._codes is None:
            lengths = dict(zip(labels, map(len, self.layout.tokens("", labels)), strict=True))
            self._codes = sorted(labels, key=lengths.__getitem__)
        return tuple(self._codes[:count])

    def add_joint_canvas(self) -> None:
        """Put all questions on one canvas. Raises `ConfigError` if their labels cannot be told apart there."""
        plans = self.questions
        prompt = "\n\n".join(f"{name}: {plan.question.prompt(plan.labels)}" for name, plan in plans.items())
        prompt += "\n\nGive each answer on a line of its own, behind its name and a colon."
        lines = [f"{name}: {plan.question.template}" for name, plan in plans.items()]
        examples = [line.replace(ANSWER, plan.labels[0]) for line, plan in zip(lines, plans.values(), strict=True)]
        slots: dict[int, tuple[int, ...]] = {}
        answer: _LabelTokens | None = None
        for number, (name, plan) in enumerate(plans.items()):
            template = "\n".join([*examples[:number], lines[number], *examples[number + 1 :]])
            try:
                tokens = self._label_tokens(prompt, template, plan.labels, 1)
            except _LabelsError as error:
                message = f"questions.{name[:64]}: {error}; send other labels, or leave together out"
                raise ConfigError(message) from error
            if len(tokens.prefix) in slots:
                raise ConfigError(f"together: {name[:64]!r} and another question share a token; leave together out")
            slots[len(tokens.prefix)] = tuple(label[0] for label in tokens.labels)
            answer = answer or tokens
        assert answer is not None
        masks = sorted({*answer.masks, *slots})
        first = masks[0]
        row = (*answer.prefix, *answer.labels[0], *answer.suffix)
        canvas = [self.mask_id if place in slots else token for place, token in enumerate(row)]
        self._add_ask(canvas, masks, slots, first)
        for place, (name, plan) in zip(slots, plans.items(), strict=True):
            summands = tuple(((0, place - first, token),) for token in range(len(plan.labels)))
            plans[name] = replace(plan, summands=summands)

    def _add_canvases(self, tokens: "_LabelTokens") -> tuple[tuple[LogprobIndex, ...], ...]:
        """Add an ask for each beginning of a label. Returns the summands of each label's log-probability."""
        continuations: dict[tuple[int, ...], list[int]] = {}
        for label in tokens.labels:
            for length, token in enumerate(label):
                next_tokens = continuations.setdefault(label[:length], [])
                if token not in next_tokens:
                    next_tokens.append(token)
        start = len(tokens.prefix)
        stop = start + tokens.width
        first = min([start, *tokens.masks])
        numbers = {}
        for beginning, next_tokens in continuations.items():
            numbers[beginning] = len(self.asks)
            place = start + len(beginning)
            row = (*tokens.prefix, *beginning, *[self.mask_id] * (stop - place), *tokens.suffix)
            self._add_ask(row, sorted({*tokens.masks, *range(place, stop)}), {place: tuple(next_tokens)}, first)

        def summand(label: tuple[int, ...], length: int) -> LogprobIndex:
            beginning = label[:length]
            return numbers[beginning], start + length - first, continuations[beginning].index(label[length])

        return tuple(tuple(summand(label, length) for length in range(len(label))) for label in tokens.labels)

    def _label_tokens(
        self, prompt: str, template: str, labels: Sequence[str], max_length: int | None
    ) -> "_LabelTokens":
        """Return the tokens by which the labels differ in the answer.

        All labels must have the same number of tokens, at most `max_length`. If that is None, their numbers may differ.
        Raises `_LabelsError` if the labels cannot be told apart so.
        """
        layout = self.layout
        masks: list[int] = []
        quoted_prompt = _quote(prompt, layout.tokenizer)
        quoted_template = _quote(template, layout.tokenizer)
        quoted_labels = [_quote(label, layout.tokenizer) for label in labels]
        if MASK in quoted_template:
            # A mask is where the tokens differ with another special token in its place: a prompt may spell masks too.
            mask, other = layout.mask_texts(self.mask_id)
            probes = [quoted_template.replace(MASK, text).replace(ANSWER, quoted_labels[0]) for text in (mask, other)]
            with_mask, with_other = layout.tokens(quoted_prompt, probes)
            pairs = zip(with_mask, with_other, strict=False)
            masks = [place for place, (token, other_token) in enumerate(pairs) if token != other_token]
            if len(with_mask) != len(with_other) or len(masks) != quoted_template.count(MASK):
                raise _LabelsError(f"the vocabulary cannot put a mask where {MASK} stands in its template")
            quoted_template = quoted_template.replace(MASK, mask)
        token_lists = layout.tokens(quoted_prompt, [quoted_template.replace(ANSWER, label) for label in quoted_labels])
        if max_length is None:
            return _uneven_labels(labels, token_lists, masks)
        return _even_labels(labels, token_lists, masks, max_length)

    def _add_ask(
        self, row: Sequence[int], masks: Sequence[int], slots: Mapping[int, tuple[int, ...]], first: int
    ) -> None:
        """Add the ask of a `row` of tokens whose answer begins at `first`.

        `masks` are its places with masks, `slots` the tokens that are read, by place. Raises `ConfigError` on too many.
        """
        places = tuple(place - first for place in masks)
        labels = {place - first: tokens for place, tokens in slots.items()}
        self.asks.append(Ask(tuple(row[:first]), Reading(tuple(row[first:]), places, labels)))
        if self._max_canvases is not None and len(self.asks) * self._canvas_factor > self._max_canvases:
            raise ConfigError(
                f"questions take more than {self._max_canvases} canvases, one for each beginning of a label and twice "
                "as many with calibrate; ask fewer at a time (max_reads)"
            )


def _quote(text: str, tokenizer: Tokenizer) -> str:
    """`text` without names of special tokens, except the placeholders of masks and answers."""
    parts = re.split(f"({re.escape(MASK)}|{re.escape(ANSWER)})", text)
    return "".join(part if part in (MASK, ANSWER) else tokenizer.quote(part) for part in parts)


def _template_turns(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Messages as the chat template reads them, without names of special tokens.

    Calls of tools become texts if the template has no place for them.
    """
    has_tools = "tool" in (tokenizer.chat_template or "")
    turns: list[dict[str, Any]] = tokenizer.quote([*messages] if has_tools else without_tools(messages))
    return turns


def _render_opening(turns: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> str:
    """The text of the turns before a question."""
    if not tokenizer.has_chat_template:
        return "".join(f"{turn['content']}\n\n" for turn in turns)
    return tokenizer.render_chat(turns, add_generation_prompt=False) if turns else ""


def _render_around(turns: Sequence[Mapping[str, Any]], opening: str, tokenizer: Tokenizer) -> tuple[str, str, str]:
    """Return the texts before a question, between it and its answer, and behind the answer.

    `opening` is the text of the `turns`. Raises `ConfigError` if the chat template changes the question or the answer.
    """
    question, answer = (f"m{secrets.token_hex(8)}{name}" for name in "qa")  # random texts, to be found again
    if tokenizer.has_chat_template:
        all_turns = [*turns, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        text = tokenizer.render_chat(all_turns, add_generation_prompt=False)
    else:
        text = f"{opening}{question}\n{answer}"
    if text.count(question) != 1 or text.count(answer) != 1 or text.index(question) > text.index(answer):
        raise ConfigError("decisions: the chat template does not write a question and its answer as they are")
    before, behind_question = text.split(question)
    middle, behind_answer = behind_question.split(answer)
    return before, middle, behind_answer


def _common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two sequences have in common."""
    for length, (token_a, token_b) in enumerate(zip(a, b, strict=False)):
        if token_a != token_b:
            return length
    return min(len(a), len(b))


@dataclass(frozen=True, slots=True)
class _LabelTokens:
    """The tokens that tell labels apart, and those around them behind the state.

    `width` masks between `prefix` and `suffix` have room for every label. `masks` are places of masks that are not
    read.
    """

    prefix: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]
    width: int
    suffix: tuple[int, ...]
    masks: tuple[int, ...]

    @property
    def canvas_count(self) -> int:
        """How many canvases must be read: one for each beginning of a label."""
        return len({label[:place] for label in self.labels for place in range(len(label))})


def _check_distinct(labels: Sequence[str], token_lists: Sequence[Sequence[int]]) -> None:
    """Raise `_LabelsError` if two labels have the same tokens."""
    labels_by_tokens: dict[tuple[int, ...], str] = {}
    for label, tokens in zip(labels, token_lists, strict=True):
        if (duplicate := labels_by_tokens.get(tuple(tokens))) is not None:
            raise _LabelsError(f"the vocabulary cannot tell the labels {duplicate!r} and {label!r} apart")
        labels_by_tokens[tuple(tokens)] = label


def _even_labels(
    labels: Sequence[str], token_lists: Sequence[Sequence[int]], masks: Sequence[int], max_length: int
) -> _LabelTokens:
    """Return the tokens by which `token_lists`, the tokenized answer of each label, differ.

    Raises `_LabelsError` if their lengths differ, or if they differ in more than `max_length` tokens.
    """
    first = token_lists[0]
    for label, tokens in zip(labels, token_lists, strict=True):
        if len(tokens) != len(first):
            longer, shorter = (labels[0], label) if len(first) > len(tokens) else (label, labels[0])
            raise _LabelsError(f"the label {longer!r} takes more tokens than {shorter!r}, and all must take as many")
    _check_distinct(labels, token_lists)
    columns = [place for place, column in enumerate(zip(*token_lists, strict=True)) if len(set(column)) > 1]
    start, stop = columns[0], columns[-1] + 1
    if stop - start > max_length:
        raise _LabelsError(f"its labels differ in {stop - start} tokens, and at most {max_length} are read here")
    if any(start <= place < stop for place in masks):
        raise _LabelsError(f"{MASK} stands within the label in its template")
    label_tokens = tuple(tuple(tokens[start:stop]) for tokens in token_lists)
    prefix, suffix = tuple(first[:start]), tuple(first[stop:])
    return _LabelTokens(prefix, label_tokens, width=stop - start, suffix=suffix, masks=tuple(masks))


def _uneven_labels(labels: Sequence[str], token_lists: Sequence[Sequence[int]], masks: Sequence[int]) -> _LabelTokens:
    """Return the shortest beginnings that tell `token_lists` apart, the tokenized answers; their lengths may differ.

    Raises `_LabelsError` if one answer is the beginning of another, or if masks stand behind the labels.
    """
    _check_distinct(labels, token_lists)
    answers = [list(tokens) for tokens in token_lists]
    start = _common_prefix_length(min(answers), max(answers))  # what the first and the last share, all share
    if any(place >= start for place in masks):
        raise _LabelsError(f"{MASK} stands behind labels of different lengths in its template")
    tails = [tuple(tokens[start:]) for tokens in token_lists]
    lengths = dict.fromkeys(tails, 0)
    for tail, next_tail in pairwise(sorted(tails)):  # neighbours have the longest common beginnings
        length = _common_prefix_length(tail, next_tail) + 1
        if length > len(tail):
            shorter = labels[tails.index(tail)]
            longer = labels[tails.index(next_tail)]
            raise _LabelsError(
                f"the label {shorter!r} is how {longer!r} begins, and nothing follows it; leave end_turn at true"
            )
        lengths[tail] = max(lengths[tail], length)
        lengths[next_tail] = max(lengths[next_tail], length)
    label_tokens = tuple(tail[: lengths[tail]] for tail in tails)
    prefix = tuple(token_lists[0][:start])
    return _LabelTokens(prefix, label_tokens, width=max(map(len, tails)), suffix=(), masks=tuple(masks))
