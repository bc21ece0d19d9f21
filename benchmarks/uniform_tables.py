"""The uniform thesis's tables of quality and speed, ours beside the published numbers.

    python -m benchmarks.uniform_tables --table 6.9                                          # bundled-uniform
    python -m benchmarks.uniform_tables --table 6.9 --model gidd-100m --load-format dummy --json FILE
    python -m benchmarks.uniform_tables --table 6.1 --model dvruette/gidd-unif-3b --judge nvidia/Minitron-4B-Base \
        --prompts wikitext.txt --json FILE

On `bundled-uniform` whole responses of its own task are generated, at lengths that fit its canvas of 128; quality is
the share of right lists. On other checkpoints the settings are the thesis's, and quality is generative perplexity where
a judge and prompts are given. Random weights have no quality, and only the middle block of a response is timed, some
steps of each kind standing for all of them (`--full-steps`, `--cached-steps`).

All caches take turns in one run. With `--json` every row is kept as soon as it is known, and a second call goes on
where the first one stopped.

`--table correction` is ours alone: what correction steps make of poor samples.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from benchmarks.uniform_blocks import BlockShape, time_block
from benchmarks.uniform_settings import CACHED, CANVAS, NONE, TABLES, Row, Setting
from remask import LLM, EngineConfig, SamplingParams
from remask.core.request import Request
from remask.errors import ConfigError
from remask.evals.bench import run_bench
from remask.evals.contenders import contender
from remask.evals.judge import Judge
from remask.evals.perplexity import Policy, cut_prompts, measure, read_texts
from remask.evals.record import about
from remask.evals.sweep import Sweep
from remask.evals.workload import Task, Workload, is_bundled_uniform, random_workload, timetable_workload

Json = dict[str, Any]
Quality = Callable[[Setting, SamplingParams], Mapping[str, Json]]


def main() -> None:
    """Measure one table, print it, and keep its rows where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", required=True, choices=TABLES)
    parser.add_argument("--model", default="bundled-uniform")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=16, help="prompts a setting; the thesis takes 6, 16 or 64")
    parser.add_argument("--rounds", type=int, default=1, help="turns of every cache, where responses are generated")
    parser.add_argument("--seed", type=int, default=42, help="of the first request; the thesis has 42")
    parser.add_argument("--full-steps", type=int, default=3, help="steps of none and block-prefix that a block runs")
    parser.add_argument("--cached-steps", type=int, default=32, help="steps of uniform-cache, beside the first")
    parser.add_argument("--divide", type=int, default=1, help="divide the thesis's lengths, for shorter canvases")
    parser.add_argument("--judge", help="causal language model for the perplexity: folder or hub id")
    parser.add_argument("--prompts", metavar="FILE", help="texts for the prompts, as `remask eval gen-ppl` reads them")
    parser.add_argument("--json", metavar="FILE", help="keep rows here, and resume from here")
    args = parser.parse_args()
    if (args.judge is None) != (args.prompts is None):
        raise ConfigError("--judge and --prompts go together: what is judged are responses to real prompts")
    limits = EngineConfig(max_num_seqs=1, store_budget_tokens=0)
    llm = LLM(args.model, load_format=args.load_format, dtype=args.dtype, device=args.device, engine=limits)
    if llm.loaded.config.kind != "uniform":
        raise ConfigError(f"the tables are of uniform models, and {llm.loaded.name!r} is none")
    given = {name: value for name, value in vars(args).items() if name not in ("json", "model", "device", "seed")}
    sweep = Sweep(args.json, "uniform tables", about(llm, seed=args.seed, settings=given))
    quality = judged(llm, args) if args.judge is not None else None
    rows = []
    for row in TABLES[args.table].rows:
        setting = fitting(llm, row, args)
        point = {"table": args.table, **asdict(setting)}
        rows.append((row, setting, sweep.row(point, partial(result, llm, args, setting, quality))))
    print(text(args.table, rows))


def fitting(llm: LLM, row: Row, args: argparse.Namespace) -> Setting:
    """The row's setting at lengths that fit the model. Raises `ConfigError` where there is none."""
    if is_bundled_uniform(llm):
        return row.bundled
    if row.thesis is None:
        raise ConfigError(
            f"--table {args.table} needs right and wrong answers: leave --model out for 'bundled-uniform'"
        )
    longest = llm.loaded.config.max_length
    if longest < CANVAS // args.divide:
        raise ConfigError(
            f"the thesis's canvas has {CANVAS} positions and {llm.loaded.name!r} takes {longest}; divide all lengths "
            f"with --divide {-(-CANVAS // longest)}"
        )
    lengths = ("prompt", "response", "block", "steps")
    return replace(row.thesis, **{name: max(1, getattr(row.thesis, name) // args.divide) for name in lengths})


def result(llm: LLM, args: argparse.Namespace, setting: Setting, quality: Quality | None) -> Json:
    """What every cache takes and how good its responses are, by the cache's name."""
    own = {CACHED: {"refresh_next": setting.refresh}}
    caches = {name: own.get(name, {}) for name in TABLES[args.table].caches}
    if args.load_format == "dummy":
        return timed_block(llm, args, setting, caches)
    params = SamplingParams(
        max_tokens=setting.response,
        block_length=setting.block,
        steps_per_block=setting.steps,
        tokens_per_step=setting.per_step,
        sampler="adaptive" if setting.per_step else "ancestral",
        temperature=setting.temperature,
        correction_steps=setting.corrections,
        canvas_length=min(CANVAS // args.divide, llm.loaded.config.max_length),
        ignore_eos=True,
    )
    workload = workload_of(llm, args, setting, params)
    engine = replace(llm.engine_config, max_num_seqs=setting.batch)
    rows = [contender(llm, name, settings, workload) for name, settings in caches.items()]
    results = run_bench(llm, workload, rows, args.rounds, engine, progress=False).data["results"]
    scores = {} if quality is None else quality(setting, params)
    found = {}
    for row in results:
        speed = row["throughput_tok_s"]
        found[row["cache"]] = {
            "seconds": args.requests * setting.response / speed,
            "tokens_per_s": speed,
            "requests_per_s": speed / setting.response,
            "gain": row["ratio_to_none"],
            "gain_in_work": row["work_ratio_to_none"],
            "agreement": row["agreement_with_none"],
            "accuracy": row["accuracy"],
            "accuracy_interval": row["accuracy_interval"],
            **scores.get(row["cache"], {}),
        }
    return found


def workload_of(llm: LLM, args: argparse.Namespace, setting: Setting, params: SamplingParams) -> Workload:
    """The bundled model's task, the given prompts, or random tokens."""
    if is_bundled_uniform(llm):
        return timetable_workload(llm, args.requests, args.seed, params)
    if args.prompts is None:
        return random_workload(llm, args.requests, 1, args.seed, replace(params, seed=args.seed), 0, setting.prompt)
    prompts = cut_prompts(llm, read_texts(args.prompts), setting.prompt, args.requests)
    each = (replace(params, seed=args.seed + number) for number in range(args.requests))
    tasks = [Task(Request(str(i), prompt, own)) for i, (prompt, own) in enumerate(zip(prompts, each, strict=True))]
    return Workload("prompts of a file", args.seed, tuple(tasks), 0)


def timed_block(llm: LLM, args: argparse.Namespace, setting: Setting, caches: Mapping[str, Json]) -> Json:
    """The response's middle block, where `block-prefix` saves its mean; what stands before it counts as prompt."""
    block = BlockShape(
        canvas=CANVAS // args.divide,
        prompt=setting.prompt + (setting.response - setting.block) // 2,
        block=setting.block,
        steps=setting.steps,
        per_step=setting.per_step or 1,
        batch=setting.batch,
        next_block=setting.blocks > 1,
    )
    policies = {name: llm.policy(name, own) for name, own in caches.items()}
    times = time_block(llm, block, policies, args.full_steps, args.cached_steps)
    tokens = setting.batch * setting.block
    return {
        name: {
            "seconds": own.block_s * setting.blocks * args.requests / setting.batch,
            "tokens_per_s": tokens / own.block_s,
            "requests_per_s": tokens / own.block_s / setting.response,
            "gain": times[NONE].block_s / own.block_s,
            "gain_in_work": times[NONE].block_rows / own.block_rows,
        }
        for name, own in times.items()
    }


def judged(llm: LLM, args: argparse.Namespace) -> Quality:
    """Generative perplexity of every cache, as `remask eval gen-ppl` measures it."""
    judge = Judge(args.judge, "auto", llm.model.device)

    def quality(setting: Setting, params: SamplingParams) -> Mapping[str, Json]:
        prompts = cut_prompts(llm, read_texts(args.prompts), setting.prompt, args.requests)
        own = {CACHED: {"refresh_next": setting.refresh}}
        policies = [Policy(name, own.get(name, {})) for name in TABLES[args.table].caches]
        rows = measure(llm, judge, prompts, policies, params, args.seed)
        return {row.cache: {"perplexity": row.perplexity, "perplexity_interval": [row.low, row.high]} for row in rows}

    return quality


def text(name: str, rows: Sequence[tuple[Row, Setting, Json]]) -> str:
    """The table as Markdown, with the thesis's setting and numbers in its last column."""
    lines = [
        TABLES[name].source,
        "",
        "| setting | cache | time, s | tok/s | req/s | gain | gain in work | quality (95 %) | agreement | thesis |",
        "|" + "---|" * 10,
    ]
    for row, setting, found in rows:
        for cache, own in found.items():
            numbers = (f"{own['seconds']:.1f}", f"{own['tokens_per_s']:.1f}", f"{own['requests_per_s']:.3f}")
            gains = (f"{own['gain']:.2f}x", f"{own['gain_in_work']:.2f}x")
            agreement = "-" if own.get("agreement") is None else f"{own['agreement']:.1%}"
            published = f"{row.thesis.label}: {row.published[cache]}" if row.thesis and cache in row.published else ""
            cells = (setting.label, cache, *numbers, *gains, _quality(own), agreement, published)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _quality(own: Json) -> str:
    if own.get("perplexity") is not None:
        low, high = own["perplexity_interval"]
        return f"PPL {own['perplexity']:.2f} ({low:.2f} to {high:.2f})"
    if own.get("accuracy") is not None:
        low, high = own["accuracy_interval"]
        return f"{own['accuracy']:.1%} ({100 * low:.1f} to {100 * high:.1f})"
    return "-"


if __name__ == "__main__":
    main()
