"""The responses of a bench side by side, as text and as a page. Words that differ from the baseline's are marked.

The page is one HTML file without other resources, from the template `answers.html` in this folder.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from remask_lab.records.machine import processor_text
from remask_lab.records.record import Record, number_format

TEMPLATE = Path(__file__).with_name("answers.html")
PROMPT_CHARACTERS = 600  # at the end of a prompt; the page folds the rest
VERDICTS = {True: "right", False: "wrong", None: ""}


def changes(reference: Sequence[str], words: Sequence[str]) -> list[tuple[str, bool]]:
    """`words` joined to runs, each with whether `reference` lacks it at its place, by a diff of the two."""
    matcher = difflib.SequenceMatcher(None, reference, words, autojunk=False)
    return [
        (" ".join(words[start:stop]), kind != "equal")
        for kind, _, _, start, stop in matcher.get_opcodes()
        if stop > start
    ]


def _words(answer: Mapping[str, Any]) -> list[str]:
    """The words of a response; its token ids if the model has no tokenizer."""
    return [str(token) for token in answer["token_ids"]] if answer["text"] is None else answer["text"].split()


def _answer_changes(case: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], list[tuple[str, bool]]]]:
    """The answers to a prompt, each with its `changes` from the answer of its baseline."""
    words = {answer["cache"]: _words(answer) for answer in case["answers"]}
    for answer in case["answers"]:
        yield answer, changes(words[answer["baseline"]], words[answer["cache"]])


def summary(cases: Sequence[Mapping[str, Any]]) -> str:
    """How many responses are equal to the baseline's under each policy, in sentences."""
    sentences = []
    for answers in zip(*(case["answers"] for case in cases), strict=True):
        name, baseline = answers[0]["cache"], answers[0]["baseline"]
        same = sum(answer["agreement"] == 1 for answer in answers)
        if name != baseline:
            sentences.append(f"{name}: {same} of {len(cases)} responses are the same to the token as under {baseline}.")
    return " ".join(sentences)


def text(record: Record) -> str:
    """Every response, with the words in brackets that differ from its baseline's."""
    cases = record.data["answers"]
    lines = [summary(cases)]
    for number, case in enumerate(cases, start=1):
        lines.append(f"Prompt {number}" + ("" if case["right"] is None else f" (right answer: {case['right']})"))
        for answer, runs in _answer_changes(case):
            words = " ".join(f"[{run}]" if differs else run for run, differs in runs)
            verdict = VERDICTS[answer["correct"]]
            facts = f"{answer['forwards']} forwards, {1e3 * answer['seconds']:.0f} ms"
            lines.append(f"  {answer['cache']} ({facts}{', ' if verdict else ''}{verdict}): {words}")
    return "\n".join(lines)


def page(record: Record) -> str:
    """The responses as HTML. Texts of models and users are escaped."""
    about, cases = record.about, record.data["answers"]
    facts = (
        f"{about['model']}, {number_format(about)} on {processor_text(about['machine'])}, "
        f"{about['settings']['concurrency']} at a time, commit {about['commit'] or 'unknown'}, {about['date']}."
    )
    template = Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        model=about["model"],
        cases=[(case, list(_answer_changes(case))) for case in cases],
        summary=summary(cases),
        facts=facts,
        limit=PROMPT_CHARACTERS,
        verdicts=VERDICTS,
    )
