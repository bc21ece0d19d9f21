"""Many requests that share a system prompt, answered together with BiCache.

    python examples/shared_prefix.py

The bundled transit model reads a table of stops in the system prompt and answers where a ride ends.
"""

from remask import LLM, SamplingParams

SYSTEM = {
    "role": "system",
    "content": "you guide riders on one loop line . each stop has one next stop . table : "
    "abbey > mill ; mill > pond ; pond > forge ; forge > reef ; reef > abbey ;",
}


def main() -> None:
    """Ask three questions about one line."""
    llm = LLM("bundled-transit", cache="bicache", cache_config={"depth": 6, "refresh_interval": 4}, dtype="float32")
    chats = [
        [SYSTEM, {"role": "user", "content": f"from {stop} go 2 , where am i ?"}] for stop in ("abbey", "pond", "reef")
    ]
    params = SamplingParams(max_tokens=16, steps=8, block_length=2)
    for chat, output in zip(chats, llm.generate(chats, params), strict=True):
        print(f"{chat[-1]['content']}  ->  {output.text}   [{output.usage.cached_tokens} tokens from the store]")


if __name__ == "__main__":
    main()
