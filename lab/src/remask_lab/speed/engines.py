"""Ways to run the same requests, in turns: together or alone, batch-invariant, sharing pages, quantized."""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from remask import LLM, EngineConfig, SamplingParams
from remask.checks import BUNDLED_TARIFF
from remask.engine.pack import pack_uncached
from remask.engine.request import Request
from remask.errors import IntegrityError
from remask.model.pool import Pool
from remask.plan.canvas import Canvas
from remask.tasks import tariff
from remask.tasks.workload import messages
from remask_lab.asked import separated
from remask_lab.speed.command import in_turns, report, thread_seconds
from remask_lab.speed.runs import answers, open_random, random_requests, row_layers


def invariance(args: argparse.Namespace) -> dict[str, Any]:
    """The cost of batch invariance: the same requests with `batch_invariant` and without it.

    Both runs of a cache take turns. The command checks that the first request is answered alone, under
    `batch_invariant`, as it was among the others.
    """
    length = args.prompt + args.response
    plain = EngineConfig(max_num_seqs=args.concurrency, max_model_len=length, store_budget_tokens=2 * length)
    llm = LLM(args.model, load_format="dummy", dtype=args.dtype, device=args.device, engine=plain)
    params = SamplingParams(max_tokens=args.response, block_length=args.block_length, steps=args.steps, ignore_eos=True)
    results = []
    for cache in separated(args.caches):
        work = random_requests(llm, args.requests, params, llm.session.policy(cache), args.prompt, args.prompt // 2)
        results.append({"cache": cache, **_invariant(llm, cache, work, plain, args.rounds)})
    return report(llm, results=results)


def _invariant(llm: LLM, cache: str, work: Sequence[Request], plain: EngineConfig, rounds: int) -> dict[str, Any]:
    """The seconds of both runs, and how many times as long the invariant one takes."""
    invariant = replace(plain, batch_invariant=True)
    answers(llm, work[:1], config=plain)  # the first run of a shape makes kernels
    (alone,) = answers(llm, work[:1], config=invariant)[1]
    seconds, changed = [], 0
    for _ in range(rounds):
        (usual, one), (ours, other) = (answers(llm, work, config=config) for config in (plain, invariant))
        if other[0].token_ids != alone.token_ids:
            raise IntegrityError(f"{cache}: with batch_invariant an answer depends on what else runs")
        changed = sum(a.token_ids != b.token_ids for a, b in zip(one, other, strict=True))
        seconds.append((usual, ours))
    found = [ours / usual for usual, ours in seconds]
    return {
        "times_as_long": statistics.median(found),
        "range": [min(found), max(found)],
        "seconds": [statistics.median(column) for column in zip(*seconds, strict=True)],
        "answers_that_differ": changed,
    }


def sharing(args: argparse.Namespace) -> dict[str, Any]:
    """The gain of exact page sharing: many requests under one system prompt, with and without it.

    Both runs use `exact`, one with a store of pages and one without. They take turns. The command checks that the
    context is computed once, and that its pages are held once.
    """
    length = args.prompt + args.own + args.response
    limits = {"max_num_seqs": args.concurrency, "max_model_len": length + 64}
    llm = open_random(args, **limits, store_budget_tokens=0)
    params = SamplingParams(max_tokens=args.response, ignore_eos=True)
    requests = random_requests(
        llm, args.requests, params, llm.session.policy("exact"), args.prompt + args.own, args.prompt
    )
    work = [replace(request, prefix_length=0) for request in requests]
    gains = []
    for _ in range(args.rounds):
        engine = llm.session.new_engine(EngineConfig(**limits, store_budget_tokens=16 * length))
        (ours, own), (theirs, reference) = answers(llm, work, engine), answers(llm, work)
        gains.append(theirs / ours)
    chain, found = engine.memory.chain, [output.usage.cached_tokens for output in own]
    pages = args.prompt // chain.page_size
    if any(tokens != pages * chain.page_size for tokens in found[1:]):
        raise IntegrityError("the context was computed again")
    if sum(page.hits == len(work) - 1 for page in chain.pages) != pages:
        raise IntegrityError("the context's pages are held more than once")
    if [output.token_ids for output in own] != [output.token_ids for output in reference]:
        raise IntegrityError("sharing changed an answer")
    (alone,) = answers(llm, [replace(work[-1], id="again")], engine)[1]
    assert own[0].first_settled_s is not None
    assert alone.first_settled_s is not None
    return report(
        llm,
        throughput_gain=statistics.median(gains),
        row_layers_gain=row_layers(reference) / row_layers(own),
        requests_that_skip_the_context=sum(tokens > 0 for tokens in found),
        first_settled_first_ms=1e3 * own[0].first_settled_s,
        first_settled_alone_hit_ms=1e3 * alone.first_settled_s,
        tok_per_s=[args.requests * args.response / seconds for seconds in (ours, theirs)],
    )


def quantised(args: argparse.Namespace) -> dict[str, Any]:
    """Quantized weights beside those of the model's dtype: bytes, time of a pass, and answers of the bundled model.

    Passes over random canvases take turns; their time is that of the computing thread's processor, with one thread. The
    bundled model answers questions of its task under `none` and under `block-dual`: how many are right, and what share
    of the tokens is that of the unquantised model.
    """
    kinds: list[Any] = [None, *separated(args.kinds)]
    opened = partial(LLM, dtype=args.dtype, device=args.device, threads=1)
    limits = EngineConfig(max_num_seqs=8, max_model_len=1)
    models = [opened(args.model, load_format="dummy", engine=limits, quantization=kind) for kind in kinds]
    sizes = [llm.loaded.weights.nbytes for llm in models]
    rows: list[dict[str, Any]] = [
        {"quantization": kind, "weight_bytes": size, "share_of_bytes": size / sizes[0], "times_as_fast": {}}
        for kind, size in zip(kinds, sizes, strict=True)
    ]
    for count in args.rows:
        seconds = _passes(models, count, args.rounds)
        for row, own in zip(rows, seconds, strict=True):
            row["times_as_fast"][count] = seconds[0] / own
    found: list[dict[str, Any]] = []
    work = tariff.make_workload(args.questions, min(4, args.questions), 0) if args.questions else ()
    before: dict[str, list[int]] = {}
    for kind in kinds if work else ():
        llm = opened(BUNDLED_TARIFF, engine=EngineConfig(max_num_seqs=8), quantization=kind)
        for cache in ("none", "block-dual"):
            outputs = llm.generate([messages(each.prompt, each.question) for each in work], cache=cache)
            tokens = [token for output in outputs for token in output.token_ids]
            same = [one == other for one, other in zip(before.setdefault(cache, tokens), tokens, strict=False)]
            right = sum(tariff.is_correct(o.text or "", each.reference) for o, each in zip(outputs, work, strict=True))
            told = {"right": right, "of": len(work), "same_tokens": sum(same) / len(same)}
            found.append({"quantization": kind, "cache": cache, **told})
    return report(models[0], results=rows, bundled=found)


def _passes(models: Sequence[LLM], count: int, rounds: int) -> list[float]:
    """Seconds of processor time of a pass over `count` rows, the median of `rounds`, of each model."""
    tokens = np.random.default_rng(0).integers(0, models[0].loaded.config.vocab, count).tolist()

    def one(llm: LLM, pool: Pool) -> None:
        llm.model.forward(pack_uncached(llm.model, [Canvas(tokens, (), 0)]), pool)

    calls = {
        str(number): partial(one, llm, Pool(llm.model.config, count, 1, llm.model.dtype, llm.model.device))
        for number, llm in enumerate(models)
    }
    with torch.inference_mode():
        times = in_turns(calls, rounds, thread_seconds)
    return [statistics.median(own) for own in times.values()]
