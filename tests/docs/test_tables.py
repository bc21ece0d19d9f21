"""Tables and pictures that scripts write: none is older than the code, and nothing in them goes unexplained."""

import json
import re
import runpy
from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints
from xml.etree import ElementTree

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

import remask.plan
from remask.checks.fields import declared
from remask.cli.commands import all_commands
from remask.cli.parser import Parser
from remask.denoising.rules import REMASKING
from remask.engine.expected_speed import pass_seconds, tokens_per_second
from remask.families import PRESETS
from remask.model.cpu_kernels import int8_kernel
from remask.plan import View
from remask.policies.registry import POLICIES
from remask.request.sampling_groups import BlockParams, RemaskingParams, UniformParams
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms
from remask.server.fields import FOREIGN
from remask.server.protocol.generation import ChatBody, CompletionBody

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT: dict[str, Any] = runpy.run_path(str(DOCS.parent / "scripts" / "docs_tables.py"))
OPENAI = (chat_create_params.CompletionCreateParamsBase, completion_create_params.CompletionCreateParamsBase)
OF_VLLM = """
add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of cache_salt chat_template
chat_template_kwargs continue_final_message documents echo guided_choice guided_decoding_backend guided_grammar
guided_json guided_regex guided_whitespace_pattern ignore_eos include_reasoning include_stop_str_in_output
kv_transfer_params length_penalty logits_processors media_io_kwargs min_p min_tokens mm_processor_kwargs priority
prompt_embeds prompt_logprobs reasoning repetition_penalty request_id return_token_ids return_tokens_as_token_ids
skip_special_tokens spaces_between_special_tokens stop_token_ids structural_tag structured_outputs
thinking_token_budget top_k truncate_prompt_tokens use_beam_search vllm_xargs
"""
PAGES: list[Path] = SCRIPT["pages"]()
written: Callable[[str], str] = SCRIPT["fill_tables"]


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_no_table_is_older_than_the_code(page: Path) -> None:
    """To the last digit where this machine sizes passes and int8 weights as the page of recipes does.

    Without Triton a pass takes other memory, and int8 weights a little more or less by the kernel that computes them.
    """
    found = page.read_text(encoding="utf-8")
    expected = written(found)
    if page.name == "recipes.md" and (find_spec("triton") is None or int8_kernel().name != "fbgemm"):
        found, expected = (
            re.sub(r"(?s)<!-- generated: room -->.*?<!-- end -->", "", each) for each in (found, expected)
        )
        here, there = ([float(each) for each in re.findall(r"\d+\.\d+", each)] for each in (found, expected))
        assert here == pytest.approx(there, rel=0.05)
        found, expected = (re.sub(r"\d+\.\d+", "#", each) for each in (found, expected))
    assert found == expected, "run: python scripts/docs_tables.py"
    assert re.findall(r"^\| `.*\|  \|$", found, re.MULTILINE) == [], "something is said of every option and field"


def test_every_table_has_a_page_and_a_stale_one_is_noticed() -> None:
    named = [name for page in PAGES for name in re.findall(r"<!-- generated: (\w+) -->", page.read_text("utf-8"))]
    assert sorted(named) == sorted(SCRIPT["TABLES"])
    page = text("sampling.md")
    assert written(page.replace("| `top_k` |", "| `top_q` |")) == page


def test_every_field_and_rule_is_there() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", text("sampling.md"), re.MULTILINE))
    classes = (SamplingParams, Terms, RemaskingParams, UniformParams, BlockParams)
    assert {*REMASKING, *(name for each in classes for name in declared(each))} == named


def test_every_option_of_every_help_is_there() -> None:
    """Of commands without subjects, whose own help lists all: in their section, or in a group that it names."""
    page = text("commands.md")
    groups = dict(re.findall(r"^## Options: (.*)\n((?:\|.*\n)+)", page, re.MULTILINE))
    for name, command in all_commands().items():
        if f"remask {name}".startswith(SCRIPT["LAB"]):
            continue
        parser = Parser(prog=f"remask {name}")
        command.add_arguments(parser)
        if parser._subparsers is not None:
            assert f"\n## `remask {name} " in page
            continue
        told = set(re.findall(r"^ {2}(?:-h, )?(--[\w-]+)", parser.format_help(), re.MULTILINE)) - {"--help"}
        assert len(told) > 2, name
        section = page.split(f"\n## `remask {name}`\n")[1].split("\n## ")[0]
        taken = [rows for title, rows in groups.items() if f"[{title}](" in section or title.startswith("messages")]
        assert told <= set(re.findall(r"`(--[\w-]+)", section + "".join(taken))), f"remask {name}"


def test_every_word_of_a_view_and_every_class_of_plans_is_there() -> None:
    page = text("lab/policy-reference.md")
    named = set(re.findall(r"^\| `(\w+)", page.split("### `View`\n")[1].split("\n### ")[0], re.MULTILINE))
    own = {
        name
        for name, value in vars(View).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }
    assert {field.name for field in fields(View)} | own == named
    explained = {"Mask", "Positions", "NEVER", "Widths"}  # in the text; sizes of a model
    listed = re.findall(r"^\| `(\w+)` \| `remask", text("lab/hooks-and-readers.md"), re.MULTILINE)
    assert set(remask.plan.__all__) - explained <= {*re.findall(r"^### `(\w+)`$", page, re.MULTILINE), *listed}


def test_every_cache_and_its_settings_are_listed() -> None:
    """Each policy once, and under its heading each setting with its default."""
    first, *sections = text("caches.md").split("\n## ")
    assert sorted(re.findall(r"^\| (?:\[)?`([\w-]+)`", first, re.MULTILINE)) == sorted(POLICIES.built_in)
    for name, policy in POLICIES.built_in.items():
        told = "".join(section for section in sections if f"`{name}`" in section.partition("\n")[0])
        defaults = {setting: getattr(policy.make(), field) for setting, field in policy.settings.items()}
        if policy.tables:
            defaults["depth"] = "earned" if policy.earns else "table"
        for setting, default in defaults.items():
            assert f"| `{setting}` | `{json.dumps(default)}` |" in told, f"{name}: {setting}"


def test_every_field_of_the_official_client_and_of_vllm_has_a_fate() -> None:
    honoured, bodies = SCRIPT["HONOURED"].keys(), ChatBody.model_fields.keys() | CompletionBody.model_fields.keys()
    assert honoured <= bodies
    assert bodies.isdisjoint(FOREIGN)
    assert all(field.reason for field in FOREIGN.values())
    for names in (*(get_type_hints(params) for params in OPENAI), OF_VLLM.split()):
        assert len(names) > 15
        assert {*names, "stream"} <= honoured | FOREIGN.keys()


def test_the_time_of_an_8b_is_bounded_by_its_products_and_its_weights() -> None:
    """By hand: of 1,024 rows the FLOPs of the matrices, of 32 rows the bytes of these, on an H100's data sheet."""
    config = PRESETS["nemotron-labs-diffusion-8b"]
    full, rate = pass_seconds(config, None, "h100"), tokens_per_second(config, "exact", "h100")
    layers = config.parameters - 2 * 131072 * 4096
    assert full == pytest.approx(2 * 1024 * (layers + 131072 * 4096) / 989e12, rel=0.05)
    assert 1 / rate == pytest.approx(2 * (layers + 131072 * 4096) / 3.35e12, rel=0.1)


ROOT = Path(__file__).parents[2]
DRAWN: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "docs_pictures.py"))
SCENES: dict[str, Any] = DRAWN["SCENES"]


@pytest.mark.parametrize("name", SCENES)
def test_it_is_up_to_date(name: str) -> None:
    text = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
    assert text == DRAWN["svg"](SCENES[name], DRAWN["panels"](SCENES[name])), "run: python scripts/docs_pictures.py"
    ElementTree.fromstring(text)


def test_every_picture_is_shown_and_all_that_are_shown_exist() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("how-*.md"))
    assert {path.stem for path in (ROOT / "docs" / "images").glob("how-*.svg")} == set(SCENES)
    assert all(f"](images/{name}.svg)" in pages for name in SCENES)


@pytest.mark.parametrize("name", SCENES)
def test_cells_are_the_work_that_was_counted(name: str) -> None:
    """The blue cells of a pass are its row-layers: the plan's cost, with the rows that the device chose."""
    computed = DRAWN["COMPUTED"]
    for panel in DRAWN["panels"](SCENES[name]):
        assert (panel.cells == computed).sum() == panel.cost


def test_both_pages_expect_the_same_speed_of_a_model() -> None:
    table = SCRIPT["speed"]()
    expected = {name: row.split("|")[-2].strip() for row in table.splitlines() for name in re.findall(r"`(\S+)`", row)}
    listed = {line.split()[0]: line.split()[-1] for line in SCRIPT["shelf_sizes"]().splitlines() if " fits as " in line}
    common = {name for name, speed in listed.items() if speed != "-"} & expected.keys()
    assert "sumi-7b" in common
    assert {name: float(listed[name]) for name in common} == {name: float(expected[name]) for name in common}
