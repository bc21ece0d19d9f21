"""A tokenizer of the `tokenizers` library with the methods of transformers' that `remask.text` calls.

Importing transformers takes 0.7 s of CPU time, more than all else that a tokenizer made by this package needs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Core


class NativeTokenizer:
    """Reads and writes texts as `transformers.PreTrainedTokenizerFast(tokenizer_object=core, ...)` does.

    Args:
        core: it neither cuts nor pads, and holds all special tokens as such.
        special: texts of special tokens by their roles, such as `eos_token`.
        chat_template: Jinja; None: there is none.
    """

    def __init__(self, core: Core, special: Mapping[str, str], chat_template: str | None) -> None:
        self.backend_tokenizer, self.special_tokens_map, self.chat_template = core, dict(special), chat_template
        self.all_special_tokens = list(dict.fromkeys(special.values()))
        self.all_special_ids = [core.token_to_id(token) for token in self.all_special_tokens]

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Tokens that are found in a text before it is read, by their ids."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_chat_template(self) -> str | None:
        """The chat template."""
        return self.chat_template

    def encode(
        self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False, **_: Any
    ) -> list[int]:
        """Token ids. With `split_special_tokens` names of special tokens are text, in this call and by a state."""
        core = self.backend_tokenizer
        if core.encode_special_tokens != split_special_tokens:
            core.encode_special_tokens = split_special_tokens
        # `encode` of a single text would hold the interpreter's lock.
        (encoding,) = core.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of `ids`. Spaces are not cleaned up."""
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """The name of a token, or those of several; None where there is no such token."""
        name = self.backend_tokenizer.id_to_token
        return name(ids) if isinstance(ids, int) else [name(token) for token in ids]
