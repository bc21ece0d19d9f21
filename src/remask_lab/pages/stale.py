"""Says which kept figures are stale: those whose commit is older than the last change to what they measure.

    python -m remask_lab pages stale [--results FOLDER] [--root FOLDER]

Looks at the result files in benchmarks/results, and at the figures of README.md and docs that name a commit and the
command that made them. What stands below a date is of that day, and not looked at. "Numbers" (answers, work, agreement)
depend on the policies, the sampling, the model and the measurement itself; "times" depend on all that runs as well.
Nothing is measured.
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from remask.checks import BUNDLED_MODELS
from remask.errors import ConfigError
from remask.policies.registry import POLICIES
from remask_lab.pages.page import PAGES, RESULTS, ROOT, page_parser, run_page
from remask_lab.pages.results import read_all
from remask_lab.records.machine import git
from remask_lab.records.markdown import markdown_table
from remask_lab.records.record import Record
from remask_lab.speed.__main__ import MEASUREMENTS

CORE, LAB = "src/remask", "src/remask_lab"
# Whatever runs has a part in every time.
TIMES = tuple(f"{CORE}/{name}" for name in ("engine", "model", "store", "plan", "machine"))
# What decides answers, whatever the policy.
NUMBERS = tuple(f"{CORE}/sampling/{name}.py" for name in ("score", "filters", "blocks", "noise", "select"))
DECODERS = {"masked": "masked", "uniform": "uniform", "block_causal": "block_causal"}
POLICY_FILES = {name: each.make.__module__.rpartition(".")[2] for name, each in POLICIES.built_in.items()}
# Beside its plans, what a policy's results rest on.
BEHIND = {
    "bicache": (f"{CORE}/depth",),
    "acache": (f"{CORE}/policies/on_device.py", f"{CORE}/model/row_attention.py"),
    "elastic-cache": (f"{CORE}/policies/on_device.py", f"{CORE}/model/row_attention.py"),
    "uniform-cache": (f"{CORE}/policies/block.py", f"{CORE}/policies/on_device.py"),
}
BENCHES = tuple(f"{LAB}/bench/{name}.py" for name in ("bench", "contenders", "workload", "fewer_steps"))
MODELS = {name: name.replace("-", "_") for name in BUNDLED_MODELS}
_COMMIT = re.compile(r"\bcommit\s+([0-9a-f]{7,40})\b")
_DATED = re.compile(r"^## (?=20\d\d-)", re.MULTILINE)
_MODULE = re.compile(r"python -m remask_lab[ .]([\w.-]+)(?: ([a-z]\w*))?")  # a command, or a module
_ELSEWHERE = {"gpu-bounds": "gpu.bounds", "paper-shapes": "papers.uniform_shapes"}
_COMMAND = re.compile(
    r"\bremask (?:--quiet )?(analyze|eval) (\w[\w-]*)|\bremask (?:--quiet )?(bench|profile[- ]ops|profile)\b"
)
_OF_COMMAND = {
    "bench": ("bench/bench.py", "bench/contenders.py", "bench/workload.py", "bench/fewer_steps.py"),
    "profile ops": ("ops",),
    "profile-ops": ("ops",),
    "profile": (),
    "eval": ("harness", "cli/evaluate", "likelihood"),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A kept figure: where it stands, the commit that it was measured at, and the paths that it rests on."""

    place: str
    commit: str | None
    numbers: tuple[str, ...]
    times: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a figure is stale. Each of the two is the newest commit that changed what it rests on, or None."""

    figure: Figure
    numbers: str | None
    times: str | None
    known: bool = True


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row a figure. Returns 0, or 2 where the files or the history cannot be read."""
    parser = page_parser("stale", __doc__)
    parser.add_argument("--results", default=str(RESULTS), metavar="FOLDER", help="default benchmarks/results")
    parser.add_argument("--root", default=str(ROOT), metavar="FOLDER", help="the checkout; default this one")
    return run_page(_run, parser, argv)


def _run(args: argparse.Namespace) -> None:
    root = Path(args.root)
    figures = [*recorded(read_all(args.results)), *quoted(root)]
    print(report([judge(root, figure) for figure in figures]))


def recorded(records: Mapping[str, Record]) -> Iterator[Figure]:
    """The figures of result files."""
    for name, record in records.items():
        yield Figure(name, record.about["commit"], tuple(result_inputs(record)), TIMES)


def result_inputs(record: Record) -> list[str]:
    """The paths that decide the numbers of a result file."""
    about, held = record.about, json.dumps(record.data)
    caches = set(re.findall(r'"cache": "([^"]+)"', held)) | {str(about["settings"].get("cache", "none"))}
    own = [*_policies(sorted(caches)), *NUMBERS, f"{CORE}/sampling/{DECODERS[about['kind']]}.py"]
    own.append(f"{CORE}/families/{about['family'].replace('-', '_')}.py")
    if "slowfast" in held:
        own.append(f"{CORE}/sampling/slowfast.py")
    if about["model"] in MODELS:
        own.append(f"{CORE}/{MODELS[about['model']]}")
    table = about["settings"].get("table")
    own += BENCHES if table is None else [f"{LAB}/papers/measure.py"]
    return own if table is None else [*own, f"{LAB}/papers/tables/{table}.toml"]


def quoted(root: Path) -> Iterator[Figure]:
    """The figures of README.md and docs that name a commit, by the commands of their paragraph."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    for path in [page for page in pages if page.name != PAGES["results"].name]:  # that page shows result files
        line = 1
        undated = _DATED.split(path.read_text(encoding="utf-8"), maxsplit=1)[0]
        for paragraph in undated.split("\n\n"):
            for found in _COMMIT.finditer(paragraph):
                at = line + paragraph[: found.start()].count("\n")
                yield Figure(f"{path.relative_to(root)}:{at}", found[1], tuple(named(root, paragraph)), TIMES)
            line += paragraph.count("\n") + 2


def judge(root: Path, figure: Figure) -> Verdict:
    """What has changed since `figure` was measured. Raises `ConfigError` outside a checkout."""
    commit = None if figure.commit is None else figure.commit.removesuffix("+changes")
    if commit is None or git(root, "cat-file", "-t", commit) != "commit":
        if git(root, "rev-parse", "HEAD") is None:
            raise ConfigError(
                f"--root: {str(root)!r} is no checkout with a history, so nothing can be said of its figures"
            )
        return Verdict(figure, None, None, known=False)
    return Verdict(figure, _changed(root, commit, figure.numbers), _changed(root, commit, figure.times))


def report(verdicts: Iterable[Verdict]) -> str:
    """A row a figure, stale ones first, and how many there are."""
    rows, stale = [], 0
    ordered = sorted(verdicts, key=lambda each: (each.known, each.numbers is None, each.times is None))
    for each in ordered:
        commit = each.figure.commit or "none"
        if not each.known:
            rows.append([each.figure.place, commit, "unknown commit", "unknown commit"])
            continue
        stale += each.numbers is not None
        shown = [("fresh" if change is None else f"stale: {change}") for change in (each.numbers, each.times)]
        rows.append([each.figure.place, commit, *shown])
    unknown = sum(not each.known for each in ordered)
    grid = markdown_table(["figure", "measured at", "numbers", "times"], rows)
    return f"{grid}\n\n{len(ordered)} figures: the numbers of {stale} are stale, of {unknown} the commit is unknown."


def _policies(caches: Iterable[str]) -> list[str]:
    """The files of policies, and of those that they are composed of."""
    paths: dict[str, None] = {}
    for name in (part for cache in caches for part in cache.split("+")):
        if name in POLICY_FILES:
            paths |= dict.fromkeys((f"{CORE}/policies/{POLICY_FILES[name]}.py", *BEHIND.get(name, ())))
    return list(paths)


def named(root: Path, text: str) -> list[str]:
    """What the commands in `text` measure with, and the policies that it names."""
    paths = []
    for command, word in _MODULE.findall(text):
        room, _, module = _ELSEWHERE.get(command, command).partition(".")
        module = module or (word.replace("-", "_") if room in ("speed", "pages") else "")
        paths.append(f"{LAB}/{room}/{MEASUREMENTS.get(module, (module, ''))[0]}".rstrip("/"))
    for group, subject, alone in _COMMAND.findall(text):
        if group == "analyze":
            paths.append(f"{LAB}/subjects/{subject.replace('-', '_')}.py")
        else:
            paths += [f"{LAB}/{name}" for name in _OF_COMMAND[group or alone]]
    paths = [path if (root / path).exists() else f"{path}.py" for path in paths]
    named = [name for name in POLICY_FILES if re.search(rf"[`\s+,]{re.escape(name)}[`\s+,.]", text)]
    return [*paths, *_policies(named), *NUMBERS]


def _changed(root: Path, commit: str, paths: tuple[str, ...]) -> str | None:
    """The newest commit after `commit` that touched one of `paths`, with its date and subject; None without one."""
    return git(root, "log", "-1", "--format=%h %as %s", f"{commit}..HEAD", "--", *paths) or None
