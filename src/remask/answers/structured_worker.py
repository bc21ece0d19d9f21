"""Compiles a form of answers: a task of helpers (`remask.machine.helper`), which `remask.answers.structured` asks.

Patterns are whatever clients send, so that compiling them has limits of time and memory.
"""

import marshal
import re
from array import array
from typing import Any, TypedDict, cast

from remask.machine.helper import Answers, RefusedError

END = "\U0010ffff"
"""Follows a pattern, as a token of its own. outlines-core leaves out transitions from complete to incomplete texts,
such as from `yes` to `yes n`; with a token behind it, no text is complete."""


MAX_REASON = 300
"""Characters of the reason of outlines-core, which may repeat a long pattern."""


class CompilerSettings(TypedDict):
    """What all patterns of a process have in common."""

    tokens: list[tuple[int, bytes]]
    """Id and bytes of each token that texts may hold."""
    vocab_size: int
    max_transitions: int


class CompiledPattern(TypedDict):
    """An automaton of tokens. Its transitions are columns, the bytes of int64 numbers."""

    source: bytes
    label: bytes
    """The token of each transition."""
    target: bytes
    start: int
    final: list[int]


def compile_pattern(pattern: str, settings: CompilerSettings) -> CompiledPattern:
    """Return the automaton of the token sequences that spell what `pattern` matches.

    Raises `RefusedError` if outlines-core refuses the pattern, or if there are too many transitions.
    """
    from outlines_core import Index, Vocabulary

    tokens: dict[str | bytes, list[int]] = {}
    for token, content in settings["tokens"]:
        tokens.setdefault(content, []).append(token)
    end = settings["vocab_size"]  # the id of `END`, the first that no token of the model has
    ends_itself = _ends_itself(pattern)
    if not ends_itself:
        pattern = f"({pattern}){END}"
    tokens[END.encode()] = [end]
    try:
        index = Index(pattern, Vocabulary(eos_token_id=end + 1, map=tokens))
    except (ValueError, TypeError) as error:
        raise RefusedError(str(error).split("\n")[0][:MAX_REASON]) from error
    source, label, target = array("q"), array("q"), array("q")
    index_final_states = index.get_final_states()
    final = set(index_final_states) if ends_itself else set[int]()
    for state, transitions in index.get_transitions().items():
        if not ends_itself and transitions.get(end) in index_final_states:
            final.add(state)
        for token, next_state in transitions.items():
            if token < end:  # `END` and outlines-core's own end are no tokens of the model
                source.append(state)
                label.append(token)
                target.append(next_state)
        if len(source) > settings["max_transitions"]:
            raise RefusedError(f"its automaton has more than {settings['max_transitions']} transitions")
    return {
        "source": source.tobytes(),
        "label": label.tobytes(),
        "target": target.tobytes(),
        "start": index.get_initial_state(),
        "final": sorted(final),
    }


def _ends_itself(pattern: str) -> bool:
    """Whether `END` cannot follow a pattern: it has an end anchor, or would close a bracket around it."""
    depth = 0
    for piece in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):  # a set is one piece
        depth += (piece == "(") - (piece == ")")
        if piece in ("$", r"\z") or depth < 0:
            return True
    return False


def compiler(settings: bytes) -> Answers:
    """Return a function that compiles patterns by these `CompilerSettings`. All bytes are of Python's `marshal`."""
    compiler_settings: CompilerSettings = marshal.loads(settings)

    def compile_form(pattern: bytes) -> bytes:
        return marshal.dumps(cast("Any", compile_pattern(marshal.loads(pattern), compiler_settings)))

    return compile_form
