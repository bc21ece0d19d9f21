"""Clients that ask for decisions, as their users set them up. Prints what they came to."""

import asyncio
import json
import sys
from typing import Any, Literal

from langchain_openai.decisions import Choice, OpenAIDecisions, Predicate, Score
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai_decisions import OpenAIDecisionsModel
from pydantic_ai.models.system_one import SystemOneModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.system_one import SystemOneProvider
from typesafe_sdk import Choice as JevChoice
from typesafe_sdk import Noul, TypeSafeClient, TypeSafeNotFoundError
from typesafe_sdk import Score as JevScore

MESSAGES: list[Any] = [
    {"role": "developer", "content": "Orders are read out."},
    {
        "role": "user",
        "content": [{"type": "input_text", "text": "rope"}, {"type": "input_json", "data": {"by": ["Anna"]}}],
    },
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": "soap"}'},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "Ben"}]},
    {"type": "custom_tool_call", "call_id": "d", "name": "say", "input": "Ben"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": "said"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "Ben."}, {"type": "refusal", "refusal": "no"}]},
]
QUESTIONS: list[Any] = [
    {"type": "predicate", "name": "p", "instructions": [{"type": "input_text", "text": "Is it soap?"}]},
    {"type": "choice", "instructions": "Is it?", "choices": [{"value": "true"}, {"value": True, "description": "so"}]},
    {"type": "score", "name": "s", "instructions": "How?", "levels": [{"label": "bad"}, {"label": "good"}]},
]


def of_openai(base: str, model: str) -> dict[str, Any]:
    """Sync and async, three kinds, messages, 400 questions, typed values and errors."""
    client: Any = OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0)
    found = client.decisions.create(
        model=model,
        input=MESSAGES,
        questions=QUESTIONS,
        prompt_cache_key="k",
        prompt_cache_options={"mode": "explicit", "ttl": "30m"},
        safety_identifier="me",
        extra_body={"calibrate": False},
    )
    waiting: Any = AsyncOpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0)
    again = asyncio.run(waiting.decisions.create(model=model, input=MESSAGES, questions=QUESTIONS))
    many = client.decisions.create(model=model, input="rope", questions=[QUESTIONS[1]] * 400)
    failed = {}
    for name, fields in (
        ("questions", {"questions": [QUESTIONS[1]] * 401}),
        ("input", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}),
        ("model", {"model": "gpt-6-luna"}),
    ):
        try:
            client.decisions.create(**{"model": model, "input": "rope", "questions": QUESTIONS, **fields})
        except (BadRequestError, NotFoundError) as error:
            failed[name] = [error.status_code, error.param]
    return {
        "types": [type(answer).__name__.removeprefix("AnswerAnswerResource") for answer in found.answers],
        "names": [answer.name for answer in found.answers],
        "values": [repr(each.value) for each in found.answers[1].probabilities],
        "same": [answer.type for answer in found.answers] == [answer.type for answer in again.answers],
        "usage": found.usage.total_tokens == found.usage.input_tokens > 0,
        "many": len({round(answer.confidence, 4) for answer in many.answers}) == 1 and len(many.answers),
        "failed": failed,
        "probability": found.answers[0].probability,
    }


def of_typesafe(base: str) -> dict[str, Any]:
    with TypeSafeClient(api_key="any", base_url=base) as client:
        questions = {
            "n": Noul(criteria={"true": {"is": ["soap"]}}),
            "c": JevChoice(instructions=["Who?"], criteria={"Anna": None, "Ben": {"a": 1}}),
            "s": JevScore(instructions="How?", criteria=["bad", {"is": "good"}]),
        }
        found = client.system_one(state={"order": "rope"}, questions=questions)
        try:
            client.system_one(state="rope", questions=questions, model="other")
        except TypeSafeNotFoundError as error:
            unknown = str(error)
        models = [model.name for model in client.models.list().models]
    return {
        "noul": found.nouls["n"].noul,
        "choice": found.choices["c"].choice,
        "legend": found.scores["s"].legend,
        "model": found.model,
        "models": models,
        "unknown": unknown,
    }


def of_langchain(base: str, model: str) -> dict[str, Any]:
    decisions = OpenAIDecisions(model=model, base_url=f"{base}/v1", api_key="any", max_retries=0)
    questions = {
        "p": Predicate(instructions="Is it soap?"),
        "c": Choice(instructions="Who?", choices={"Anna": "first", "Ben": "second"}),
        "s": Score(instructions="How?", levels=["bad", "good"]),
    }
    found = decisions.invoke({"input": {"order": "rope"}, "questions": questions})
    return {"p": found.predicates["p"].probability, "c": found.choices["c"].choice, "s": found.scores["s"].score}


class Order(BaseModel):
    soap: bool = Field(description="Is it soap?")
    who: Literal["Anna", "Ben"] = Field(description="Who ordered it?")


def of_pydantic_ai(base: str, model: str) -> dict[str, Any]:
    system = SystemOneModel(model, provider=SystemOneProvider(base_url=base))
    openai = OpenAIDecisionsModel(model, provider=OpenAIProvider(base_url=f"{base}/v1", api_key="any"))
    told = {}
    for name, each in (("system_one", system), ("openai", openai)):
        agent: Agent[None, Order] = Agent(each, output_type=Order)
        told[name] = agent.run_sync("rope Anna").output.model_dump()
    return told


def main(base: str, model: str) -> dict[str, Any]:
    return {
        "openai": of_openai(base, model),
        "typesafe": of_typesafe(base),
        "langchain": of_langchain(base, model),
        "pydantic_ai": of_pydantic_ai(base, model),
    }


print(json.dumps(main(sys.argv[1], sys.argv[2])))
