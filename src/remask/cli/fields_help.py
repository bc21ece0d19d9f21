"""The fields of a request as a list in the terminal."""

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from remask.checks.fields import declared
from remask.checks.kinds import in_words
from remask.remasking.rules import RULES
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms

WIDTH = 100


def listing() -> str:
    """Return every declared field with its values, default and meaning, and the remasking rules, as text."""
    parts = [
        'Sampling parameters, as in --sampling \'{"max_tokens": 64}\' and in the object "sampling" of a line:',
        *_fields(SamplingParams),
        "Terms, beside the prompt of a line:",
        *_fields(Terms),
        "Values of remasking:",
        *(_entry(rule.name, f"{rule.meaning} For {in_words(rule.kinds)} models.") for rule in RULES.usable().values()),
    ]
    return "\n".join(parts)


def _fields(cls: type[Any]) -> Iterator[str]:
    for name, field in declared(cls).items():
        default = "" if field.default is None else f"; default {json.dumps(field.default)}"
        yield _entry(name, f"{field.values.words}{default}. {field.described}")


def _entry(name: str, text: str) -> str:
    margin = " " * 6
    filled = textwrap.fill(text, WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
    return f"  {name}\n{filled}"
