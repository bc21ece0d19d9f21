"""Benches of caches on pretrained weights: questions about pages, questions of GSM8K, and continued documents."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, TypeAlias

from remask.engine.config import DEFAULT_STORE_TOKENS, EngineConfig
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from remask.tasks.town import SAMPLING as TOWN_SAMPLING
from remask.tasks.town import TownSettings
from remask_lab import gsm8k
from remask_lab.bench.bench import run_bench
from remask_lab.bench.contenders import COMPOSITIONS, at_depths, contender, every_contender
from remask_lab.bench.documents import document_workload, read_documents
from remask_lab.bench.lookup import BY_HAND, GENERATED, LookupSettings
from remask_lab.bench.workload import Task, TaskChoice, Workload, usual_workload
from remask_lab.pages.real_weights_sizes import SEED, Size, Source, open_model
from remask_lab.records.record import Record

SHOTS: Final = "shots-"
DOCUMENTS: Final = "documents-"
DEPTHS: Final[Mapping[str, int]] = {"town-depths": 8, "town-depths-16": 16, "town-depths-24": 24}
"""Parts that compare depths, with the numbers of shops on their pages."""
TOWNS: Final = ("town", *DEPTHS, "town-steps", "town-refresh", "town-caches")
LOOKUPS: Final[Mapping[str, str]] = {"lookup-generated": GENERATED, "lookup-by-hand": BY_HAND}
"""Parts with pages of kinds that no training had, and how the pages were written."""
SHARES: Final = (20, 50, 80, 91)
"""Percentages of a document that are its prefix; the paper's canvases have 91."""
REFRESHED: Final = (5, 15)
"""Depths of the part `town-refresh`."""
REFRESHES: Final = (1, 4, None)
"""Steps between refreshes of the prefix in the part `town-refresh`; None never refreshes it."""

DEEPEST: Final = 6
"""The deepest of the depths of `town-depths` that keeps the answers."""
NEAR: Final = (DEEPEST, DEEPEST + 1)
"""Depths of the part `town-steps`."""

ROUNDS: Final = 8
"""Rounds of the part `town`, each with a share of the pages."""
DEEP: Final = 15
"""A depth of the part `town`, beside the one that audits earn."""

EARNED: Final = "bicache, earned depth"

Draw: TypeAlias = Callable[[LLM, Source], Workload]
"""Draws a workload for a model."""


def is_bench(part: str) -> bool:
    """Whether a part compares caches: its record is then one of `remask bench`."""
    return part in (*TOWNS, *LOOKUPS) or part.startswith((SHOTS, DOCUMENTS))


def bench(part: str, size: Size, source: Source) -> Record:
    """Measure a part that compares caches (`is_bench`)."""
    # As many tokens a step as are probable, so that many questions are answered in little time.
    threshold = {"threshold": 0.9}
    if part == "town":
        draw, rounds = town_draw(size, size.town, threshold), min(ROUNDS, size.town[1])
        return _compare(source, size, draw, only=("none", "reuse"), depths=(DEEP,), rounds=rounds, earned=True)
    if part in LOOKUPS:
        depths = (DEEPEST,) if size.shops >= 8 else size.depths
        draw = lookup_draw(size, LOOKUPS[part], threshold)
        return _compare(source, size, draw, only=("none", "reuse"), depths=depths, earned=True)
    if part in DEPTHS:
        draw = town_draw(size, size.town_depths, threshold, DEPTHS[part] if size.shops >= 8 else size.shops)
        return _compare(source, size, draw, only=("none", "reuse"), depths=size.depths)
    if part == "town-steps":
        # A token a step, as no threshold ends a block early.
        depths = NEAR if size.shops >= 8 else size.depths
        return _compare(source, size, town_draw(size, size.town_depths, {}), only=("none", "reuse"), depths=depths)
    if part == "town-refresh":
        # A token a step, so that the prefix is refreshed while an answer is written.
        draw = town_draw(size, size.town_depths, {"steps": TOWN_SAMPLING["max_tokens"]})
        depths = tuple(depth for depth in REFRESHED if size.shops >= 8 or depth < 8)
        return _compare(source, size, draw, only=("none", "reuse"), depths=depths, refreshes=REFRESHES)
    if part == "town-caches":
        # Two tokens a step, so that caches within a request have steps to save.
        return _compare(source, size, town_draw(size, size.town_caches, {"steps": 16}))
    number = int(part.rpartition("-")[2])
    draw = gsm8k_draw(size, number) if part.startswith(SHOTS) else document_draw(size, number)
    return _compare(source, size, draw, depths=size.depths[::2], losses=True)


def _compare(
    source: Source,
    size: Size,
    draw: Draw,
    *,
    only: Sequence[str] | None = None,
    depths: Sequence[int] = (),
    refreshes: Sequence[int | None] = (),
    losses: bool = False,
    rounds: int = 1,
    earned: bool = False,
) -> Record:
    """Run a bench of all caches, or of `only` some, and of `bicache` at `depths`. Returns its record.

    Each request runs once, without warm-up.

    `bicache` and compositions among all caches reuse half of the layers. With `refreshes` each depth is run with each
    of these intervals. `losses` measures the loss of reference answers in place of accuracy, and `earned` adds
    `bicache` at the depth that audits earn. The record names the caches that were left out.
    """
    llm = open_model(source, "int8")
    workload = draw(llm, source)
    depth = {"depth": llm.loaded.config.layers // 2}
    rows, left_out = every_contender(llm, workload, dict.fromkeys(("bicache", *COMPOSITIONS), depth))
    if only is not None:
        rows, left_out = [row for row in rows if row.name in only], []
    for steps in refreshes:
        refreshed = at_depths(llm, workload, depths, {"refresh_interval": steps})
        rows += [replace(row, name=f"{row.name} refresh={steps or 'never'}") for row in refreshed]
    if not refreshes:
        rows += at_depths(llm, workload, depths)
    if earned:
        rows.append(replace(contender(llm, "bicache", None, workload), name=EARNED))
    requests = [task.request for task in workload.tasks]
    canvas = max(len(request.prompt_token_ids) + request.params.max_tokens for request in requests)
    store_tokens = max(DEFAULT_STORE_TOKENS, size.concurrency * canvas)
    engine = EngineConfig(size.concurrency, canvas, store_budget_tokens=store_tokens)
    divided = rounds > 1
    record = run_bench(
        llm, workload, rows, rounds, engine, progress=False, answers=False, losses=losses, warm_up=0, divided=divided
    )
    record.about["settings"]["divided"] = divided
    record.data["left_out"] = [asdict(policy) for policy in left_out]
    return record


def town_draw(size: Size, counts: tuple[int, int], sampling: Mapping[str, Any], shops: int | None = None) -> Draw:
    """Return what draws questions of the town task; `counts` are those of questions and pages."""
    requests, pages = counts
    task = TaskChoice("town", TownSettings(shops=shops or size.shops))
    return lambda llm, _: usual_workload(llm, requests, SEED, sampling, prefixes=pages, task=task)


def lookup_draw(size: Size, written: str, sampling: Mapping[str, Any]) -> Draw:
    """Return what draws questions of the look-up task; `written` is how its pages came to be."""
    requests, pages = size.lookups[written]
    task = TaskChoice("lookup", LookupSettings(written=written))
    return lambda llm, _: usual_workload(llm, requests, SEED, sampling, prefixes=pages, task=task)


def gsm8k_draw(size: Size, shots: int) -> Draw:
    """Return what draws questions of GSM8K behind `shots` worked examples; two share a system prompt.

    The model solves few of them, so agreement and losses are compared.
    """
    count, tokens = size.gsm8k[shots], size.gsm8k_tokens
    sampling = {"max_tokens": tokens, "steps": size.gsm8k_steps, "block_length": tokens // 2, "ignore_eos": True}
    task = TaskChoice("gsm8k", gsm8k.Gsm8kSettings(shots=shots))

    def draw(llm: LLM, _: Source) -> Workload:
        workload = usual_workload(llm, count, SEED, sampling, prefixes=-(-count // 2), task=task)
        # References are cut to the length of responses; the rest would double the time.
        return replace(workload, tasks=tuple(_with_cut_reference(llm, task) for task in workload.tasks))

    return draw


def document_draw(size: Size, share: int) -> Draw:
    """Return what draws documents with a prefix of `share` percent, whose last tokens are written, two a step."""
    count, canvas, tokens = size.documents
    params = SamplingParams(max_tokens=tokens, steps=tokens // 2, block_length=tokens // 2, ignore_eos=True)
    return lambda llm, source: document_workload(
        llm, list(read_documents(source.documents)), count=count, canvas=canvas, ratio=share, seed=SEED, sampling=params
    )


def _with_cut_reference(llm: LLM, task: Task) -> Task:
    """`task` with the first `max_tokens` tokens of its reference."""
    assert llm.tokenizer is not None
    tokens = llm.tokenizer.encode(task.reference or "", add_special_tokens=False)[: task.request.params.max_tokens]
    return replace(task, reference=llm.tokenizer.decode(tokens))
