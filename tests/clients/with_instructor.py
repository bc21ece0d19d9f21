"""instructor, which makes a Pydantic model of an answer. Prints what it came to."""

import json
import sys
from typing import Annotated, Any, Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class Robot(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=6)
    on: bool
    legs: int = Field(ge=2, le=8)


class Cat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["dog"]
    barks: bool


class Owner(BaseModel):
    """Whose pet is a discriminated union."""

    model_config = ConfigDict(extra="forbid")

    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


def main(base: str, model: str) -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0)
    found = {}
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
        made = instructor.from_openai(client, mode=mode)
        turns = [{"role": "user", "content": "a robot"}]
        try:
            robot = made.chat.completions.create(
                model=model, messages=turns, response_model=Robot, max_tokens=48, max_retries=0
            )
            found[mode.value] = robot.model_dump()
        except Exception as error:
            found[mode.value] = str(error)[:500]
    made = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    asked = {"model": model, "max_tokens": 48, "max_retries": 0}
    turns = [{"role": "user", "content": "whose pet"}]
    found["union"] = made.chat.completions.create(messages=turns, response_model=Owner, **asked).model_dump()
    # With `echo` the answer is whole, as a library must have it that reads it as JSON.
    turns.append({"role": "assistant", "content": '{"pet": {"kind": "dog", "barks": t'})
    own = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
    found["continued"] = made.chat.completions.create(
        messages=turns, response_model=Owner, extra_body=own, **asked
    ).model_dump()
    return found


print(json.dumps(main(sys.argv[1], sys.argv[2])))
