"""The page of `remask analyze compare`: one HTML file that needs nothing else."""

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment

from remask_lab.subjects.compare import Case

PROMPT_CHARACTERS = 600  # of a prompt's end that are shown before one asks for all of it

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ model }}: responses side by side</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1b1f24;
  background: #fff; }
table { border-collapse: collapse; width: 100%; margin: 0.5rem 0 2rem; }
th, td { border-top: 1px solid #d0d7de; padding: 0.4rem 0.6rem; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.response { white-space: pre-wrap; overflow-wrap: anywhere; }
mark { background: #ffd8a8; padding: 0 0.15em; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f8fa; padding: 0.6rem; }
p.facts { color: #57606a; }
</style>
</head>
<body>
<h1>{{ model }}: responses side by side</h1>
<p>{{ reading }}</p>
<p>Words that are not in the response of <b>{{ first }}</b> at their place are <mark>marked</mark>.</p>
{% for case in cases %}
<h2>Prompt {{ loop.index }}</h2>
{% if case.prompt|length > limit %}
<details><summary>… {{ case.prompt[-limit:] }}</summary><pre>{{ case.prompt }}</pre></details>
{% else %}
<pre>{{ case.prompt }}</pre>
{% endif %}
<table>
<tr><th>variant</th><th>response</th><th class="number">tokens equal</th><th class="number">forwards</th>
<th class="number">row-layers</th><th class="number">ms</th><th>end</th></tr>
{% for answer in case.answers %}
<tr><td>{{ answer.variant }}</td>
<td class="response">{% for piece in answer.pieces %}{% if piece.differs %}<mark>{{ piece.text }}</mark>{% else %}{{
piece.text }}{% endif %}{{ " " if not loop.last }}{% endfor %}</td>
<td class="number">{{ "%.0f %%"|format(100 * answer.agreement) }}</td>
<td class="number">{{ answer.forwards }}</td><td class="number">{{ answer.row_layers }}</td>
<td class="number">{{ "%.0f"|format(1000 * answer.seconds) }}</td><td>{{ answer.finish_reason }}</td></tr>
{% endfor %}
</table>
{% endfor %}
<p class="facts">{{ facts }}</p>
</body>
</html>
"""


def page(model: str, cases: Sequence[Case], reading: str, about: dict[str, Any]) -> str:
    """The comparison as HTML; all that models and users wrote is escaped."""
    machine = about["machine"]
    facts = (
        f"{model}, {machine['dtype']} on {machine.get('gpu', machine['cpu'])} ({machine['threads']} threads), one "
        f"request at a time, commit {about['commit'] or 'unknown'}, {about['date']}."
    )
    template = Environment(autoescape=True).from_string(PAGE)
    first = cases[0].answers[0].variant
    return template.render(model=model, cases=cases, reading=reading, first=first, facts=facts, limit=PROMPT_CHARACTERS)
