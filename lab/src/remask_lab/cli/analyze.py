"""`remask analyze SUBJECT`: the subjects with their options; runs one, prints its outcome, and keeps it.

What a subject measures is the module of its name in `remask_lab.subjects`, which has `measure(args) -> Outcome`. Help
and misspelled words wait for this module, so that it imports no PyTorch.
"""

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from remask.cli.parser import examples
from remask.cli.shared_options import add_model_options
from remask_lab.cli.options import TAU, add, add_workload
from remask_lab.similarity.options import add_rule_options, add_similarity_options, add_system_prompt_option

Group = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True, slots=True)
class Subject:
    """One subject.

    Attributes:
        summary: its line in `remask analyze --help`.
        examples: two commands with which its own help ends.
        options: defaults by name, as `options.add` takes them.
        groups: what adds further options, those of requests and of the model among them.
    """

    summary: str
    examples: Sequence[str]
    options: Mapping[str, Any]
    groups: Sequence[Group]


def add_without_depths(parser: argparse.ArgumentParser) -> None:
    """The model, for what runs no policy that looks a depth up."""
    add_model_options(parser, depths=False)


RESULTS = {"output": None, "plots": None}
SUBJECTS: Mapping[str, Subject] = {
    "depth": Subject(
        "depth of reuse by task and ratio, its convergence, and its stability under other system prompts",
        (
            "remask analyze depth --model bundled --samples 8 --plots pictures",
            "remask analyze depth --model bundled --tau 0.95 --ratios 50 75 90 --output depth.json",
        ),
        {
            "task": {
                "action": "append",
                "default": [],
                "metavar": "NAME=FILE",
                "help": "a kind of task and its prompts, as 'papers profile --prompts' takes them; may be given again "
                "(default: those that the model's tokenizer reads)",
            },
            "tau": TAU,
            "ratios": None,
            "samples": {"help": "requests per ratio and task (default 16)"},
            "system_prompts": {"type": int, "default": 8, "metavar": "N", "help": "how many"},
            "canvas": None,
            "response": None,
            "seed": {"default": 0, "help": "of the choice of prompts"},
            **RESULTS,
        },
        (add_system_prompt_option, add_similarity_options, add_rule_options, add_without_depths),
    ),
    "prefix-similarity": Subject(
        "K/V of a shared prefix in its canvas against the prefix alone, by layer and step",
        (
            "remask analyze prefix-similarity --model bundled --requests 8 --plots pictures",
            "remask analyze prefix-similarity --model bundled --tau 0.95 --official",
        ),
        {
            "official": {"action": "store_true", "help": "the authors' profiler: one cosine per token"},
            "tau": TAU,
            **RESULTS,
        },
        (partial(add_workload, requests=16), add_without_depths),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a parser for each subject."""
    found = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    for name, subject in SUBJECTS.items():
        own = found.add_parser(name, help=subject.summary, epilog=examples(*subject.examples))
        add(own, **subject.options)
        for group in subject.groups:
            group(own)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and keep what was asked for."""
    from remask_lab.arguments import check_result_options, save_outcome

    check_result_options(args)
    subject = importlib.import_module(f"remask_lab.subjects.{args.subject.replace('-', '_')}")
    save_outcome(args, subject.measure(args))
    return 0
