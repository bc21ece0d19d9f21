"""The responses of a bench side by side, the words marked in which each differs from its baseline's.

The page, one HTML file that needs nothing else, is drawn from `answers.html` in this folder.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from remask_lab.records.machine import processor_text
from remask_lab.records.record import Record, number_format

TEMPLATE = Path(__file__).with_name("answers.html")
PROMPT_CHARACTERS = 600  # of a prompt's end that the page shows before one asks for all of it
VERDICTS = {True: "right", False: "wrong", None: ""}


def pieces(reference: Sequence[str], words: Sequence[str]) -> list[tuple[str, bool]]:
    """`words` in runs, each with whether it is not in `reference` at its place."""
    matcher = difflib.SequenceMatcher(None, reference, words, autojunk=False)
    return [
        (" ".join(words[start:stop]), kind != "equal")
        for kind, _, _, start, stop in matcher.get_opcodes()
        if stop > start
    ]


def _words(answer: Mapping[str, Any]) -> list[str]:
    """The response in words; token ids where the model has no words."""
    return [str(token) for token in answer["token_ids"]] if answer["text"] is None else answer["text"].split()


def _marked(case: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], list[tuple[str, bool]]]]:
    words = {answer["cache"]: _words(answer) for answer in case["answers"]}
    for answer in case["answers"]:
        yield answer, pieces(words[answer["baseline"]], words[answer["cache"]])


def reading(cases: Sequence[Mapping[str, Any]]) -> str:
    """How many responses are the same under each policy."""
    parts = []
    for answers in zip(*(case["answers"] for case in cases), strict=True):
        name, baseline = answers[0]["cache"], answers[0]["baseline"]
        same = sum(answer["agreement"] == 1 for answer in answers)
        if name != baseline:
            parts.append(f"{name}: {same} of {len(cases)} responses are the same to the token as under {baseline}.")
    return " ".join(parts)


def text(record: Record) -> str:
    """Every response, with the words in brackets that differ from its baseline's."""
    cases = record.data["answers"]
    lines = [reading(cases)]
    for number, case in enumerate(cases, start=1):
        lines.append(f"Prompt {number}" + ("" if case["right"] is None else f" (right answer: {case['right']})"))
        for answer, runs in _marked(case):
            words = " ".join(f"[{run}]" if differs else run for run, differs in runs)
            judged = "".join(f", {word}" for word in (VERDICTS[answer["correct"]],) if word)
            facts = f"{answer['forwards']} forwards, {1e3 * answer['seconds']:.0f} ms{judged}"
            lines.append(f"  {answer['cache']} ({facts}): {words}")
    return "\n".join(lines)


def page(record: Record) -> str:
    """The responses as HTML; all that models and users wrote is escaped."""
    about, cases = record.about, record.data["answers"]
    facts = (
        f"{about['model']}, {number_format(about)} on {processor_text(about['machine'])}, "
        f"{about['settings']['concurrency']} at a time, commit {about['commit'] or 'unknown'}, {about['date']}."
    )
    template = Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    shown = [(case, list(_marked(case))) for case in cases]
    return template.render(
        model=about["model"],
        cases=shown,
        reading=reading(cases),
        facts=facts,
        limit=PROMPT_CHARACTERS,
        verdicts=VERDICTS,
    )
