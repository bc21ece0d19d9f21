"""Forms of answers, compiled for one model's tokens."""

import importlib.util
import marshal
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from remask.answers.structured_worker import CompiledPattern, CompilerSettings
from remask.checks.plugins import install_command
from remask.errors import ConfigError, FormError
from remask.machine.helper import HelperError, Helpers, LateError, RefusedError, StartError
from remask.model.config import ModelConfig
from remask.readers.constraint import Constraint
from remask.request.forms import FormSource, StructuredOutputs
from remask.sampling.automaton import TokenAutomaton
from remask.text.tokenizer import Tokenizer

MAX_SECONDS = 2
"""Processor time of one compilation, for a small vocabulary; a large one has a second more for each 50,000 tokens."""
WAIT = 20
"""Limit of wall time, as a multiple of the processor time. It is wide, as waiting for a core counts."""
MAX_BYTES = 2 << 30
MAX_TRANSITIONS = 2**22
MAX_STATES = 2048
MAX_CLASS_TRANSITIONS = 2**16
"""Transitions by classes of tokens. Every step of a request visits all of them for each position of its block."""
CACHE_SIZE = 64
"""Number of the most recently used forms whose constraint or error is cached."""


class _TransientError(FormError):
    """An error that is not cached: the same form may compile another time."""


class Structures:
    """Compiles forms for one vocabulary, and caches them. Thread-safe.

    A form is compiled once, however many threads ask for it at a time, even if its compilation fails.

    Args:
        tokens: the bytes of each token id, or None if a token is no part of a text.
        padding: ids of tokens that end a response and fill it up.
    """

    def __init__(self, tokens: Sequence[bytes | None], padding: Sequence[int]) -> None:
        self._tokens = [(token, content) for token, content in enumerate(tokens) if content is not None]
        self._by_bytes = {content: token for token, content in self._tokens}
        self._vocab_size = len(tokens)
        self._padding = tuple(padding)
        self._forms: OrderedDict[FormSource, Future[Constraint]] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    @classmethod
    def of_model(cls, tokenizer: Tokenizer | None, config: ModelConfig) -> "Structures":
        """Return the structures for the vocabulary of a model.

        Raises `FormError` if it has no tokenizer, or one of which `token_bytes` cannot tell the bytes of each token.
        """
        if tokenizer is None:
            raise FormError(" cannot be met without a tokenizer, and this model folder has none")
        tokens = tokenizer.token_bytes(config.vocab)
        excluded = {config.mask_id, *config.stop_ids}
        padding = [token for token in config.stop_ids if token in tokenizer.special_ids]
        return cls([None if token in excluded else content for token, content in enumerate(tokens)], padding)

    def compile(self, form: StructuredOutputs, beginning: str = "") -> Constraint:
        """The constraint of a form, or of the rest of an answer with this `beginning`. Waits for other threads.

        Raises `FormError` if the form cannot be compiled within the limits, and if no answer begins so.
        """
        constraint = self._compile_once(form)
        if not beginning:
            return constraint
        return constraint.continued_from(self._state_after(constraint.automaton, beginning))

    def _state_after(self, automaton: TokenAutomaton, text: str) -> int:
        """The state of an automaton after `text`, which is the same for any tokens that spell it.

        Raises `FormError` if no answer begins with `text`.
        """
        content = text.encode()
        # Tokens of single bytes, if there are all of them, reach every state that longer tokens reach.
        has_byte_tokens = all(content[i : i + 1] in self._by_bytes for i in range(len(content)))
        sizes = [1] if has_byte_tokens else sorted(set(map(len, self._by_bytes)))
        states = {0: automaton.start}  # by the number of bytes that lead to them
        for offset in range(len(content)):
            if offset in states:
                for size in sizes:
                    token = self._by_bytes.get(content[offset : offset + size])
                    state = None if token is None else automaton.next_state(states[offset], token)
                    if state is not None:
                        states[offset + size] = state
        if len(content) not in states:
            index = len(content[: max(states)].decode(errors="ignore"))
            raise FormError(
                f": the answer that is to be continued leaves the form at character {index + 1}: no "
                f"answer has {text[index]!r} behind {text[max(0, index - 20) : index]!r}; shorten it, or ask for "
                "another form"
            )
        return states[len(content)]

    def _compile_once(self, form: StructuredOutputs) -> Constraint:
        """The constraint of a form, from the cache, another thread or a compilation. Raises its `FormError`."""
        key = form.source
        with self._lock:
            is_new = key not in self._forms
            future = self._forms.setdefault(key, Future())
            self._forms.move_to_end(key)
        if is_new:
            self._compile_into(key, future)
        error = future.exception()
        if isinstance(error, ConfigError):
            raise copy(error)  # so that no two callers share a traceback
        return future.result()

    def _compile_into(self, key: FormSource, future: Future[Constraint]) -> None:
        """Set the result or the exception of `future`. Removes transient errors and the oldest forms from the cache."""
        is_final = True
        try:
            future.set_result(Constraint(self._automaton(self._compile_source(key))))
        except BaseException as error:
            is_final = isinstance(error, ConfigError) and not isinstance(error, _TransientError)
            future.set_exception(copy(error) if isinstance(error, ConfigError) else error)
        with self._lock:
            if not is_final:
                del self._forms[key]
            finished = [key for key, form in self._forms.items() if form.done()]
            for oldest in finished[:-CACHE_SIZE]:
                del self._forms[oldest]

    def is_cached(self, form: StructuredOutputs) -> bool:
        """Whether `compile` returns the constraint of a form, or raises its error, at once."""
        with self._lock:
            future = self._forms.get(form.source)
        return future is not None and future.done()

    def _compile_source(self, source: FormSource) -> CompiledPattern:
        """Compile the source of a form in a process of its own.

        Raises `FormError`.
        """
        if importlib.util.find_spec("outlines_core") is None:
            raise _TransientError(f" need the package outlines-core: {install_command('server')}")
        seconds = MAX_SECONDS + self._vocab_size // 50_000
        settings: CompilerSettings = {
            "tokens": self._tokens,
            "vocab_size": self._vocab_size,
            "max_transitions": MAX_TRANSITIONS,
        }
        task = "remask.answers.structured_worker:compiler"
        wait = WAIT * seconds
        helpers = Helpers(
            task, marshal.dumps(cast("Any", settings)), seconds=seconds, memory=MAX_BYTES, background=True, wait=wait
        )
        failure = f": the {_FORM_NAMES[source.kind]} cannot be compiled:"
        try:
            answer: CompiledPattern = marshal.loads(helpers.ask(marshal.dumps(source.expression)))
        except (LateError, StartError) as error:
            raise _TransientError(f"{failure} {error}; try again later") from error
        except (RefusedError, HelperError) as error:
            raise FormError(f"{failure} {error}") from error
        finally:
            helpers.close()
        return answer

    def _automaton(self, compiled: CompiledPattern) -> TokenAutomaton:
        """The automaton of a compiled pattern. Raises `FormError` if it is too large."""
        columns = [np.frombuffer(compiled[name], dtype=np.int64) for name in ("source", "label", "target")]
        final = np.array(compiled["final"], dtype=np.int64)
        automaton = automaton_of(np.stack(columns, axis=1), compiled["start"], final, self._vocab_size, self._padding)
        states = "states", automaton.state_count, MAX_STATES
        transitions = "transitions", automaton.transition_count, MAX_CLASS_TRANSITIONS
        for name, size, limit in (states, transitions):
            if size > limit:
                raise FormError(
                    f": its automaton has {size} {name}, and at most {limit} are taken; ask for a simpler form"
                )
        return automaton


_FORM_NAMES = {"regex": "regular expression", "json": "JSON schema"}


def automaton_of(
    edges: NDArray[np.int64], start: int, final: NDArray[np.int64], vocab_size: int, padding: Sequence[int] = ()
) -> TokenAutomaton:
    """The automaton with these `edges`, int64 [E, 3]: a state, a token id, the state that it leads to.

    States are any numbers; `final` are the accepting ones. `padding` tokens lead from accepting states to a state of
    their own, from which only they lead on.
    """
    state_ids = np.unique(np.concatenate([edges[:, 0], edges[:, 2], final, [start]]))
    source = np.searchsorted(state_ids, edges[:, 0])
    token = edges[:, 1]
    target = np.searchsorted(state_ids, edges[:, 2])
    padding_state = len(state_ids)
    accepting = np.zeros(len(state_ids) + 1, dtype=np.bool_)
    accepting[np.searchsorted(state_ids, final)] = True
    if padding:
        ends = np.append(np.flatnonzero(accepting), padding_state)
        accepting[padding_state] = True
        source = np.concatenate([source, np.tile(ends, len(padding))])
        token = np.concatenate([token, np.repeat(np.asarray(padding, dtype=np.int64), len(ends))])
        target = np.concatenate([target, np.full(len(ends) * len(padding), padding_state)])
    classes = _classes(source, token, target, vocab_size)
    merged = np.unique(np.stack([source, classes[token], target]), axis=1)
    return TokenAutomaton(classes, merged[0], merged[1], merged[2], int(np.searchsorted(state_ids, start)), accepting)


def _classes(
    source: NDArray[np.int64], token: NDArray[np.int64], target: NDArray[np.int64], vocab_size: int
) -> NDArray[np.int64]:
    """The class of each token, int64 [vocab_size]: equal transitions share one, tokens without any have 0."""
    order = np.lexsort((target, source, token))
    transitions = np.stack([source[order], target[order]], axis=1)
    token_ids, starts = np.unique(token[order], return_index=True)
    class_ids: dict[bytes, int] = {}
    classes = np.zeros(vocab_size, dtype=np.int64)
    for token_id, group in zip(token_ids.tolist(), np.split(transitions, starts[1:]), strict=True):
        classes[token_id] = class_ids.setdefault(group.tobytes(), len(class_ids) + 1)
    return classes
