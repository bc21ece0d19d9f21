"""Strict matching on tricky strings, as a table: strictly right, and right up to notation."""

import pytest

from remask.tasks.transit import is_correct
from remask_lab.gsm8k import final_number
from remask_lab.harness.score import judge, same_answer

RIGHT, NOTATION, WRONG = (True, True), (False, True), (False, False)

CASES = [
    # where the final answer stands
    ("## 18", "18", RIGHT),
    ("Nine eggs at 2 dollars make 18.\n## 18", "18", RIGHT),
    ("##18", "18", RIGHT),
    ("##\n18", "18", RIGHT),
    ("##\n\n  18  \n", "18", RIGHT),
    ("18", "18", WRONG),
    ("The answer is 18", "18", WRONG),
    ("# 18", "18", WRONG),
    ("", "18", WRONG),
    ("##", "18", WRONG),
    ("## ", "18", WRONG),
    ("## 17\nNo, wait.\n## 18", "18", RIGHT),
    ("I answer after ##, as I was told.\n## 18", "18", RIGHT),
    ("## 18\n## 17", "18", WRONG),
    ("## 18 ##", "18", WRONG),
    ("### 18", "18", RIGHT),
    ("#### 18", "18", RIGHT),
    ("## 18\nI hope this helps.", "18", NOTATION),
    ("## 18\n19", "18", WRONG),
    ("## the answer is 18", "18", WRONG),
    # numbers
    ("## 1,080", "1080", NOTATION),
    ("## 1{,}080", "1080", NOTATION),
    ("## 10,80", "1080", WRONG),
    ("## 1 080", "1080", WRONG),
    ("## 18.", "18", NOTATION),
    ("## 18.0", "18", NOTATION),
    ("## 18.5", "18", WRONG),
    ("## .5", "0.5", NOTATION),
    ("## 0.5", "1/2", NOTATION),
    ("## $18", "18", NOTATION),
    ("## \\$18.00", "18", NOTATION),
    ("## 18€", "18", WRONG),
    ("## €18", "18", NOTATION),
    ("## 50%", "50", NOTATION),
    ("## 50\\%", "50", NOTATION),
    ("## 90^\\circ", "90", NOTATION),
    ("## 18 dollars", "18", NOTATION),
    ("## 18 eggs a day.", "18", NOTATION),
    ("## 18 or 19", "18", WRONG),
    ("## 18dollars", "18", WRONG),
    ("## -5", "-5", RIGHT),
    ("## - 5", "-5", NOTATION),
    ("## −5", "-5", NOTATION),
    ("## 5", "-5", WRONG),
    ("## +5", "5", NOTATION),
    ("## -$5", "-5", NOTATION),
    ("## １８", "18", NOTATION),
    ("## 018", "18", NOTATION),
    ("## 1e2", "100", WRONG),
    ("## 1/0", "1", WRONG),
    ("## 3 x", "3 y", WRONG),
    # LaTeX
    ("## \\frac{1}{2}", "\\frac{1}{2}", RIGHT),
    ("## $\\frac{1}{2}$", "\\frac{1}{2}", NOTATION),
    ("## \\(\\frac{1}{2}\\)", "\\frac{1}{2}", NOTATION),
    ("## \\[ \\frac{1}{2} \\].", "\\frac{1}{2}", NOTATION),
    ("## \\dfrac{1}{2}", "\\frac{1}{2}", NOTATION),
    ("## \\frac12", "\\frac{1}{2}", NOTATION),
    ("## 1/2", "\\frac{1}{2}", NOTATION),
    ("## -\\frac{3}{6}", "-\\frac{1}{2}", NOTATION),
    ("## \\frac{1}{0}", "\\frac{1}{2}", WRONG),
    ("## \\boxed{18}", "18", NOTATION),
    ("## $\\boxed{\\text{18}}$.", "18", NOTATION),
    ("## **18**", "18", NOTATION),
    ("## \\left(3, \\frac{\\pi}{2}\\right)", "\\left( 3, \\frac{\\pi}{2} \\right)", NOTATION),
    ("## (3,\\frac{\\pi}{2})", "\\left( 3, \\frac{\\pi}{2} \\right)", NOTATION),
    ("## 2\\sqrt{3}", "2\\sqrt{3}", RIGHT),
    ("## 2 \\sqrt{3}", "2\\sqrt{3}", NOTATION),
    ("## 2\\sqrt{2}", "2\\sqrt{3}", WRONG),
    ("## x \\leftarrow y", "x\\leftarrow y", NOTATION),
    # choices and words
    ("## B", "B", RIGHT),
    ("## b", "B", NOTATION),
    ("## (B)", "B", NOTATION),
    ("## B.", "B", NOTATION),
    ("## B. Paris", "B", WRONG),
    ("## A", "B", WRONG),
    ("## (A)", "(A)", RIGHT),
    ("## True", "True", RIGHT),
    ("## true", "True", WRONG),
    ("## ...", "...", RIGHT),
]


@pytest.mark.parametrize(("text", "answer", "right"), CASES)
def test_a_response_against_the_right_answer(text: str, answer: str, right: tuple[bool, bool]) -> None:
    verdict = judge(text, answer)
    assert (verdict.strict, verdict.same) == right
    assert is_correct(text, answer) is verdict.strict, "the benchmarks count alike"


def test_the_answer_is_told() -> None:
    assert judge("a ## b ## c ", "d").answer == "c"
    assert judge("a # b", "d").answer is None
    assert judge("##", "d").answer == ""


def test_nothing_equals_nothing() -> None:
    assert not same_answer("", "")
    assert not same_answer("$$", ".")


@pytest.mark.parametrize(
    ("worked", "number"),
    [
        ("9 * 2 = 18 dollars.\n#### 18", "18"),
        ("so many\n#### 1,080", "1080"),
        ("####-3", "-3"),
        ("## 4\n#### 2,520,000 ", "2520000"),
    ],
)
def test_the_number_of_a_worked_answer(worked: str, number: str) -> None:
    assert final_number(worked) == number
    assert judge(f"## {number}", number).strict
