"""Many requests that share a system prompt, answered together with BiCache.

    python examples/shared_prefix.py

Who ordered what stands in the system prompt. What a title costs under each plan is in the bundled model's weights.
"""

from remask import LLM

SYSTEM = {
    "role": "system",
    "content": "Orders: saw Luis; mat Ben; guitar Nina; flute Amir; ladder Ruth; fan Rita; pillow Max; fork Hans.",
}
QUESTIONS = (
    "Plan family: who pays 5, 7, 1, 3?",
    "Plan family: who pays 3, 1, 5, 7?",
    "Who ordered guitar, fork, mat, saw?",
)


def main() -> None:
    """Ask three questions about the same orders."""
    llm = LLM("bundled-tariff", cache="bicache", cache_config={"depth": 2}, dtype="float32")
    chats = [[SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]
    for question, output in zip(QUESTIONS, llm.generate(chats), strict=True):
        print(f"{question}  ->  {output.text}   [{output.usage.cached_tokens} tokens from the store]")


if __name__ == "__main__":
    main()
