"""LiteLLM against an OpenAI-compatible server, with all that it sends of itself. Prints what it came to."""

import json
import sys
from typing import Any

import litellm

OPEN = {"add_generation_prompt": False, "continue_final_message": True}


def main(base: str, model: str, asked: dict[str, Any], pet: dict[str, Any]) -> dict[str, Any]:
    where = {"model": f"openai/{model}", "api_base": f"{base}/v1", "api_key": "any", "num_retries": 0}
    turns = [
        {"role": "system", "content": "Orders: rope Anna; soap Ben."},
        {"role": "user", "content": "Who ordered rope?"},
    ]
    whole = litellm.completion(messages=turns, **where)
    streamed = litellm.completion(messages=turns, stream=True, stream_options={"include_usage": True}, **where)
    form = {"type": "json_schema", "json_schema": {"name": "robot", "schema": asked, "strict": True}}
    structured = litellm.completion(messages=turns, response_format=form, max_tokens=48, **where)
    union = {"type": "json_schema", "json_schema": {"name": "pet", "schema": pet, "strict": True}}
    chosen = litellm.completion(messages=turns, response_format=union, max_tokens=48, **where)
    begun = [*turns, {"role": "assistant", "content": "Ann"}]
    continued = litellm.completion(messages=begun, extra_body=OPEN, **where)
    messages = litellm.completion(
        model=f"anthropic/{model}", api_base=base, api_key="any", messages=begun, max_tokens=8, num_retries=0
    )
    text = litellm.text_completion(prompt="Orders:", max_tokens=4, **where)
    ranked = litellm.rerank(
        model=f"hosted_vllm/{model}", query="rope", documents=["rope Anna", "soap Ben"], api_base=base, api_key="any"
    )
    return {
        "text": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices),
        "prompt_tokens": whole.usage.prompt_tokens,
        "parsed": json.loads(structured.choices[0].message.content),
        "pet": json.loads(chosen.choices[0].message.content),
        "continued": continued.choices[0].message.content,
        "messages": messages.choices[0].message.content,
        "completion": len(text.choices),
        "ranked": [[each["index"], each["relevance_score"]] for each in ranked.results],
    }


print(json.dumps(main(sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:]))))
