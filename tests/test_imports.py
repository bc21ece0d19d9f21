"""The architecture, read from the source: imports run one way, no state at module level, no hidden environment."""

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def files_in(folder: Path, *inside: str) -> dict[str, Path]:
    """The files of the packages in a folder, or of those that are named, by the modules that they are."""
    paths = [path for name in inside or [""] for path in (folder / name).rglob("*.py")]
    names = (path.relative_to(folder).with_suffix("").as_posix().replace("/", ".") for path in paths)
    return dict(zip((name.removesuffix(".__init__") for name in names), paths, strict=True))


FILES = files_in(ROOT / "src") | files_in(ROOT / "lab" / "src")
MODULES = sorted(FILES)

# Every package and every module that stands alone has a level of its own: it may import what stands before it.
ORDER = (
    "remask.errors",
    "remask.checks.plugins",  # looks for installed packages
    "remask.checks",
    "remask.machine",
    "remask.plan",
    "remask.denoising",  # what a request and a model may name
    "remask.request",
    "remask.tasks",
    "remask.store",
    "remask.model",
    "remask.families",
    "remask.text",
    "remask.checkpoint",
    "remask.policies",
    "remask.policies.on_device",
    "remask.sampling",
    "remask.readers",
    "remask.parallel",
    "remask.engine",
    "remask.depth",
    "remask.answers",
    "remask.outputs",
    "remask.session",
    "remask.loading",
    "remask.llm",
    "remask.async_llm",
    "remask",  # the package itself: the public names
    "remask.server",
    "remask.deploy",
    "remask.cli",
    "remask.__main__",
    "remask_lab",
    "remask_lab.gsm8k",
    "remask_lab.observe",
    "remask_lab.drawing",
    "remask_lab.records",
    "remask_lab.similarity",
    "remask_lab.ops",
    "remask_lab.bench",
    "remask_lab.likelihood",
    "remask_lab.harness",
    "remask_lab.arguments",
    "remask_lab.instruments",
    "remask_lab.subjects",
    "remask_lab.speed",
    "remask_lab.audits",
    "remask_lab.decisions",
    "remask_lab.thresholds",
    "remask_lab.page",
    "remask_lab.gpu",
    "remask_lab.papers",
    "remask_lab.pages",
    "remask_lab.verify",
    "remask_lab.cli",
    "remask_lab.__main__",
)
# What may not be seen from where it could be: what runs on the device, what decides and what remembers are apart.
APART = {
    "remask.model": {"remask.store"},
    "remask.policies": {"remask.model", "remask.store"},
    "remask.sampling": {"remask.model", "remask.store"},
}
# What decides, and what a request may say, is standard library and NumPy: no tensor is there.
NO_TENSORS = {
    "remask.errors",
    "remask.checks",
    "remask.plan",
    "remask.denoising",
    "remask.request",
    "remask.policies",
}
# Who may read the environment: what a user starts, and what starts processes of its own.
MAY_READ_ENVIRONMENT = {
    "remask.machine",
    "remask.cli",
    "remask_lab.cli",
    "remask_lab.harness",
    "remask_lab.pages",
    "remask_lab.speed",
}
# Of a running engine the laboratory knows its settings, its requests, and what `remask_lab.observe` hands out.
ENGINE_DOORS = {
    "remask.engine.config",
    "remask.engine.engine",
    "remask.request.result",
    "remask.engine.proof",
    "remask.engine.request",
    "remask.engine.report",
    "remask.engine.member",
    "remask.engine.pack",
    "remask.engine.audit_passes",
    "remask.engine.audit_report",
}
# Names of classes that stand in two modules of `remask` still: those of the API's document stand elsewhere too.
SHARED_NAMES = {"Usage"}
UNDESCRIBED = ("remask_lab.papers", "remask_lab.pages", "remask_lab.speed")
MUTATORS = {"append", "extend", "add", "update", "clear", "pop", "popitem", "setdefault", "remove", "insert"}
PURE = {"__future__", "abc", "collections", "dataclasses", "difflib", "enum", "functools", "hashlib", "inspect"}
PURE |= {"itertools", "json", "math", "numpy", "operator", "re", "textwrap", "types", "typing"}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


@cache
def nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(tree(module)))


@cache
def place(module: str) -> str:
    """The entry of `ORDER` that `module` belongs to: the longest that its name begins with."""
    parts = module.split(".")
    found = next((name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in ORDER), None)
    alone = found in ("remask", "remask_lab") and module != found
    assert found is not None, f"{module} has no place in the architecture: give it one in {__file__}"
    assert not alone, f"{module} has no place in the architecture: give it one in {__file__}"
    return found


def imported(module: str) -> Iterator[str]:
    """Absolute names of everything that `module` imports, wherever in the file."""
    for node in nodes(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import in line {node.lineno}"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in FILES else node.module


def own(module: str) -> Iterator[str]:
    """Modules of the two packages that `module` imports."""
    return (name for name in imported(module) if name.partition(".")[0] in ("remask", "remask_lab"))


def test_the_parser_sees_both_packages() -> None:
    assert {"remask.errors", "remask.plan.plan", "remask.engine.engine", "remask", "remask_lab.cli"} <= set(MODULES)
    assert "remask.store.pages" in set(own("remask.store.prefix"))
    assert "remask.engine.memory" in set(own("remask.engine.engine"))
    assert {place(module) for module in MODULES} == set(ORDER), "every level has a module"


def test_imports_run_one_way() -> None:
    for module in MODULES:
        here = place(module)
        for target in own(module):
            there = place(target)
            assert ORDER.index(there) <= ORDER.index(here), f"{module} imports {target} from above"
            assert there not in APART.get(here, ()), f"{module} imports {target} from beside"


def test_the_laboratory_knows_no_running_request() -> None:
    for module in filter(lambda m: m.startswith("remask_lab") and m != "remask_lab.observe", MODULES):
        for target in own(module):
            assert place(target) != "remask.engine" or target in ENGINE_DOORS, f"{module} imports {target}"


def test_pictures_are_a_need_of_drawing_functions_only() -> None:
    """Whatever measures or serves runs where matplotlib is not installed."""
    for module in MODULES:
        checked = {id(inner) for node in nodes(module) if is_type_checking(node) for inner in ast.walk(node)}
        functions = [node for node in nodes(module) if isinstance(node, ast.FunctionDef)]
        inside = {id(inner) for function in functions for inner in ast.walk(function)}
        for node in nodes(module):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "matplotlib" for name in names):
                assert module.startswith("remask_lab"), f"{module} draws"
                assert id(node) in inside | checked, f"{module} line {node.lineno}: matplotlib is imported at the top"


def is_type_checking(node: ast.AST) -> bool:
    """Whether `node` is a block that only type checkers read."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_plans_and_policies_hold_no_tensors() -> None:
    for module in filter(lambda m: place(m) in NO_TENSORS, MODULES):
        outside = {name.split(".")[0] for name in imported(module)} - {"remask"}
        assert outside <= PURE, f"{module} imports {outside - PURE}"


def test_there_are_no_cycles() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"cycle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for target in own(module):
                if target in FILES:
                    visit(target, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    """Names bound by plain assignment at module level."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from ((name.id, node.value) for name in ast.walk(target) if isinstance(name, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        elif isinstance(node, ast.AugAssign):
            raise AssertionError(f"line {node.lineno}: a module-level name is changed")


def is_type(name: str, value: ast.expr | None) -> bool:
    """A type alias or a type variable: capitalised, and neither a literal container nor a number."""
    literal = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.Constant
    return name[0].isupper() and not isinstance(value, literal)


def is_logger(name: str, value: ast.expr | None) -> bool:
    return name == "log" and isinstance(value, ast.Call) and ast.unparse(value).startswith("logging.getLogger")


def test_modules_hold_constants_only() -> None:
    for module in MODULES:
        names = dict(assigned(tree(module)))
        for name, value in names.items():
            constant = name.lstrip("_").isupper() or (name.startswith("__") and name.endswith("__"))
            known = constant or is_logger(name, value) or is_type(name, value)
            assert known, f"{module}.{name} is neither constant, logger nor type"
        for node in nodes(module):
            assert not isinstance(node, ast.Global), f"{module} line {getattr(node, 'lineno', 0)}: global statement"
            target = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
                target = node.func.value
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                target = node.value
            if isinstance(target, ast.Name) and target.id.lstrip("_").isupper():
                assert target.id not in names, f"{module} line {getattr(node, 'lineno', 0)}: {target.id} is changed"


def test_the_environment_is_read_at_the_top_only() -> None:
    for module in filter(lambda m: place(m) not in MAY_READ_ENVIRONMENT, MODULES):
        for node in nodes(module):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
                assert ast.unparse(node.value) != "os", f"{module} line {node.lineno}"
            assert not (isinstance(node, ast.ImportFrom) and node.module == "os"), f"{module} imports from os"


def test_public_methods_say_what_they_do() -> None:
    """In their own words or a base's. The docstring of a protocol may describe its attributes."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for node in itertools.chain.from_iterable(map(nodes, MODULES)):
        if isinstance(node, ast.ClassDef):
            classes.setdefault(node.name, []).append(node)

    def said(cls: ast.ClassDef) -> set[str]:
        """Methods of `cls` and its bases that have a docstring."""
        names = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in cls.bases} - {cls.name}
        known = [base for name in names for base in classes.get(name, ())]
        return set().union({each.name for each in methods(cls) if ast.get_docstring(each)}, *map(said, known))

    missing = [
        f"{module}: {cls.name}.{method.name}"
        for module in filter(lambda module: not module.startswith(UNDESCRIBED), MODULES)
        for cls in nodes(module)
        if isinstance(cls, ast.ClassDef) and not cls.name.startswith("_")
        for method in methods(cls)
        if not method.name.startswith("_") and method.name not in said(cls) and ast.unparse(method.body[-1]) != "..."
    ]
    assert missing == []


def methods(cls: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_no_assert_stands_for_a_users_error() -> None:
    """`assert` may narrow types for the checker; with a message it would be an error report."""
    for module in MODULES:
        for node in nodes(module):
            assert not (isinstance(node, ast.Assert) and node.msg is not None), f"{module} line {node.lineno}"


def brought(extra: str) -> set[str]:
    """Names of the distributions that `remask[extra]` installs, and of what these need."""
    done, waiting = set[tuple[str, str]](), [("remask", extra)]
    while waiting:
        name, chosen = pair = waiting.pop()
        if pair in done:
            continue
        done.add(pair)
        try:
            lines = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            continue
        for need in map(Requirement, lines):
            if need.marker is None or need.marker.evaluate({"extra": chosen}):
                waiting += [(normal(need.name), own) for own in ("", *need.extras)]
    return {name for name, _ in done}


def normal(name: str) -> str:
    """A distribution's name as all spellings of it are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


IMPORT = re.compile(r"^(?:import (?P<names>.+)|from (?P<module>[\w.]+) import (?P<parts>\([^)]*\)|.+))", re.MULTILINE)
SKIP = re.compile(r"^(?:\w+ = )?pytest\.importorskip\(|^    pytest\.skip\(.*allow_module_level", re.MULTILINE)


def imported_at_top(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports when it is imported, and of what it takes from them.

    What stands behind a skip of the whole file does not count.
    """
    for found in IMPORT.finditer(SKIP.split(path.read_text(encoding="utf-8"))[0]):
        names = re.findall(r"[\w.]+", re.sub(r"#.*| as \w+", "", found["names"] or found["parts"]))
        yield from [found["module"], *(f"{found['module']}.{name}" for name in names)] if found["module"] else names


def test_tests_import_what_the_extra_dev_brings() -> None:
    """Else a newcomer's `make test` ends before the first test. What other extras bring is imported inside of tests."""
    files = FILES | files_in(ROOT, "tests", "lab/tests", "training", "scripts/releasing")
    # What another program runs, in an environment of its own.
    roots = [name for name in files if re.match(r"(lab\.)?tests\.(?!clients\.)", name)]
    importers, waiting = dict[str, str](), list(roots)
    seen = set(roots)
    while waiting:
        module = waiting.pop()
        for name in imported_at_top(files[module]):
            if name in files:
                waiting += [name] if name not in seen else []
                seen.add(name)
            else:
                importers.setdefault(name.partition(".")[0], module)
    allowed = brought("dev")
    assert {"torch", "pytest", "anthropic", "h11"} <= allowed
    distributions = metadata.packages_distributions()
    for name, module in importers.items():
        if name in sys.stdlib_module_names or name in ("remask", "remask_lab", "lab", "scripts", "tests", "training"):
            continue
        makers = {normal(maker) for maker in distributions.get(name, ())}
        assert makers & allowed, f"{module} imports {name} at its top, which the extra 'dev' does not bring"


def test_no_class_name_stands_in_two_modules() -> None:
    """Those with an underscore may."""
    homes: dict[str, set[str]] = {}
    for module in MODULES:
        if module.split(".")[0] == "remask":
            for node in tree(module).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, set()).add(module)
    assert {name for name, found in homes.items() if len(found) > 1} == SHARED_NAMES
