"""LangChain's ChatOpenAI, as its users set it up. Prints what it came to."""

import json
import sys
from typing import Any

from langchain_openai import ChatOpenAI


def main(base: str, model: str, asked: dict[str, Any]) -> dict[str, Any]:
    def chat(**fields: Any) -> ChatOpenAI:
        return ChatOpenAI(base_url=f"{base}/v1", api_key="any", model=model, max_retries=0, **fields)

    turns = [("system", "Orders: rope Anna; soap Ben."), ("human", "Who ordered rope?")]
    whole = chat(temperature=0.0, logprobs=True, top_logprobs=2).invoke(turns)
    more = chat(extra_body={"max_tokens": 4, "ignore_eos": True}).batch([turns, turns])
    structured = chat(max_tokens=48).with_structured_output(asked, method="json_schema", include_raw=True)
    told = structured.invoke("a robot")
    assert told["parsing_error"] is None, told
    return {
        "text": whole.content,
        "streamed": "".join(chunk.content for chunk in chat(stream_usage=True).stream(turns)),
        "prompt_tokens": whole.usage_metadata["input_tokens"],
        "top_logprobs": len(whole.response_metadata["logprobs"]["content"][0]["top_logprobs"]),
        "tokens": [each.usage_metadata["output_tokens"] for each in more],
        "parsed": told["parsed"],
    }


print(json.dumps(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))
