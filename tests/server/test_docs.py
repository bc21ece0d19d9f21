"""The pages about serving against the code: flags, fields, endpoints, metrics, errors and sizes."""

import argparse
import re
from pathlib import Path

import pytest
import torch

from remask.checks.fields import declared
from remask.cli.arguments import serve
from remask.families import preset
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms
from remask.server.errors import _CODES
from remask.server.protocol.generation import ChatBody, CompletionBody
from tests.server.serving import Running
from tests.server.test_openapi import PATHS

DOCS = Path(__file__).parents[2] / "docs"
# The page of each section.
PAGES = {
    "Limits": "limits",
    "Fields of a request": "http",
    "Endpoints": "http",
    "Errors": "http",
    "Metrics": "operation",
    "Sizing": "sharing",
}


def table(section: str) -> list[list[str]]:
    """Cells of the rows of a section's only table."""
    text = (DOCS / f"{PAGES[section]}.md").read_text(encoding="utf-8")
    part = text.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def named(section: str, column: int = 0) -> set[str]:
    """Everything in backticks in a column."""
    return {name for row in table(section) for name in re.findall(r"`([^`]+)`", row[column])}


def test_flags_of_limits() -> None:
    parser = argparse.ArgumentParser()
    serve(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {name for name in named("Limits") if name.startswith("--")} <= flags


def test_defaults_of_limits() -> None:
    parser = argparse.ArgumentParser()
    serve(parser)
    for cells in [cells for cells in table("Limits") if cells[0].startswith("`--")]:
        default = parser.get_default(cells[0].strip("`").removeprefix("--").replace("-", "_"))
        if default is not None:
            number, _, unit = cells[1].partition(" ")
            assert float(number) * {"MiB": 2**20}.get(unit, 1) == default, cells[0]


def test_fields() -> None:
    fields = set(ChatBody.model_fields) | set(CompletionBody.model_fields)
    own = fields - set(declared(SamplingParams)) - set(declared(Terms))
    assert own - {"stream_drafts"} <= named("Fields of a request"), "that one stands above the table"


def test_endpoints() -> None:
    paths = {word.split(" ")[-1] for word in named("Endpoints")}
    own = {path for path in PATHS if not path.startswith("/playground/")}
    assert paths == own | {"/", "/playground", "/docs", "/openapi.json"}


def test_metrics(server: Running) -> None:
    server.ask()
    text = server.client.get("/metrics").text
    told = set(re.findall(r"^# TYPE remask:(\w+) \w+$", text, re.MULTILINE))
    told = {name for name in told if not name.endswith("_created")}  # when a histogram was made
    assert {name for name in named("Metrics") if name != "remask:"} == told


def test_errors() -> None:
    documented: dict[int, set[str]] = {}
    for status, codes, *_ in table("Errors"):
        documented.setdefault(int(status), set()).update(re.findall(r"`(\w+)`", codes))
    own = {status: {code} for status, (_, code) in _CODES.items()}
    own[404] |= {"model_not_found"}
    own[503] |= {"too_many_connections", "engine_dead", "step_overdue", "replica_lost"}
    assert documented == {400: set(), **own}


@pytest.mark.parametrize("row", table("Sizing"), ids=lambda row: row[0])
def test_sizes(row: list[str]) -> None:
    shape = preset(row[0].strip("`"))
    size = {"bfloat16": torch.bfloat16, "float32": torch.float32}[row[1]].itemsize
    kv, state = 2 * shape.kv_heads * shape.head_dim * size, shape.hidden * size
    whole = (shape.layers * kv + (shape.layers - 1) * state) / 1024
    assert [row[2], row[3], row[4]] == [str(kv), str(state), f"{whole:.1f} KiB"]
