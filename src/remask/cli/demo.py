"""`remask demo`: the main job. One page, eight questions about it, and what two ways to keep the page cost and gain."""

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
from remask.tasks.page import SAMPLING, asked
from remask.tasks.town import TownRequest, is_correct

CACHES: Final = {
    "none": "every pass computes the page anew",
    "reuse": "the page is kept as it is without a question, and all layers read that",
    "bicache": "the page is kept, and the first layers alone read it",
}
_WIDTH: Final = 100
_SHOWN: Final = 56  # characters of a question


@dataclass(frozen=True, slots=True)
class Row:
    """What all questions came to under one cache.

    Attributes:
        right: how many were answered right.
        hits: how many read the page that an earlier one had left.
        passes: forward passes an answer, on average.
        written: tokens a pass, on average.
        tokens_s: tokens of the answers a second.
        work: rows times layers that were computed, the page's own passes included.
        depth: layers that read the page.
    """

    cache: str
    questions: int
    right: int
    hits: int
    passes: float
    written: float
    tokens_s: float
    work: int
    depth: int

    @classmethod
    def of(cls, cache: str, answered: Sequence[tuple[TownRequest, Output]], seconds: float) -> "Row":
        """The row of questions with their outputs, which took so many `seconds` together."""
        usages = [output.usage for _, output in answered]
        total = Usage.total(usages)
        return cls(
            cache,
            len(answered),
            sum(is_correct(item, output.text or "") for item, output in answered),
            sum(usage.prefix_depth > 0 and not usage.prefix_row_layers for usage in usages),
            total.forwards / len(answered),
            total.completion_tokens / total.forwards,
            total.completion_tokens / seconds,
            total.row_layers + total.prefix_row_layers,
            total.prefix_depth,
        )

    def cells(self, none: "Row") -> list[str]:
        """Its cells in the table; work is a share of that of `none`."""
        counts = f"{self.right} of {self.questions}", f"{self.passes:.1f}", f"{self.tokens_s:.1f}"
        return [self.cache, *counts, f"{100 * self.work / none.work:.0f} %", f"{self.hits} of {self.questions}"]


HEAD: Final = ("cache", "right", "passes an answer", "tokens/s", "work", "prefix hits")


def run(args: argparse.Namespace) -> int:
    """Ask all questions under each cache, and print the table. Returns 0."""
    # With so few questions audits would cost more than what they earn saves, so depths are those that ship.
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=1, audit=0.0), reads="chat")
    questions = asked()
    print(textwrap.fill(questions[0].system, _WIDTH, initial_indent="  ", subsequent_indent="  "), flush=True)
    rows = [_row(llm, cache, questions) for cache in CACHES]
    print(f"\n{table(rows)}\n\n{textwrap.fill(reading(rows, llm.loaded.config.layers), _WIDTH)}")
    return 0


def _row(llm: LLM, cache: str, questions: Sequence[TownRequest]) -> Row:
    """Ask `questions` one after the other under `cache`, and print each answer as it comes."""
    print(f"\n{cache}: {CACHES[cache]}", flush=True)
    engine, answered, seconds = llm.session.new_engine(), list[tuple[TownRequest, Output]](), 0.0
    policy = llm.session.policy(cache)
    for item in questions:
        (request,) = llm.session.requests([item.messages], SAMPLING, policy=policy)
        began = time.perf_counter()
        (output,) = llm.session.run([request], engine=engine, progress=False)
        seconds += time.perf_counter() - began
        if output.error is not None:
            raise RemaskError(f"the question {item.question!r} failed: {output.error}")
        answered.append((item, output))
        verdict = "right" if is_correct(item, output.text or "") else f"WRONG, it is {item.asked}"
        print(f"  {item.question:<{_SHOWN}} {' '.join((output.text or '').split())}  [{verdict}]", flush=True)
    return Row.of(cache, answered, seconds)


def table(rows: Sequence[Row]) -> str:
    """The rows as text, each column as wide as its longest cell."""
    cells = [list(HEAD), *(row.cells(rows[0]) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (zip(line, widths, strict=True) for line in cells)
    return "\n".join("  ".join(cell.ljust(width) for cell, width in line).rstrip() for line in lines)


def reading(rows: Sequence[Row], layers: int) -> str:
    """One sentence that reads the table."""
    none, reuse, bicache = rows
    lost = none.right - bicache.right
    answers = "as many" if not lost else f"{lost} fewer" if lost > 0 else f"{-lost} more"
    return (
        f"Kept in all {layers} layers, as other engines keep a prompt, the page leaves {reuse.right} of "
        f"{reuse.questions} answers right; kept in the first {bicache.depth} (the depth that ships with this model; a "
        f"server earns it by audits) it leaves {answers} right as no cache does, for {none.work / bicache.work:.1f} "
        f"times less work, and each pass writes {bicache.written:.1f} tokens of an answer."
    )
