"""Measures the papers' tables, and prints our results beside the published numbers.

    python -m remask_lab papers bicache-1 [--json FILE]
    python -m remask_lab papers bicache-1 --scale paper --model GSAI-ML/LLaDA-8B-Instruct
    python -m remask_lab papers --all --out benchmarks/results
    python -m remask_lab papers profile --model MODEL

The scale "bundled" takes about a minute a table on a laptop's CPU, with the models that come with the package. "paper"
uses the paper's lengths. An interrupted run resumes where it stopped. `--list` names the tables. `profile` measures
depths by the rule of the BiCache paper, and has a `--help` of its own.
"""

import argparse
import re
import sys
from pathlib import Path

from remask import LLM, EngineConfig
from remask.checkpoint.settings import LoadSettings
from remask.cli.flags import add_flags
from remask.cli.options import check_folder
from remask.errors import ConfigError, RemaskError
from remask_lab.arguments import check_least
from remask_lab.likelihood.perplexity import Judge
from remask_lab.papers import profile
from remask_lab.papers.definition import SCALES, WORKLOADS, PaperTable, load_table, table_names
from remask_lab.papers.measure import Measurer, check_kind, run_table
from remask_lab.papers.show import beside, published
from remask_lab.similarity.table import SimilarityTable


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 0, 2 on an error, and 130 when interrupted."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if words[:1] == ["profile"]:
            profile.run(words[1:])
        else:
            _run(_parser().parse_args(words))
    except RemaskError as error:
        print(f"remask_lab.papers: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("remask_lab.papers: interrupted; the same command resumes where this one stopped", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    """The parser of everything but `profile`."""
    parser = argparse.ArgumentParser(
        prog="python -m remask_lab papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="names, as --list gives them")
    parser.add_argument("--all", action="store_true", help="every table that the model's kind allows")
    parser.add_argument("--list", action="store_true", help="name the tables and end")
    parser.add_argument("--published", action="store_true", help="print the published numbers alone, and end")
    parser.add_argument("--scale", default="bundled", choices=SCALES)
    parser.add_argument("--json", metavar="FILE", help="result file of a single table")
    parser.add_argument("--out", metavar="FOLDER", help="folder of result files, one a table and model")
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="requests, in place of the table's; rows with their own number keep it",
    )
    parser.add_argument("--rounds", type=int, metavar="K", help="turns of each contender, in place of the table's")
    parser.add_argument("--seed", type=int, default=31337, help="seed of the workload")
    parser.add_argument(
        "--workload", choices=WORKLOADS, help="workload, in place of the table's; random measures speed only"
    )
    parser.add_argument("--prompts", metavar="FILE", help="file of texts, for the workload 'texts'")
    parser.add_argument("--judge", metavar="MODEL", help="causal language model that scores texts, for perplexities")
    parser.add_argument("--ar-model", metavar="MODEL", help="autoregressive model (default: random weights, our shape)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    group = parser.add_argument_group("model")
    group.add_argument("--model", help="folder, hub id or preset, in place of the table's model")
    group.add_argument("--load-format", choices=("auto", "dummy"), help="dummy: random weights of a preset's shape")
    group.add_argument("--dtype", help="auto, float32, bfloat16 or float16, in place of the table's")
    group.add_argument("--device", default="auto")
    add_flags(group, LoadSettings, ("check_weights",))
    group.add_argument("--depth-table", metavar="FILE", help="depth table written by 'remask profile'")
    parser.add_argument(
        "--similarities", metavar="FILE", help="what 'papers profile' wrote of the model, for tables with rows by tau"
    )
    return parser


def _run(args: argparse.Namespace) -> None:
    """List or print tables, or measure them one after another.

    Raises `ConfigError` on options that do not fit, and if a table cannot be measured; with `--all` after all others.
    """
    if args.list:
        print("\n".join(f"{name:<24}{load_table(name).title}" for name in table_names()))
        return
    if bool(args.tables) is args.all:
        raise ConfigError(f"give names of tables, or --all; there are {', '.join(table_names())}")
    tables = [load_table(name) for name in (table_names() if args.all else args.tables)]
    if args.published:
        print("\n\n".join(f"## {table.name}: {table.title}\n\n{published(table)}" for table in tables))
        return
    _check_options(args, len(tables))
    failed_names = []
    for table in tables:
        try:
            _measure_table(table, args)
        except ConfigError as error:
            if not args.all:
                raise
            failed_names.append(table.name)
            print(f"{table.name}: stopped: {error}\n", file=sys.stderr, flush=True)
    if failed_names:
        raise ConfigError(f"{', '.join(failed_names)} stopped, for the reasons above; all other tables are measured")


def _check_options(args: argparse.Namespace, table_count: int) -> None:
    """Raise `ConfigError` on numbers, files and folders that cannot be used, before a model is opened."""
    check_least(args, requests=1, rounds=1)
    if args.json is not None and (table_count > 1 or args.out is not None):
        raise ConfigError("--json is the result file of a single table; --out FOLDER takes those of many")
    check_folder("--json", args.json)
    if args.out is not None and not Path(args.out).is_dir():
        raise ConfigError(f"--out: there is no folder {args.out!r}; make it, or name another one")
    if args.judge is not None and args.prompts is None:
        raise ConfigError("--judge scores responses to texts: give a file of them with --prompts")


def _measure_table(table: PaperTable, args: argparse.Namespace) -> None:
    """Open a model, measure a table and print it. With `--all`, a table for another kind of model is skipped."""
    table_scale = table.scales[args.scale]
    workload = "texts" if args.prompts is not None and args.workload is None else args.workload
    scale = table_scale.overridden(args.requests, args.rounds, workload)
    load_format = args.load_format or (table_scale.load_format if args.model is None else "auto")
    llm = LLM(
        args.model or table_scale.model,
        dtype=args.dtype or (table_scale.dtype if args.model is None else "auto"),
        device=args.device,
        load_format=load_format,
        check_weights=args.check_weights,
        depth_table=args.depth_table,
        engine=EngineConfig(max_num_seqs=scale.concurrency),
        progress=not args.quiet,
    )
    if args.all:
        try:
            check_kind(table, llm)
        except ConfigError as error:
            print(f"left out: {error}\n")
            return
    judge = None if args.judge is None else Judge(args.judge, "auto", llm.model.device)
    similarities = None
    if args.similarities is not None:
        similarities = SimilarityTable.load(args.similarities, llm.loaded.fingerprint)
    measurer = Measurer(
        llm,
        rounds=scale.rounds,
        seed=args.seed,
        prompts=args.prompts,
        judge=judge,
        ar_model=args.ar_model,
        divided=scale.divided,
        similarities=similarities,
    )
    model = llm.loaded.name
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(model).name if Path(model).is_dir() else model)
    path = args.json if args.out is None else Path(args.out) / f"{table.name}.{slug}.json"
    record = run_table(table, args.scale, scale, measurer, path, progress=not args.quiet)
    print(f"## {table.name}: {table.title}\n\n{beside(table, record)}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
