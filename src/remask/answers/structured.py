"""Forms of answers, compiled for one model's tokens."""

import importlib.util
import marshal
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remask.checks.plugins import install_line
from remask.errors import ConfigError, FormError
from remask.machine.helper import HelperError, Helpers, LateError, RefusedError
from remask.model.config import ModelConfig
from remask.readers.constraint import Constraint
from remask.request.forms import StructuredOutputs
from remask.sampling.automaton import TokenAutomaton
from remask.text.tokenizer import Tokenizer

MAX_SECONDS = 2
"""Processor time of one compilation, for a small vocabulary; a large one has a second more for each 50,000 tokens."""
WAIT = 20
"""So many times as long by the clock. The wait for a core counts in this, so it is a wide limit."""
MAX_BYTES = 2 << 30
MAX_TRANSITIONS = 2**22
MAX_STATES = 2048
MAX_CLASS_TRANSITIONS = 2**16
"""Transitions by classes of tokens, which every step of a request goes over, for each position of its block."""
KEPT = 64
"""Forms that are kept compiled, or as the error that they end in, those used last."""


class _PassingError(FormError):
    """An error that the same form need not end in another time."""


class Structures:
    """Compiles forms for one vocabulary, and keeps them. Safe on any threads.

    A form is compiled once, however many threads ask for it at a time, also where it cannot be compiled.

    Args:
        tokens: the bytes of each token id; None where a token is no part of a text.
        padding: tokens that end a response and fill it up.
    """

    def __init__(self, tokens: Sequence[bytes | None], padding: Sequence[int]) -> None:
        self._tokens = [(token, content) for token, content in enumerate(tokens) if content is not None]
        self._by_bytes = {content: token for token, content in self._tokens}
        self._vocab, self._padding = len(tokens), tuple(padding)
        self._forms: OrderedDict[tuple[str, str], Future[Constraint]] = OrderedDict()  # those used last stand last
        self._lock = threading.Lock()

    @classmethod
    def of_model(cls, tokenizer: Tokenizer | None, config: ModelConfig) -> "Structures":
        """Those of a model. Raises `ConfigError` where it has no tokenizer."""
        if tokenizer is None:
            raise FormError(" need a tokenizer, and this model folder has none")
        tokens = tokenizer.token_bytes(config.vocab)
        barred = {config.mask_id, *config.stop_ids}
        padding = [token for token in config.stop_ids if token in tokenizer.special_ids]
        return cls([None if token in barred else content for token, content in enumerate(tokens)], padding)

    def compiled(self, form: StructuredOutputs, beginning: str = "") -> Constraint:
        """The constraint of a form, or of the rest of an answer with this `beginning`.

        Raises `ConfigError` where it cannot be compiled, or not within the limits, and where no answer begins so.
        """
        constraint = self._whole(form)
        return constraint.begun(self._after(constraint.automaton, beginning)) if beginning else constraint

    def _after(self, automaton: TokenAutomaton, text: str) -> int:
        """The state of an automaton after a text. It is the same whichever tokens spell it."""
        content = text.encode()
        # Single bytes, if there are tokens of them: no other token leads further than those that it is made of.
        single = all(content[at : at + 1] in self._by_bytes for at in range(len(content)))
        sizes = [1] if single else sorted(set(map(len, self._by_bytes)))
        reached = {0: automaton.start}
        for at in range(len(content)):
            if at in reached:
                for size in sizes:
                    token = self._by_bytes.get(content[at : at + size])
                    state = None if token is None else automaton.next_state(reached[at], token)
                    if state is not None:
                        reached[at + size] = state
        if len(content) not in reached:
            place = len(content[: max(reached)].decode(errors="ignore"))
            raise FormError(
                f": the answer that is to be continued leaves the form at character {place + 1}: no "
                f"answer has {text[place]!r} behind {text[max(0, place - 20) : place]!r}; shorten it, or ask for "
                "another form"
            )
        return reached[len(content)]

    def _whole(self, form: StructuredOutputs) -> Constraint:
        key = form.source
        with self._lock:
            first = key not in self._forms
            future = self._forms.setdefault(key, Future())
            self._forms.move_to_end(key)
        if first:
            self._compile(key, future)
        error = future.exception()
        if isinstance(error, ConfigError):
            raise copy(error)  # so that no two callers share a traceback
        return future.result()

    def _compile(self, key: tuple[str, str], future: Future[Constraint]) -> None:
        """Give `future` its result. It is kept, but for an error that need not come again."""
        lasts = True
        try:
            future.set_result(Constraint(self._automaton(self._run(*key))))
        except BaseException as error:
            lasts = isinstance(error, ConfigError) and not isinstance(error, _PassingError)
            future.set_exception(copy(error) if isinstance(error, ConfigError) else error)
        with self._lock:
            if not lasts:
                del self._forms[key]
            for old in [key for key, form in self._forms.items() if form.done()][:-KEPT]:
                del self._forms[old]

    def keeps(self, form: StructuredOutputs) -> bool:
        """Whether `compiled` returns the constraint of a form, or raises its error, at once."""
        with self._lock:
            future = self._forms.get(form.source)
        return future is not None and future.done()

    def _run(self, kind: str, text: str) -> dict[str, Any]:
        if importlib.util.find_spec("outlines_core") is None:
            raise _PassingError(f" need the package outlines-core: {install_line('server')}")
        seconds = MAX_SECONDS + self._vocab // 50_000
        settings = {"tokens": self._tokens, "vocab": self._vocab, "most": MAX_TRANSITIONS}
        task, wait = "remask.answers.structured_worker:compiler", WAIT * seconds
        helpers = Helpers(task, marshal.dumps(settings), seconds=seconds, memory=MAX_BYTES, background=True, wait=wait)
        failure = f": the {_NAMES[kind]} cannot be compiled:"
        try:
            answer: dict[str, Any] = marshal.loads(helpers.ask(marshal.dumps(text)))
        except LateError as error:
            raise _PassingError(f"{failure} {error}; try again later") from error
        except (RefusedError, HelperError) as error:
            raise FormError(f"{failure} {error}") from error
        finally:
            helpers.close()
        return answer

    def _automaton(self, answer: dict[str, Any]) -> TokenAutomaton:
        columns = [np.frombuffer(answer[name], dtype=np.int64) for name in ("source", "label", "target")]
        final = np.array(answer["final"], dtype=np.int64)
        automaton = automaton_of(np.stack(columns, axis=1), answer["start"], final, self._vocab, self._padding)
        for name, most in (("states", MAX_STATES), ("transitions", MAX_CLASS_TRANSITIONS)):
            if (size := getattr(automaton, name)) > most:
                raise FormError(
                    f": its automaton has {size} {name}, and at most {most} are taken; ask for a simpler form"
                )
        return automaton


_NAMES = {"regex": "regular expression", "json": "JSON schema"}


def automaton_of(
    edges: NDArray[np.int64], start: int, final: NDArray[np.int64], vocab: int, padding: Sequence[int] = ()
) -> TokenAutomaton:
    """The automaton of `edges`: from which state which token leads where, int64 [E, 3]; states are any numbers.

    `padding` tokens lead from accepting states to one of their own that takes nothing else.
    """
    source, token, target = edges.T
    names = np.unique(np.concatenate([source, target, final, [start]]))
    source, target = np.searchsorted(names, source), np.searchsorted(names, target)
    accepting = np.zeros(len(names) + 1, dtype=np.bool_)
    accepting[np.searchsorted(names, final)] = True
    filled = len(names)  # the state after the answer's end
    if padding:
        before = np.append(np.flatnonzero(accepting), filled)
        accepting[filled] = True
        source = np.concatenate([source, np.tile(before, len(padding))])
        token = np.concatenate([token, np.repeat(np.asarray(padding, dtype=np.int64), len(before))])
        target = np.concatenate([target, np.full(len(before) * len(padding), filled)])
    classes = _classes(source, token, target, vocab)
    merged = np.unique(np.stack([source, classes[token], target]), axis=1)
    return TokenAutomaton(classes, merged[0], merged[1], merged[2], int(np.searchsorted(names, start)), accepting)


def _classes(
    source: NDArray[np.int64], token: NDArray[np.int64], target: NDArray[np.int64], vocab: int
) -> NDArray[np.int64]:
    """The class of each token: tokens with the same transitions have one, those without any have 0."""
    order = np.lexsort((target, source, token))
    source, token, target = source[order], token[order], target[order]
    used, first = np.unique(token, return_index=True)
    seen: dict[bytes, int] = {}
    classes = np.zeros(vocab, dtype=np.int64)
    pairs = np.stack([source, target], axis=1)
    for name, group in zip(used.tolist(), np.split(pairs, first[1:]), strict=True):
        classes[name] = seen.setdefault(group.tobytes(), len(seen) + 1)
    return classes
