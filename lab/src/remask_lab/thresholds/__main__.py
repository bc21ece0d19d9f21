"""`python -m remask_lab thresholds town|open`: how sure must a model be of a token to write it?

Each threshold, and one token a step, with penalties of two kinds and without, under the model's own cache: right
answers, passes, tokens and seconds. `town` asks questions about pages, `open` those of a list that stands beside this
command. A part of a setting is written as soon as it is measured, so the same command goes on where it was
interrupted; what was measured is printed as a table.
"""

import sys
from functools import partial
from itertools import product

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
    known = [each for each in THRESHOLDS if each is not None]
    parser.add_argument(
        "--thresholds", type=float, nargs="+", default=[0.0, *known], help="0: one token a step (default: all)"
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
    asked = args.questions if args.task == "town" else len(open_questions())
    parts = [range(first, min(first + args.part, asked)) for first in range(0, asked, args.part)][: args.parts]
    engine = EngineConfig(max_num_seqs=args.at_once)
    with LLM(args.model, device="cpu", engine=engine, threads=args.threads) as llm:
        own = {"questions": asked, "shops": args.shops} if args.task == "town" else {"max_tokens": args.max_tokens}
        facts = about(llm, seed=args.seed, settings={**own, "part": args.part, "cache": llm.session.cache_name})
        sweep = Sweep(args.json, f"thresholds {args.task}", facts)
        workload = town(llm, args.questions, args.shops, args.seed) if args.task == "town" else None
        for part, penalty, threshold in product(parts, args.penalties, [each or None for each in args.thresholds]):
            sampling = {"threshold": threshold, **PENALTIES[penalty]}
            asks = partial(ask_open, llm, args.max_tokens) if workload is None else partial(ask_town, llm, workload)
            point = {"threshold": threshold, "penalty": penalty, "part": f"{part.start}-{part.stop - 1}"}
            sweep.row(point, partial(asks, sampling, part))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(table(sweep.record.data["rows"]))
    if args.task == "open":
        print(f"\n{RULE}")


if __name__ == "__main__":
    sys.exit(run_command(main))
