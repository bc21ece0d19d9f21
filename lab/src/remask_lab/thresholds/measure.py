"""Answers of one model under settings of its decoding: how many are right, and their passes and time."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from remask.llm import LLM, Output
from remask.request.sampling_params import SamplingParams
from remask_lab.bench.workload import Workload, choose_task, usual_workload
from remask_lab.records.interval import estimate, paired_difference, percent_text
from remask_lab.records.markdown import markdown_table, number_text

THRESHOLDS: Final = (None, 0.9, 0.8, 0.7)
"""The least probabilities with which tokens are written; None: one token a step."""
PENALTIES: Final[Mapping[str, Mapping[str, float]]] = {
    "repetition 1.1": {"repetition_penalty": 1.1},
    "none": {},
    "presence 1": {"presence_penalty": 1.0},
}
"""Penalties of repetitions. A repetition penalty counts the prompt's tokens too, a presence penalty does not."""
REPEATED: Final = 4
"""A text that has this number of words in a row twice repeats itself."""
RULE: Final = (
    "Right is an answer in which one of the accepted words stands, whatever its capitals. Texts without one answer are "
    f"right if no {REPEATED} words in a row stand in them twice."
)


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """A question without a page, and the texts of which a right answer has one; none if the answer is open."""

    question: str
    accepted: tuple[str, ...] = ()

    def right(self, text: str) -> bool:
        """Whether the answer `text` is right by `RULE`."""
        if not self.accepted:
            return not repeats(text)
        words = "|".join(map(re.escape, self.accepted))
        return re.search(rf"(?<!\w)(?:{words})(?!\w)", text, re.IGNORECASE) is not None


def open_questions() -> list[OpenQuestion]:
    """The questions of `open.jsonl`, in its order."""
    lines = Path(__file__).with_name("open.jsonl").read_text(encoding="utf-8").splitlines()
    return [OpenQuestion(item["question"], tuple(item.get("accepted", ()))) for item in map(json.loads, lines)]


def repeats(text: str) -> bool:
    """Whether `text` has `REPEATED` words in a row twice."""
    words = re.findall(r"\w+", text.casefold())
    runs = [tuple(words[start : start + REPEATED]) for start in range(len(words) - REPEATED + 1)]
    return len(set(runs)) < len(runs)


def block_params(llm: LLM, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of blocks from the model's folder, under the threshold of `sampling` or without one."""
    params = llm.session.params()
    length = params.block_length or llm.loaded.config.block_length
    fallback = None if sampling.get("threshold") is None else params.remasking.fallback
    return {"block_length": length, "blocks": params.blocks, "remasking": replace(params.remasking, fallback=fallback)}


def town(llm: LLM, questions: int, shops: int, seed: int) -> Workload:
    """Questions about pages of the town task with `shops` shops, four for each page."""
    task = choose_task("town", {"shops": shops})
    return usual_workload(llm, questions, seed, {}, prefixes=max(1, questions // 4), task=task)


def ask_town(llm: LLM, workload: Workload, sampling: Mapping[str, Any], part: range) -> dict[str, Any]:
    """The result of the questions `part` of a workload: their answers, which are right, and their `_costs`.

    They run under the model's default cache and `block_params`, with `sampling` on top of the task's.
    """
    params = replace(workload.tasks[0].request.params, **block_params(llm, sampling), **sampling)
    tasks = workload.under(params).tasks[part.start : part.stop]
    clusters = workload.clusters[part.start : part.stop]
    policy = llm.session.policy(*llm.session.default_cache())
    requests = [task.request.with_policy(policy) for task in tasks]
    outputs, costs = _costs(lambda: list(llm.session.run(requests, progress=False)))
    by_id = {output.id: output.text or "" for output in outputs}
    texts = [by_id[request.id] for request in requests]
    right = [bool(task.correct(text)) for task, text in zip(tasks, texts, strict=True)]
    return costs | {"right": right, "clusters": clusters, "answers": texts}


def ask_open(llm: LLM, max_tokens: int, sampling: Mapping[str, Any], part: range) -> dict[str, Any]:
    """The result of the open questions `part`, with the fields and under the settings of `ask_town`."""
    questions = open_questions()[part.start : part.stop]
    params = SamplingParams(max_tokens=max_tokens, **block_params(llm, sampling), **sampling)
    chats = [[{"role": "user", "content": question.question}] for question in questions]
    outputs, costs = _costs(lambda: llm.chat(chats, params))
    texts = [output.text or "" for output in outputs]
    right = [question.right(text) for question, text in zip(questions, texts, strict=True)]
    return costs | {"right": right, "clusters": list(part), "answers": texts}


def _costs(run: Callable[[], Sequence[Output]]) -> tuple[Sequence[Output], dict[str, Any]]:
    """The outputs of `run`, and the costs of all of them: CPU seconds of all threads, seconds, passes and tokens."""
    cpu_start, start = time.process_time(), time.perf_counter()
    outputs = run()
    return outputs, {
        "cpu_seconds": time.process_time() - cpu_start,
        "seconds": time.perf_counter() - start,
        "passes": sum(output.usage.forwards for output in outputs),
        "tokens": sum(output.usage.completion_tokens for output in outputs),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table with a line for each setting, over all parts that were measured under it.

    `rows` are those of a sweep, each with the point, which has `threshold`, `penalty` and `part`, and the result.
    """
    by_setting: dict[tuple[str, float], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        point = row["point"]
        by_setting.setdefault((point["penalty"], point["threshold"] or 1.0), {})[point["part"]] = row["result"]
    lines = []
    for (penalty, threshold), results in sorted(by_setting.items(), key=itemgetter(0), reverse=True):
        right = _values(results, "right")
        share, *interval = estimate(right, _values(results, "clusters"))
        means = {name: sum(result[name] for result in results.values()) / len(right) for name in _FORMATS}
        lines.append(
            [
                "-" if threshold == 1.0 else f"{threshold:g}",
                penalty,
                str(len(right)),
                percent_text(share, interval),
                "-" if threshold == 1.0 else _difference_text(results, by_setting.get((penalty, 1.0), {})),
                *(number_text(form, means[name]) for name, form in _FORMATS.items()),
            ]
        )
    header = ["threshold", "penalty", "questions", "right", "over one token a step"]
    header += [f"{name.replace('_', ' ')} an answer" for name in _FORMATS]
    return markdown_table(header, lines, aligned=True)


_FORMATS: Final = {"passes": ".1f", "tokens": ".1f", "cpu_seconds": ".2f", "seconds": ".2f"}


def _values(results: Mapping[str, Mapping[str, Any]], name: str) -> list[Any]:
    """The list `name` of the results of all parts, joined."""
    return [value for result in results.values() for value in result[name]]


def _difference_text(results: Mapping[str, Mapping[str, Any]], others: Mapping[str, Mapping[str, Any]]) -> str:
    """The share of right answers minus that of `others`, in points, over the parts that both have; "-" without any."""
    parts = [part for part in results if part in others]
    if not parts:
        return "-"
    ours, theirs = ({part: by_part[part] for part in parts} for by_part in (results, others))
    estimate = paired_difference(_values(ours, "right"), _values(theirs, "right"), _values(ours, "clusters"))
    share, low, high = (100 * value for value in estimate)
    return f"{share:+.1f} ({low:+.1f} to {high:+.1f})"
