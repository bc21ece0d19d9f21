"""Recent prompts of each tenant, as radix trees over tokens: with which earlier prompt a new one begins alike."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = NDArray[np.int32]

MAX_PROMPTS = 64
MAX_TOKENS = 65_536
MAX_TENANTS = 64


@dataclass(slots=True, eq=False)
class _Node:
    """A run of tokens that follows `parent`. The children begin with different tokens.

    A node that is no root has two children or more, or a prompt `ends` with it: there are less than twice as many as
    prompts.
    """

    tokens: Tokens  # a copy, so that no prompt is kept for the sake of a part
    parent: "_Node | None"
    children: dict[int, "_Node"] = field(default_factory=dict)
    ends: bool = False

    def lead(self, tokens: Tokens) -> int:
        """How many leading tokens of the node `tokens` begins with."""
        count = min(len(self.tokens), len(tokens))
        differ = np.flatnonzero(self.tokens[:count] != tokens[:count])
        return int(differ[0]) if len(differ) else count


@dataclass(slots=True, eq=False)
class PromptTree:
    """The last prompts of one tenant: at most `max_prompts`, whose tree has at most `max_tokens` tokens.

    A prompt that alone has more than `max_tokens` tokens is kept as far as they go. Time for a prompt grows with its
    length and with the number of prompts kept, not with their product.
    """

    max_prompts: int = MAX_PROMPTS
    max_tokens: int = MAX_TOKENS
    tokens: int = 0  # in all nodes
    _root: _Node = field(default_factory=lambda: _Node(np.empty(0, np.int32), None))
    _ends: OrderedDict[int, _Node] = field(default_factory=OrderedDict)  # by identity, the oldest first

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, prompt: Sequence[int]) -> int:
        """Remember `prompt`. Returns how many leading tokens of it an earlier one begins with too."""
        tokens = np.asarray(prompt, dtype=np.int32)[: self.max_tokens]
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            lead = child.lead(tokens[at:])
            at += lead
            if lead < len(child.tokens):
                node = self._split(child, lead)
                break
            node = child
        common = at
        if at < len(tokens):
            node = self._append(node, tokens[at:].copy())
        node.ends = True
        self._ends[id(node)] = node
        self._ends.move_to_end(id(node))
        while len(self._ends) > self.max_prompts or self.tokens > self.max_tokens:
            self._forget(self._ends.popitem(last=False)[1])
        return common

    def _append(self, parent: _Node, tokens: Tokens) -> _Node:
        node = parent.children[int(tokens[0])] = _Node(tokens, parent)
        self.tokens += len(tokens)
        return node

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut `node` after its first `at` tokens, 0 < at < all. Returns the first half; `node` is the second."""
        assert node.parent is not None
        first = _Node(node.tokens[:at].copy(), node.parent)
        node.parent.children[int(first.tokens[0])] = first
        node.tokens, node.parent = node.tokens[at:].copy(), first
        first.children[int(node.tokens[0])] = node
        return first

    def _forget(self, node: _Node) -> None:
        """Forget the prompt that ends with `node`, and the tokens that no other prompt has."""
        node.ends = False
        parent = node.parent
        while parent is not None and not node.children and not node.ends:
            del parent.children[int(node.tokens[0])]
            self.tokens -= len(node.tokens)
            node, parent = parent, parent.parent
        if parent is not None and not node.ends and len(node.children) == 1:
            # The child stays, as prompts are known by it.
            (child,) = node.children.values()
            child.tokens, child.parent = np.concatenate([node.tokens, child.tokens]), parent
            parent.children[int(child.tokens[0])] = child


@dataclass(slots=True)
class RecentPrompts:
    """The trees of up to `max_tenants` tenants, by `cache_salt`.

    Where there are more, tenants of which no two prompts had `useful` tokens in common go before those that share,
    whoever asked last. So one who sends a new salt with every prompt pushes out one tenant that gains by being
    remembered, and no more.
    """

    max_tenants: int = MAX_TENANTS
    useful: int = 1
    _trees: OrderedDict[str, PromptTree] = field(default_factory=OrderedDict)
    _sharing: set[str] = field(default_factory=set)

    @property
    def prompts(self) -> int:
        """Prompts remembered."""
        return sum(map(len, self._trees.values()))

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return sum(tree.tokens for tree in self._trees.values())

    def add(self, prompt: Sequence[int], cache_salt: str) -> int:
        """As `PromptTree.add`, for one tenant."""
        tree = self._trees.setdefault(cache_salt, PromptTree())
        self._trees.move_to_end(cache_salt)
        common = tree.add(prompt)
        if common >= self.useful:
            self._sharing.add(cache_salt)
        if len(self._trees) > self.max_tenants:
            idle = (salt for salt in self._trees if salt not in self._sharing and salt != cache_salt)
            victim = next(idle, next(iter(self._trees)))
            del self._trees[victim]
            self._sharing.discard(victim)
        return common
