"""Answers of one model under a setting of its decoding: which are right, in how many passes, and in what time."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from remask_lab.bench.workload import Workload, choose_task, usual_workload
from remask_lab.records.interval import estimate, paired_difference, percent_text
from remask_lab.records.markdown import markdown_table, number_text

THRESHOLDS: Final = (None, 0.9, 0.8, 0.7)
"""Probabilities from which on a token is written; None: one token a step."""
PENALTIES: Final[Mapping[str, Mapping[str, float]]] = {
    "repetition 1.1": {"repetition_penalty": 1.1},
    "none": {},
    "presence 1": {"presence_penalty": 1.0},
}
"""What keeps a text from repeating itself. A repetition penalty counts the prompt's tokens too, presence does not."""
REPEATED: Final = 4
"""Words in a row that stand twice in a text that repeats itself."""
RULE: Final = (
    "Right is an answer in which one of the accepted words stands, whatever its capitals. Texts without one answer are "
    f"right if no {REPEATED} words in a row stand in them twice."
)


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """A question without a page, and the words of which one stands in a right answer; none where there are many."""

    question: str
    accepted: tuple[str, ...] = ()

    def right(self, text: str) -> bool:
        """Whether `text` answers it, by `RULE`."""
        if not self.accepted:
            return not repeats(text)
        words = "|".join(map(re.escape, self.accepted))
        return re.search(rf"(?<!\w)(?:{words})(?!\w)", text, re.IGNORECASE) is not None


def open_questions() -> list[OpenQuestion]:
    """The questions of the list, in its order."""
    lines = Path(__file__).with_name("open.jsonl").read_text(encoding="utf-8").splitlines()
    asked = map(json.loads, lines)
    return [OpenQuestion(each["question"], tuple(each.get("accepted", ()))) for each in asked]


def repeats(text: str) -> bool:
    """Whether `REPEATED` words in a row stand in `text` twice."""
    words = re.findall(r"\w+", text.casefold())
    runs = [tuple(words[place : place + REPEATED]) for place in range(len(words) - REPEATED + 1)]
    return len(set(runs)) < len(runs)


def own_blocks(llm: LLM, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """How the model's folder says that blocks are decoded under the threshold of `sampling`, or without one."""
    params = llm.session.params()
    length = params.block_length or llm.loaded.config.block_length
    fallback = None if sampling.get("threshold") is None else params.remasking.fallback
    return {"block_length": length, "blocks": params.blocks, "remasking": replace(params.remasking, fallback=fallback)}


def town(llm: LLM, questions: int, shops: int, seed: int) -> Workload:
    """Questions about pages of so many shops, four of each page."""
    task = choose_task("town", {"shops": shops})
    return usual_workload(llm, questions, seed, {}, prefixes=max(1, questions // 4), task=task)


def ask_town(llm: LLM, workload: Workload, sampling: Mapping[str, Any], part: range) -> dict[str, Any]:
    """Answer `part` of a workload under the model's own cache and blocks, and `sampling` on top of the task's."""
    params = replace(workload.tasks[0].request.params, **own_blocks(llm, sampling), **sampling)
    tasks = workload.under(params).tasks[part.start : part.stop]
    clusters = workload.clusters[part.start : part.stop]
    policy = llm.session.policy(*llm.session.default_cache())
    timed = _timed(lambda: list(llm.session.run([each.request.with_policy(policy) for each in tasks], progress=False)))
    outputs = {output.id: output for output in timed.pop("outputs")}
    texts = [outputs[each.request.id].text or "" for each in tasks]
    right = [bool(task.correct(text)) for task, text in zip(tasks, texts, strict=True)]
    return timed | {"right": right, "clusters": clusters, "answers": texts}


def ask_open(llm: LLM, most: int, sampling: Mapping[str, Any], part: range) -> dict[str, Any]:
    """Answer `part` of the open questions in at most so many tokens, under the model's own cache and blocks."""
    asked = open_questions()[part.start : part.stop]
    params = SamplingParams(max_tokens=most, **own_blocks(llm, sampling), **sampling)
    timed = _timed(lambda: llm.chat([[{"role": "user", "content": each.question}] for each in asked], params))
    texts = [output.text or "" for output in timed.pop("outputs")]
    right = [each.right(text) for each, text in zip(asked, texts, strict=True)]
    return timed | {"right": right, "clusters": list(part), "answers": texts}


def _timed(answers: Callable[[], Sequence[Any]]) -> dict[str, Any]:
    """The outputs of a call, their passes and tokens, and its seconds: of the CPU, all threads together, and passed."""
    cpu, began = time.process_time(), time.perf_counter()
    outputs = answers()
    return {
        "outputs": outputs,
        "cpu_seconds": time.process_time() - cpu,
        "seconds": time.perf_counter() - began,
        "passes": sum(output.usage.forwards for output in outputs),
        "tokens": sum(output.usage.completion_tokens for output in outputs),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The parts of each setting together, a line a setting, beside the same questions one token a step.

    `rows` are those of a sweep: of each the point, with `threshold` and `penalty`, and the result of a part.
    """

    def setting(row: Mapping[str, Any]) -> tuple[str, float]:
        return row["point"]["penalty"], row["point"]["threshold"] or 1.0

    grouped = {own: list(parts) for own, parts in groupby(sorted(rows, key=setting, reverse=True), key=setting)}
    lines = []
    for (penalty, threshold), parts in grouped.items():
        found = {row["point"]["part"]: row["result"] for row in parts}
        right, clusters = ([value for each in found.values() for value in each[name]] for name in ("right", "clusters"))
        share, *ends = estimate(right, clusters)
        total = {
            name: sum(each[name] for each in found.values()) / len(right)
            for name in ("passes", "tokens", "cpu_seconds", "seconds")
        }
        lines.append(
            [
                "-" if threshold == 1.0 else f"{threshold:g}",
                penalty,
                str(len(right)),
                percent_text(share, ends),
                _over(found, grouped.get((penalty, 1.0), ())),
                *(number_text(form, total[name]) for name, form in _FORMS.items()),
            ]
        )
    head = ["threshold", "penalty", "questions", "right", "over one token a step"]
    return markdown_table([*head, *(f"{name.replace('_', ' ')} an answer" for name in _FORMS)], lines, aligned=True)


_FORMS: Final = {"passes": ".1f", "tokens": ".1f", "cpu_seconds": ".2f", "seconds": ".2f"}


def _over(found: Mapping[str, Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> str:
    """How many more of the questions that both were asked are right, in points."""
    beside = {row["point"]["part"]: row["result"] for row in others}
    both = [part for part in found if part in beside and beside[part] is not found[part]]
    if not both:
        return "-"
    own, theirs = ([value for part in both for value in results[part]["right"]] for results in (found, beside))
    over, low, high = paired_difference(own, theirs, [value for part in both for value in found[part]["clusters"]])
    return f"{100 * over:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
