"""What a request asks to be read of masks on its canvas, in place of an answer that is written."""

from collections.abc import Mapping
from dataclasses import dataclass

from remask.core.kinds import ModelKind, in_words
from remask.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer with masks in it, of which one pass is asked how probable some tokens are. Nothing is written.

    Attributes:
        token_ids: the answer; what stands at a mask is not looked at.
        masks: places of the answer that are masks, ascending, counted from its first token.
        slots: the masks that are read, and of each the tokens whose log-probabilities are returned.
    """

    token_ids: tuple[int, ...]
    masks: tuple[int, ...]
    slots: Mapping[int, tuple[int, ...]]

    @property
    def width(self) -> int:
        """Numbers a row that are read: those of the slot of most tokens."""
        return max(map(len, self.slots.values()))

    @staticmethod
    def check_kind(kind: ModelKind, family: str) -> None:
        """Raise `ConfigError` on a kind of model that has no masks to be read so."""
        if kind != "masked":
            raise ConfigError(
                "decisions read masks in one pass, with what stands before and behind them, and "
                f"{in_words((kind,))} models ({family}) have no such masks; use a masked model"
            )

    def check(self, vocab: int, mask_id: int) -> None:
        """Raise `ConfigError` where it cannot be read on a model of `vocab` tokens."""
        if not self.slots or not all(self.slots.values()):
            raise ConfigError("reading: it needs at least one slot, and each slot at least one token")
        if list(self.masks) != sorted(set(self.masks)) or not set(self.masks) <= set(range(len(self.token_ids))):
            raise ConfigError(f"reading.masks must be ascending places below {len(self.token_ids)}, got {self.masks}")
        if not self.slots.keys() <= set(self.masks):
            raise ConfigError(f"reading.slots holds {min(self.slots.keys() - set(self.masks))}, where no mask stands")
        tokens = {token for each in self.slots.values() for token in each} | set(self.token_ids)
        bad = [token for token in tokens if not 0 <= token < vocab]
        if bad:
            raise ConfigError(f"reading holds the token {bad[0]}; token ids are whole numbers from 0 to {vocab - 1}")
        if any(mask_id in each for each in self.slots.values()):
            raise ConfigError(f"reading.slots holds the mask token {mask_id}, which no answer has")
