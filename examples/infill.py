"""An answer with fixed parts: the model fills the holes, and sees what stands on both sides of them.

    python examples/infill.py

Who ordered what stands in the system prompt. What a title costs under each plan is in the bundled model's weights.
"""

from remask import LLM

SYSTEM = {
    "role": "system",
    "content": "Orders: saw Luis; mat Ben; guitar Nina; flute Amir; ladder Ruth; fan Rita; pillow Max; fork Hans.",
}
QUESTION = {"role": "user", "content": "Plan family: who pays 5, 7, 1, 3?"}
CANVAS = [
    {"text": "5"},
    {"mask": 1},
    {"text": " 7"},
    {"mask": 1},
    {"text": " 1"},
    {"mask": 1},
    {"text": " 3 Hans"},
]


def main() -> None:
    """Ask once, with the prices given and the names left open."""
    llm = LLM("bundled-tariff", cache="bicache", dtype="float32")
    (output,) = llm.infill([[SYSTEM, QUESTION]], CANVAS)
    print(f"{output.text}   holes: {output.holes}   {output.usage.steps} steps")


if __name__ == "__main__":
    main()
