"""LangChain's `bind_tools`: a forced call, whole and streamed, and a free one. Prints what it came to."""

import json
import sys
from typing import Any

from langchain_openai import ChatOpenAI


def main(base: str, model: str, asked: dict[str, Any]) -> dict[str, Any]:
    def chat(tokens: int) -> ChatOpenAI:
        return ChatOpenAI(base_url=f"{base}/v1", api_key="any", model=model, max_retries=0, max_tokens=tokens)

    made = chat(48)
    robot = {"name": "robot", "description": "A robot.", "parameters": asked}
    forced = made.bind_tools([robot], tool_choice="robot")
    whole, *rest = forced.stream("a robot")
    for chunk in rest:
        whole = whole + chunk
    described = asked | {"description": "A robot."}
    return {
        "calls": forced.invoke("a robot").tool_calls,
        "streamed": whole.tool_calls,
        "any": made.bind_tools([robot], tool_choice="any").invoke("a robot").tool_calls,
        "free": chat(8).bind_tools([robot]).invoke("a robot").content,
        "structured": made.with_structured_output(described, method="function_calling").invoke("one"),
    }


print(json.dumps(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))
