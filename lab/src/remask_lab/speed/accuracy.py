"""What ways to share prefixes, documents and passes cost in answers: right ones, equal tokens, and work."""

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from remask import LLM, EngineConfig, Output, SamplingParams
from remask.depth.conversations import TokenPrompts
from remask.depth.profile import Cuts, rule_limits
from remask.depth.rule import ProfileSettings, depth_at
from remask.engine.request import Request
from remask.request.parts import Segment
from remask.tasks import tariff, transit
from remask.tasks.workload import messages
from remask_lab.bench.workload import TaskChoice, chat_workload
from remask_lab.instruments.depths import RULES
from remask_lab.records.interval import clustered, wilson
from remask_lab.speed.command import print_line, report
from remask_lab.speed.runs import answers, row_layers, under

GOLDENS = Path(__file__).parents[4] / "tests" / "goldens"
BOUNDARIES = ("stored", "recomputed")
Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, what judges its output, and what it shares with others: their verdicts count together."""

    request: Request
    right: Callable[[Output], bool]
    cluster: Any = None
    kind: str = ""


def outputs(llm: LLM, work: Sequence[Asked], cache: str, settings: Settings, **terms: Any) -> list[Output]:
    """Outputs in order, from a new engine."""
    return answers(llm, under([each.request for each in work], llm.session.policy(cache, settings), **terms))[1]


def judged(work: Sequence[Asked], found: Sequence[Output]) -> dict[str, Any]:
    """The share of right answers and its 95 % interval."""
    right = [each.right(output) for each, output in zip(work, found, strict=True)]
    bounds = clustered(right, [each.cluster for each in work])
    return {"accuracy": round(mean(right), 3), "interval": [round(bound, 3) for bound in bounds]}


TARIFF_RATIO = 85  # of the requests of `tests/goldens/tariff`, in percent
TARIFF_PARAMS = SamplingParams(max_tokens=8, steps=8, block_length=8, ignore_eos=True)


def tariff_goldens(count: int) -> tuple[LLM, list[Asked]]:
    """The small model whose prefix rows must see the question, and requests; names stand at odd places of answers."""
    folder = GOLDENS / "tariff"
    limits = EngineConfig(max_num_seqs=16, max_model_len=160, store_budget_tokens=4096)
    llm = LLM(str(folder), dtype="float32", device="cpu", engine=limits)

    def right(line: Mapping[str, Any], output: Output) -> bool:
        return bool(list(output.token_ids[1::2]) == line["answer_token_ids"][1::2])

    work = []
    for text in (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()[:count]:
        line = json.loads(text)
        tokens, length = line["prompt_token_ids"], line["prefix_length"]
        request = Request(line["id"], tokens, TARIFF_PARAMS, length)
        work.append(Asked(request, partial(right, line), tuple(tokens[:length])))
    return llm, work


def depth_rule(args: argparse.Namespace) -> None:
    """The depth at which BiCache's accuracy falls, beside the depth that each rule of a depth table picks.

    Runs on a small trained model whose prefix rows must see the question (`tests/goldens/tariff`). Prints a line for
    `none` and for each boundary and depth, then one for each rule, profiled on canvases of one request and of several.
    """
    llm, work = tariff_goldens(args.requests)

    def measured(cache: str, settings: Settings) -> dict[str, Any]:
        found = outputs(llm, work, cache, settings)
        return {**judged(work, found), "row_layers": row_layers(found)}

    print_line(cache="none", **measured("none", {}))
    for each in BOUNDARIES:
        for depth in range(1, llm.loaded.config.layers + 1):
            settings = {"depth": depth, "boundary": each}
            print_line(**settings, **measured("bicache", settings))
    prompts = TokenPrompts("its requests", tuple(tuple(each.request.prompt_token_ids) for each in work))
    curves = {}
    for name, canvas in {"one request": 144, "several requests": 400}.items():
        asked = ProfileSettings(ratios=(TARIFF_RATIO,), canvas=canvas, response=TARIFF_PARAMS.max_tokens)
        cuts = Cuts(llm.session, prompts, asked)
        curves[name] = [cuts.measure(number, lambda: None) for number in range(args.samples)]
    for rule in RULES:
        limits = {name: rule_limits(rule, (TARIFF_RATIO,), found)[TARIFF_RATIO] for name, found in curves.items()}
        print_line(rule=str(rule), **{name: depth_at(each, ProfileSettings().tau) for name, each in limits.items()})


def within_request(args: argparse.Namespace) -> None:
    """BiCache at depth 0: what refreshing a prefix within the request keeps and spares, beside `none` and fewer steps.

    Nothing is read from the store: all layers keep the K/V that the prefix's rows had at the last refresh (BiCache,
    equation 5 with no shallow layer). Each request has a prefix of its own, so answers are independent of each other.
    Runs the bundled models on their tasks, with long and with short prefixes, and the small model of
    `tests/goldens/tariff`, whose prefix rows must see the question. Prints a line for each task and setting.
    """
    limits = EngineConfig(max_num_seqs=8, max_model_len=512)
    orders, lines = (
        LLM(name, dtype="float32", device="cpu", engine=limits) for name in ("bundled-tariff", "bundled-transit")
    )
    print(json.dumps(report(orders, requests=args.requests, seeds=args.seeds), indent=2))

    def drawn(llm: LLM, task: TaskChoice) -> list[Asked]:
        """As many requests of each seed, each under a system prompt of its own, with the model's own sampling."""
        work = []
        for seed in args.seeds:
            for each in chat_workload(llm, task, args.requests, args.requests, seed, llm.session.params()).tasks:
                request = replace(each.request, id=f"{seed}:{each.request.id}")
                work.append(Asked(request, partial(lambda own, output: bool(own.correct(output.text)), each)))
        return work

    for name, kind, count in (
        ("plans, 40 orders", "plan", 40),
        ("plans, 10 orders", "plan", 10),
        ("look-ups", "lookup", 40),
    ):
        asked = drawn(orders, TaskChoice("tariff", tariff.TariffSettings(kinds=(kind,), orders=count)))
        _within(f"bundled-tariff, {name}", orders, asked)
    for rows in (transit.TransitSettings().rows, 8):
        asked = drawn(lines, TaskChoice("transit", transit.TransitSettings(rows)))
        _within(f"bundled-transit, {rows} rows", lines, asked)
    _within("tests/goldens/tariff", *tariff_goldens(args.requests * len(args.seeds)))


def _within(task: str, llm: LLM, work: Sequence[Asked]) -> None:
    """A line for each setting of one task: right answers with the interval of their share, and row-layers."""
    params = work[0].request.params
    steps = params.steps or params.max_tokens
    ratios = [
        each.request.prefix_length / (len(each.request.prompt_token_ids) + each.request.params.max_tokens)
        for each in work
    ]
    print_line(task=task, steps=steps, prefix_ratio=round(mean(ratios), 3))
    rows: list[tuple[str, dict[str, Any], int]] = [("none", {}, steps), ("none", {}, steps // 2), ("reuse", {}, steps)]
    rows += [
        ("bicache", {"depth": 0, "within_request": True, "refresh_interval": interval}, steps)
        for interval in (2, 4, 8, 16, None)
        if interval is None or interval < steps
    ]
    for cache, settings, taken in rows:
        block = max(params.block_length or params.max_tokens, params.max_tokens // taken)
        found = outputs(llm, work, cache, settings, params=replace(params, steps=taken, block_length=block))
        right = sum(each.right(output) for each, output in zip(work, found, strict=True))
        interval95 = [round(bound, 3) for bound in wilson(right, len(work))]
        told = {"right": right, "of": len(work), "interval": interval95, "row_layers": row_layers(found)}
        print_line(cache=cache, **settings, steps=taken, **told)


def parts(args: argparse.Namespace) -> None:
    """Stored documents that stand in any order in a prompt: accuracy and work, by depth, beside computing everything.

    Runs the bundled model. The orders of a system prompt are cut into documents, and each request has those of its
    system prompt in an order of its own, before a question of a plan or a look-up. So its prompts have hardly a common
    prefix, and all of their documents in common. Prints a line for each setting.
    """
    llm = LLM("bundled-tariff", dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=8, max_model_len=192))
    work = _documents(llm, args.prompts, args.requests, args.documents)
    lengths = [len(part.positions) for each in work for part in each.request.segments]
    share = sum(lengths) / sum(len(each.request.prompt_token_ids) + 8 for each in work)
    tokens = sorted(set(lengths))
    head = report(llm, requests=len(work), part_tokens=tokens, share_of_canvas=round(share, 3))
    print(json.dumps(head, indent=2))
    settings: list[tuple[str, Settings]] = [("none", {})]
    for interval in args.intervals:
        settings += [("bicache", {"depth": depth, "refresh_interval": interval}) for depth in args.depths]
    settings += [("acache", {"ratio": ratio}) for ratio in args.ratios]
    for cache, own in settings:
        print_line(cache=cache, **own, **_of_parts(llm, work, cache, own))
    prefixed = [
        replace(
            each, request=replace(each.request, segments=(), prefix_length=each.request.segments[-1].positions.stop)
        )
        for each in work
    ]
    for depth in args.depths[:2]:
        told = _of_parts(llm, prefixed, "bicache", {"depth": depth})
        print_line(cache="bicache", shared="prefix", depth=depth, **told)


def _documents(llm: LLM, prompts: int, requests: int, documents: int) -> list[Asked]:
    """`requests` questions of either kind over `prompts` system prompts each, whose documents stand in random order."""
    assert llm.tokenizer is not None
    words = 3  # tokens of an order: the title, the name, and what separates it from the next one
    made: list[Asked] = []
    for seed, kind in enumerate(tariff.KINDS):
        rng = random.Random(f"documents {kind}")
        for item in tariff.make_workload(requests, prompts, 31337 + seed, tariff.TariffSettings(kinds=(kind,))):
            orders = item.prompt.orders
            size = -(-len(orders) // documents)
            pieces = [orders[at : at + size] for at in range(0, len(orders), size)]
            rng.shuffle(pieces)
            shuffled = replace(item.prompt, orders=tuple(order for piece in pieces for order in piece))
            (request,) = llm.session.requests([messages(shuffled, item.question)], {"ignore_eos": True})
            said = [llm.tokenizer.decode([token]).strip() for token in request.prompt_token_ids]
            at, segments = said.index(shuffled.orders[0][0]), []
            for piece in pieces:
                # What ends the last order of a document is not its own: it is another token at the end of the list.
                segments.append(Segment(at, words * len(piece) - 1))
                at += words * len(piece)
            name = f"{kind} {len(made)}"
            asked = replace(request, id=name, prefix_length=0, find_prefix=False, segments=segments)
            right = partial(lambda answer, output: tariff.is_correct(output.text or "", answer), item.reference)
            made.append(Asked(asked, right, item.prompt_index, kind))
    return made


def _of_parts(llm: LLM, work: Sequence[Asked], cache: str, settings: Settings) -> dict[str, Any]:
    """Accuracy by kind with 95 % intervals, row-layers of the requests and of passes over parts, and what was found."""
    engine = llm.session.new_engine()
    requests = under([each.request for each in work], llm.session.policy(cache, settings))
    found = answers(llm, requests, engine)[1]
    by_kind = {}
    for kind in tariff.KINDS:
        pairs = [(each, output) for each, output in zip(work, found, strict=True) if each.kind == kind]
        by_kind[kind] = judged([each for each, _ in pairs], [output for _, output in pairs])
    usages = [output.usage for output in found]
    return {
        **by_kind,
        "row_layers": row_layers(found),
        "row_layers_of_parts": engine.stats.prefix_row_layers,
        "passes_over_parts": engine.stats.prefix_passes,
        "cached_share": round(sum(u.cached_tokens for u in usages) / sum(u.prompt_tokens for u in usages), 3),
    }
