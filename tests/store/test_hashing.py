import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.store.hashing import prefix_hash, salted
from tests.goldens import cache_policy

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=8)


@pytest.mark.parametrize("name", sorted(cache_policy()["prefixes"]))
def test_without_salt_it_is_the_authors_key(name: str) -> None:
    golden = cache_policy()
    assert prefix_hash(golden["prefixes"][name]) == int(golden["xxh64_of_uint32_le_ids"][name])


def test_the_salt_tells_models_apart() -> None:
    assert prefix_hash([1, 2], b"a:float32") != prefix_hash([1, 2], b"a:bfloat16")


@given(TOKENS, TOKENS)
def test_order_and_length_count(a: list[int], b: list[int]) -> None:
    assert (prefix_hash(a) == prefix_hash(b)) == (a == b)


@given(TOKENS)
def test_the_kind_of_sequence_does_not(tokens: list[int]) -> None:
    assert prefix_hash(tuple(tokens)) == prefix_hash(tokens)
    assert 0 <= prefix_hash(tokens) < 2**64


@pytest.mark.parametrize("token", [-1, 2**32])
def test_ids_beyond_32_bits_are_refused_not_wrapped(token: int) -> None:
    with pytest.raises(OverflowError):
        prefix_hash([token])


@given(st.text(), st.text(), TOKENS)
def test_tenants_salts_tell_them_apart(one: str, other: str, tokens: list[int]) -> None:
    assert (salted(b"model", one) == salted(b"model", other)) == (one == other)
    assert (prefix_hash(tokens, salted(b"m", one)) == prefix_hash(tokens, salted(b"m", other))) == (one == other)


def test_no_salt_of_a_tenant_changes_nothing() -> None:
    assert salted(b"model", "") == b"model"
