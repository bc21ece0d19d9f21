"""Writes the tables of the documentation that come from the code: `python scripts/docs_tables.py`.

A page names the table that stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

import argparse
import ast
import dataclasses
import inspect
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from remask.checkpoint.shelf import CACHES, SHELF
from remask.checks import in_words
from remask.checks.fields import Group, declared
from remask.cli.commands import all_commands
from remask.cli.models import CORES, lines_for, table_text
from remask.cli.parser import FURTHER, Parser
from remask.denoising.rules import REMASKING, RULES, Remasking
from remask.engine.expected_speed import pass_seconds, tokens_per_second
from remask.families import PRESETS, preset
from remask.model.config import ModelConfig
from remask.plan import (
    HookCost,
    LastPass,
    LayerHook,
    Plan,
    PrefixHit,
    RowMeasure,
    Span,
    Spans,
    StepFacts,
    TopRho,
    View,
    rows_of,
)
from remask.plan.cost import OperationCost
from remask.policies import Around, CachePolicy, DepthLookup, RequestFacts, Schedule, Traits
from remask.policies.on_device import AttendingRows, DeviceHook, PassCanvas
from remask.policies.registry import POLICIES
from remask.readers import DeviceRead, Predictions, Reader, ReadPass, RequestView, Start
from remask.request.json_schema import ANNOTATIONS, REFUSED, WORKS
from remask.request.questions import Decisions, Question
from remask.request.sampling_groups import BlockParams, RemaskingParams, UniformParams
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms
from remask.sampling.vocabulary import Vocabulary
from remask.server.fields import FOREIGN, FOREIGN_TO_READS
from remask.server.protocol.base import Foreign
from remask.server.protocol.messages import FOREIGN_TO_MESSAGES
from remask.server.protocol.responses import FOREIGN_TO_RESPONSES
from remask_lab.bench.report import decoding_text
from remask_lab.pages.page import RESULTS
from remask_lab.papers.definition import load_table
from remask_lab.papers.show import results_of
from remask_lab.records.interval import accuracy_difference, percent_text
from remask_lab.records.record import read_record

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"(?<=<!-- generated: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def fill_tables(text: str) -> str:
    """Return the page `text` with each table made anew."""
    return BLOCK.sub(lambda match: f"{match[1]}{match[2]}{TABLES[match[1]]()}", text)


def pages() -> list[Path]:
    """Return the pages that have tables from the code."""
    return [page for page in sorted(DOCS.rglob("*.md")) if BLOCK.search(page.read_text(encoding="utf-8"))]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the first of which is the header, as Markdown."""
    header, *lines = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)
    return header + "|" + "---|" * len(rows[0]) + "\n" + "".join(lines)


# Fields of requests.


def fields(cls: type[Any]) -> str:
    """Return the table of a declared class. Without the column of models if all fields are for the same ones."""
    rows = [("field", "value", "default", "models", "meaning")]
    for name, field in declared(cls).items():
        no_default = field.default is None or isinstance(field.values, Group)
        default = "" if no_default else f"`{json.dumps(field.default)}`"
        models = "all" if field.for_all else in_words(field.kinds)
        rows.append(
            (
                f"`{name}`",
                re.sub(r"^a (whole number|number) from", r"\1", without_plugins(field.values.words)).replace(
                    "2**63", "2^63"
                ),
                default,
                models,
                field.meaning,
            )
        )
    shared = len({row[3] for row in rows[1:]}) == 1
    return table([[cell for column, cell in enumerate(row) if not (shared and column == 3)] for row in rows])


def without_plugins(words: str) -> str:
    """Return `words` without the names that other packages, which are installed here, have registered."""
    for registry in (POLICIES, RULES):
        words = words.replace(", ".join(registry.names()), ", ".join(registry.built_in))
    return words


def rules() -> str:
    """Return the table of remasking rules."""
    rows = [("`remasking`", "models", "which positions become final", "schedule", "`threshold` and `factor`")]
    for rule in REMASKING.values():
        thresholds = "yes" if rule.thresholds else "no"
        rows.append((f"`{rule.name}`", in_words(rule.kinds), rule.meaning, schedule(rule), thresholds))
    return table(rows)


def schedule(rule: Remasking) -> str:
    """Return what decides how many positions a step transfers, in words."""
    if rule.counts == "rule":
        return "none"
    return {"never": "even", "always": "time", "by_family": "time on Dream or with `eps`, else even"}[rule.timed]


_SAMPLING = "as [sampling parameter](sampling.md#sampling-parameters)"
_TERM = "as [term](sampling.md#terms)"

HONOURED: Mapping[str, str] = {
    "add_generation_prompt": "chat; false leaves the assistant's turn unopened, or with `continue_final_message` open",
    "cache_salt": _TERM,
    "chat_template_kwargs": "chat; variables of the chat template",
    "continue_final_message": "chat, with `add_generation_prompt` false: the answer "
    "[goes on](chat.md#continue-an-answer) from the last message, an assistant's",
    "echo": "chat; the answer begins with the message that it continues. Otherwise refused, but for `false`",
    "frequency_penalty": f"{_SAMPLING}; of masked and block-causal models, and 0 of all",
    "ignore_eos": _SAMPLING,
    "include_stop_str_in_output": _SAMPLING,
    "logit_bias": f"{_SAMPLING}; up to 1024 token ids, each from -100 to 100",
    "logprobs": "of each token in the step that wrote it: true (chat), or 0 to 20 (completions)",
    "max_completion_tokens": "chat; the newer name of `max_tokens`",
    "max_tokens": _SAMPLING,
    "messages": "chat; texts, tool calls and results of tools; `developer` is read as `system`, and reasoning in an "
    "assistant's turn is ignored",
    "min_p": _SAMPLING,
    "min_tokens": _SAMPLING,
    "model": "a served name, or that of an [adapter](models.md#several-adapters-at-once)",
    "n": "choice i has `seed + i`",
    "parallel_tool_calls": "chat; false reads one call from an answer at most",
    "presence_penalty": f"{_SAMPLING}; of masked and block-causal models, and 0 of all",
    "priority": f"{_TERM}; lower numbers begin first, as in vLLM",
    "prompt": "completions; a text, token ids, or a list of either",
    "repetition_penalty": f"{_SAMPLING}; of masked and block-causal models, and 1 of all",
    "response_format": "`text`, `json_object` or `json_schema`: see [structured outputs](structured-outputs.md)",
    "return_token_ids": "`token_ids` of each choice, and `prompt_token_ids`",
    "seed": f"{_SAMPLING}; -1 draws one",
    "stop": _SAMPLING,
    "stop_token_ids": _SAMPLING,
    "stream": "server-sent events",
    "stream_options": "`include_usage`, and with it `continuous_usage_stats`; `include_obfuscation` is ignored",
    "structured_outputs": "`regex`, `choice`, `json`, `json_object`: see [structured outputs](structured-outputs.md)",
    "suffix": "text after the response: see [infilling](infilling.md)",
    "temperature": _SAMPLING,
    "tool_choice": "chat; `none`, `auto`, `required` or the name of one: see [tools](tools.md)",
    "tools": "chat; functions: see [tools](tools.md)",
    "top_k": f"{_SAMPLING}; -1 and 0 keep all",
    "top_logprobs": "chat; 0 to 20, with `logprobs: true`",
    "top_p": _SAMPLING,
    "user": "goes into the access log",
}
"""Fields of those bodies that are honoured, and how."""


def foreign_fields(honoured: Mapping[str, str], foreign: Mapping[str, Foreign]) -> str:
    """Return the table of fields of other APIs' bodies: those that are `honoured`, and those in `foreign`."""
    rows = [(name, "honoured", how) for name, how in honoured.items()]
    for name, field in foreign.items():
        allowed = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral or ())
        refused = f"refused, but for {allowed}" if allowed else "refused"
        rows.append((name, "ignored" if field.neutral is None else refused, field.reason))
    return fates("field", rows)


def fates(noun: str, rows: Iterable[tuple[str, str, str]]) -> str:
    """Return a table of names, what becomes of each, and how or why. Names with one fate and reason share a row."""
    names_by_fate: dict[tuple[str, str], list[str]] = {}
    for name, fate, reason in sorted(rows, key=lambda row: row[0].lower()):
        names_by_fate.setdefault((fate, reason), []).append(f"`{name}`")
    lines = [(", ".join(names), fate, reason) for (fate, reason), names in names_by_fate.items()]
    return table([(noun, "what becomes of it", "how, or why"), *lines])


def other_fields(foreign: Mapping[str, Foreign]) -> Mapping[str, Foreign]:
    """Return those of `foreign` that are not in the table of OpenAI's and vLLM's bodies, or have another fate there."""
    return {name: field for name, field in foreign.items() if FOREIGN.get(name) != field}


def keywords() -> str:
    """Return the table of JSON Schema's keywords."""
    groups = (("works", WORKS), ("ignored", ANNOTATIONS), ("refused", REFUSED))
    return fates("keyword", ((name, fate, reason) for fate, group in groups for name, reason in group.items()))


# Commands.

LAB = ("remask analyze", "remask bench", "remask eval", "remask profile ops", "remask verify")
# The section of the manual about an option.
SEE = {
    "--attention": "design.md#work-lists",
    "--batch-invariant": "rollouts.md#the-same-answer-in-every-batch",
    "--cache": "caches.md",
    "--depth-table": "depth-table.md",
    "--gpu-memory-utilization": "models.md#memory",
    "--force": "shelf.md",
    "--graphs": "design.md#graphs",
    "--model": "models.md",
    "--overlap": "design.md#passes-that-overlap",
    "--prefix-match": "design.md#prefixes-of-several-lengths",
    "--prefix-sharing": "design.md#prefixes-that-nobody-names",
    "--priority-key": "limits.md",
    "--adapter": "models.md#low-rank-adapters",
    "--lora-modules": "models.md#several-adapters-at-once",
    "--allowed-hosts": "security.md#names",
    "--quantization": "models.md#few-bits",
    "--sampling": "sampling.md",
    "--skip-weight-check": "limits.md#limits",
    "--store-budget-tokens": "models.md#memory",
    "--tensor-parallel": "models.md#several-devices",
    "--threads": "operation.md#threads",
}

Row = tuple[str, str, str]
"""An option with its value, its default, and its meaning."""


def commands() -> str:
    """Return the sections of all commands but those of `LAB`: groups of options that several have, then each command.

    An option that an earlier command has in the same form is only named, with a link to that command.
    """
    parsers = {name: parser for name, parser in all_parsers() if not name.startswith(LAB)}
    groups = common_groups(list(parsers.values()))
    parts = [f"## Options: {title}\n{table([HEAD, *rows])}\n" for title, rows in groups.items()]
    owners = dict[Row, str]()
    for name, parser in parsers.items():
        rows = [common_row(title, row, groups) for title, row in options_of(parser) if row not in groups.get(title, ())]
        new_rows = [row for row in rows if owners.setdefault(row, name) == name]
        parts.append(f"## `{name}`\n{sentence(parser.description)}\n\n")
        parts += [table([HEAD, *new_rows]) + "\n"] if new_rows else []
        for owner in dict.fromkeys(owners[row] for row in rows if row not in new_rows):
            options = ", ".join(f"`{option_name(row)}`" for row in rows if owners[row] == owner)
            parts.append(f"{options}: as of [`{owner}`](#{owner.replace(' ', '-')}).\n\n")
        parts.append(common_options_sentence(parser, groups))
    return "".join(parts).rstrip("\n") + "\n"


HEAD = ("option", "default", "meaning")


def all_parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the words of each command with its parser; of a command with subjects, those of each subject."""
    for name, command in all_commands().items():
        parser = Parser(prog=f"remask {name}", description=command.summary)
        command.add_arguments(parser)
        yield from leaves(parser)


def leaves(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the words and the parser of a command, or of each of its subjects, whose parsers get a description."""
    subject_actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not subject_actions:
        yield parser.prog, parser
    for action in subject_actions:
        summaries = {choice.dest: choice.help for choice in action._choices_actions}
        for name, subject in action.choices.items():
            subject.prog, subject.description = f"{parser.prog} {name}", subject.description or summaries[name]
            yield from leaves(subject)


def common_groups(parsers: Sequence[argparse.ArgumentParser]) -> dict[str, list[Row]]:
    """Return the groups of options that several commands have, each option as most of them declare it."""
    counted: dict[str, dict[str, Counter[Row]]] = {}
    for parser in parsers:
        for title, row in options_of(parser):
            counted.setdefault(title, {}).setdefault(option_name(row), Counter())[row] += 1
    del counted["options"]
    return {
        title: [rows.most_common(1)[0][0] for rows in options.values()]
        for title, options in counted.items()
        if any(rows.total() > 1 for rows in options.values())
    }


def common_row(title: str, row: Row, groups: Mapping[str, Sequence[Row]]) -> Row:
    """Return the row of a command's option. If its group has the option, only a link to the group and the default."""
    if all(option_name(common) != option_name(row) for common in groups.get(title, ())):
        return row
    default = re.search(r" \(default [^)]*\)", row[2]) if not row[1] else None
    return row[0], row[1], f"as of [{title}](#options-{title})" + (default[0] if default else "")


def option_name(row: Row) -> str:
    """Return the first name of an option."""
    return re.split(r"[` ]", row[0])[1]


def common_options_sentence(parser: argparse.ArgumentParser, groups: Mapping[str, list[Row]]) -> str:
    """Return the sentence that links the groups whose options a command has; empty if it has none of any."""
    rows = list(options_of(parser))
    links = []
    for title, common_rows in groups.items():
        own_rows = [row for group, row in rows if group == title and row in common_rows]
        if own_rows and not title.startswith("messages"):
            missing = ", ".join(f"`{option_name(row)}`" for row in common_rows if row not in own_rows)
            anchor = re.sub(r"[^a-z ]", "", f"options {title}").replace(" ", "-")
            links.append(f"[{title}](#{anchor})" + (f" (but for {missing})" if missing else ""))
    return f"Also the options of {', '.join(links)}.\n\n" if links else ""


def options_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, Row]]:
    """Yield the title of the group and the row of each option of a command."""
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        title = "options" if group.title in ("positional arguments", FURTHER) else group.title or ""
        for action in group._group_actions:
            if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
                continue
            default = default_text(parser, action)
            meaning = " ".join(formatter._expand_help(action).split()) if action.help else ""
            if default:  # the column says it
                meaning = re.sub(rf" \(default:? {re.escape(default.strip('`'))}\)$", "", meaning)
            if meaning[1:2].islower():
                meaning = meaning[0].lower() + meaning[1:]
            page = SEE.get(action.option_strings[0]) if action.option_strings else None
            link = f" ([more]({page}))" if page else ""
            yield title, (option_text(action), default, escaped(meaning) + link)


def option_text(action: argparse.Action) -> str:
    """Return an option's names, the first with its value."""
    first, *other_names = action.option_strings or [""]
    if action.nargs == 0:
        value = ""
    elif action.choices is not None:
        value = "|".join(map(str, action.choices))
    else:
        kinds = {int: "N", float: "X"}
        value = kinds.get(action.type, str(action.metavar or "TEXT"))  # type: ignore[call-overload]
    dots = "..." if action.nargs in ("+", "*") else ""
    return ", ".join(f"`{name}`" for name in (f"{first} {value}{dots}".strip(), *other_names))


def default_text(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the default of an option; "required" if it has none, and "" if leaving it out asks for nothing."""
    if action.required:
        return "required"
    value = parser.get_default(action.dest)
    if value is None or value is False or value == [] or value == argparse.SUPPRESS or action.nargs == 0:
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def sentence(text: str | None) -> str:
    """Return the description of a command as a sentence."""
    words = (text or "").strip().rstrip(".")
    return escaped(f"{words[:1].upper()}{words[1:]}.")


def escaped(text: str) -> str:
    """Return the `text` of a help as Markdown, in which `<` and `*` are no markup."""
    return text.replace("<", "&lt;").replace("*", "\\*")


# What authors of policies, hooks and readers import.

POLICY: dict[str, tuple[Any, ...]] = {
    "What a policy is shown": (View,),
    "What a policy answers": (Plan, Span, rows_of),
    "The policy itself": (CachePolicy, Around, Traits, RowMeasure),
}
DEVICE: dict[str, tuple[Any, ...]] = {
    "What few policies need": (PrefixHit, LastPass, StepFacts, Spans, TopRho, Schedule, RequestFacts, DepthLookup),
    "Between layers": (LayerHook, HookCost, OperationCost, DeviceHook, PassCanvas, AttendingRows),
    "Readers": (Reader, RequestView, Start, ReadPass, Predictions, DeviceRead, Vocabulary),
}
_ATTRIBUTES = re.compile(r"\n*^(?:Attributes|Args):\n((?:[ ]{4}.*\n?|\n)+)", re.MULTILINE)


def classes(sections: Mapping[str, Sequence[Any]]) -> str:
    """Return the sections of classes and functions, from their docstrings."""
    parts = []
    for title, objects in sections.items():
        parts += [f"## {title}\n\n", *map(section, objects)]
    return "".join(parts).rstrip("\n") + "\n"


def class_list(sections: Mapping[str, Sequence[type[Any]]]) -> str:
    """Return tables of classes, with their modules and the first paragraph of their docstrings."""
    parts = []
    for title, items in sections.items():
        rows = [("class", "module", "what it is")]
        for item in items:
            summary = " ".join((inspect.getdoc(item) or "").split("\n\n")[0].split())
            rows.append((f"`{item.__name__}`", f"`{item.__module__}`", as_markdown(summary)))
        parts.append(f"### {title}\n\n{table(rows)}")
    return "\n".join(parts)


def section(item: Any) -> str:
    """Return the section of a function, or of a class with tables of its fields, methods and properties."""
    text = inspect.getdoc(item) or ""
    if not inspect.isclass(item):
        return f"### `{item.__name__}`\n`{item.__module__}.{item.__name__}`: {as_markdown(text)}\n\n"
    parts = [
        f"### `{item.__name__}`\nFrom `{item.__module__}`. {as_markdown(_ATTRIBUTES.sub(chr(10), text).strip())}\n"
    ]
    for head, rows in (("field", attributes(item, text)), ("method or property", methods(item))):
        if lines := [(name, " ".join(as_markdown(meaning).split())) for name, meaning in rows]:
            parts.append("\n" + table([(head, "meaning"), *lines]))
    return "".join(parts) + "\n"


def attributes(item: type[Any], text: str) -> Iterator[tuple[str, str]]:
    """Yield each field that a class itself declares, and its meaning: from the docstring, or the comment behind it."""
    lines = textwrap.dedent(inspect.getsource(item)).splitlines()
    (tree,) = ast.parse("\n".join(lines)).body
    assert isinstance(tree, ast.ClassDef)
    match = _ATTRIBUTES.search(text)
    entries = textwrap.dedent(match[1]) if match else ""
    meanings: dict[str, str] = {}
    for names, meaning in re.findall(r"^(\w+(?:, \w+)*): ((?:.*\n?)(?:[ ]+.*\n?)*)", entries, re.MULTILINE):
        meanings |= dict.fromkeys(names.split(", "), meaning)
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            _, _, comment = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")
            kind = ast.unparse(node.annotation).strip("'")
            yield f"`{node.target.id}: {kind}`", meanings.get(node.target.id) or comment


def methods(item: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield each public method and property that a class itself defines, and the first paragraph of its docstring."""
    field_names = {field.name for field in dataclasses.fields(item)} if dataclasses.is_dataclass(item) else set()
    for name, value in vars(item).items():
        function = value
        if isinstance(value, property):
            function = value.fget
        elif isinstance(value, classmethod | staticmethod):
            function = value.__func__
        elif not inspect.isfunction(value):
            function = getattr(value, "func", None)  # a cached property
        if name.startswith("_") or name in field_names or not inspect.isfunction(function):
            continue
        call = "" if function is not value else f"({', '.join([*inspect.signature(function).parameters][1:])})"
        yield f"`{name}{call}`", (inspect.getdoc(function) or "").split("\n\n")[0]


def as_markdown(text: str) -> str:
    """Return the `text` of a docstring as Markdown, in which `<` and shapes such as `[T]` are no markup."""
    return re.sub(r"(?<!`)\[(?=[A-Z])", r"\\[", text).replace("<", "&lt;")


UNPUBLISHED = re.compile(r"-tiny$|-100m$|-1b$|^smollm2-")  # shapes that nobody else published


@cache
def shapes() -> dict[str, str]:
    """Return one preset of each published shape, with the names of all presets of that shape as Markdown."""
    by_shape: dict[ModelConfig, list[str]] = {}
    for name in PRESETS:
        if not UNPUBLISHED.search(name):
            by_shape.setdefault(preset(name), []).append(name)
    return {names[0]: ", ".join(f"`{name}`" for name in names) for names in by_shape.values()}


def shelf_sizes() -> str:
    """Return what `remask models` prints for a CPU with 16 GB if no model is on the disk."""
    lines = [dataclasses.replace(line, on_disk=line.ships) for line in lines_for(16 * 10**9)]
    return f"```text\n{table_text(lines)}\n```\n"


def shelf() -> str:
    """Return the table of the shelf: how each model is started."""
    rows = [["name", "hub id", "decoding", "cache", "runs"]]
    for row in SHELF.values():
        decoding = f"`{json.dumps(row.sampling)}`" if row.sampling else "-"
        link = f"[{row.hub}](https://huggingface.co/{row.hub})"
        rows.append([f"`{row.name}`", link, decoding, f"`{row.cache}`", "yes" if row.recorded else "no"])
    return table(rows)


def speed() -> str:
    """Return the table of expected speeds at one token a step, by the least time that a pass takes."""
    rows = [["preset", "H100: tokens/s", "without", f"{CORES} cores, int8: tokens/s"]]
    for name, names in shapes().items():
        config = preset(name)
        policy = SHELF[name].cache if name in SHELF else CACHES[config.kind]
        full, rate = pass_seconds(config, None, "h100"), tokens_per_second(config, policy, "h100")
        slow = float(f"{tokens_per_second(config, policy, CORES):.2g}")
        rows.append([names, f"{rate:,.0f}", f"{1 / full:,.0f}", f"{slow:g}"])
    return table(rows)


def block_costs() -> str:
    """Return the table of what block caches cost and save, from the kept benches of two models."""
    rows = [["model, decoding", "cache", "right answers (95 % interval)", "over `none`, points", "work saved"]]
    paper = read_record(RESULTS / "bicache-1.bundled.json")
    paper_results = results_of(load_table("bicache-1"), paper)
    sampling = paper.about["settings"]["sampling"]
    benches = [
        (
            f"`bundled`, {sampling['max_tokens']} tokens in {sampling['steps']} steps",
            {"none": paper_results["No caching"], "block-dual": paper_results["Fast-dLLM"]},
        )
    ]
    towns = read_record(RESULTS / "real-weights" / "town-caches.json")
    by_cache = {row["cache"]: row for row in towns.data["results"]}
    caches = ("none", "block-prefix", "block-dual")
    benches.append((f"`smollm2`, {decoding_text(towns)}", {name: by_cache[name] for name in caches}))
    for title, results in benches:
        for name, row in results.items():
            change, low, high = (100 * share for share in accuracy_difference(row, results["none"]))
            change_text = "" if name == "none" else f"{change:+.1f} ({low:+.1f} to {high:+.1f})"
            accuracy = percent_text(row["accuracy"], row["accuracy_interval"])
            rows.append([title, f"`{name}`", accuracy, change_text, f"{row['work_ratio_to_none']:.2f}x"])
    return table(rows)


TABLES: dict[str, Callable[[], str]] = {
    "block_costs": block_costs,
    "sampling": partial(fields, SamplingParams),
    "terms": partial(fields, Terms),
    "of_remasking": partial(fields, RemaskingParams),
    "of_blocks": partial(fields, BlockParams),
    "of_uniform": partial(fields, UniformParams),
    "decisions": partial(fields, Decisions),
    "questions": partial(fields, Question),
    "remasking": rules,
    "others": partial(foreign_fields, HONOURED, FOREIGN),
    "reads": partial(foreign_fields, {}, FOREIGN_TO_READS),
    "responses": partial(foreign_fields, {}, other_fields(FOREIGN_TO_RESPONSES)),
    "messages": partial(foreign_fields, {}, other_fields(FOREIGN_TO_MESSAGES)),
    "keywords": keywords,
    "commands": commands,
    "policies": partial(classes, POLICY),
    "hooks": partial(class_list, DEVICE),
    "shelf": shelf,
    "shelf_sizes": shelf_sizes,
    "speed": speed,
}

if __name__ == "__main__":
    for page in pages():
        page.write_text(fill_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
