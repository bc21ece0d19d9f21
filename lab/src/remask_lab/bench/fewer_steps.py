"""Baselines with fewer steps: `none` under a shorter schedule, which caches must beat (dKV-Cache, table 1)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_groups import ANCESTRAL
from remask.request.sampling_params import SamplingParams
from remask.sampling.blocks import even_blocks
from remask_lab.bench.contenders import Contender, LeftOut
from remask_lab.bench.workload import Workload, has_own_task, steps_of

FEW = "few"
KINDS = f"half, {FEW}, or a number of steps"
USUAL, OFF = "1,half", "off"
"""What a bundled model's own task is run with where nothing is asked for, and the word that leaves baselines out."""


def step_baselines(
    llm: LLM, text: str, workload: Workload, rows: Sequence[Contender], engine: EngineConfig
) -> tuple[list[Contender], list[LeftOut]]:
    """Returns contenders of `none` in fewer steps, and those that no schedule allows.

    `text` holds "half" of the workload's steps, numbers of steps, and "few", which takes as many steps as compute the
    row-layers of a cache, for each of `rows` that computes fewer than its baseline; separated by commas. Raises
    `ConfigError` on other words, on numbers that the schedule cannot have, and where the sampler has no schedule.
    """
    _check_scheduled(workload)
    found: dict[str, Contender] = {}
    left_out: list[LeftOut] = []
    for word in (part.strip() for part in text.split(",")):
        wanted = _few(llm, workload, rows, engine) if word == FEW else iter([(_number(word, workload), None)])
        for target, row in wanted:
            base = workload if row is None or row.workload is None else row.workload
            full = base.tasks[0].request.params
            params = with_steps(full, target)
            if params.steps == steps_of(full) and even_blocks(params).length == even_blocks(full).length:
                name = f"none in {word} steps" + ("" if row is None else f", as much work as {row.name}")
                left_out.append(LeftOut(name, f"no schedule comes closer than all {steps_of(full)} steps"))
                continue
            made = _baseline(llm, base, params, row)
            settings = dict(found.get(made.name, made).settings)
            if row is not None:
                settings["work of"] = " and ".join(filter(None, (settings.get("work of"), row.name)))
            found[made.name] = replace(made, settings=settings)
    return list(found.values()), left_out


def asked_step_baselines(
    llm: LLM, text: str | None, workload: Workload, rows: Sequence[Contender], engine: EngineConfig
) -> tuple[list[Contender], list[LeftOut]]:
    """The baselines of `text` as `step_baselines` has them, none for "off", and for None the `USUAL` ones.

    These are of a bundled model's questions; where its sampling has no schedule, they are left out, and why.
    """
    if text is not None:
        return ([], []) if text == OFF else step_baselines(llm, text, workload, rows, engine)
    if not has_own_task(llm) or workload.tasks[0].answer is None:
        return [], []
    try:
        most = steps_of(workload.tasks[0].request.params)
        words = (word for word in USUAL.split(",") if not word.isdigit() or int(word) < most)
        return step_baselines(llm, ",".join(words), workload, rows, engine)
    except ConfigError as error:
        return [], [LeftOut("none in fewer steps", str(error))]


def with_steps(params: SamplingParams, target: float) -> SamplingParams:
    """Returns `params` with the number of steps nearest to `target` that its blocks can share evenly.

    Of two equally near numbers it takes the smaller one. Where `target` is below one step a block, it joins blocks
    until one step a block is not too many.
    """
    whole = block = even_blocks(params).length
    while params.max_tokens // block > max(1.0, target):
        sizes = range(block + 1, params.max_tokens + 1)
        block = next(size for size in sizes if size % whole == 0 and params.max_tokens % size == 0)
    blocks = params.max_tokens // block
    share = target / blocks
    # Joined blocks never take more steps than `target`, or they might take as many as the full schedule.
    steps = max(1, math.ceil(share - 0.5) if block == whole else int(share)) * blocks
    length = params.block_length if block == whole else block
    return replace(params, steps=steps, steps_per_block=None, block_length=length)


def _number(word: str, workload: Workload) -> float:
    params = workload.tasks[0].request.params
    full = steps_of(params)
    if word == "half":
        return full / 2
    try:
        steps = int(word)
    except ValueError as error:
        raise ConfigError(f"--baseline-steps takes {KINDS}, separated by commas; got {word!r}") from error
    if not 1 <= steps < full:
        raise ConfigError(f"--baseline-steps: {steps} is not below the workload's {full} steps, and at least 1")
    near = with_steps(params, steps).steps
    if near != steps:
        raise ConfigError(
            f"--baseline-steps: {steps} steps cannot be shared evenly among the {even_blocks(params).count} blocks; "
            f"use {near}"
        )
    return steps


def _check_scheduled(workload: Workload) -> None:
    params = workload.tasks[0].request.params
    if len({(steps_of(each.request.params), even_blocks(each.request.params).length) for each in workload.tasks}) > 1:
        raise ConfigError("--baseline-steps shortens one schedule, and these requests have several; leave it out")
    if (
        params.threshold is not None
        or params.remasking.factor is not None
        or params.remasking.rule == "order"
        or not params.uses_steps
    ):
        raise ConfigError(
            "--baseline-steps shortens a schedule of steps, and the sampling given has none that could be shortened: "
            "leave out threshold and factor, and remasking 'order' and rules without a schedule"
        )


def _few(
    llm: LLM, workload: Workload, rows: Sequence[Contender], engine: EngineConfig
) -> Iterator[tuple[float, Contender]]:
    """Yields, for each row that computes fewer row-layers than its baseline, the steps that would compute as many.

    Row-layers are measured on one batch. Prefix-only passes do not count, since many requests share them.
    """
    work = {row.name: _row_layers(llm, row, workload, engine) for row in rows}
    for row in rows:
        params = (row.workload or workload).tasks[0].request.params
        share = work[row.name] / work[row.baseline]
        if share < 1:
            yield share * steps_of(params), row


def _row_layers(llm: LLM, row: Contender, workload: Workload, engine: EngineConfig) -> int:
    tasks = (row.workload or workload).tasks[: engine.max_num_seqs]
    work = [task.request.with_policy(row.policy) for task in tasks]
    outputs = llm.session.run(work, engine=llm.session.new_engine(engine), progress=False)
    return sum(output.usage.row_layers for output in outputs)


def _baseline(llm: LLM, workload: Workload, params: SamplingParams, row: Contender | None) -> Contender:
    """Returns `none` on `workload` in the steps of `params`. Its baseline is `row`'s.

    On a uniform model each position of a block may change once, in however few steps.
    """
    own, blocks = {"steps": params.steps}, even_blocks(params)
    schedule = {name: getattr(params, name) for name in ("steps", "steps_per_block", "block_length")}
    if params.block_length != workload.tasks[0].request.params.block_length:
        own["block_length"] = params.block_length
    if llm.loaded.config.kind == "uniform":
        each = blocks.total_steps // blocks.count
        schedule |= {"steps": None, "steps_per_block": each}
        if params.uniform.sampler not in ANCESTRAL:
            own["tokens_per_step"] = -(-blocks.length // each)
            schedule["uniform"] = replace(params.uniform, tokens_per_step=own["tokens_per_step"])
    baseline = "none" if row is None else row.baseline
    name = f"{baseline} {' '.join(f'{key}={value}' for key, value in own.items())}"
    settings = {**own, **({"remasking": params.remasking.rule} if baseline != "none" else {})}
    # Each request keeps what is its own, such as the seed of its noise.
    tasks = [
        replace(task, request=replace(task.request, params=replace(task.request.params, **schedule)))
        for task in workload.tasks
    ]
    reduced, policy = replace(workload, tasks=tuple(tasks)), llm.session.policy("none")
    llm.engine.check(reduced.tasks[0].request.with_policy(policy))
    return Contender(name, policy, reduced, settings, baseline)
