"""The architecture, read from the source: imports run one way, no state at module level, no hidden environment."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "remask"
TREES = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): ast.parse(
        path.read_text(encoding="utf-8")
    )
    for path in sorted(ROOT.rglob("*.py"))
}
TREES["remask"] = TREES.pop("__init__")
MODULES = sorted(TREES)

# A module may import its own level's package and every lower level. The longest prefix of a module's name decides.
LEVELS = {
    "errors": 0,
    "core": 0,
    "tasks": 1,
    "plugins": 0,
    "policies": 1,
    "store.hashing": 1,
    "models": 2,
    "sampling": 2,
    "store": 2,
    "engine": 3,
    "config": 4,
    "prompts": 4,
    "detokenize": 4,
    "llm": 4,
    "profiling": 4,
    "analysis": 4,
    "remask": 4,  # the package itself: the public names
    "evals": 5,
    "plots": 5,
    "server": 6,
    "deploy": 7,
    "cli": 8,
}
# Packages of one level that may not see each other, although no order between them would break a layer.
APART = {(a, b) for a in ("models", "sampling", "store") for b in ("models", "sampling", "store") if a != b}
MUTATORS = {"append", "extend", "add", "update", "clear", "pop", "popitem", "setdefault", "remove", "insert"}
PURE = {
    "inspect",
    "re",
    "__future__",
    "json",
    "dataclasses",
    "typing",
    "collections",
    "math",
    "types",
    "abc",
    "enum",
    "numpy",
    "difflib",
}


def place(module: str) -> str:
    """The entry of `LEVELS` that `module` belongs to."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in LEVELS:
            return ".".join(parts[:end])
    raise AssertionError(f"{module} has no place in the architecture: give it one in {__file__}")


def imported(module: str) -> Iterator[str]:
    """Absolute names of everything that `module` imports, wherever in the file; `remask.` is left out."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import in line {node.lineno}"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full.removeprefix("remask.") in TREES else node.module


def own(module: str) -> Iterator[str]:
    """Modules of this package that `module` imports."""
    for name in imported(module):
        if name == "remask" or name.startswith("remask."):
            yield name.removeprefix("remask.")


def test_the_parser_sees_the_whole_package() -> None:
    assert {"errors", "core.plan", "engine.engine", "store.prefix", "policies.bicache", "remask"} <= set(MODULES)
    assert "store.pages" in set(own("store.prefix"))
    assert "store.prefix" in set(own("engine.engine"))


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    here = place(module)
    for target in own(module):
        there = place(target)
        assert LEVELS[there] <= LEVELS[here], f"{module} imports {target} from above"
        assert (here.split(".")[0], there.split(".")[0]) not in APART, f"{module} imports {target} from beside"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith(("core", "errors", "policies"))])
def test_core_and_policies_hold_no_tensors(module: str) -> None:
    outside = {name.split(".")[0] for name in imported(module)} - {"remask"}
    assert outside <= PURE, f"{module} imports {outside - PURE}"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("plots")])
def test_plots_read_results_only(module: str) -> None:
    for target in own(module):
        report = target.startswith(("analysis.", "profiling.")) and target.endswith("report")
        fine = report or target == "profiling.table" or place(target) in ("core", "errors", "plots")
        assert fine, f"{module} imports {target}"


def test_there_are_no_cycles() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"cycle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for target in own(module):
                if target in TREES:
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


@pytest.mark.parametrize("module", MODULES)
def test_modules_hold_constants_only(module: str) -> None:
    tree = TREES[module]
    names = dict(assigned(tree))
    for name, value in names.items():
        constant = name.lstrip("_").isupper() or (name.startswith("__") and name.endswith("__"))
        logger = name == "log" and isinstance(value, ast.Call) and ast.unparse(value).startswith("logging.getLogger")
        assert constant or logger or is_type(name, value), f"{module}.{name} is neither constant, logger nor type"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"{module} line {getattr(node, 'lineno', 0)}: global statement"
        target = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            target = node.func.value
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node.value
        if isinstance(target, ast.Name) and target.id.lstrip("_").isupper():
            assert target.id not in names, f"{module} line {getattr(node, 'lineno', 0)}: {target.id} is changed"


@pytest.mark.parametrize("module", [m for m in MODULES if place(m) not in ("config", "cli")])
def test_the_environment_is_read_at_the_top_only(module: str) -> None:
    for node in ast.walk(TREES[module]):
        text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.ImportFrom) else ""
        assert text not in ("os.environ", "os.getenv", "os.putenv"), f"{module} line {getattr(node, 'lineno', 0)}"
        assert not (isinstance(node, ast.ImportFrom) and node.module == "os"), f"{module} imports from os"


@pytest.mark.parametrize("module", MODULES)
def test_no_assert_stands_for_a_users_error(module: str) -> None:
    """`assert` may narrow types for the checker; with a message it would be an error report."""
    for node in ast.walk(TREES[module]):
        assert not (isinstance(node, ast.Assert) and node.msg is not None), f"{module} line {node.lineno}"
