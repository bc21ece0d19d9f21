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
from remask_lab.records.interval import accuracy_over, percent_text
from remask_lab.records.record import read_record

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"(?<=<!-- generated: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def written(text: str) -> str:
    """The page `text` with its tables as they should be."""
    return BLOCK.sub(lambda found: f"{found[1]}{found[2]}{TABLES[found[1]]()}", text)


def pages() -> list[Path]:
    """The pages that have tables from the code."""
    return [page for page in sorted(DOCS.rglob("*.md")) if BLOCK.search(page.read_text(encoding="utf-8"))]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows, the first of which is the head, as Markdown."""
    head, *rest = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)
    return head + "|" + "---|" * len(rows[0]) + "\n" + "".join(rest)


# What a request may say.


def fields(cls: type[Any]) -> str:
    """The table of a declared class."""
    rows = [("field", "value", "default", "models", "meaning")]
    for name, field in declared(cls).items():
        no_default = field.default is None or isinstance(field.values, Group)
        default = "" if no_default else f"`{json.dumps(field.default)}`"
        models = "all" if field.for_all else in_words(field.kinds)
        rows.append(
            (
                f"`{name}`",
                re.sub(r"^a (whole number|number) from", r"\1", of_remask(field.values.words)).replace("2**63", "2^63"),
                default,
                models,
                field.meaning,
            )
        )
    shared = len({row[3] for row in rows[1:]}) == 1
    return table([[cell for column, cell in enumerate(row) if not (shared and column == 3)] for row in rows])


def of_remask(words: str) -> str:
    """`words` without names of other packages that are installed here."""
    for registry in (POLICIES, RULES):
        words = words.replace(", ".join(registry.names()), ", ".join(registry.built_in))
    return words


def rules() -> str:
    """The table of remasking rules."""
    rows = [("`remasking`", "models", "which positions become final", "schedule", "`threshold` and `factor`")]
    for rule in REMASKING.values():
        thresholds = "yes" if rule.thresholds else "no"
        rows.append((f"`{rule.name}`", in_words(rule.kinds), rule.meaning, schedule(rule), thresholds))
    return table(rows)


def schedule(rule: Remasking) -> str:
    """What decides how many positions a step transfers."""
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


def others(honoured: Mapping[str, str], foreign: Mapping[str, Foreign]) -> str:
    """The table of the fields of others' bodies."""
    rows = [(name, "honoured", how) for name, how in honoured.items()]
    for name, field in foreign.items():
        allowed = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral or ())
        refused = f"refused, but for {allowed}" if allowed else "refused"
        rows.append((name, "ignored" if field.neutral is None else refused, field.reason))
    return fates("field", rows)


def fates(what: str, rows: Iterable[tuple[str, str, str]]) -> str:
    """A table of names, what becomes of them, and how or why. Names of one fate share a row."""
    shared: dict[tuple[str, str], list[str]] = {}
    for name, fate, why in sorted(rows, key=lambda row: row[0].lower()):
        shared.setdefault((fate, why), []).append(f"`{name}`")
    told = [(", ".join(names), fate, why) for (fate, why), names in shared.items()]
    return table([(what, "what becomes of it", "how, or why"), *told])


def apart(foreign: Mapping[str, Foreign]) -> Mapping[str, Foreign]:
    """Those of `foreign` that are not in the table of OpenAI's and vLLM's bodies, or have another fate."""
    return {name: field for name, field in foreign.items() if FOREIGN.get(name) != field}


def keywords() -> str:
    """The table of JSON Schema's keywords."""
    told = (("works", WORKS), ("ignored", ANNOTATIONS), ("refused", REFUSED))
    return fates("keyword", ((name, fate, how) for fate, some in told for name, how in some.items()))


# Commands.

LAB = ("remask analyze", "remask bench", "remask eval", "remask profile ops", "remask verify")
# Where more is said of an option.
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
    """The commands but those of `LAB`: groups of options that several have, then each command."""
    parsers = {name: parser for name, parser in all_parsers() if not name.startswith(LAB)}
    groups = common_groups(list(parsers.values()))
    parts = [f"## Options: {title}\n{table([HEAD, *rows])}\n" for title, rows in groups.items()]
    owners = dict[Row, str]()
    for name, parser in parsers.items():
        own = [told(title, row, groups) for title, row in options_of(parser) if row not in groups.get(title, ())]
        new = [row for row in own if owners.setdefault(row, name) == name]
        parts += [f"## `{name}`\n{sentence(parser.description)}\n\n", table([HEAD, *new]) + "\n" if new else ""]
        for owner in dict.fromkeys(owners[row] for row in own if row not in new):
            named = ", ".join(f"`{option(row)}`" for row in own if owners[row] == owner)
            parts.append(f"{named}: as of [`{owner}`](#{owner.replace(' ', '-')}).\n\n")
        parts.append(taken(parser, groups))
    return "".join(parts).rstrip("\n") + "\n"


HEAD = ("option", "default", "meaning")


def all_parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parser of each command, and of each subject of those that have some, by the words that lead there."""
    for name, command in all_commands().items():
        parser = Parser(prog=f"remask {name}", description=command.summary)
        command.add_arguments(parser)
        yield from leaves(parser)


def leaves(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """`parser`, or those of its subjects."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser.prog, parser
    for action in below:
        told = {each.dest: each.help for each in action._choices_actions}
        for name, each in action.choices.items():
            each.prog, each.description = f"{parser.prog} {name}", each.description or told[name]
            yield from leaves(each)


def common_groups(parsers: Sequence[argparse.ArgumentParser]) -> dict[str, list[Row]]:
    """The groups of options that several commands have, each option as most of them declare it."""
    counted: dict[str, dict[str, Counter[Row]]] = {}
    for parser in parsers:
        for title, row in options_of(parser):
            counted.setdefault(title, {}).setdefault(option(row), Counter())[row] += 1
    del counted["options"]
    return {
        title: [rows.most_common(1)[0][0] for rows in options.values()]
        for title, options in counted.items()
        if any(rows.total() > 1 for rows in options.values())
    }


def told(title: str, row: Row, groups: Mapping[str, Sequence[Row]]) -> Row:
    """The row of a command's option; of one that differs from its group's in the default alone, that is enough."""
    if all(option(each) != option(row) for each in groups.get(title, ())):
        return row
    default = re.search(r" \(default [^)]*\)", row[2]) if not row[1] else None
    return row[0], row[1], f"as of [{title}](#options-{title})" + (default[0] if default else "")


def option(row: Row) -> str:
    """The first name of an option."""
    return re.split(r"[` ]", row[0])[1]


def taken(parser: argparse.ArgumentParser, groups: Mapping[str, list[Row]]) -> str:
    """The sentence that names the groups of which a command takes options as they stand there."""
    rows, told = list(options_of(parser)), []
    for title, common in groups.items():
        taken = [row for each, row in rows if each == title and row in common]
        if taken and not title.startswith("messages"):
            missing = ", ".join(f"`{option(row)}`" for row in common if row not in taken)
            anchor = re.sub(r"[^a-z ]", "", f"options {title}").replace(" ", "-")
            told.append(f"[{title}](#{anchor})" + (f" (but for {missing})" if missing else ""))
    return f"Also the options of {', '.join(told)}.\n\n" if told else ""


def options_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, Row]]:
    """The group and the row of each option of a command."""
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        title = "options" if group.title in ("positional arguments", FURTHER) else group.title or ""
        for action in group._group_actions:
            if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
                continue
            default = shown(parser, action)
            meaning = " ".join(formatter._expand_help(action).split()) if action.help else ""
            if default:  # the column says it
                meaning = re.sub(rf" \(default:? {re.escape(default.strip('`'))}\)$", "", meaning)
            if meaning[1:2].islower():
                meaning = meaning[0].lower() + meaning[1:]
            see = SEE.get(action.option_strings[0]) if action.option_strings else None
            more = f" ([more]({see}))" if see else ""
            yield title, (names(action), default, escaped(meaning) + more)


def names(action: argparse.Action) -> str:
    """An option's names, the first with its value."""
    first, *rest = action.option_strings or [""]
    if action.nargs == 0:
        value = ""
    elif action.choices is not None:
        value = "|".join(map(str, action.choices))
    else:
        kinds = {int: "N", float: "X"}
        value = kinds.get(action.type, str(action.metavar or "TEXT"))  # type: ignore[call-overload]
    dots = "..." if action.nargs in ("+", "*") else ""
    return ", ".join(f"`{each}`" for each in (f"{first} {value}{dots}".strip(), *rest))


def shown(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The default of an option; empty where leaving it out asks for nothing."""
    if action.required:
        return "required"
    value = parser.get_default(action.dest)
    if value is None or value is False or value == [] or value == argparse.SUPPRESS or action.nargs == 0:
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def sentence(text: str | None) -> str:
    """What a parser says of a command, as a sentence."""
    told = (text or "").strip().rstrip(".")
    return escaped(f"{told[:1].upper()}{told[1:]}.")


def escaped(text: str) -> str:
    """`text` of a help as Markdown: what looks like HTML is text."""
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
    """Classes and functions, from their docstrings."""
    parts = []
    for title, objects in sections.items():
        parts += [f"## {title}\n\n", *map(section, objects)]
    return "".join(parts).rstrip("\n") + "\n"


def class_list(sections: Mapping[str, Sequence[type[Any]]]) -> str:
    """Classes with their modules, and the first paragraph of their docstrings."""
    parts = []
    for title, items in sections.items():
        told = [(item, " ".join((inspect.getdoc(item) or "").split("\n\n")[0].split())) for item in items]
        rows = [(f"`{item.__name__}`", f"`{item.__module__}`", marked(said)) for item, said in told]
        parts.append(f"### {title}\n\n{table([('class', 'module', 'what it is'), *rows])}")
    return "\n".join(parts)


def section(item: Any) -> str:
    """What stands about a class or a function."""
    text = inspect.getdoc(item) or ""
    if not inspect.isclass(item):
        return f"### `{item.__name__}`\n`{item.__module__}.{item.__name__}`: {marked(text)}\n\n"
    parts = [f"### `{item.__name__}`\nFrom `{item.__module__}`. {marked(_ATTRIBUTES.sub(chr(10), text).strip())}\n"]
    for head, rows in (("field", attributes(item, text)), ("method or property", methods(item))):
        if found := [(name, " ".join(marked(said).split())) for name, said in rows]:
            parts.append("\n" + table([(head, "meaning"), *found]))
    return "".join(parts) + "\n"


def attributes(item: type[Any], text: str) -> Iterator[tuple[str, str]]:
    """Each field of a class itself, and what its docstring or the comment behind the field says of it."""
    lines = textwrap.dedent(inspect.getsource(item)).splitlines()
    (tree,) = ast.parse("\n".join(lines)).body
    assert isinstance(tree, ast.ClassDef)
    found = _ATTRIBUTES.search(text)
    entries = textwrap.dedent(found[1]) if found else ""
    meanings: dict[str, str] = {}
    for named, said in re.findall(r"^(\w+(?:, \w+)*): ((?:.*\n?)(?:[ ]+.*\n?)*)", entries, re.MULTILINE):
        meanings |= dict.fromkeys(named.split(", "), said)
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            _, _, comment = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")
            kind = ast.unparse(node.annotation).strip("'")
            yield f"`{node.target.id}: {kind}`", meanings.get(node.target.id) or comment


def methods(item: type[Any]) -> Iterator[tuple[str, str]]:
    """Each public method and property of a class itself, and the first paragraph of its docstring."""
    told = {field.name for field in dataclasses.fields(item)} if dataclasses.is_dataclass(item) else set()
    for name, value in vars(item).items():
        function = value
        if isinstance(value, property):
            function = value.fget
        elif isinstance(value, classmethod | staticmethod):
            function = value.__func__
        elif not inspect.isfunction(value):
            function = getattr(value, "func", None)  # a cached property
        if name.startswith("_") or name in told or not inspect.isfunction(function):
            continue
        call = "" if function is not value else f"({', '.join([*inspect.signature(function).parameters][1:])})"
        yield f"`{name}{call}`", (inspect.getdoc(function) or "").split("\n\n")[0]


def marked(text: str) -> str:
    """`text` of a docstring as Markdown: what looks like HTML or a link there is text."""
    return re.sub(r"(?<!`)\[(?=[A-Z])", r"\\[", text).replace("<", "&lt;")


OURS = re.compile(r"-tiny$|-100m$|-1b$|^smollm2-")  # shapes that nobody else published


@cache
def shapes() -> dict[str, str]:
    """One preset of each published shape, and all names of that shape as they are shown."""
    alike: dict[ModelConfig, list[str]] = {}
    for name in PRESETS:
        if not OURS.search(name):
            alike.setdefault(preset(name), []).append(name)
    return {each[0]: ", ".join(f"`{name}`" for name in each) for each in alike.values()}


def shelf_sizes() -> str:
    """What `remask models` prints for a CPU with 16 GB, where no model is on the disk."""
    lines = [dataclasses.replace(line, on_disk=line.ships) for line in lines_for(16 * 10**9)]
    return f"```text\n{table_text(lines)}\n```\n"


def shelf() -> str:
    """How the shelf starts its models."""
    rows = [["name", "hub id", "decoding", "cache", "runs"]]
    for row in SHELF.values():
        decoding = f"`{json.dumps(row.sampling)}`" if row.sampling else "-"
        link = f"[{row.hub}](https://huggingface.co/{row.hub})"
        rows.append([f"`{row.name}`", link, decoding, f"`{row.cache}`", "yes" if row.recorded else "no"])
    return table(rows)


def speed() -> str:
    """What a pass takes at least, and how many tokens a second come of it at one token a step."""
    rows = [["preset", "H100: tokens/s", "without", f"{CORES} cores, int8: tokens/s"]]
    for name, shown in shapes().items():
        config = preset(name)
        policy = CACHES[config.kind]
        full, rate = pass_seconds(config, None, "h100"), tokens_per_second(config, policy, "h100")
        slow = float(f"{tokens_per_second(config, policy, CORES):.2g}")
        rows.append([shown, f"{rate:,.0f}", f"{1 / full:,.0f}", f"{slow:g}"])
    return table(rows)


def block_costs() -> str:
    """What block caches cost and save, from the kept benches of two models."""
    rows = [["model, decoding", "cache", "right answers (95 % interval)", "over `none`, points", "work saved"]]
    paper = read_record(RESULTS / "bicache-1.bundled.json")
    own = results_of(load_table("bicache-1"), paper)
    sampling = paper.about["settings"]["sampling"]
    kept = [
        (
            f"`bundled`, {sampling['max_tokens']} tokens in {sampling['steps']} steps",
            {"none": own["No caching"], "block-dual": own["Fast-dLLM"]},
        )
    ]
    towns = read_record(RESULTS / "real-weights" / "town-caches.json")
    by_cache = {row["cache"]: row for row in towns.data["results"]}
    caches = ("none", "block-prefix", "block-dual")
    kept.append((f"`smollm2`, {decoding_text(towns)}", {name: by_cache[name] for name in caches}))
    for told, results in kept:
        for name, row in results.items():
            over, low, high = (100 * each for each in accuracy_over(row, results["none"]))
            lost = "" if name == "none" else f"{over:+.1f} ({low:+.1f} to {high:+.1f})"
            right = percent_text(row["accuracy"], row["accuracy_interval"])
            rows.append([told, f"`{name}`", right, lost, f"{row['work_ratio_to_none']:.2f}x"])
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
    "others": partial(others, HONOURED, FOREIGN),
    "reads": partial(others, {}, FOREIGN_TO_READS),
    "responses": partial(others, {}, apart(FOREIGN_TO_RESPONSES)),
    "messages": partial(others, {}, apart(FOREIGN_TO_MESSAGES)),
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
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
