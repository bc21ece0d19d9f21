"""A tokenizer of the `tokenizers` library with the methods of transformers' that `remask.text` calls.

Importing transformers takes 0.7 s of CPU time, more than all else that a tokenizer made by this package needs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Core


class NativeTokenizer:
    """Encodes and decodes as `transformers.PreTrainedTokenizerFast(tokenizer_object=core, ...)` does.

    Args:
        core: a tokenizer without truncation and padding, in which all special tokens are marked as special.
        special: texts of special tokens by their roles, such as `eos_token`.
        chat_template: a Jinja template; None if there is none.
    """

    def __init__(self, core: Core, special: Mapping[str, str], chat_template: str | None) -> None:
        self.backend_tokenizer = core
        self.special_tokens_map = dict(special)
        self.chat_template = chat_template
        self.all_special_tokens = list(dict.fromkeys(special.values()))
        self.all_special_ids = [core.token_to_id(token) for token in self.all_special_tokens]

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The tokens that are split off before a text is tokenized, by their ids."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def encode(
        self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False, **_: Any
    ) -> list[int]:
        """The token ids of `text`. With `split_special_tokens` names of special tokens are ordinary text.

        The flag is a state of `core`, so calls that differ in it must not run at the same time.
        """
        core = self.backend_tokenizer
        if core.encode_special_tokens != split_special_tokens:
            core.encode_special_tokens = split_special_tokens
        # `encode_batch` releases the interpreter's lock, `encode` does not.
        (encoding,) = core.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of `ids`. Spaces are not cleaned up."""
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """The name of a token, or a list of those of several; the name is None if there is no such token."""
        name_of = self.backend_tokenizer.id_to_token
        return name_of(ids) if isinstance(ids, int) else [name_of(token) for token in ids]
