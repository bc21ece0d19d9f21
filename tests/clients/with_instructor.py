"""instructor, which makes a Pydantic model of an answer. Prints what it came to."""

import json
import sys
from typing import Any

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class Robot(BaseModel):
    """What is asked for."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=6)
    on: bool
    legs: int = Field(ge=2, le=8)


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
    return found


print(json.dumps(main(sys.argv[1], sys.argv[2])))
