"""Answers and tokens."""

from fastapi import APIRouter, Request, Response

from remask.errors import ConfigError
from remask.server.errors import json_response
from remask.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from remask.server.routes.common import documented, service_of
from remask.server.shapes import ChatShape, CompletionShape

router = APIRouter(responses=documented(400, 401, 404, 413, 422))


@router.post("/v1/chat/completions", responses=documented(429, 500, 503, 504))
async def chat_completions(request: Request, body: ChatBody) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    return await service.answer(request, body, service.intake.chat, ChatShape)


@router.post("/v1/completions", responses=documented(429, 500, 503, 504))
async def completions(request: Request, body: CompletionBody) -> Response:
    """Answer one or more prompts."""
    service = service_of(request)
    return await service.answer(request, body, service.intake.completion, CompletionShape)


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeBody) -> Response:
    """The token ids of a text, or of a conversation as the chat template renders it."""
    service = service_of(request)
    service.intake.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ConfigError("a body needs either prompt or messages")
    if body.prompt is not None:
        tokens = await service.off_loop(service.intake.tokenizer.encode, body.prompt)
    else:
        tokens = await service.off_loop(service.intake.conversation, body.messages, body.add_generation_prompt)
    told = {"count": len(tokens), "max_model_len": service.llm.engine.max_model_len, "tokens": tokens}
    return json_response(told)


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeBody) -> Response:
    """The text of token ids, special tokens included."""
    service = service_of(request)
    service.intake.check_model(body.model)
    vocab = service.llm.loaded.config.vocab
    bad = [token for token in body.tokens if not 0 <= token < vocab]
    if bad:
        raise ConfigError(f"tokens holds {bad[0]}; token ids are whole numbers from 0 to {vocab - 1}")
    return json_response({"prompt": await service.off_loop(service.intake.tokenizer.decode, body.tokens, False)})
