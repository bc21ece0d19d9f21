"""Questions about a popular document, which stands as a level of its own under the system prompt.

    python examples/retrieval.py

Pages are found from the left, as far as they match: all requests share the system prompt, those about one document
share that too, and nobody says where a level ends. The weights are random: what is shown is the sharing, not the
answers.
"""

from remask import LLM, SamplingParams
from remask.engine.config import EngineConfig

SYSTEM = list(range(1, 65))
DOCUMENTS = {"popular": list(range(65, 193)), "rare": list(range(192, 64, -1))}
QUESTIONS = [("popular", 7), ("popular", 8), ("rare", 9), ("popular", 10), ("popular", 11)]


def main() -> None:
    """Answer one question after another, and say what each found in the store."""
    llm = LLM("sdar-tiny", load_format="dummy", cache="exact", dtype="float32", engine=EngineConfig(page_size=16))
    for document, question in QUESTIONS:
        prompt = SYSTEM + DOCUMENTS[document] + [question] * 8
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=8))
        print(f"{document:>8}: {output.usage.cached_tokens:>4} of {len(prompt)} prompt tokens read from shared pages")


if __name__ == "__main__":
    main()
