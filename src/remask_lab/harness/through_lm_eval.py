"""Runs tasks of lm-eval, and our own tasks on their published data, one row of results a task."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import constants
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from remask.errors import ConfigError
from remask_lab.harness.benchmark import FOLDER, is_own
from remask_lab.harness.hub import go_offline_without_network
from remask_lab.harness.lm import RemaskLM
from remask_lab.harness.score import shares
from remask_lab.records.interval import wilson


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """Options of a run of lm-eval.

    Attributes:
        role: the first part of the system prompt. None leaves the task's own prompt alone.
        chat: whether the chat template renders the prompts.
        limit: documents of a task. None takes all.
        run_code: whether tasks that execute generated code may run.
        seed: of few-shot examples.
        shots: number of few-shot examples; None leaves a task's own.
    """

    role: str | None
    chat: bool
    limit: int | None
    run_code: bool
    seed: int
    shots: int | None = None


class Harness:
    """lm-eval with our own tasks beside its own. The index of its tasks is read once."""

    def __init__(self, *, own_only: bool, folders: Sequence[str] = ()) -> None:
        """`folders` hold further configs. `own_only` leaves out lm-eval's own tasks."""
        self._manager = TaskManager(include_path=[str(FOLDER), *folders], include_defaults=not own_only)

    def check(self, tasks: Sequence[str]) -> None:
        """Raise `ConfigError` on a task that lm-eval does not know, and on a tag. Then look for the network."""
        known = self._manager.all_tasks
        for task in tasks:
            if task not in known:
                raise ConfigError(f"Unknown task {task!r}: neither one of ours nor of lm-eval's ('lm_eval ls tasks')")
            if task in self._manager.all_tags:
                raise ConfigError(f"{task!r} is a tag of several tasks, which have no common score; name them instead")
        go_offline_without_network()

    def run(self, lm: RemaskLM, task: str | Mapping[str, Any], options: EvalOptions) -> dict[str, Any]:
        """Return one row: metrics, samples, and the costs of generation. `task` is a name, or a config that has one.

        Raises `ConfigError` where lm-eval cannot run the task: its data are missing, or it would run code and may not.
        """
        logging.getLogger("lm_eval").setLevel(logging.WARNING)
        try:
            found = simple_evaluate(
                model=lm,
                tasks=[task if isinstance(task, str) else dict(task)],
                limit=options.limit,
                num_fewshot=options.shots,
                fewshot_as_multiturn=bool(options.shots) and options.chat,
                bootstrap_iters=0,
                system_instruction=options.role,
                apply_chat_template=options.chat,
                task_manager=self._manager,
                confirm_run_unsafe_code=options.run_code,
                random_seed=options.seed,
                numpy_random_seed=options.seed,
                torch_random_seed=options.seed,
                fewshot_random_seed=options.seed,
            )
        except (OSError, ValueError, ImportError) as error:
            if isinstance(error, ConfigError):
                raise
            way_out = ". The hub cannot be reached: give local data by --data" if constants.HF_HUB_OFFLINE else ""
            raise ConfigError(f"lm-eval cannot run {task!r}: {type(error).__name__}: {error}{way_out}") from error
        assert found is not None
        name = task if isinstance(task, str) else task["task"]
        row: dict[str, Any] = {} if lm.generation is None else lm.generation.costs()
        if is_own(name):
            samples = _own_samples(found["samples"][name], lm)
            return {**row, "metrics": shares(samples), "samples": samples}
        samples = _samples(found["samples"])
        return {**row, "metrics": _metrics(found["results"][name], samples), "samples": samples}


def _own_samples(samples: Sequence[Mapping[str, Any]], lm: RemaskLM) -> list[dict[str, Any]]:
    assert lm.generation is not None
    rows = []
    ordered = sorted(samples, key=lambda sample: int(sample["doc_id"]))
    for sample, output in zip(ordered, lm.generation.outputs, strict=True):
        metrics = {name: float(sample[name]) for name in sample["metrics"]}
        rows.append(
            {"text": output.text, "token_ids": list(output.token_ids), "right": sample["doc"]["right"], **metrics}
        )
    return rows


def _samples(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Metrics by document. Metrics that are no single number, such as perplexities, are left out."""
    return [
        {
            "task": task,
            "doc": sample["doc_id"],
            "filter": sample["filter"],
            **{name: sample[name] for name in sample["metrics"] if isinstance(sample[name], int | float)},
        }
        for task, each in samples.items()
        for sample in each
    ]


def _metrics(results: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """lm-eval's numbers ("metric,filter"), with Wilson's interval where a number is the share of right documents."""
    found = {}
    for key, value in results.items():
        metric, separator, chosen = key.partition(",")
        if not separator or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        each = [sample[metric] for sample in samples if sample["filter"] == chosen and metric in sample]
        share = each and all(one in (0, 1) for one in each) and abs(sum(each) / len(each) - value) < 1e-9
        found[key] = {"value": float(value), "interval": list(wilson(int(sum(each)), len(each))) if share else None}
    return found
