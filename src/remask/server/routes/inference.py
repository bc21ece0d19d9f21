"""Endpoints that generate text, and those that convert between text and tokens."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from remask.errors import ConfigError
from remask.server.bodies import BodyRoute
from remask.server.document import READS, RUNS, answers
from remask.server.errors import json_response
from remask.server.generation import Choices
from remask.server.protocol.generation import ChatBody, CompletionBody
from remask.server.protocol.texts import DetokenizeBody, TokenizeBody
from remask.server.routes.common import service_of
from remask.server.schemas.choices import ChatAnswer, ChatEvent, CompletionAnswer, CompletionEvent
from remask.server.schemas.info import DetokenizedText, Tokens
from remask.server.schemas.messages import MessageAnswer, MessageEvent, MessagesError, TokenCount
from remask.server.schemas.responses import ResponseAnswer, ResponseEvent
from remask.server.shapes import ChatShape, CompletionShape
from remask.server.surfaces.messages_answer import MessagesAnswer
from remask.server.surfaces.messages_body import CountTokensBody, MessagesBody
from remask.server.surfaces.responses_answer import ResponsesAnswer
from remask.server.surfaces.responses_body import ResponsesBody
from remask.text.prompts import text_tokens


async def chat_completions(request: Request, body: ChatBody) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    return await service.answer(request, body, service.intake.chat, partial(Choices, shape=ChatShape))


async def completions(request: Request, body: CompletionBody) -> Response:
    """Answer one or more prompts."""
    service = service_of(request)
    return await service.answer(request, body, service.intake.completion, partial(Choices, shape=CompletionShape))


async def responses(request: Request, body: ResponsesBody) -> Response:
    """Answer a conversation in the form of OpenAI's newer API; nothing is kept beyond the answer."""
    service = service_of(request)
    return await service.answer(request, body.chat, service.intake.chat, partial(ResponsesAnswer, asked=body))


async def messages(request: Request, body: MessagesBody) -> Response:
    """Answer a conversation in the form of Anthropic's API."""
    service = service_of(request)
    return await service.answer(request, body.chat, service.intake.chat, MessagesAnswer)


async def count_tokens(request: Request, body: CountTokensBody) -> Response:
    """Count the tokens of such a conversation, as the chat template renders it."""
    service, chat = service_of(request), body.chat
    service.intake.check_model(chat.model)
    size = service.intake.check_size(chat)
    told = chat.messages, True, chat.variables, body.control_tokens
    tokens = await service.off_loop(request, size, service.intake.conversation, *told)
    return json_response({"input_tokens": len(tokens)})


async def tokenize(request: Request, body: TokenizeBody) -> Response:
    """Return the token ids of a text, or of a conversation as the chat template renders it."""
    service = service_of(request)
    service.intake.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ConfigError("a body needs either prompt or messages")
    size = service.intake.check_size(body)
    if body.prompt is not None:
        told = body.prompt, service.intake.tokenizer, body.control_tokens
        tokens = await service.off_loop(request, size, text_tokens, *told)
    else:
        call = service.intake.conversation
        how = body.add_generation_prompt, body.chat_template_kwargs, body.control_tokens
        tokens = await service.off_loop(request, size, call, body.messages, *how)
    fields = {"count": len(tokens), "max_model_len": service.llm.engine.max_model_len, "tokens": tokens}
    return json_response(fields)


async def detokenize(request: Request, body: DetokenizeBody) -> Response:
    """Return the text of token ids, special tokens included."""
    service = service_of(request)
    service.intake.check_model(body.model)
    vocab, most = service.llm.loaded.config.vocab, service.intake.max_prompt_chars
    if len(body.tokens) > most:
        raise ConfigError(f"tokens holds {len(body.tokens)} token ids; at most {most} are taken (max_prompt_chars)")
    bad = [token for token in body.tokens if not 0 <= token < vocab]
    if bad:
        raise ConfigError(f"tokens holds {bad[0]}; token ids are whole numbers from 0 to {vocab - 1}")
    call, tokens = service.intake.tokenizer.decode, body.tokens
    return json_response({"prompt": await service.off_loop(request, len(tokens), call, tokens, False)})


def router() -> APIRouter:
    """The routes of this module."""
    made = APIRouter(route_class=BodyRoute)

    def post(path: str, endpoint: Callable[..., Awaitable[Response]], told: dict[int | str, Any]) -> None:
        made.add_api_route(path, endpoint, methods=["POST"], responses=told)

    post("/v1/chat/completions", chat_completions, answers(ChatAnswer, *RUNS, stream=ChatEvent))
    post("/v1/completions", completions, answers(CompletionAnswer, *RUNS, stream=CompletionEvent))
    post("/v1/responses", responses, answers(ResponseAnswer, *RUNS, stream=ResponseEvent))
    post("/v1/messages", messages, answers(MessageAnswer, *RUNS, stream=MessageEvent, error=MessagesError))
    post("/v1/messages/count_tokens", count_tokens, answers(TokenCount, *READS, 429, error=MessagesError))
    post("/tokenize", tokenize, answers(Tokens, *READS, 429))
    post("/detokenize", detokenize, answers(DetokenizedText, *READS, 429))
    # The name that Inception's and Mistral's APIs have for a prompt and its suffix.
    made.add_api_route("/v1/fim/completions", completions, methods=["POST"], include_in_schema=False)
    return made
