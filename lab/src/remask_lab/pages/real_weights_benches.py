"""Benches of caches on pretrained weights: questions about pages, GSM8K's, and documents that go on."""

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
"""Parts that compare depths, and the shops of their pages."""
TOWNS: Final = ("town", *DEPTHS, "town-steps", "town-refresh", "town-caches")
LOOKUPS: Final[Mapping[str, str]] = {"lookup-generated": GENERATED, "lookup-by-hand": BY_HAND}
"""Parts that ask about pages of kinds that no training had, and who wrote them."""
SHARES: Final = (20, 50, 80, 91)
"""Percent of a document that are its prefix; the paper's canvases have 91."""
REFRESHED, REFRESHES = (5, 15), (1, 4, None)
"""Depths of the part `town-refresh`, and steps between refreshes of the prefix; None: one at first alone."""

DEEPEST: Final = 6
"""The deepest of the depths of `town-depths` that keep its answers."""
NEAR: Final = (DEEPEST, DEEPEST + 1)
"""Depths of the part `town-steps`."""

ROUNDS, DEEP = 8, 15
"""Of the part `town`: its rounds, each with a share of the pages, and a depth beside the one that audits earn."""

EARNED: Final = "bicache, earned depth"

Draw: TypeAlias = Callable[[LLM, Source], Workload]


def is_bench(part: str) -> bool:
    """Whether a part compares caches, and is a record of `remask bench`."""
    return part in (*TOWNS, *LOOKUPS) or part.startswith((SHOTS, DOCUMENTS))


def bench(part: str, size: Size, source: Source) -> Record:
    sure = {"threshold": 0.9}  # as many tokens a step as are sure, so that many questions are asked in little time
    if part == "town":
        draw, rounds = town(size, size.town, sure), min(ROUNDS, size.town[1])
        return _compare(source, size, draw, ("none", "reuse"), depths=(DEEP,), rounds=rounds, earned=True)
    if part in LOOKUPS:
        depths = (DEEPEST,) if size.shops >= 8 else size.depths
        draw = lookups(size, LOOKUPS[part], sure)
        return _compare(source, size, draw, ("none", "reuse"), depths=depths, earned=True)
    if part in DEPTHS:
        draw = town(size, size.town_depths, sure, DEPTHS[part] if size.shops >= 8 else size.shops)
        return _compare(source, size, draw, only=("none", "reuse"), depths=size.depths)
    if part == "town-steps":
        # A token a step, as no threshold ends a block early.
        depths = NEAR if size.shops >= 8 else size.depths
        return _compare(source, size, town(size, size.town_depths, {}), only=("none", "reuse"), depths=depths)
    if part == "town-refresh":
        # A token a step, so that the prefix is refreshed while an answer is written.
        draw = town(size, size.town_depths, {"steps": TOWN_SAMPLING["max_tokens"]})
        depths = tuple(depth for depth in REFRESHED if size.shops >= 8 or depth < 8)
        return _compare(source, size, draw, only=("none", "reuse"), depths=depths, refreshes=REFRESHES)
    if part == "town-caches":
        # Two tokens a step, so that caches within a request have steps to save.
        return _compare(source, size, town(size, size.town_caches, {"steps": 16}))
    number = int(part.rpartition("-")[2])
    draw = solved(size, number) if part.startswith(SHOTS) else documents(size, number)
    return _compare(source, size, draw, depths=size.depths[::2], by_answers=False)


def _compare(
    source: Source,
    size: Size,
    draw: Draw,
    only: Sequence[str] | None = None,
    depths: Sequence[int] = (),
    refreshes: Sequence[int | None] = (),
    by_answers: bool = True,
    rounds: int = 1,
    earned: bool = False,
) -> Record:
    """A bench of every cache, or of `only` these and `bicache` at `depths`, without a warm-up; each request runs once.

    BiCache's depth is half the layers where none is named. With `refreshes` each depth is run at each of them. `earned`
    adds `bicache` as it comes, at the depth that audits have earned before. The record says what was left out.
    """
    llm = open_model(source, "int8")
    workload = draw(llm, source)
    depth = {"depth": llm.loaded.config.layers // 2}
    rows, left_out = every_contender(llm, workload, dict.fromkeys(("bicache", *COMPOSITIONS), depth))
    if only is not None:
        rows, left_out = [row for row in rows if row.name in only], []
    for steps in refreshes:
        named = at_depths(llm, workload, depths, {"refresh_interval": steps})
        rows += [replace(row, name=f"{row.name} refresh={steps or 'never'}") for row in named]
    if not refreshes:
        rows += at_depths(llm, workload, depths)
    if earned:
        rows.append(replace(contender(llm, "bicache", None, workload), name=EARNED))
    requests = (task.request for task in workload.tasks)
    longest = max(len(each.prompt_token_ids) + each.params.max_tokens for each in requests)
    tokens = max(DEFAULT_STORE_TOKENS, size.at_once * longest)
    engine = EngineConfig(size.at_once, longest, store_budget_tokens=tokens)
    divided, losses = rounds > 1, not by_answers
    record = run_bench(
        llm, workload, rows, rounds, engine, progress=False, answers=False, losses=losses, warm_up=0, divided=divided
    )
    record.about["settings"]["divided"] = divided
    record.data["left_out"] = [asdict(left) for left in left_out]
    return record


def town(size: Size, counts: tuple[int, int], sampling: Mapping[str, Any], shops: int | None = None) -> Draw:
    requests, pages = counts
    task = TaskChoice("town", TownSettings(shops=shops or size.shops))
    return lambda llm, _: usual_workload(llm, requests, SEED, sampling, prefixes=pages, task=task)


def lookups(size: Size, written: str, sampling: Mapping[str, Any]) -> Draw:
    requests, pages = size.lookups[written]
    task = TaskChoice("lookup", LookupSettings(written=written))
    return lambda llm, _: usual_workload(llm, requests, SEED, sampling, prefixes=pages, task=task)


def solved(size: Size, shots: int) -> Draw:
    """Questions of GSM8K behind worked examples: agreement and loss, as the model solves few. Two share a prompt."""
    count = size.solved[shots]
    sampling = {
        "max_tokens": size.solved_tokens,
        "steps": size.solved_steps,
        "block_length": size.solved_tokens // 2,
        "ignore_eos": True,
    }
    task = TaskChoice("gsm8k", gsm8k.Gsm8kSettings(shots=shots))

    def draw(llm: LLM, _: Source) -> Workload:
        workload = usual_workload(llm, count, SEED, sampling, prefixes=-(-count // 2), task=task)
        # Of a reference as much as of a response: what follows would take as long again.
        return replace(workload, tasks=tuple(_cut(llm, each) for each in workload.tasks))

    return draw


def documents(size: Size, share: int) -> Draw:
    """Documents whose last tokens are written, two a step: agreement and loss."""
    count, canvas, written = size.documents
    params = SamplingParams(max_tokens=written, steps=written // 2, block_length=written // 2, ignore_eos=True)
    return lambda llm, source: document_workload(
        llm, list(read_documents(source.documents)), count, canvas, share, SEED, params
    )


def _cut(llm: LLM, task: Task) -> Task:
    assert llm.tokenizer is not None
    tokens = llm.tokenizer.encode(task.reference or "", add_special_tokens=False)[: task.request.params.max_tokens]
    return replace(task, reference=llm.tokenizer.decode(tokens))
