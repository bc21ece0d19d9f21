"""`remask demo`: a bundled model answers the questions of its task under several cache policies."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from remask.checks import BUNDLED, BUNDLED_TARIFF, BUNDLED_TRANSIT, BUNDLED_UNIFORM
from remask.cli.options import open_llm
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM
from remask.tasks.cards import card
from remask_lab.asked import asked_task, check_least
from remask_lab.bench.bench import check_first_answers, run_bench
from remask_lab.bench.by_depth import at_depths, by_depth_text, draw_by_depth, reading
from remask_lab.bench.contenders import Contender
from remask_lab.bench.fewer_steps import asked_step_baselines
from remask_lab.bench.names import COMPARED_CACHES, OWN_TASKS
from remask_lab.bench.report import table
from remask_lab.bench.workload import TaskChoice, Workload, usual_workload
from remask_lab.drawing import check_drawing, save_figure
from remask_lab.records.record import Record
from remask_lab.similarity.plot import check_target

PREFIXES_SHOWN = 20
"""Shared prefixes of the demo: prefixes differ in difficulty, so few of them would decide what it says."""

_MODELS = {"relay": BUNDLED, "tariff": BUNDLED_TARIFF, "transit": BUNDLED_TRANSIT}


def run(args: argparse.Namespace) -> int:
    """Show one answer and the table; draw the picture where `--picture` asks for it."""
    if args.uniform and args.picture is not None:
        raise ConfigError("--picture shows depths of shared prefixes, which uniform models do not have; leave it out")
    if args.uniform and args.task is not None:
        raise ConfigError(
            "--task chooses among the masked models' tasks, and --uniform runs another model; leave one out"
        )
    check_least(args, requests=1)
    task = asked_task(args) or TaskChoice(OWN_TASKS[BUNDLED])
    if task.name not in _MODELS:
        raise ConfigError(f"the demo asks the bundled models: --task is one of {', '.join(_MODELS)}, not {task.name}")
    picture = None if args.picture is None else Path(args.picture)
    if picture is not None:
        check_drawing()
        try:
            picture.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            place = str(picture.parent)
            raise ConfigError(f"--picture: the folder {place!r} cannot be made: {error.strerror}") from error
        check_target(picture)
    args.model = BUNDLED_UNIFORM if args.uniform else _MODELS[task.name]
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=8))
    if args.uniform:
        workload = usual_workload(llm, args.requests, args.seed, {})
        print("Uniform diffusion: the response begins as noise, and any token of a block may change.")
        _show_answer(llm, workload, "uniform-cache", "a system prompt")
        _compare(llm, workload, args)
        _say_what_to_ask(llm)
        return 0
    workload = usual_workload(llm, args.requests, args.seed, {}, prefixes=PREFIXES_SHOWN, task=task)
    check_first_answers(llm, workload, llm.session.engine_config)  # harder settings may be beyond the model
    shared = workload.tasks[0].request.prefix_length
    _show_answer(llm, workload, "bicache", f"{shared} shared tokens of a system prompt")
    depths = at_depths(llm, workload, range(1, llm.loaded.config.layers + 1))
    record = _compare(llm, workload, args, depths)
    print(f"\n{by_depth_text(record)}\n\n{reading(record)}")
    if picture is not None:
        assert llm.depth_table is not None  # it is shipped
        print(f"\nPicture: {save_figure(draw_by_depth(record, llm.depth_table), picture, llm.loaded.name)}")
    _say_what_to_ask(llm)
    return 0


def _compare(llm: LLM, workload: Workload, args: argparse.Namespace, others: Sequence[Contender] = ()) -> Record:
    """Print the table of the usual caches, and of `none` in fewer steps.

    Returns the record of them and of `others`, which ran beside them.
    """
    usual = [Contender(name, llm.session.policy(name)) for name in COMPARED_CACHES[llm.loaded.config.kind]]
    usual += asked_step_baselines(llm, None, workload, usual, llm.session.engine_config)[0]
    rows, questions = len(usual) + len(others), len(workload.tasks)
    print(
        f"The same {questions} questions under {rows} settings: {', '.join(each.name for each in usual)}"
        f"{', and bicache at each depth' if others else ''}. {rows * (questions + min(2, questions))} answers, two of "
        "each setting to warm up.\n"
    )
    record = run_bench(llm, workload, [*usual, *others], 1, llm.session.engine_config, args.progress)
    shown = replace(record, data={**record.data, "results": record.data["results"][: len(usual)]})
    print(table(shown))
    return record


def _show_answer(llm: LLM, workload: Workload, cache: str, before: str) -> None:
    """Prints the first request behind its system prompt, which `before` names, and the answer under `cache`."""
    task = workload.tasks[0]
    (output,) = llm.session.run([task.request.with_policy(llm.session.policy(cache))], progress=False)
    assert task.question is not None  # the tasks of the demo are all asked in words
    prompt = " ".join(task.question.split())
    print(f"{before}, then the user's turn:")
    print(f"  {prompt}\n  -> {output.text}   (right answer: {task.answer})\n")


def _say_what_to_ask(llm: LLM) -> None:
    name = llm.loaded.name
    known = card(name)
    assert known is not None  # the demo runs bundled models
    print(f"\nTo ask {name} yourself: remask serve {name}, and the page at its address; or remask chat --model {name}.")
    print("\n".join([known.answers, *(f"  {each.question}" for each in known.questions)]))
