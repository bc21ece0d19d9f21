"""Writes the tables of the docs that come from declarations: `python scripts/docs_fields.py`."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remask.checks.fields import declared
from remask.checks.kinds import in_words
from remask.remasking.rules import REMASKING, Remasking
from remask.remasking.slowfast import SlowFastKnobs
from remask.request.questions import Decisions, Question
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms
from remask.server.fields import FOREIGN, FOREIGN_TO_READS, HONOURED, Foreign
from remask.server.surfaces.messages_body import FOREIGN_TO_MESSAGES
from remask.server.surfaces.responses_body import FOREIGN_TO_RESPONSES

DOCS = Path(__file__).parents[1] / "docs"
PAGES = tuple(DOCS / f"{name}.md" for name in ("sampling", "http", "decisions", "responses-and-messages"))
BLOCK = re.compile(r"(?<=<!-- generated: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def fields(cls: type[Any]) -> str:
    """The table of a declared class."""
    rows = []
    for name, field in declared(cls).items():
        default = "" if field.default is None else f"`{json.dumps(field.default)}`"
        models = "all" if field.for_all else in_words(field.kinds)
        rows.append((f"`{name}`", field.values.words.replace("2**63", "2^63"), default, models, field.meaning))
    shared = all(row[3] == "all" for row in rows)
    head = ("field", "value", "default", "models", "meaning")
    kept = [column for column in range(len(head)) if not (shared and head[column] == "models")]
    return table([[row[column] for column in kept] for row in (head, *rows)])


def rules() -> str:
    """The table of remasking rules."""
    head = ("`remasking`", "models", "which positions become final", "schedule", "`threshold` and `factor`")
    rows = [
        (f"`{rule.name}`", in_words(rule.kinds), rule.meaning, schedule(rule), "yes" if rule.thresholds else "no")
        for rule in REMASKING.values()
    ]
    return table([head, *rows])


def others(honoured: Mapping[str, str], foreign: Mapping[str, Foreign]) -> str:
    """The table of the fields of others' bodies."""
    rows = [(f"`{name}`", "honoured", how) for name, how in honoured.items()]
    for name, field in foreign.items():
        allowed = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral or ())
        refused = f"refused, but for {allowed}" if allowed else "refused"
        rows.append((f"`{name}`", "ignored" if field.ignored else refused, field.reason))
    return table([("field", "what becomes of it", "how, or why"), *sorted(rows)])


def apart(foreign: Mapping[str, Foreign]) -> Mapping[str, Foreign]:
    """Those of `foreign` that are not in the table of OpenAI's and vLLM's bodies, or have another fate."""
    return {name: field for name, field in foreign.items() if FOREIGN.get(name) != field}


def schedule(rule: Remasking) -> str:
    """What decides how many positions a step transfers."""
    if rule.counts == "rule":
        return "none"
    return {"never": "even", "always": "time", "by_family": "time on Dream or with `eps`, else even"}[rule.timed]


def table(rows: list[Any]) -> str:
    """Rows, the first of which is the head, as Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def written(text: str) -> str:
    """The page `text` with its generated blocks as they should be."""
    blocks = {
        "sampling": fields(SamplingParams),
        "terms": fields(Terms),
        "slowfast": fields(SlowFastKnobs),
        "remasking": rules(),
        "others": others(HONOURED, FOREIGN),
        "decisions": fields(Decisions),
        "questions": fields(Question),
        "reads": others({}, FOREIGN_TO_READS),
        "responses": others({}, apart(FOREIGN_TO_RESPONSES)),
        "messages": others({}, apart(FOREIGN_TO_MESSAGES)),
    }
    return BLOCK.sub(lambda found: f"{found[1]}{found[2]}{blocks[found[1]]}", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
