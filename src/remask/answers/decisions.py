"""From decisions to readings of masks, and from what was read to answers.

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


@dataclass(frozen=True, slots=True)
class Ask:
    """One canvas that is read. `before` stands between the state and the answer; `free`: the state is content-free."""

    before: tuple[int, ...]
    reading: Reading
    free: bool = False


LogprobIndex: TypeAlias = tuple[int, int, int]
"""Where a log-probability stands: in the reads of which ask, at which place, of which of its tokens."""


@dataclass(frozen=True, slots=True)
class QuestionPlan:
    """A question with its labels, and for each of them what its log-probability is the sum of."""

    question: Question
    labels: tuple[str, ...]
    summands: tuple[tuple[LogprobIndex, ...], ...]


@dataclass(frozen=True, slots=True)
class DecisionPlan:
    """What is read for some decisions.

    Attributes:
        shared: tokens that all canvases begin with, those of the state.
        free: the same of the content-free state.
        stored: how many of `shared` other requests may share.
        asks: the canvases; with calibration the second half is that of the first, over the content-free state.
    """

    shared: tuple[int, ...]
    free: tuple[int, ...]
    stored: int
    asks: tuple[Ask, ...]
    questions: Mapping[str, QuestionPlan]
    calibrated: bool

    @classmethod
    def of(cls, decisions: Decisions, tokenizer: Tokenizer, mask_id: int, most: int | None = None) -> "DecisionPlan":
        """Raises `ConfigError` where labels cannot be told apart, and where more than `most` canvases are needed."""
        layout = free = _Layout.of(decisions, decisions.transcript, tokenizer)
        builder = _Builder(layout, mask_id, most, 1 + decisions.calibrate).all(decisions)
        asks = builder.asks
        if decisions.calibrate:
            free = _Layout.of(decisions, CONTENT_FREE, tokenizer)
            apart = layout.between == free.between and not (layout.head or free.head)
            other = builder if apart else _Builder(free, mask_id, most, 2).all(decisions)
            if other.questions != builder.questions:
                raise ConfigError("calibrate: without the state the labels are other tokens; leave calibrate out")
            asks = [*asks, *(replace(ask, free=True) for ask in other.asks)]
        return cls(
            tuple(layout.shared),
            tuple(free.shared),
            layout.stored(decisions),
            tuple(asks),
            builder.questions,
            decisions.calibrate,
        )

    def request(self, number: int, name: str, *, policy: CachePolicy, **terms: Any) -> Request:
        """The request of one of the asks. `terms` are further fields of `Request`.

        It reads no depth that audits earn: probabilities would follow what else runs, from question to question.
        """
        ask = self.asks[number]
        state = self.free if ask.free else self.shared
        return Request(
            id=name,
            prompt_token_ids=[*state, *ask.before],
            params=SamplingParams(max_tokens=len(ask.reading.token_ids)),
            prefix_length=len(state) if ask.free else self.stored,
            policy=policy.at_start_depth if isinstance(policy, BiCache) else policy,
            readers=(ask.reading,),
            **terms,
        )

    def answers(self, reads: Sequence[Reads]) -> dict[str, Decision]:
        """The decisions that follow from what was read of each ask."""
        half = len(self.asks) // 2

        def logprobs(plan: QuestionPlan, first: int) -> list[float]:
            return [sum(reads[first + ask][place][token] for ask, place, token in sums) for sums in plan.summands]

        return {
            name: Decision.of(
                plan.question, logprobs(plan, 0), plan.labels, logprobs(plan, half) if self.calibrated else None
            )
            for name, plan in self.questions.items()
        }


@dataclass(frozen=True, slots=True)
class _Layout:
    """A conversation of a state and a question, with the answer: `shared` tokens, then texts around both.

    Texts are tokenized apart where a special token stands between them and a probe comes to the tokens of the whole.
    """

    shared: list[int]
    between: tuple[str, str, str]  # before the question, before the answer, behind it
    tokenizer: Tokenizer
    head: str = ""  # text of the state, where it is tokenized with what follows
    opening: int = 0  # length of what stands before the answer and is tokenized with the question

    @classmethod
    def of(cls, decisions: Decisions, state: Transcript, tokenizer: Tokenizer) -> "_Layout":
        conversation = _turns(state.messages, tokenizer)
        marks = [f"m{secrets.token_hex(8)}{name}" for name in "qa"]
        head = _opened(conversation, tokenizer)
        if tokenizer.has_chat_template:
            turns = [*conversation, {"role": "user", "content": marks[0]}, {"role": "assistant", "content": marks[1]}]
            text = tokenizer.render_chat(turns, add_generation_prompt=False)
        else:
            text = f"{head}{marks[0]}\n{marks[1]}"
        if [text.count(mark) for mark in marks] != [1, 1] or text.index(marks[0]) > text.index(marks[1]):
            raise ConfigError("decisions: the chat template does not write a question and its answer as they are")
        first, rest = text.split(marks[0])
        middle, last = rest.split(marks[1])
        if not first.startswith(head):
            head = ""
        between = first[len(head) :], middle, last if decisions.end_turn else ""
        plain = cls([], between, tokenizer, head)
        (whole,) = plain.tokens("question", ["answer"])
        # What follows the state begins with a fixed text, and does not join its last token.
        shared = tokenizer.encode_quoted(head) if head and between[0] else []
        special = [tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.special_ids]
        ends = [middle.rindex(text) + len(text) for text in special if text and text in middle]
        for opening in (max(ends, default=0), 0):
            layout = cls(shared, between, tokenizer, "" if shared else head, opening)
            if shared + layout.tokens("question", ["answer"])[0] == whole:
                return layout
        return plain

    def stored(self, decisions: Decisions) -> int:
        """How many of the shared tokens other requests may share."""
        messages = decisions.shared_messages
        if not messages:
            return 0
        if messages is decisions.transcript.messages:
            return len(self.shared)
        opening = _opened(_turns(messages, self.tokenizer), self.tokenizer)
        return _common(self.shared, self.tokenizer.encode_quoted(opening))

    def tokens(self, question: str, answers: Sequence[str]) -> list[list[int]]:
        """The tokens behind the shared ones, for each answer."""
        encode, (before, middle, last) = self.tokenizer.encode_quoted, self.between
        beginning, rest = f"{self.head}{before}{question}{middle[: self.opening]}", middle[self.opening :]
        if not self.opening:
            return [encode(f"{beginning}{rest}{answer}{last}") for answer in answers]
        tokens = encode(beginning)
        return [tokens + encode(f"{rest}{answer}{last}") for answer in answers]

    def pieces(self, mask_id: int) -> tuple[str, str]:
        """The texts of the mask token and of another special one. Raises `ConfigError` where they have none."""
        for other in sorted(self.tokenizer.special_ids - {mask_id}):
            texts = [self.tokenizer.decode([token], skip_special_tokens=False) for token in (mask_id, other)]
            if [self.tokenizer.encode(text, add_special_tokens=False) for text in texts] == [[mask_id], [other]]:
                return texts[0], texts[1]
        raise ConfigError(f"template: the tokenizer has no text for the mask token, so {MASK} cannot stand in it")


class _Builder:
    """Collects asks. `factor` is how many canvases one of them comes to, of which at most `most` may be made."""

    def __init__(self, layout: _Layout, mask_id: int, most: int | None, factor: int) -> None:
        self.layout, self.mask_id, self._most, self._factor = layout, mask_id, most, factor
        self.asks: list[Ask] = []
        self.questions: dict[str, QuestionPlan] = {}
        self._codes: list[str] | None = None  # labels of a question of many alternatives, the shortest first

    def all(self, decisions: Decisions) -> "_Builder":
        """This builder with the asks of all questions."""
        for name, question in decisions.readable_questions.items():
            self.add(name, question, together=decisions.together)
        if decisions.together and self.questions:
            self.join()
        return self

    def add(self, name: str, question: Question, *, together: bool) -> None:
        """Plan one question, on canvases of its own; `together` takes labels of one token alone, and plans no canvas.

        Raises `ConfigError` where its labels cannot be told apart.
        """
        choices, why = list[tuple[tuple[str, ...], _LabelTokens]](), ""
        lengths = (1,) if together else (MAX_LABEL_TOKENS, None)
        for group, longest in product(question.labellings, lengths):
            for pool in group:
                labels = self._shortest(question, pool)
                tokens = self._label_tokens(question.prompt(labels), question.template, labels, longest)
                if not isinstance(tokens, str):
                    choices.append((labels, tokens))
                elif longest == lengths[-1]:
                    why = why or tokens
                if choices and choices[-1][1].canvases == 1:
                    break
            if choices:
                break
        if not choices:
            raise ConfigError(f"questions.{name[:64]}: {why}; send other labels")
        labels, best = min(choices, key=lambda choice: choice[1].canvases)
        self.questions[name] = QuestionPlan(question, labels, () if together else self._trie(best))

    def _shortest(self, question: Question, labels: tuple[str, ...]) -> tuple[str, ...]:
        """As many of `labels` as there are alternatives: those of the fewest tokens, in their order."""
        count = len(question.alternatives)
        if len(labels) == count:
            return labels
        if self._codes is None:
            texts = self.layout.tokens("", labels)
            self._codes = sorted(labels, key=dict(zip(labels, map(len, texts), strict=True)).__getitem__)
        return tuple(self._codes[:count])

    def join(self) -> None:
        """Put all questions on one canvas. Raises `ConfigError` where their labels cannot be told apart there."""
        plans = self.questions
        prompt = "\n\n".join(f"{name}: {plan.question.prompt(plan.labels)}" for name, plan in plans.items())
        prompt += "\n\nGive each answer on a line of its own, behind its name and a colon."
        lines = [f"{name}: {plan.question.template}" for name, plan in plans.items()]
        examples = [line.replace(ANSWER, plan.labels[0]) for line, plan in zip(lines, plans.values(), strict=True)]
        slots: dict[int, tuple[int, ...]] = {}
        answer: _LabelTokens | None = None
        for number, (name, plan) in enumerate(plans.items()):
            template = "\n".join([*examples[:number], lines[number], *examples[number + 1 :]])
            tokens = self._label_tokens(prompt, template, plan.labels, 1)
            if isinstance(tokens, str):
                raise ConfigError(f"questions.{name[:64]}: {tokens}; send other labels, or leave together out")
            if len(tokens.before) in slots:
                raise ConfigError(f"together: {name[:64]!r} and another question share a token; leave together out")
            slots[len(tokens.before)] = tuple(label[0] for label in tokens.labels)
            answer = answer or tokens
        assert answer is not None
        masks = sorted({*answer.masks, *slots})
        first = masks[0]
        row = (*answer.before, *answer.labels[0], *answer.after)
        self._append([self.mask_id if at in slots else token for at, token in enumerate(row)], masks, slots, first)
        for place, (name, plan) in zip(slots, plans.items(), strict=True):
            summands = tuple(((0, place - first, token),) for token in range(len(plan.labels)))
            plans[name] = replace(plan, summands=summands)

    def _trie(self, tokens: "_LabelTokens") -> tuple[tuple[LogprobIndex, ...], ...]:
        """Asks for what may follow each beginning of a label, and where each label's log-probabilities stand."""
        nexts: dict[tuple[int, ...], list[int]] = {}
        for label in tokens.labels:
            for place, token in enumerate(label):
                known = nexts.setdefault(label[:place], [])
                if token not in known:
                    known.append(token)
        start = len(tokens.before)
        first, stop = min([start, *tokens.masks]), start + tokens.width
        numbers = {}
        for beginning, known in nexts.items():
            numbers[beginning] = len(self.asks)
            at = start + len(beginning)
            row = (*tokens.before, *beginning, *[self.mask_id] * (stop - at), *tokens.after)
            self._append(row, sorted({*tokens.masks, *range(at, stop)}), {at: tuple(known)}, first)
        return tuple(
            tuple(
                (numbers[label[:place]], start + place - first, nexts[label[:place]].index(token))
                for place, token in enumerate(label)
            )
            for label in tokens.labels
        )

    def _label_tokens(
        self, prompt: str, template: str, labels: Sequence[str], longest: int | None
    ) -> "_LabelTokens | str":
        """What differs in the answer from label to label; or why it cannot be read in at most `longest` tokens.

        Without `longest` labels may have any lengths.
        """
        layout, masks, names = self.layout, [], labels
        prompt, template, *labels = (_quoted(text, layout.tokenizer) for text in (prompt, template, *labels))
        if MASK in template:
            # Where masks stand is where another token of one piece changes the text: a prompt may spell a mask too.
            mask, other = layout.pieces(self.mask_id)
            one, two = layout.tokens(
                prompt, [template.replace(MASK, text).replace(ANSWER, labels[0]) for text in (mask, other)]
            )
            masks = [at for at, (this, that) in enumerate(zip(one, two, strict=False)) if this != that]
            if len(one) != len(two) or len(masks) != template.count(MASK):
                return f"the vocabulary cannot put a mask where {MASK} stands in its template"
            template = template.replace(MASK, mask)
        texts = layout.tokens(prompt, [template.replace(ANSWER, label) for label in labels])
        return _open_labels(names, texts, masks) if longest is None else _even_labels(names, texts, masks, longest)

    def _append(
        self, row: Sequence[int], masks: Sequence[int], slots: Mapping[int, tuple[int, ...]], first: int
    ) -> None:
        """Add the ask of a `row` of tokens whose answer begins at `first`. `masks` and `slots` are places of it."""
        places, labels = tuple(at - first for at in masks), {at - first: slots[at] for at in slots}
        self.asks.append(Ask(tuple(row[:first]), Reading(tuple(row[first:]), places, labels)))
        if self._most is not None and len(self.asks) * self._factor > self._most:
            raise ConfigError(
                f"questions take more than {self._most} canvases, one for each beginning of a label and twice as many "
                "with calibrate; ask fewer at a time (max_reads)"
            )


def _quoted(text: str, tokenizer: Tokenizer) -> str:
    """`text` without names of special tokens, but with what stands for masks and answers."""
    parts = re.split(f"({re.escape(MASK)}|{re.escape(ANSWER)})", text)
    return "".join(part if place % 2 else tokenizer.quoted(part) for place, part in enumerate(parts))


def _turns(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Messages as a template reads them, without names of special tokens, and as texts where it knows no tools."""
    known = "tool" in (tokenizer.chat_template or "")
    turns: list[dict[str, Any]] = tokenizer.quoted([*messages] if known else without_tools(messages))
    return turns


def _opened(turns: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> str:
    """The text of turns before a question."""
    if not tokenizer.has_chat_template:
        return "".join(f"{turn['content']}\n\n" for turn in turns)
    return tokenizer.render_chat(turns, add_generation_prompt=False) if turns else ""


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


@dataclass(frozen=True, slots=True)
class _LabelTokens:
    """Labels, of which each is read up to some token, and what stands around them behind the state.

    `width` masks have room for them between `before` and `after`. Masks at other places, `masks`, are not read.
    """

    before: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]
    width: int
    after: tuple[int, ...]
    masks: tuple[int, ...]

    @property
    def canvases(self) -> int:
        """One for each beginning of a label."""
        return len({label[:place] for label in self.labels for place in range(len(label))})


def _same(labels: Sequence[str], texts: Sequence[Sequence[int]]) -> str | None:
    """Why labels cannot be told apart, where two have the same tokens."""
    seen: dict[tuple[int, ...], str] = {}
    for label, text in zip(labels, texts, strict=True):
        if (same := seen.get(tuple(text))) is not None:
            return f"the vocabulary cannot tell the labels {same!r} and {label!r} apart"
        seen[tuple(text)] = label
    return None


def _even_labels(
    labels: Sequence[str], texts: Sequence[Sequence[int]], masks: Sequence[int], longest: int
) -> _LabelTokens | str:
    """What differs among tokenized texts, one for each label; or why it cannot be read in at most `longest` tokens."""
    first = texts[0]
    for label, text in zip(labels, texts, strict=True):
        if len(text) != len(first):
            more, less = (labels[0], label) if len(first) > len(text) else (label, labels[0])
            return f"the label {more!r} takes more tokens than {less!r}, and all must take as many"
    if (same := _same(labels, texts)) is not None:
        return same
    columns = [place for place, tokens in enumerate(zip(*texts, strict=True)) if len(set(tokens)) > 1]
    start, stop = columns[0], columns[-1] + 1
    if stop - start > longest:
        return f"its labels differ in {stop - start} tokens, and at most {longest} are read here"
    if any(start <= at < stop for at in masks):
        return f"{MASK} stands within the label in its template"
    read = tuple(tuple(text[start:stop]) for text in texts)
    return _LabelTokens(tuple(first[:start]), read, stop - start, tuple(first[stop:]), tuple(masks))


def _open_labels(labels: Sequence[str], texts: Sequence[Sequence[int]], masks: Sequence[int]) -> _LabelTokens | str:
    """The beginnings that tell tokenized texts of any lengths apart, one for each label; or why none do."""
    if (same := _same(labels, texts)) is not None:
        return same
    listed = [list(text) for text in texts]
    start = _common(min(listed), max(listed))
    if any(at >= start for at in masks):
        return f"{MASK} stands behind labels of different lengths in its template"
    rests = [tuple(text[start:]) for text in texts]
    ordered = sorted(rests)
    needed = dict.fromkeys(rests, 0)
    for one, other in pairwise(ordered):
        apart = _common(one, other) + 1
        if apart > len(one):
            shorter, longer = (labels[rests.index(rest)] for rest in (one, other))
            return (
                f"the label {shorter!r} is how {longer!r} begins, and nothing stands behind it; leave end_turn at true"
            )
        needed |= {one: max(needed[one], apart), other: max(needed[other], apart)}
    read = tuple(rest[: needed[rest]] for rest in rests)
    return _LabelTokens(tuple(texts[0][:start]), read, max(map(len, rests)), (), tuple(masks))
