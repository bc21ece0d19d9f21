"""Makes the kept figures whose inputs have changed, and then the pages: `make figures`.

    python -m remask_lab pages figures [--only TEXT] [--minutes N]   # make what is stale, oldest first, then the pages
    python -m remask_lab pages figures --list                        # every figure: its state, minutes and command
    python -m remask_lab pages figures --check                       # status 1 where a stale figure is not allowed
    python -m remask_lab pages figures --allow REASON [--only TEXT]  # allow what is stale now
    python -m remask_lab pages figures --note TEXT                   # made of the sources as they are, by hand

A figure is a result file or a picture. Its inputs are its command, the code that decides its numbers, and the model;
what times depend on besides is not among them. `benchmarks/inputs.json` has a digest of the inputs that each
was made of, and one of the file itself, so neither history nor commits are needed. Comments and docstrings do not
count. Each result is made in a folder of its own and takes its place when it is whole, so the command may be
interrupted at any time and goes on where it was. `benchmarks/stale.toml` lists the stale figures that are kept,
with the reason.
"""

import argparse
import ast
import hashlib
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from remask.checks import BUNDLED, BUNDLED_MODELS, BUNDLED_TARIFF, SMOLLM2
from remask.errors import ConfigError
from remask.machine.disk import write_whole
from remask.policies.registry import POLICIES
from remask_lab.bench.decodings import GRIDS
from remask_lab.pages import dynamics
from remask_lab.pages.gallery import read_entries
from remask_lab.pages.measure_real_weights import PUBLISHED
from remask_lab.pages.page import NOTEBOOK, ROOT, page_parser, run_page
from remask_lab.pages.real_weights_benches import DOCUMENTS
from remask_lab.papers.definition import load_table, table_names
from remask_lab.records.markdown import markdown_table
from remask_lab.records.record import Record, read_record
from remask_lab.speed.command import REMASK

FOLDER, MAKING = Path("benchmarks", "results"), ".making"
INPUTS, ALLOWED = Path("benchmarks", "inputs.json"), Path("benchmarks", "stale.toml")
PICTURES = NOTEBOOK / "gallery"
OWN_PAGES = ("caches", "results", "real-weights", "when-bicache", "gallery")
FRESH, STALE = "fresh", "stale"
# As commands end that this command cannot run: what they ask for may not be at hand.
ON_GPU, OF_FILE, OF_FOLDER = ", on a GPU", ", FILE being GSM8K's test.jsonl", ", FOLDER being pages of one's own"
PICTURE_MINUTES = 2.0
CORE, LAB = "src/remask", "lab/src/remask_lab"
# What decides answers, whatever the policy.
NUMBERS = tuple(f"{CORE}/sampling/{name}.py" for name in ("score", "filters", "blocks", "noise", "select"))
POLICY_FILES = {name: each.make.__module__.rpartition(".")[2] for name, each in POLICIES.built_in.items()}
# Beside its plans, what a policy's results rest on.
BEHIND = {
    "bicache": (f"{CORE}/depth",),
    "acache": (f"{CORE}/policies/on_device.py", f"{CORE}/model/row_attention.py"),
    "elastic-cache": (f"{CORE}/policies/on_device.py", f"{CORE}/model/row_attention.py"),
    "uniform-cache": (f"{CORE}/policies/block.py", f"{CORE}/policies/on_device.py"),
}
BENCHES = tuple(f"{LAB}/bench/{name}.py" for name in ("bench", "contenders", "workload", "fewer_steps"))
# What measures, beside `analyze`, whose subjects have files of their names.
COMMANDS = {
    "analyze": (*BENCHES, f"{LAB}/instruments"),
    "bench": BENCHES,
    "demo": (*BENCHES, f"{LAB}/cli/demo.py"),
    "eval": tuple(f"{LAB}/{name}" for name in ("harness", "cli/evaluate", "likelihood")),
    "profile": (f"{LAB}/ops",),
}
# Of a command, whose policies may be those of a default.
EVERY_POLICY = (f"{CORE}/policies", f"{CORE}/depth", f"{CORE}/model/row_attention.py")
REAL_WEIGHTS = tuple(
    f"{LAB}/{name}.py"
    for name in (
        "pages/measure_real_weights",
        *(f"pages/real_weights_{of}" for of in ("benches", "losses", "sizes")),
        *(f"subjects/{of}" for of in ("first_predictions", "prefix_similarity")),
        "instruments/depths",
    )
)
MODELS = {name: name.replace("-", "_") for name in BUNDLED_MODELS}


@dataclass(frozen=True, slots=True)
class Figure:
    """A result file or a picture.

    Attributes:
        name: its path from the root of the checkout.
        command: what makes it; {out} is the file, {folder} a folder for it. Of a picture it puts it there itself.
        minutes: about, of two idle cores.
        inputs: paths that decide its numbers.
    """

    name: str
    command: str
    minutes: float
    inputs: tuple[str, ...]

    @property
    def elsewhere(self) -> bool:
        """Whether it is made by hand, and noted with `--note`."""
        return self.command.endswith((ON_GPU, OF_FILE, OF_FOLDER))


def main(argv: Sequence[str] | None = None) -> int:
    """Do what is asked for. Returns 0, 1 where a check fails, or 2 after printing an error that the user can mend."""
    parser = page_parser("figures", __doc__)
    parser.add_argument("--root", default=str(ROOT), metavar="FOLDER", help="of the checkout (default: this one)")
    parser.add_argument("--only", default="", metavar="TEXT", help="figures whose path contains TEXT")
    parser.add_argument("--minutes", type=float, metavar="N", help="begin no figure that takes longer than this")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="show every figure and make none")
    what.add_argument("--check", action="store_true", help="status 1 where a figure is stale and not allowed to be")
    what.add_argument("--allow", metavar="REASON", help="allow the stale figures, for this reason")
    what.add_argument("--note", metavar="TEXT", help="take figures whose path contains TEXT as made of these sources")
    found: list[int] = []
    status = run_page(lambda args: found.append(_run(args)), parser, argv)
    return status or found[0]


def _run(args: argparse.Namespace) -> int:
    root = Path(args.root)
    figures = [figure for figure in all_figures(root) if args.only in figure.name]
    if args.list:
        print(listing(root, figures))
    elif args.check:
        found = problems(root, all_figures(root))
        print("\n".join(found) or f"{len(figures)} figures: none is stale that is not listed in {ALLOWED}.")
        return 1 if found else 0
    elif args.allow is not None:
        allow(root, all_figures(root), args.allow, args.only)
    elif args.note is not None:
        noted = [figure for figure in figures if args.note in figure.name]
        if not noted:
            raise ConfigError(f"--note: no figure's path contains {args.note!r}; --list shows them")
        note(root, noted)
    else:
        make(root, figures, args.minutes)
    return 0


def all_figures(root: Path) -> list[Figure]:
    """Every figure that is kept in the checkout `root`, or that one of its tables would keep."""
    results = root / FOLDER
    listed = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    found: list[Figure] = []
    for name in table_names():
        path = FOLDER / f"{name}.{load_table(name).scales['bundled'].model}.json"
        command = f"python -m remask_lab papers {name} --json {{out}}"
        found.append(_of_result(root, path, command, listed["tables"][name]))
    for name, (minutes, command) in listed["commands"].items():
        found.append(_of_result(root, FOLDER / name, command, minutes))
    for name, words in dynamics.commands():
        found.append(_of_result(root, FOLDER / "drift" / name, f"{shlex.join(words)} --output {{out}}", 1))
    for path in sorted((results / "caches").glob("*.json")):
        model, _, number = path.stem.rpartition(".")
        asked = shlex.join(["--measure", model, "--decodings", list(GRIDS[model].decodings)[int(number)]])
        command = f"python -m remask_lab pages caches {asked} --folder {{folder}} --output {{folder}}.md"
        found.append(_of_result(root, path.relative_to(root), command, 3, f"{LAB}/bench/decodings.py"))
    for path in [*sorted((results / "real-weights").glob("*.json")), results / f"bench.{SMOLLM2}.json"]:
        part = path.stem if path.parent.name == "real-weights" else "town"
        how = "large --device cuda" if "gpu" in read_record(path).about["machine"] else "small"
        command = f"python -m remask_lab pages real-weights --measure {how} --parts {part} --folder {{folder}}/parts"
        command += " --output {folder}/page.md"
        command += f" --published FILE{OF_FILE}" if part == PUBLISHED else ""
        command += f" --documents FOLDER{OF_FOLDER}" if part == "outputs" or part.startswith(DOCUMENTS) else ""
        command += ON_GPU if how != "small" else ""
        found.append(_of_result(root, path.relative_to(root), command, 5, *REAL_WEIGHTS))
    on_gpu = (f"{LAB}/gpu", f"{CORE}/engine", f"{CORE}/model")
    found += [
        Figure(str(path.relative_to(root)), f"scripts/gpu OUTPUT{ON_GPU}", 8, on_gpu)
        for path in sorted((results / "gpu").glob("*.json"))
    ]
    for entry in read_entries(root / PICTURES / "entries.toml"):
        name = str(PICTURES / entry.picture)
        found.append(Figure(name, entry.command, PICTURE_MINUTES, tuple(_of_command(entry.command))))
    return found


def _of_result(root: Path, path: Path, command: str, minutes: float, *more: str) -> Figure:
    """The figure of a result file, by what its record holds where it is kept, by its command, and by `more` paths."""
    inputs = [*more, *(_of_command(command) if command.startswith("remask ") else ())]
    if (root / path).exists():
        inputs += _of_record(read_record(root / path))
    return Figure(str(path), command, minutes, tuple(dict.fromkeys(inputs)))


def _of_record(record: Record) -> list[str]:
    """The paths that the numbers of a result file rest on."""
    about, held = record.about, json.dumps(record.data)
    caches = set(re.findall(r'"cache": "([^"]+)"', held)) | {str(about["settings"].get("cache", "none"))}
    own = [*_of_policies(sorted(caches)), *NUMBERS, f"{CORE}/sampling/{about['kind']}.py"]
    own.append(f"{CORE}/families/{about['family'].replace('-', '_')}.py")
    if "slowfast" in held:
        own.append(f"{CORE}/sampling/slowfast.py")
    if about["model"] in MODELS:
        own.append(f"{CORE}/{MODELS[about['model']]}")
    table = about["settings"].get("table")
    paper = () if table is None else (f"{LAB}/papers/measure.py", f"{LAB}/papers/tables/{table}.toml")
    return [*own, *BENCHES, *paper]


def _of_policies(caches: Iterable[str]) -> Iterator[str]:
    """The files of policies, and of those that they are composed of; settings may stand behind them."""
    for name in {part for cache in caches for part in re.split(r"[+ ]", cache)} & set(POLICY_FILES):
        yield from (f"{CORE}/policies/{POLICY_FILES[name]}.py", *BEHIND.get(name, ()))


def _of_command(command: str) -> Iterator[str]:
    """The paths that the numbers of a command `remask ...` rest on."""
    _, name, subject, *_ = shlex.split(command)
    if name == "analyze":
        yield f"{LAB}/subjects/{subject.replace('-', '_')}.py"
    yield from (*COMMANDS[name], *EVERY_POLICY, *NUMBERS)
    own = f"--model {BUNDLED_TARIFF if '--task tariff' in command else BUNDLED}" if name == "demo" else command
    for model in re.findall(r"--model (\S+)", own):
        yield from (f"{CORE}/{MODELS[model]}",) if model in MODELS else ()
        uniform = "uniform" in model
        yield f"{CORE}/sampling/{'uniform' if uniform else 'masked'}.py"
        yield f"{CORE}/families/{'gidd' if uniform else 'llada'}.py"


def digest(root: Path, figure: Figure) -> str:
    """A digest of a figure's command and inputs in the checkout `root`. A path that is not there counts as such."""
    told = hashlib.sha256(figure.command.encode())
    for name in sorted(set(figure.inputs)):
        path = root / name
        files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        for each in files:
            if "__pycache__" not in each.parts and each.suffix != ".md":
                told.update(f"\n{each.relative_to(root)} {_content(each)}".encode())
    return told.hexdigest()[:16]


def _content(path: Path) -> str:
    """A digest of a file; of Python's syntax tree without docstrings, so that comments and line breaks do not count."""
    return _digest(path.read_bytes(), path.suffix == ".py") if path.exists() else "-"


@lru_cache(maxsize=2048)
def _digest(held: bytes, code: bool) -> str:
    if not code:
        return hashlib.sha256(held).hexdigest()
    tree = ast.parse(held)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [line for line in node.body if not _is_text(line)]
    return hashlib.sha256(repr(_plain(tree)).encode()).hexdigest()


def _plain(node: object) -> object:
    """A syntax tree as lists. Empty fields are left out, as versions of Python differ in which ones there are."""
    if isinstance(node, ast.AST):
        held = [(name, _plain(value)) for name, value in ast.iter_fields(node) if value is not None and value != []]
        return [type(node).__name__, *held]
    return [_plain(each) for each in node] if isinstance(node, list) else node


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)


def states(root: Path, figures: Iterable[Figure]) -> dict[str, str]:
    """Whether each figure is `FRESH`: its inputs, and the file itself, are those that were noted when it was made."""
    kept = _noted(root)
    return {figure.name: FRESH if kept.get(figure.name) == _facts(root, root, figure) else STALE for figure in figures}


def _noted(root: Path) -> dict[str, dict[str, str]]:
    path = root / INPUTS
    found: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def _facts(root: Path, sources: Path, figure: Figure) -> dict[str, str]:
    return {"inputs": digest(sources, figure), "file": _content(root / figure.name)[:16]}


def note(root: Path, figures: Iterable[Figure], sources: Path | None = None) -> None:
    """Note that `figures` were made of the sources in `sources`, by default those of `root`, as they are."""
    kept = _noted(root) | {figure.name: _facts(root, sources or root, figure) for figure in figures}
    text = json.dumps({name: kept[name] for name in sorted(kept)}, indent=1)
    write_whole("the digests", root / INPUTS, f"{text}\n")


def read_allowed(root: Path) -> dict[str, str]:
    """The stale figures that are kept, each with its reason."""
    path = root / ALLOWED
    raw = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: group["reason"] for group in raw.get("kept", ()) for name in group["figures"]}


def allow(root: Path, figures: Sequence[Figure], reason: str, only: str = "") -> None:
    """List the stale figures: of those that were listed what is stale still, and for `reason` others with `only`."""
    before = read_allowed(root)
    groups: dict[str, list[str]] = {}
    for name, state in states(root, figures).items():
        if state == STALE and (name in before or only in name):
            groups.setdefault(before.get(name, reason), []).append(name)
    lines = ["# Figures that are older than their inputs, and kept: `pages figures --allow REASON` writes this list."]
    for told, names in groups.items():
        quoted = "".join(f"  {json.dumps(name)},\n" for name in names)
        lines.append(f"\n[[kept]]\nreason = {json.dumps(told)}\nfigures = [\n{quoted}]")
    write_whole("the list", root / ALLOWED, "\n".join(lines) + "\n")


def problems(root: Path, figures: Sequence[Figure]) -> list[str]:
    """What `--check` finds: stale figures that are not allowed, allowed ones that are not stale, and unknown files."""
    found, allowed = states(root, figures), read_allowed(root)
    told = [
        f"{each.name}: its inputs have changed since it was made; "
        f"{f'measure it by hand ({each.command}) and --note it' if each.elsewhere else 'make figures'}, "
        "or --allow REASON keeps it"
        for each in figures
        if found[each.name] == STALE and each.name not in allowed
    ]
    told += [
        f"{name}: {'no figure of this name' if name not in found else 'it is fresh'}; take it out of {ALLOWED}"
        for name in allowed
        if found.get(name) != STALE
    ]
    kept = [*(root / FOLDER).rglob("*.json"), *(root / PICTURES).rglob("*.png")]
    return told + [
        f"{name}: no command of ours makes it; pages/figures.toml lists those of result files"
        for name in sorted(str(path.relative_to(root)) for path in kept if MAKING not in path.parts)
        if name not in found
    ]


def listing(root: Path, figures: Sequence[Figure]) -> str:
    """A row a figure, stale ones first, and how long making those would take."""
    found, allowed = states(root, figures), read_allowed(root)
    rows = [
        [figure.name, found[figure.name], f"{figure.minutes:g}", figure.command, allowed.get(figure.name, "-")]
        for figure in sorted(figures, key=lambda each: (found[each.name] == FRESH, each.name))
    ]
    todo = {each.command: each.minutes for each in figures if found[each.name] == STALE and not each.elsewhere}
    count = sum(state == STALE for state in found.values())
    table = markdown_table(["figure", "state", "minutes", "command", "kept, as"], rows)
    said = f"making them takes about {sum(todo.values()):g} minutes of two idle cores"
    return f"{table}\n\n{count} of {len(figures)} figures are stale; {said}."


def make(root: Path, figures: Sequence[Figure], minutes: float | None) -> None:
    """Make the stale ones of `figures`, oldest first, then all pages. Raises `ConfigError` where a command fails."""
    found, kept = states(root, figures), _noted(root)
    todo = [figure for figure in figures if found[figure.name] == STALE and not figure.elsewhere]
    todo = [figure for figure in todo if minutes is None or figure.minutes <= minutes]
    done: set[str] = set()
    for number, figure in enumerate(sorted(todo, key=lambda each: (each.name in kept, _date(root, each))), start=1):
        if figure.name in done:  # one command makes several pictures
            continue
        print(f"[{number} of {len(todo)}, about {figure.minutes:g} min] {figure.name}", flush=True)
        _make(root, figure)
        # What a result holds is among its inputs, so they are read anew.
        beside = [each for each in all_figures(root) if each.command == figure.command]
        note(root, beside)
        done |= {each.name for each in beside}
    for name in OWN_PAGES:
        if importlib.import_module(f"remask_lab.pages.{name.replace('-', '_')}").main([]):
            raise ConfigError(f"the page {name!r} is not written, though its figures are made; the line above says why")


def _date(root: Path, figure: Figure) -> str:
    """The day on which a result was measured; of what holds none, that is the first."""
    path = root / figure.name
    return str(read_record(path).about["date"]) if path.suffix == ".json" and path.exists() else ""


def _make(root: Path, figure: Figure) -> None:
    """Run a figure's command in a folder of its own, and put what it leaves in its place.

    The folder is called after the inputs, so that what an interrupted command left of others is not gone on with.
    """
    target = root / figure.name
    if target.suffix == ".png":
        _execute(
            root,
            ["python", "-m", "remask_lab", "pages", "gallery", "--draw", str(Path(figure.name).relative_to(PICTURES))],
        )
        return
    folder = root / FOLDER / MAKING / f"{target.stem}.{digest(root, figure)}"
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / target.name
    _execute(
        root,
        [
            word.format(out=out, folder=folder) if "{out}" in word or "{folder}" in word else word
            for word in shlex.split(figure.command)
        ],
    )
    made = next((path for path in folder.rglob(target.name)), None)
    if made is None:
        raise ConfigError(f"{figure.name}: its command left no {target.name}: {figure.command}")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(made, target)
    shutil.rmtree(folder)


def _execute(root: Path, words: Sequence[str]) -> None:
    start = [sys.executable] if words[0] == "python" else [*REMASK, "--quiet"]
    done = subprocess.run([*start, *words[1:]], cwd=root, env=dict(os.environ), stdout=subprocess.DEVNULL)
    if done.returncode:
        raise ConfigError(f"the command failed with status {done.returncode}: {shlex.join(words)}")
