"""The gain of exact page sharing: many requests under one system prompt, with and without it.

    python -m remask_lab.speed.sharing [--model sdar-100m] [--requests 100] [--prompt 1000]

Both runs use `exact`, one with a store of pages and one without. They take turns. The command checks that the context
is computed once, and that its pages are held once.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np

from remask import LLM, EngineConfig, SamplingParams
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.errors import IntegrityError
from remask.llm import Output
from remask_lab.speed.command import add_model_options, command_parser, open_random, print_report, run_command


def main() -> None:
    """Measure and print one JSON object."""
    parser = command_parser(__doc__)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of the common system prompt")
    parser.add_argument("--own", type=int, default=24, help="tokens of each request's own")
    parser.add_argument("--response", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    add_model_options(parser, "sdar-100m")
    args = parser.parse_args()
    length = args.prompt + args.own + args.response
    sharing = EngineConfig(max_num_seqs=args.concurrency, max_model_len=length + 64, store_budget_tokens=16 * length)
    off = EngineConfig(max_num_seqs=args.concurrency, max_model_len=length + 64, store_budget_tokens=0)
    llm = open_random(args, off)
    work = requests(llm, args)
    rounds = [(run(llm, work, sharing), run(llm, work, off)) for _ in range(args.rounds)]
    last, reference = rounds[-1]
    pages = len(work[0].prompt_token_ids[: args.prompt]) // last["page_size"]
    if any(found != pages * last["page_size"] for found in last["found"][1:]):
        raise IntegrityError("the context was computed again")
    if last["context_pages"] != pages:
        raise IntegrityError("the context's pages are held more than once")
    if last["tokens"] != reference["tokens"]:
        raise IntegrityError("sharing changed an answer")
    firsts = last["first_settled_s"]
    print_report(
        llm,
        **{name: getattr(args, name) for name in ("model", "requests", "prompt", "own", "response", "concurrency")},
        throughput_gain=statistics.median(theirs["seconds"] / ours["seconds"] for ours, theirs in rounds),
        row_layers_gain=reference["row_layers"] / last["row_layers"],
        requests_that_skip_the_context=sum(found > 0 for found in last["found"]),
        first_settled_first_ms=1e3 * firsts[0],
        first_settled_alone_hit_ms=1e3 * alone(llm, work[-1], last["engine"]),
        tok_per_s=[args.requests * args.response / run["seconds"] for run in (last, reference)],
    )


def requests(llm: LLM, args: argparse.Namespace) -> list[Request]:
    """Requests with one random system prompt, each followed by random tokens of its own."""
    rng = np.random.default_rng(0)
    vocab = llm.loaded.config.vocab
    system = rng.integers(0, vocab, args.prompt).tolist()
    params = SamplingParams(max_tokens=args.response, ignore_eos=True)
    policy = llm.policy("exact")
    prompts = [system + rng.integers(0, vocab, args.own).tolist() for _ in range(args.requests)]
    return [Request(str(number), prompt, params, policy=policy) for number, prompt in enumerate(prompts)]


def run(llm: LLM, work: list[Request], config: EngineConfig) -> dict[str, Any]:
    """Run all requests on a new engine."""
    engine = llm.new_engine(config)
    start = time.perf_counter()
    outputs = {output.id: output for output in llm.run(work, engine=engine, progress=False)}
    seconds = time.perf_counter() - start
    ordered: list[Output] = [outputs[item.id] for item in work]
    chain = engine.memory.chain
    return {
        "engine": engine,
        "seconds": seconds,
        "page_size": chain.page_size,
        "tokens": [output.token_ids for output in ordered],
        "found": [output.usage.cached_tokens for output in ordered],
        "row_layers": sum(output.usage.row_layers for output in ordered),
        "first_settled_s": [output.first_settled_s for output in ordered],
        "context_pages": sum(page.hits == len(work) - 1 for page in chain.pages),
    }


def alone(llm: LLM, item: Request, engine: Engine) -> float:
    """Seconds until the first settled token of a request that runs alone and finds the context in the store."""
    again = Request("again", item.prompt_token_ids, item.params, policy=item.policy)
    (output,) = llm.run([again], engine=engine, progress=False)
    assert output.first_settled_s is not None
    return output.first_settled_s


if __name__ == "__main__":
    sys.exit(run_command(main))
