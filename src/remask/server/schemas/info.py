"""Answers about the model and the server, and of what converts between text and tokens."""

from typing import Any, Literal

from remask.server.schemas.base import Answer, left_out


class CardQuestion(Answer):
    """A question that a bundled model can answer."""

    question: str
    answer: str
    canvas: str
    """The answer with holes: `[[n]]` is one of n tokens."""
    decision: dict[str, Any] | None
    """The same as a question of `/v1/decisions`."""


class ModelCard(Answer):
    """What a bundled model can answer."""

    answers: str
    system: str | None
    """The system prompt that the questions are about."""
    questions: list[CardQuestion]


class Model(Answer):
    """A served name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["remask"]
    max_model_len: int
    card: ModelCard = left_out()


class Models(Answer):
    """All served names."""

    object: Literal["list"]
    data: list[Model]


class Computing(Answer):
    """What computes passes, and why."""

    attention: str
    attention_why: str
    overlap: bool
    graphs: bool
    overlap_and_graphs_why: str


class Health(Answer):
    """Requests are accepted."""

    status: Literal["ok"]
    computing: Computing


class Version(Answer):
    """The version of remask."""

    version: str


class ModelInfo(Answer):
    """The model and the server's limits."""

    model_path: str
    is_generation: Literal[True]
    family: str
    fingerprint: str
    parameters: int
    layers: int
    vocab_size: int
    mask_token_id: int
    stop_token_ids: list[int]
    dtype: str
    device: str
    max_model_len: int
    max_num_seqs: int
    max_queue: int
    max_steps: int
    max_request_row_layers: int | None
    cache: str
    cache_config: dict[str, Any]
    store_budget_tokens: int
    has_chat_template: bool
    sampling: dict[str, Any]
    """Sampling parameters of requests that leave them out."""


class Tokens(Answer):
    """Token ids of a text, or of a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizedText(Answer):
    """The text of token ids, special tokens included."""

    prompt: str
