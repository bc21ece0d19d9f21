"""Identity: equal for requests that can share a stored prefix, and told from a body alone."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.deploy.identity import prefix_identity

SYSTEM = {"role": "system", "content": "rules"}
FIRST = {"role": "user", "content": "one"}
REPLY = {"role": "assistant", "content": "yes"}
SECOND = {"role": "user", "content": "two"}
MARK = {"cache_control": {"type": "ephemeral"}}


def chat(*messages: dict[str, Any], **fields: Any) -> bytes | None:
    return prefix_identity({"messages": list(messages), **fields})


def test_conversations_are_known_by_their_opening() -> None:
    system = chat(SYSTEM, FIRST)
    assert system is not None
    assert system == chat(SYSTEM, SECOND) == chat(SYSTEM, FIRST, REPLY, SECOND)
    assert system == chat(
        {**SYSTEM, "content": [{"type": "text", "text": "ru"}, {"type": "text", "text": "les"}]}, FIRST
    )
    assert system == chat(SYSTEM, FIRST, temperature=1.0, stream=True, model="x")
    assert system != chat({**SYSTEM, "content": "other rules"}, FIRST)
    assert system != chat(SYSTEM, FIRST, cache_salt="tenant")
    assert chat(SYSTEM, FIRST, cache_salt="a") != chat(SYSTEM, FIRST, cache_salt="b")


def test_other_apis_have_the_systems_turn_apart() -> None:
    system = chat(SYSTEM, FIRST)
    assert system == prefix_identity({"system": "rules", "messages": [FIRST]})
    assert system == prefix_identity({"system": [{"type": "text", "text": "rules"}], "messages": [SECOND]})
    assert system == prefix_identity({"instructions": "rules", "input": "one"})
    assert system == prefix_identity({"input": [SYSTEM, FIRST]})
    assert prefix_identity({"input": "one"}) is None


def test_without_a_system_prompt_the_first_turn_is_the_opening() -> None:
    assert chat(FIRST) is None, "nothing stands before the last user turn"
    turn = chat(FIRST, REPLY, SECOND)
    assert turn is not None
    assert turn == chat(FIRST, REPLY, SECOND, REPLY, SECOND)
    assert turn != chat(SECOND, REPLY, FIRST)


def test_markers_and_lengths() -> None:
    other = {"role": "system", "content": "date"}
    assert chat({**SYSTEM, **MARK}, other, FIRST) == chat(SYSTEM, FIRST)
    assert chat(SYSTEM, other, FIRST) != chat(SYSTEM, FIRST)
    assert chat({**SYSTEM, **MARK}, {**other, **MARK}, FIRST) == chat(SYSTEM, other, FIRST), "the last marker counts"
    assert chat({**FIRST, **MARK}) is not None, "a marker may hold the whole prompt"
    assert chat(SYSTEM, FIRST, prefix_length=0) is None
    assert chat(SYSTEM, FIRST, prefix_length=5) == chat(SYSTEM, SECOND, prefix_length=5)


def test_text_prompts_share_what_they_say() -> None:
    ids = [1, 2, 3, 4]
    assert prefix_identity({"prompt": ids}) is None
    assert prefix_identity({"prompt": ids, "prefix_length": 3}) == prefix_identity(
        {"prompt": [1, 2, 3, 9], "prefix_length": 3}
    )
    assert prefix_identity({"prompt": "abcd", "prefix_length": 2}) == prefix_identity(
        {"prompt": ["abxy"], "prefix_length": 2}
    )


def test_no_cache_no_identity() -> None:
    assert chat(SYSTEM, FIRST, cache="none") is None


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "x",
        {},
        {"messages": []},
        {"messages": [5]},
        {"messages": [{}]},
        {"messages": "x"},
        {"prompt": 5, "prefix_length": 2},
        {"prompt": [], "prefix_length": 2},
        {"messages": [SYSTEM, FIRST], "prefix_length": "x"},
        {"messages": [SYSTEM, FIRST], "prefix_length": True},
    ],
)
def test_bodies_that_will_be_refused(body: Any) -> None:
    assert prefix_identity(body) is None


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "text"]), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["messages", "prompt", "prefix_length", "cache", "cache_salt"]), JSON))
def test_no_body_breaks_it(body: dict[str, Any]) -> None:
    found = prefix_identity(body)
    assert found is None or isinstance(found, bytes)
