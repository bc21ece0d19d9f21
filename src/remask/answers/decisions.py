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
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Found:
    """A log-probability among those that are read: of which ask, at which place, of which of its tokens."""

    ask: int
    place: int
    token: int


@dataclass(frozen=True, slots=True)
class Planned:
    """A question with its labels, and for each of them what its log-probability is the sum of."""

    question: Question
    labels: tuple[str, ...]
    found: tuple[tuple[Found, ...], ...]


@dataclass(frozen=True, slots=True)
class DecisionPlan:
    """What is read for some decisions.

    Attributes:
        shared: tokens that all canvases begin with, those of the state.
        free: the same of the content-free state.
        stored: how many of `shared` other requests may share.
        asks: the canvases; with calibration the second half is that of the first, over the content-free state.
        planned: the questions by their ids.
    """

    shared: tuple[int, ...]
    free: tuple[int, ...]
    stored: int
    asks: tuple[Ask, ...]
    planned: Mapping[str, Planned]
    calibrated: bool

    @classmethod
    def of(cls, asked: Decisions, tokenizer: Tokenizer, mask_id: int, most: int | None = None) -> "DecisionPlan":
        """Raises `ConfigError` where labels cannot be told apart, and where more than `most` canvases are needed."""
        layout = free = _Layout.of(asked, asked.transcript, tokenizer)
        built = _Builder(layout, mask_id, most, 1 + asked.calibrate).all(asked)
        asks, base = built.asks, []
        if asked.calibrate:
            free = _Layout.of(asked, CONTENT_FREE, tokenizer)
            apart = layout.between == free.between and not (layout.head or free.head)
            other = built if apart else _Builder(free, mask_id, most, 2).all(asked)
            if other.planned != built.planned:
                raise ConfigError("calibrate: without the state the labels are other tokens; leave calibrate out")
            base = [Ask(ask.before, ask.reading, free=True) for ask in other.asks]
        stored = layout.stored(asked)
        return cls(tuple(layout.shared), tuple(free.shared), stored, (*asks, *base), built.planned, asked.calibrate)

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
            policy=policy.unearned if isinstance(policy, BiCache) else policy,
            readers=(ask.reading,),
            **terms,
        )

    def answers(self, reads: Sequence[Reads]) -> dict[str, Decision]:
        """The decisions that follow from what was read of each ask."""
        half = len(self.asks) // 2

        def total(found: Sequence[Found], first: int) -> float:
            return sum(reads[first + each.ask][each.place][each.token] for each in found)

        return {
            name: Decision.of(
                each.question,
                [total(found, 0) for found in each.found],
                each.labels,
                [total(found, half) for found in each.found] if self.calibrated else None,
            )
            for name, each in self.planned.items()
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
    def of(cls, asked: Decisions, about: Transcript, tokenizer: Tokenizer) -> "_Layout":
        conversation = _turns(about.messages, tokenizer)
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
        between = first[len(head) :], middle, last if asked.end_turn else ""
        plain = cls([], between, tokenizer, head)
        (whole,) = plain.tokens("question", ["answer"])
        # What follows the state begins with a fixed text, and does not join its last token.
        shared = tokenizer.encode_quoted(head) if head and between[0] else []
        special = [tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.special_ids]
        ends = [middle.rindex(text) + len(text) for text in special if text and text in middle]
        for made in (
            cls(shared, between, tokenizer, "" if shared else head, max(ends, default=0)),
            cls(shared, between, tokenizer, "" if shared else head),
        ):
            if shared + made.tokens("question", ["answer"])[0] == whole:
                return made
        return plain

    def stored(self, asked: Decisions) -> int:
        """How many of the shared tokens other requests may share."""
        if asked.shared_messages is asked.transcript.messages or not asked.shared_messages:
            return len(self.shared) if asked.shared_messages else 0
        return _common(
            self.shared, self._encode(_opened(_turns(asked.shared_messages, self.tokenizer), self.tokenizer))
        )

    def tokens(self, question: str, answers: Sequence[str]) -> list[list[int]]:
        """The tokens behind the shared ones, for each answer."""
        before, middle, last = self.between
        asked, rest = f"{self.head}{before}{question}{middle[: self.opening]}", middle[self.opening :]
        if not self.opening:
            return [self._encode(f"{asked}{rest}{answer}{last}") for answer in answers]
        tokens = self._encode(asked)
        return [tokens + self._encode(f"{rest}{answer}{last}") for answer in answers]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode_quoted(text)

    def pieces(self, mask_id: int) -> tuple[str, str]:
        """The texts of the mask token and of another special one. Raises `ConfigError` where they have none."""
        for other in sorted(self.tokenizer.special_ids - {mask_id}):
            texts = [self.tokenizer.decode([token], skip_special_tokens=False) for token in (mask_id, other)]
            if [self.tokenizer.encode(text, add_special_tokens=False) for text in texts] == [[mask_id], [other]]:
                return texts[0], texts[1]
        raise ConfigError(f"template: the tokenizer has no text for the mask token, so {MASK} cannot stand in it")


class _Builder:
    """Collects asks. `each` is how many canvases one of them comes to, of which at most `most` may be made."""

    def __init__(self, layout: _Layout, mask_id: int, most: int | None, each: int) -> None:
        self.layout, self.mask_id, self._most, self._each = layout, mask_id, most, each
        self.asks: list[Ask] = []
        self.planned: dict[str, Planned] = {}
        self._codes: list[str] | None = None  # labels of a question of many alternatives, the shortest first

    def all(self, asked: Decisions) -> "_Builder":
        """This builder with the asks of all questions."""
        for name, question in asked.asked.items():
            self.add(name, question, together=asked.together)
        if asked.together and self.planned:
            self.join()
        return self

    def add(self, name: str, question: Question, *, together: bool) -> None:
        """Plan one question, on canvases of its own; `together` takes labels of one token alone, and plans no canvas.

        Raises `ConfigError` where its labels cannot be told apart.
        """
        found, why = list[tuple[tuple[str, ...], _Varying]](), ""
        lengths = (1,) if together else (MAX_LABEL_TOKENS, None)
        for group, longest in product(question.labellings, lengths):
            for pool in group:
                labels = self._shortest(question, pool)
                varying = self._varying(question.prompt(labels), question.template, labels, longest)
                if not isinstance(varying, str):
                    found.append((labels, varying))
                elif longest == lengths[-1]:
                    why = why or varying
                if found and found[-1][1].canvases == 1:
                    break
            if found:
                break
        if not found:
            raise ConfigError(f"questions.{name[:64]}: {why}; send other labels")
        labels, varying = min(found, key=lambda each: each[1].canvases)
        self.planned[name] = Planned(question, labels, () if together else self._trie(varying))

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
        named = list(self.planned.items())
        prompt = "\n\n".join(f"{name}: {each.question.prompt(each.labels)}" for name, each in named)
        prompt += "\n\nGive each answer on a line of its own, behind its name and a colon."
        lines = [f"{name}: {each.question.template}" for name, each in named]
        first = [line.replace(ANSWER, each.labels[0]) for line, (_, each) in zip(lines, named, strict=True)]
        slots: dict[int, tuple[int, ...]] = {}
        found = []
        for number, (name, each) in enumerate(named):
            template = "\n".join([*first[:number], lines[number], *first[number + 1 :]])
            varying = self._varying(prompt, template, each.labels, 1)
            if isinstance(varying, str):
                raise ConfigError(f"questions.{name[:64]}: {varying}; send other labels, or leave together out")
            if len(varying.before) in slots:
                raise ConfigError(f"together: {name[:64]!r} and another question share a token; leave together out")
            slots[len(varying.before)] = tuple(label[0] for label in varying.labels)
            found.append(varying)
        masks = tuple(sorted({*found[0].masks, *slots}))
        start = masks[0]
        tokens = (*found[0].before, *found[0].labels[0], *found[0].after)
        tokens = tuple(self.mask_id if at in slots else token for at, token in enumerate(tokens))
        reading = Reading(tokens[start:], tuple(at - start for at in masks), {at - start: slots[at] for at in slots})
        self._append(Ask(tokens[:start], reading))
        for varying, (name, each) in zip(found, named, strict=True):
            place = len(varying.before) - start
            read = tuple((Found(0, place, token),) for token in range(len(each.labels)))
            self.planned[name] = Planned(each.question, each.labels, read)

    def _trie(self, varying: "_Varying") -> tuple[tuple[Found, ...], ...]:
        """Asks for what may follow each beginning of a label, and where each label's parts are found."""
        nexts: dict[tuple[int, ...], list[int]] = {}
        for label in varying.labels:
            for place, token in enumerate(label):
                known = nexts.setdefault(label[:place], [])
                if token not in known:
                    known.append(token)
        start, first = len(varying.before), min([len(varying.before), *varying.masks])
        numbers = {}
        for begun, nexts_of in nexts.items():
            numbers[begun] = len(self.asks)
            at, stop = start + len(begun), start + varying.width
            tokens = (*varying.before, *begun, *[self.mask_id] * (stop - at), *varying.after)
            masks = sorted({*varying.masks, *range(at, stop)})
            reading = Reading(tokens[first:], tuple(m - first for m in masks), {at - first: tuple(nexts_of)})
            self._append(Ask(tokens[:first], reading))
        places = {token: {t: i for i, t in enumerate(known)} for token, known in nexts.items()}
        return tuple(
            tuple(
                Found(numbers[label[:place]], start + place - first, places[label[:place]][token])
                for place, token in enumerate(label)
            )
            for label in varying.labels
        )

    def _varying(self, prompt: str, template: str, labels: Sequence[str], longest: int | None) -> "_Varying | str":
        """What differs in the answer from label to label; or why it cannot be read in at most `longest` tokens.

        Without `longest` labels may have any lengths.
        """
        layout, masks, named = self.layout, [], labels
        prompt, template, *labels = (_quoted(text, layout.tokenizer) for text in (prompt, template, *labels))
        if MASK in template:
            # Where masks stand is where another token of one piece changes the text: a prompt may spell a mask too.
            mask, other = layout.pieces(self.mask_id)
            one, two = layout.tokens(
                prompt, [template.replace(MASK, each).replace(ANSWER, labels[0]) for each in (mask, other)]
            )
            masks = [at for at, (this, that) in enumerate(zip(one, two, strict=False)) if this != that]
            if len(one) != len(two) or len(masks) != template.count(MASK):
                return f"the vocabulary cannot put a mask where {MASK} stands in its template"
            template = template.replace(MASK, mask)
        texts = layout.tokens(prompt, [template.replace(ANSWER, label) for label in labels])
        return _open(named, texts, masks) if longest is None else _told_apart(named, texts, masks, longest)

    def _append(self, ask: Ask) -> None:
        self.asks.append(ask)
        if self._most is not None and len(self.asks) * self._each > self._most:
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
class _Varying:
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


def _told_apart(
    labels: Sequence[str], texts: Sequence[Sequence[int]], masks: Sequence[int], longest: int
) -> _Varying | str:
    """What differs among tokenized texts, one for each label; or why it cannot be read in at most `longest` tokens."""
    first = texts[0]
    for label, text in zip(labels, texts, strict=True):
        if len(text) != len(first):
            more, less = sorted((labels[0], label), key=lambda each: len(first if each == labels[0] else text))[::-1]
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
    return _Varying(tuple(first[:start]), read, stop - start, tuple(first[stop:]), tuple(masks))


def _open(labels: Sequence[str], texts: Sequence[Sequence[int]], masks: Sequence[int]) -> _Varying | str:
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
            begun, longer = (labels[rests.index(each)] for each in (one, other))
            return f"the label {begun!r} is how {longer!r} begins, and nothing stands behind it; leave end_turn at true"
        needed |= {one: max(needed[one], apart), other: max(needed[other], apart)}
    read = tuple(rest[: needed[rest]] for rest in rests)
    return _Varying(tuple(texts[0][:start]), read, max(map(len, rests)), (), tuple(masks))
