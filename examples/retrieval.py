"""Questions about documents: requests share the system prompt, and those about one document share the document too.

    python examples/retrieval.py

The store finds pages from the left, as far as they match, so no request marks where a shared part ends. The weights are
random: the example shows what is shared, not good answers.
"""

from remask import LLM, SamplingParams
from remask.engine.config import EngineConfig

SYSTEM = list(range(1, 65))
DOCUMENTS = {"popular": list(range(65, 193)), "rare": list(range(192, 64, -1))}
QUESTIONS = [("popular", 7), ("popular", 8), ("rare", 9), ("popular", 10), ("popular", 11)]


def main() -> None:
    """Answer one question after another, and print how much of each prompt was in the store."""
    llm = LLM("sdar-tiny", load_format="dummy", cache="exact", dtype="float32", engine=EngineConfig(page_size=16))
    for document, question in QUESTIONS:
        prompt = SYSTEM + DOCUMENTS[document] + [question] * 8
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=8))
        print(f"{document:>8}: {output.usage.cached_tokens:>4} of {len(prompt)} prompt tokens read from shared pages")


if __name__ == "__main__":
    main()
