"""`python -m remask_lab thresholds town|open`: how sure must a model be of a token to write it?

Each threshold, and one token a step, with penalties of two kinds and without, under the model's own cache: right
answers, passes, tokens and seconds. `town` asks questions about pages, `open` those of a list that stands beside this
command. A part of a setting is written as soon as it is measured, so the same command goes on where it was
interrupted; what was measured is printed as a table.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

from remask.engine.config import EngineConfig
from remask.llm import LLM
from remask_lab.records.record import Sweep, about
from remask_lab.speed.command import command_parser, run_command
from remask_lab.thresholds.measure import PENALTIES, RULE, THRESHOLDS, ask_open, ask_town, open_questions, table, town


def main() -> None:
    """Measure, and print the table of what was measured, a line a setting."""
    parser = command_parser(__doc__)
    parser.add_argument("task", choices=("town", "open"))
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    thresholds = [threshold or 0.0 for threshold in THRESHOLDS]
    parser.add_argument(
        "--thresholds", type=float, nargs="+", default=thresholds, help="0: one token a step (default: all)"
    )
    parser.add_argument("--penalties", nargs="+", default=[*PENALTIES], choices=PENALTIES, help="default: all")
    parser.add_argument("--questions", type=int, default=400, help="of town (default: %(default)s)")
    parser.add_argument("--shops", type=int, default=8, help="of a page of town (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=48, help="of an answer of open (default: %(default)s)")
    parser.add_argument("--part", type=int, default=40, help="questions that are asked together (default: %(default)s)")
    parser.add_argument("--parts", type=int, help="of each setting, the first so many (default: all)")
    parser.add_argument("--at-once", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--threads", type=int, help="default: by the cores that are free")
    parser.add_argument("--seed", type=int, default=31337, help="of town (default: %(default)s)")
    parser.add_argument("--json", help="the file of the result")
    args = parser.parse_args()
    engine = EngineConfig(max_num_seqs=args.at_once)
    with LLM(args.model, device="cpu", engine=engine, threads=args.threads) as llm:
        ask: Callable[[Mapping[str, Any], range], dict[str, Any]]
        if args.task == "town":
            count = args.questions
            task_settings = {"questions": count, "shops": args.shops}
            ask = partial(ask_town, llm, town(llm, count, args.shops, args.seed))
        else:
            count = len(open_questions())
            task_settings = {"max_tokens": args.max_tokens}
            ask = partial(ask_open, llm, args.max_tokens)
        settings = {**task_settings, "part": args.part, "cache": llm.session.cache_name}
        sweep = Sweep(args.json, f"thresholds {args.task}", about(llm, seed=args.seed, settings=settings))
        parts = [range(start, min(start + args.part, count)) for start in range(0, count, args.part)][: args.parts]
        for part, penalty, value in product(parts, args.penalties, args.thresholds):
            sampling = {"threshold": value or None, **PENALTIES[penalty]}
            point = {"threshold": value or None, "penalty": penalty, "part": f"{part.start}-{part.stop - 1}"}
            sweep.row(point, partial(ask, sampling, part))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(table(sweep.record.data["rows"]))
    if args.task == "open":
        print(f"\n{RULE}")


if __name__ == "__main__":
    sys.exit(run_command(main))
