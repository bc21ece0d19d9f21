"""A record of every benchmark in its data set's own shape, with what is right. All were made up here."""

from typing import Any

RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "gsm8k": ({"question": "What is 9 times 2?", "answer": "9 * 2 = <<9*2=18>>18\n#### 1,018"}, "1018"),
    "math500": ({"problem": "Halve $1$.", "solution": "...", "answer": "\\frac{1}{2}", "level": 1}, "\\frac{1}{2}"),
    "arc_challenge": (
        {
            "id": "a",
            "question": "Which is a metal?",
            "choices": {"text": ["wood", "iron", "glass"], "label": ["1", "2", "3"]},
            "answerKey": "2",
        },
        "B",
    ),
    "gpqa": (
        {
            "Question": "Which one is even?",
            "Correct Answer": "2\n",
            "Incorrect Answer 1": "3",
            "Incorrect Answer 2": "5",
            "Incorrect Answer 3": "7",
        },
        "B",
    ),
    "mmlu": ({"question": "1 + 1?", "choices": ["1", "2", "3", "4"], "answer": 1, "subject": "algebra"}, "B"),
    "mmlu_pro": (
        {"question": "1 + 1?", "options": ["9", "8", "7", "6", "5", "4", "3", "2", "1", "0"], "answer": "H"},
        "H",
    ),
    "bbh": ({"input": "not True is", "target": "False"}, "False"),
}


def perfect(name: str) -> str:
    """A response that is right, as the rules ask for it."""
    return f"Some thoughts.\n## {RECORDS[name][1]}"
