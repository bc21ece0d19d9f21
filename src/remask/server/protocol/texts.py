"""Bodies of what converts between text and tokens."""

from typing import Annotated, Any

from remask.server.declared import Checked
from remask.server.protocol.base import Body, LongText, Name, TokenIds
from remask.server.protocol.conversation import VARIABLES, Messages


class TokenizeBody(Body):
    """Body of `/tokenize`, with a text or a conversation."""

    model: Name | None = None
    prompt: LongText | None = None
    messages: Messages | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: Annotated[dict[str, Any] | None, Checked("chat_template_kwargs", VARIABLES)] = None
    control_tokens: bool | None = None


class DetokenizeBody(Body):
    """Body of `/detokenize`."""

    model: Name | None = None
    tokens: TokenIds
