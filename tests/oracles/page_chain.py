"""How much of a prompt an unlimited pool of shared pages holds, told without hashes."""

from collections.abc import Sequence


class Pool:
    """Whole pages, each known by all tokens from position 0 to its end."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: set[tuple[int, ...]] = set()

    def hit_tokens(self, tokens: Sequence[int], limit: int) -> int:
        """How many leading tokens stand in pages found, one after the other; only whole pages up to `limit` count."""
        found = 0
        while found + self.page_size <= limit and tuple(tokens[: found + self.page_size]) in self.pages:
            found += self.page_size
        return found

    def publish(self, tokens: Sequence[int]) -> None:
        """Adds the complete pages of `tokens`, whose K/V are final."""
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            self.pages.add(tuple(tokens[:end]))
