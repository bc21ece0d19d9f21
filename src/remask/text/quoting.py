"""Names of special tokens in texts that are not to become these tokens: users type them, and templates write them.

A quoted text holds one private character in place of each such name. So it goes through a chat template as any text,
and what the template itself writes is told apart from what users wrote.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

_FIRST = 0x100000
"""The private characters from here on stand for names, in their order.

The one behind them stands before a private character that a text has itself.
"""


class Quoting:
    """Quotes the names of some special tokens."""

    def __init__(self, names: Iterable[str]) -> None:
        ordered = sorted(set(names) - {""})
        self._marks = {name: chr(_FIRST + place) for place, name in enumerate(ordered)}
        self._names = {mark: name for name, mark in self._marks.items()}
        self._escape = chr(_FIRST + len(ordered))
        private = f"[{chr(_FIRST)}-{self._escape}]"
        self.pattern = re.compile(_any_of(ordered) if ordered else "(?!)")
        self._quotable = re.compile(f"{self.pattern.pattern}|{private}")
        self._quote = re.compile(f"{self._escape}.|{private}", re.DOTALL)

    def quoted(self, value: Any) -> Any:
        """A text, or all texts of lists and objects, keys included, with private characters in place of names."""
        if isinstance(value, str):
            return self._quotable.sub(self._mark, value)
        if isinstance(value, Mapping):
            return {self.quoted(key): self.quoted(each) for key, each in value.items()}
        return [self.quoted(each) for each in value] if isinstance(value, list | tuple) else value

    def holds_quotes(self, text: str) -> bool:
        """Whether a text holds a private character."""
        return self._quote.search(text) is not None

    def plain(self, text: str) -> str:
        """A quoted text as it was."""
        return self._quote.sub(lambda found: self._names.get(found[0], found[0][-1]), text)

    def _mark(self, found: re.Match[str]) -> str:
        return self._marks.get(found[0], self._escape + found[0])


def _any_of(names: list[str]) -> str:
    """An expression of the longest of `names` that begins at a place, which looks at no character twice."""
    if names == [""]:
        return ""
    rest: dict[str, list[str]] = {}
    for name in names:
        if name:
            rest.setdefault(name[0], []).append(name[1:])
    branches = "|".join(re.escape(first) + _any_of(others) for first, others in rest.items())
    if "" in names:
        return f"(?:{branches})?"
    return f"(?:{branches})" if len(rest) > 1 else branches
