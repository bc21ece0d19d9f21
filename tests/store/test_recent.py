"""Trees of recent prompts beside a list of them."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from remask.store.recent import PromptTree, RecentPrompts


class Listed:
    """The last prompts of a tenant, as a plain list."""

    def __init__(self, max_prompts: int, max_tokens: int) -> None:
        self.max_prompts, self.max_tokens = max_prompts, max_tokens
        self.prompts: list[tuple[int, ...]] = []

    @property
    def tokens(self) -> int:
        """Different leading parts, each of which is a token of the tree."""
        return len({prompt[:end] for prompt in self.prompts for end in range(1, len(prompt) + 1)})

    def add(self, prompt: Sequence[int]) -> int:
        kept = tuple(prompt[: self.max_tokens])
        common = max((shared(kept, other) for other in self.prompts), default=0)
        self.prompts = [*(other for other in self.prompts if other != kept), kept]
        while len(self.prompts) > self.max_prompts or self.tokens > self.max_tokens:
            self.prompts.pop(0)
        return common


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def check(tree: PromptTree) -> None:
    """No node could be left out, and each knows its place."""
    left, nodes, tokens, ends = [tree._root], 0, 0, 0
    while left:
        node = left.pop()
        nodes, tokens, ends = nodes + 1, tokens + len(node.tokens), ends + node.is_end
        assert node is tree._root or len(node.tokens)
        assert node is tree._root or node.is_end or len(node.children) > 1
        for first, child in node.children.items():
            assert (child.parent, int(child.tokens[0])) == (node, first)
            assert child.tokens.base is None or child.tokens.base.size == child.tokens.size
        left += node.children.values()
    assert tokens == tree.token_count
    assert ends == len(tree)
    assert nodes <= 2 * len(tree) + 1


@pytest.mark.parametrize("seed", range(12))
def test_a_tree_knows_what_a_list_knows(seed: int) -> None:
    rng = random.Random(f"recent {seed}")
    bounds = rng.choice([1, 3, 8, 64]), rng.choice([1, 10, 40, 1000])
    tree, listed, letters = PromptTree(*bounds), Listed(*bounds), rng.choice([1, 2, 3, 50])
    for _ in range(120):
        if listed.prompts and rng.random() < 0.6:
            stem = rng.choice(listed.prompts)
            prompt = [*stem[: rng.randint(0, len(stem))], *(rng.randrange(letters) for _ in range(rng.randint(0, 6)))]
        else:
            prompt = [rng.randrange(letters) for _ in range(rng.randint(0, 20))]
        assert tree.add(prompt) == listed.add(prompt)
        assert (tree.token_count, len(tree)) == (listed.tokens, len(listed.prompts))
        check(tree)


def test_a_hostile_tenant_fills_no_more_than_its_own() -> None:
    recent = RecentPrompts(min_shared=4)
    assert recent.add(range(100), "good") == 0
    assert recent.add([*range(50), 7], "good") == 50
    for number in range(300):
        recent.add(np.random.default_rng(number).integers(0, 1000, 4000).tolist(), "bad")
    assert recent.token_count <= 65_536 + 101
    assert recent.add([*range(40), 8], "good") == 40


def test_new_salts_push_out_those_that_share_nothing_first() -> None:
    recent = RecentPrompts(max_tenants=3, min_shared=2)
    recent.add([1, 2, 3], "good")
    recent.add([1, 2, 4], "good")
    for number in range(20):
        recent.add([number, 1], f"new {number}")
        recent.add([number, 2], f"new {number}")  # one token alike is no use
    assert len(recent._trees) == 3
    assert recent.add([1, 2, 5], "good") == 2


def test_among_those_that_share_the_longest_silent_one_goes() -> None:
    recent = RecentPrompts(max_tenants=2)
    for salt in ("a", "b", "a", "b", "a"):
        recent.add([1, 2], salt)
    for _ in range(2):
        recent.add([1, 2], "c")
    recent.add([1, 2], "d")
    assert set(recent._trees) == {"c", "d"}
    assert recent._sharing_tenants == {"c"}
    assert recent.prompt_count == 2
