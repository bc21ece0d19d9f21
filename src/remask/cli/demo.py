"""`remask demo`: eight questions about one page, without a cache and under two caches that keep the page."""

import argparse
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from remask.cli.options import open_llm
from remask.engine.config import EngineConfig
from remask.errors import RemaskError
from remask.llm import LLM, Output
from remask.request.result import Usage
from remask.tasks.page import SAMPLING, demo_questions
from remask.tasks.town import TownRequest, is_correct

CACHES: Final = {
    "none": "every pass computes the page anew",
    "reuse": "the page is kept as it is without a question, and all layers read that",
    "bicache": "the page is kept, and the first layers alone read it",
}
_WIDTH: Final = 100
_QUESTION_WIDTH: Final = 56  # characters


@dataclass(frozen=True, slots=True)
class Row:
    """The results of all questions under one cache.

    Attributes:
        hit_count: number of questions that read the stored page.
        work: computed row-layers, those of the page's own passes included.
        depth: number of layers that read the stored page.
    """

    cache: str
    question_count: int
    correct_count: int
    hit_count: int
    passes: float
    tokens_per_pass: float
    tokens_per_second: float
    work: int
    depth: int

    @classmethod
    def of(cls, cache: str, answers: Sequence[tuple[TownRequest, Output]], seconds: float) -> "Row":
        """Return the row of questions with their answers, which took `seconds` together."""
        usages = [output.usage for _, output in answers]
        total = Usage.total(usages)
        return cls(
            cache=cache,
            question_count=len(answers),
            correct_count=sum(is_correct(item, output.text or "") for item, output in answers),
            hit_count=sum(usage.prefix_depth > 0 and not usage.prefix_row_layers for usage in usages),
            passes=total.forwards / len(answers),
            tokens_per_pass=total.completion_tokens / total.forwards,
            tokens_per_second=total.completion_tokens / seconds,
            work=total.row_layers + total.prefix_row_layers,
            depth=total.prefix_depth,
        )

    def cells(self, baseline: "Row") -> list[str]:
        """Return the cells of the table; work is in percent of that of the row `baseline`."""
        correct, hits = (f"{count} of {self.question_count}" for count in (self.correct_count, self.hit_count))
        work = f"{100 * self.work / baseline.work:.0f} %"
        return [self.cache, correct, f"{self.passes:.1f}", f"{self.tokens_per_second:.1f}", work, hits]


HEAD: Final = ("cache", "right", "passes an answer", "tokens/s", "work", "prefix hits")


def run(args: argparse.Namespace) -> int:
    """Ask all questions under each cache, and print the table. Returns 0. Raises `RemaskError` if a question fails."""
    # Audits of so few questions would cost more than deeper reuse saves, so the shipped depths are used.
    with open_llm(args, engine=EngineConfig(max_num_seqs=1, audit=0.0), reads="chat") as llm:
        questions = demo_questions()
        print(textwrap.fill(questions[0].system, _WIDTH, initial_indent="  ", subsequent_indent="  "), flush=True)
        rows = [_answer_questions(llm, cache, questions) for cache in CACHES]
        print(f"\n{table(rows)}\n\n{textwrap.fill(conclusion(rows, llm.loaded.config.layers), _WIDTH)}")
    return 0


def _answer_questions(llm: LLM, cache: str, questions: Sequence[TownRequest]) -> Row:
    """Answer `questions` one after the other under `cache`, and print each answer. Returns their row of the table."""
    print(f"\n{cache}: {CACHES[cache]}", flush=True)
    answers: list[tuple[TownRequest, Output]] = []
    seconds = 0.0
    engine = llm.session.new_engine()
    policy = llm.session.policy(cache)
    for item in questions:
        (request,) = llm.session.requests([item.messages], SAMPLING, policy=policy)
        start = time.perf_counter()
        (output,) = llm.session.run([request], engine=engine, progress=False)
        seconds += time.perf_counter() - start
        if output.error is not None:
            raise RemaskError(f"the question {item.question!r} failed: {output.error}")
        answers.append((item, output))
        verdict = "right" if is_correct(item, output.text or "") else f"WRONG, it is {item.fact}"
        print(f"  {item.question:<{_QUESTION_WIDTH}} {' '.join((output.text or '').split())}  [{verdict}]", flush=True)
    return Row.of(cache, answers, seconds)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a text table, each column as wide as its longest cell."""
    cells = [list(HEAD), *(row.cells(rows[0]) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (zip(line, widths, strict=True) for line in cells)
    return "\n".join("  ".join(cell.ljust(width) for cell, width in line).rstrip() for line in lines)


def conclusion(rows: Sequence[Row], layers: int) -> str:
    """Return a sentence that compares the three rows, in the order of `CACHES`."""
    none, reuse, bicache = rows
    difference = bicache.correct_count - none.correct_count
    comparison = f"{abs(difference)} {'more' if difference > 0 else 'fewer'}" if difference else "as many"
    return (
        f"Kept in all {layers} layers, as other engines keep a prompt, the page leaves {reuse.correct_count} of "
        f"{reuse.question_count} answers right; kept in the first {bicache.depth} (the depth that ships with this "
        f"model; a server earns it by audits) it leaves {comparison} right as no cache does, for "
        f"{none.work / bicache.work:.1f} times less work, and each pass writes {bicache.tokens_per_pass:.1f} "
        "tokens of an answer."
    )
