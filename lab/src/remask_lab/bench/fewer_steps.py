"""Baselines in fewer steps: `none` under a shorter schedule, which a cache should beat (dKV-Cache, table 1)."""

import math
from collections.abc import Iterable, Iterator, Sequence
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
DEFAULT = "1,half"
"""The baselines of a bundled model's own task if no option names others."""
OFF = "off"
"""The value of the option that names no baselines."""


def step_baselines(
    llm: LLM, text: str, workload: Workload, rows: Sequence[Contender], engine: EngineConfig
) -> tuple[list[Contender], list[LeftOut]]:
    """Contenders of `none` in fewer steps, and those that no schedule allows.

    `text` names them, separated by commas: a number of steps, "half" of the workload's steps, or "few". The latter is a
    baseline for each of `rows` that computes fewer row-layers than its own baseline, in the steps that compute as many.
    Raises `ConfigError` on other words, on numbers that the schedule cannot have, and if the sampler has no schedule.
    """
    _check_scheduled(workload)
    baselines: dict[str, Contender] = {}
    left_out: list[LeftOut] = []
    for word in (part.strip() for part in text.split(",")):
        targets: Iterable[tuple[float, Contender | None]]
        targets = _equal_work(llm, workload, rows, engine) if word == FEW else [(_steps(word, workload), None)]
        for target, row in targets:
            base = workload if row is None or row.workload is None else row.workload
            full = base.tasks[0].request.params
            params = with_steps(full, target)
            if params.steps == steps_of(full) and even_blocks(params).length == even_blocks(full).length:
                name = f"none in {word} steps" + ("" if row is None else f", as much work as {row.name}")
                left_out.append(LeftOut(name, f"no schedule comes closer than all {steps_of(full)} steps"))
                continue
            baseline = _baseline(llm, base, params, row)
            settings = dict(baselines.get(baseline.name, baseline).settings)
            if row is not None:
                settings["work of"] = " and ".join(filter(None, (settings.get("work of"), row.name)))
            baselines[baseline.name] = replace(baseline, settings=settings)
    return list(baselines.values()), left_out


def step_baselines_option(
    llm: LLM, text: str | None, workload: Workload, rows: Sequence[Contender], engine: EngineConfig
) -> tuple[list[Contender], list[LeftOut]]:
    """The `step_baselines` of the option's value `text`: none for "off".

    Without the option these are `DEFAULT` for a bundled model's questions, and none for others. If the sampling has no
    schedule, default ones are left out, with the reason.
    """
    if text is not None:
        return ([], []) if text == OFF else step_baselines(llm, text, workload, rows, engine)
    if not has_own_task(llm) or workload.tasks[0].answer is None:
        return [], []
    try:
        full = steps_of(workload.tasks[0].request.params)
        words = (word for word in DEFAULT.split(",") if not word.isdigit() or int(word) < full)
        return step_baselines(llm, ",".join(words), workload, rows, engine)
    except ConfigError as error:
        return [], [LeftOut("none in fewer steps", str(error))]


def with_steps(params: SamplingParams, target: float) -> SamplingParams:
    """`params` with the number of steps nearest to `target` that its blocks can share evenly.

    Of two equally near numbers it takes the smaller one. If `target` is below one step a block, blocks are joined until
    they are at most `target`, or one.
    """
    length = joined_length = even_blocks(params).length
    while params.max_tokens // joined_length > max(1.0, target):
        longer = range(joined_length + 1, params.max_tokens + 1)
        joined_length = next(size for size in longer if size % length == 0 and params.max_tokens % size == 0)
    blocks = params.max_tokens // joined_length
    if joined_length == length:
        block_length, block_steps = params.block_length, math.ceil(target / blocks - 0.5)
    else:  # joined blocks never take more steps than `target`, or they might take as many as the full schedule
        block_length, block_steps = joined_length, int(target / blocks)
    return replace(params, steps=max(1, block_steps) * blocks, steps_per_block=None, block_length=block_length)


def _steps(word: str, workload: Workload) -> float:
    """The steps that "half" or a number asks for. Raises `ConfigError` on other words and impossible numbers."""
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
    """Raise `ConfigError` if requests have different schedules, or if their sampler has none that can be shortened."""
    sampling = [task.request.params for task in workload.tasks]
    params = sampling[0]
    if len({(steps_of(params), even_blocks(params).length) for params in sampling}) > 1:
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


def _equal_work(
    llm: LLM, workload: Workload, rows: Sequence[Contender], engine: EngineConfig
) -> Iterator[tuple[float, Contender]]:
    """Yield, for each row that computes fewer row-layers than its baseline, the steps in which that computes as many.

    Row-layers are measured on one batch. Prefix-only passes do not count, since many requests share them.
    """
    row_layers = {row.name: _row_layers(llm, row, workload, engine) for row in rows}
    for row in rows:
        share = row_layers[row.name] / row_layers[row.baseline]
        if share < 1:
            yield share * steps_of((row.workload or workload).tasks[0].request.params), row


def _row_layers(llm: LLM, row: Contender, workload: Workload, engine: EngineConfig) -> int:
    """The row-layers of one batch of the workload's first requests under a contender."""
    tasks = (row.workload or workload).tasks[: engine.max_num_seqs]
    requests = [task.request.with_policy(row.policy) for task in tasks]
    outputs = llm.session.run(requests, engine=llm.session.new_engine(engine), progress=False)
    return sum(output.usage.row_layers for output in outputs)


def _baseline(llm: LLM, workload: Workload, params: SamplingParams, row: Contender | None) -> Contender:
    """`none` on `workload` with the schedule of `params`, compared with the baseline of `row`, or with `none`.

    On a uniform model a step of the shorter schedule may change as many positions as it must to change each once.
    """
    settings, blocks = {"steps": params.steps}, even_blocks(params)
    schedule = {name: getattr(params, name) for name in ("steps", "steps_per_block", "block_length")}
    if params.block_length != workload.tasks[0].request.params.block_length:
        settings["block_length"] = params.block_length
    if llm.loaded.config.kind == "uniform":
        block_steps = blocks.total_steps // blocks.count
        schedule |= {"steps": None, "steps_per_block": block_steps}
        if params.uniform.sampler not in ANCESTRAL:
            settings["tokens_per_step"] = -(-blocks.length // block_steps)
            schedule["uniform"] = replace(params.uniform, tokens_per_step=settings["tokens_per_step"])
    baseline = "none" if row is None else row.baseline
    name = f"{baseline} {' '.join(f'{key}={value}' for key, value in settings.items())}"
    # Only the schedule is replaced: requests differ in other parameters, such as the seed of their noise.
    tasks = [
        replace(task, request=replace(task.request, params=replace(task.request.params, **schedule)))
        for task in workload.tasks
    ]
    reduced, policy = replace(workload, tasks=tuple(tasks)), llm.session.policy("none")
    llm.engine.check(reduced.tasks[0].request.with_policy(policy))
    rule = {} if baseline == "none" else {"remasking": params.remasking.rule}
    return Contender(name, policy, workload=reduced, settings={**settings, **rule}, baseline=baseline)
