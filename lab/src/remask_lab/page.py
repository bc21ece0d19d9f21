"""`python -m remask_lab page`: which questions about the page of `remask demo` does `smollm2` answer right?

Every question that was tried is asked under no cache, all-layer reuse and `bicache`, as the demo asks it. The demo's
are marked.
"""

import sys

from remask.cli.demo import CACHES
from remask.engine.config import EngineConfig
from remask.llm import LLM
from remask.tasks.page import DEMO_QUESTIONS, SAMPLING, candidates
from remask.tasks.town import is_correct
from remask_lab.records.markdown import markdown_table
from remask_lab.speed.command import command_parser, run_command


def main() -> None:
    """Ask all questions under each cache, and print a table with one line per question."""
    parser = command_parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    parser.add_argument("--dtype", default="auto", help="default: %(default)s")
    parser.add_argument("--quantization", help="default: the model's own")
    args = parser.parse_args()
    with LLM(args.model, dtype=args.dtype, quantization=args.quantization, engine=EngineConfig(audit=0.0)) as llm:
        questions = candidates()
        correct: dict[str, list[bool]] = {}  # by cache, in the order of the questions
        for cache in CACHES:
            outputs = llm.chat([item.messages for item in questions], SAMPLING, cache=cache)
            correct[cache] = [
                is_correct(item, output.text or "") for item, output in zip(questions, outputs, strict=True)
            ]
    rows = [
        [
            "*" * (number in DEMO_QUESTIONS),
            str(number),
            item.kind,
            item.question,
            *("-+"[marks[number]] for marks in correct.values()),
        ]
        for number, item in enumerate(questions)
    ]
    print(markdown_table(["", "kind", "question", *CACHES], rows, aligned=True))
    print(", ".join(f"{cache}: {sum(marks)} of {len(marks)}" for cache, marks in correct.items()))


if __name__ == "__main__":
    sys.exit(run_command(main))
