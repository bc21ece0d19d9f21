"""Decisions against the same answers written as text, on the bundled tasks: accuracy, work and time in one run.

    python -m remask_lab.speed.decisions [--requests 24] [--prefixes 6] [--cache bicache]

A request of the task tariff names four persons, and each of them is a choice among all names: a canvas of the answer's
own layout, with masks where the other words of the answer stand that the question does not give. A request of the task
transit asks for a stop, by the number of hops. The text is generated as the task's own workload does. Accuracy counts
names and stops. Time is that of the engine's thread within its steps.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remask.engine.config import EngineConfig
from remask.llm import LLM
from remask.request.questions import ANSWER, MASK
from remask.tasks import tariff, transit
from remask_lab.bench.workload import TARIFF_SAMPLING, TRANSIT_SAMPLING
from remask_lab.speed.command import command_parser, print_report, run_command

_PLAIN = {"labels": "names", "show_options": False}


@dataclass(frozen=True)
class Asked:
    """One request: its conversation, its questions with their right answers, and how many of them a text answers."""

    messages: Sequence[Mapping[str, str]]
    questions: Mapping[str, tuple[Mapping[str, Any], str]]
    right: Callable[[str], float]


def main() -> None:
    """Measure and print one JSON object."""
    parser = command_parser(__doc__)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prefixes", type=int, default=6)
    parser.add_argument("--seed", type=int, default=31337)
    parser.add_argument("--cache", default="bicache")
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    llm = _open("bundled-tariff", args)
    for kind in tariff.KINDS:
        settings = tariff.TariffSettings(kinds=(kind,))
        orders = tariff.make_workload(args.requests, args.prefixes, args.seed, settings)
        rows[f"tariff, {kind}"] = measured(llm, [_orders(each) for each in orders], TARIFF_SAMPLING)
    lines = _open("bundled-transit", args)
    rides = transit.make_workload(args.requests, args.prefixes, args.seed)
    for hops in range(1, transit.MAX_HOPS + 1):
        work = [_ride(each) for each in rides if each.question.hops == hops]
        rows[f"transit, {hops} hops"] = measured(lines, work, TRANSIT_SAMPLING)
    print_report(llm, requests=args.requests, prefixes=args.prefixes, seed=args.seed, cache=args.cache, tasks=rows)


def _open(model: str, args: argparse.Namespace) -> LLM:
    return LLM(model, cache=args.cache, dtype="float32", threads=1, engine=EngineConfig(max_num_seqs=16))


def _orders(each: tariff.TariffRequest) -> Asked:
    words = each.reference.split()
    questions = {}
    for number, (key, name) in enumerate(zip(words[::2], words[1::2], strict=True)):
        slots = [f"{one} {ANSWER if place == number else MASK}" for place, one in enumerate(words[::2])]
        fields = {"instructions": each.messages[1]["content"], "criteria": list(tariff.NAMES), **_PLAIN}
        questions[f"{number} {key}"] = ({**fields, "template": " ".join(slots)}, name)
    return Asked(each.messages, questions, lambda text: tariff.right_names(text, each.reference) * len(questions))


def _ride(each: transit.TransitRequest) -> Asked:
    stops = [stop for stop, _ in each.prompt.rows]
    walk = f"{each.question.start} > " + f"{MASK} > " * (each.question.hops - 1)
    fields = {"instructions": each.question.text, "criteria": stops, **_PLAIN}
    question = {**fields, "template": f"{walk}{ANSWER} {transit.SEPARATOR} {MASK}"}
    return Asked(each.messages, {"stop": (question, each.answer)}, lambda text: transit.is_correct(text, each.answer))


def measured(llm: LLM, work: Sequence[Asked], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Both ways over the same requests, each with an engine that has seen the shared prefixes once."""
    count = sum(len(each.questions) for each in work)

    def write() -> float:
        texts = llm.generate([each.messages for each in work], dict(sampling))
        return sum(each.right(output.text or "") for each, output in zip(work, texts, strict=True))

    def decide() -> float:
        right = 0
        for each in work:
            asked = {name: question for name, (question, _) in each.questions.items()}
            answers = llm.decide(each.messages[0]["content"], asked, end_turn=False).answers
            right += sum(answers[name].choice == truth for name, (_, truth) in each.questions.items())
        return right

    found: dict[str, Any] = {"questions": count}
    for name, act in (("text", write), ("decisions", decide)):
        act()  # fills the prefix store
        stats = llm.engine.stats
        steps, layers, seconds = stats.steps, stats.row_layers, stats.step_cpu_seconds
        right = act()
        found[name] = {
            "accuracy": right / count,
            "engine_steps": stats.steps - steps,
            "row_layers": stats.row_layers - layers,
            "cpu_s": stats.step_cpu_seconds - seconds,
        }
    for unit in ("row_layers", "cpu_s"):
        found[f"text_over_decisions_{unit}"] = found["text"][unit] / found["decisions"][unit]
    return found


if __name__ == "__main__":
    sys.exit(run_command(main))
