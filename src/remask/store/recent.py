"""Recent prompts of each tenant, as radix trees over tokens, which find what a new prompt has in common with them."""

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

    Except for the root, a node has at least two children or is the end of a prompt. So there are fewer than twice as
    many nodes as prompts.
    """

    tokens: Tokens  # a copy, as a view would keep the whole prompt in memory
    parent: "_Node | None"
    children: dict[int, "_Node"] = field(default_factory=dict)  # by their first token
    is_end: bool = False  # whether a prompt ends here

    def common_length(self, tokens: Tokens) -> int:
        """Number of leading tokens that the node and `tokens` have in common."""
        count = min(len(self.tokens), len(tokens))
        mismatches = np.flatnonzero(self.tokens[:count] != tokens[:count])
        return int(mismatches[0]) if len(mismatches) else count


@dataclass(slots=True, eq=False)
class PromptTree:
    """The last prompts of one tenant: at most `max_prompts`, whose tree has at most `max_tokens` tokens.

    A longer prompt is cut to its first `max_tokens` tokens. Adding a prompt takes O(length + number of prompts) time.
    """

    max_prompts: int = MAX_PROMPTS
    max_tokens: int = MAX_TOKENS
    token_count: int = 0  # in all nodes
    _root: _Node = field(default_factory=lambda: _Node(np.empty(0, np.int32), None))
    _ends: OrderedDict[int, _Node] = field(default_factory=OrderedDict)  # last nodes of prompts by id(), oldest first

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, prompt: Sequence[int]) -> int:
        """Remember `prompt`. Returns the largest number of leading tokens that it shares with an earlier prompt."""
        tokens = np.asarray(prompt, dtype=np.int32)[: self.max_tokens]
        node = self._root
        common = 0
        while common < len(tokens):
            child = node.children.get(int(tokens[common]))
            if child is None:
                break
            length = child.common_length(tokens[common:])
            common += length
            if length < len(child.tokens):
                node = self._split(child, length)
                break
            node = child
        if common < len(tokens):
            node = self._append(node, tokens[common:].copy())
        node.is_end = True
        self._ends[id(node)] = node
        self._ends.move_to_end(id(node))
        while len(self._ends) > self.max_prompts or self.token_count > self.max_tokens:
            self._forget(self._ends.popitem(last=False)[1])
        return common

    def _append(self, parent: _Node, tokens: Tokens) -> _Node:
        node = _Node(tokens, parent)
        parent.children[int(tokens[0])] = node
        self.token_count += len(tokens)
        return node

    def _split(self, node: _Node, length: int) -> _Node:
        """Move the first `length` tokens of `node`, 0 < `length` < all, to a new parent. Returns the parent."""
        assert node.parent is not None
        head = _Node(node.tokens[:length].copy(), node.parent)
        node.parent.children[int(head.tokens[0])] = head
        node.tokens = node.tokens[length:].copy()
        node.parent = head
        head.children[int(node.tokens[0])] = node
        return head

    def _forget(self, node: _Node) -> None:
        """Forget the prompt that ends with `node`, and the tokens that no other prompt has."""
        node.is_end = False
        parent = node.parent
        while parent is not None and not node.children and not node.is_end:
            del parent.children[int(node.tokens[0])]
            self.token_count -= len(node.tokens)
            node, parent = parent, parent.parent
        if parent is not None and not node.is_end and len(node.children) == 1:
            # Merge the node into its child, and not the reverse, because `_ends` may refer to the child.
            (child,) = node.children.values()
            child.tokens = np.concatenate([node.tokens, child.tokens])
            child.parent = parent
            parent.children[int(child.tokens[0])] = child


@dataclass(slots=True)
class RecentPrompts:
    """The trees of up to `max_tenants` tenants, by `cache_salt`.

    If there are more, the least recently used tenant is dropped among those of whose prompts no two have had
    `min_shared` leading tokens in common, or among all if every tenant has such prompts. So a client that sends a new
    salt with every prompt can push out at most one tenant for which remembering pays.
    """

    max_tenants: int = MAX_TENANTS
    min_shared: int = 1
    _trees: OrderedDict[str, PromptTree] = field(default_factory=OrderedDict)
    _sharing_tenants: set[str] = field(default_factory=set)

    @property
    def prompt_count(self) -> int:
        """Number of prompts that are remembered."""
        return sum(map(len, self._trees.values()))

    @property
    def token_count(self) -> int:
        """Number of tokens that are stored."""
        return sum(tree.token_count for tree in self._trees.values())

    def add(self, prompt: Sequence[int], cache_salt: str) -> int:
        """`PromptTree.add` in the tree of the tenant `cache_salt`."""
        tree = self._trees.setdefault(cache_salt, PromptTree())
        self._trees.move_to_end(cache_salt)
        common = tree.add(prompt)
        if common >= self.min_shared:
            self._sharing_tenants.add(cache_salt)
        if len(self._trees) > self.max_tenants:
            candidates = (salt for salt in self._trees if salt not in self._sharing_tenants and salt != cache_salt)
            oldest = next(iter(self._trees))
            victim = next(candidates, oldest)
            del self._trees[victim]
            self._sharing_tenants.discard(victim)
        return common
