"""Endpoints that generate text, and those that convert between text and tokens."""

from functools import partial

from fastapi import Request, Response

from remask.errors import ConfigError
from remask.server.answers.base import Answer
from remask.server.answers.choices import ChatChoices, CompletionChoices
from remask.server.answers.messages import MessagesAnswer
from remask.server.answers.responses import ResponsesAnswer
from remask.server.errors import json_response
from remask.server.protocol.conversation import DetokenizeBody, TokenizeBody
from remask.server.protocol.generation import ChatBody, CompletionBody
from remask.server.protocol.messages import CountTokensBody, MessagesBody
from remask.server.protocol.responses import ResponsesBody
from remask.server.service import Body, RequestMaker, field_names, service_of
from remask.text.prompts import text_tokens


class TokenCount(Answer):
    """Tokens of a conversation."""

    input_tokens: int


class Tokens(Answer):
    """Token ids of a text, or of a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizedText(Answer):
    """The text of token ids, special tokens included."""

    prompt: str


class Rendered(Answer):
    """A prompt as the model reads it."""

    request_id: str
    model: str
    token_ids: list[int]


async def render_chat(request: Request, body: ChatBody) -> Response:
    """Return the token ids of a conversation, as its answer would begin with, for routers that know prompts by them."""
    (rendered,) = await _render(request, body, service_of(request).intake.chat)
    return json_response(rendered)


async def render_completion(request: Request, body: CompletionBody) -> Response:
    """Return the token ids of each prompt."""
    return json_response(await _render(request, body, service_of(request).intake.completion))


async def _render(request: Request, body: Body, make: RequestMaker[Body]) -> list[Rendered]:
    """The token ids of each prompt of a body. No request is run."""
    service = service_of(request)
    service.note_user(request, body.user)
    service.note_left_out(request, body.left_out)
    size = service.intake.check_size(body)
    model = body.model or service.config.model_names[0]
    with field_names(body):
        requests = await service.off_loop(request, size, make, body, request.state.request_id)
    return [
        {"request_id": first.id, "model": model, "token_ids": list(first.prompt_token_ids)}
        for first in requests[:: body.choices]
    ]


async def chat_completions(request: Request, body: ChatBody) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    return await service.answer(request, body, service.intake.chat, ChatChoices)


async def completions(request: Request, body: CompletionBody) -> Response:
    """Answer one or more prompts."""
    service = service_of(request)
    return await service.answer(request, body, service.intake.completion, CompletionChoices)


async def responses(request: Request, body: ResponsesBody) -> Response:
    """Answer a conversation in the form of OpenAI's newer API; nothing is kept beyond the answer."""
    service = service_of(request)
    return await service.answer(request, body.chat, service.intake.chat, partial(ResponsesAnswer, responses_body=body))


async def messages(request: Request, body: MessagesBody) -> Response:
    """Answer a conversation in the form of Anthropic's API."""
    service = service_of(request)
    return await service.answer(request, body.chat, service.intake.chat, MessagesAnswer)


async def count_tokens(request: Request, body: CountTokensBody) -> Response:
    """Count the tokens of such a conversation, as the chat template renders it."""
    service = service_of(request)
    chat = body.chat
    service.intake.check_model(chat.model)
    service.note_left_out(request, chat.left_out)
    size = service.intake.check_size(chat)
    args = chat.messages, *chat.ending, chat.variables, body.control_tokens
    tokens = await service.off_loop(request, size, service.intake.conversation, *args)
    return json_response({"input_tokens": len(tokens)})


async def tokenize(request: Request, body: TokenizeBody) -> Response:
    """Return the token ids of a text, or of a conversation as the chat template renders it."""
    service = service_of(request)
    service.intake.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ConfigError("a body needs either prompt or messages; send one of them")
    for name in ("continue_final_message", "chat_template_kwargs"):
        if body.prompt is not None and getattr(body, name):
            raise ConfigError(f"{name} is of messages, and a prompt has none; leave it out")
    size = service.intake.check_size(body)
    if body.prompt is not None:
        prompt = body.prompt, service.intake.tokenizer, body.control_tokens
        tokens = await service.off_loop(request, size, text_tokens, *prompt)
    else:
        ending = body.add_generation_prompt, bool(body.continue_final_message)
        chat = body.messages, *ending, body.chat_template_kwargs, body.control_tokens
        tokens = await service.off_loop(request, size, service.intake.conversation, *chat)
    max_model_len = service.llm.engine.max_model_len
    return json_response({"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens})


async def detokenize(request: Request, body: DetokenizeBody) -> Response:
    """Return the text of token ids, special tokens included."""
    service = service_of(request)
    service.intake.check_model(body.model)
    vocab = service.llm.loaded.config.vocab
    limit = service.intake.max_prompt_chars
    if len(body.tokens) > limit:
        raise ConfigError(f"tokens holds {len(body.tokens)} token ids; at most {limit} are taken (max_prompt_chars)")
    invalid = next((token for token in body.tokens if not 0 <= token < vocab), None)
    if invalid is not None:
        raise ConfigError(f"tokens holds {invalid}; token ids are whole numbers from 0 to {vocab - 1}")
    decode = service.intake.tokenizer.decode
    return json_response({"prompt": await service.off_loop(request, len(body.tokens), decode, body.tokens, False)})
