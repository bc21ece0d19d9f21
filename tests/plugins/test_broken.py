"""Packages that provide something else than they should: named in the error, and in nobody else's way."""

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from remask import LLM, SamplingParams
from remask.cli import main
from remask.cli.commands import all_commands
from remask.denoising.rules import names_on
from remask.engine.request import Request
from remask.errors import CheckpointError, ConfigError, PluginError, RemaskError, UnknownNameError
from remask.families import REGISTRY, family_of, preset
from remask.policies import Dense, names_for, parse, policy_names
from remask.policies.bicache import DepthLookup
from tests.engine.support import Work, make_engine, request, run
from tests.plugins.installed import installed, write_package
from tests.server.serving import make_llm, serving

POLICIES, FAMILIES = "remask.policies", "remask.families"
HEAD = """
from dataclasses import dataclass, field, replace
from remask.plan import Plan, Span, View
from remask.model.config import ModelConfig
from remask.families.llada import LLADA
from remask.policies.base import CachePolicy, Traits

def whole(view):
    return Plan((Span(range(view.layers), view.everything),), view.candidates)

@dataclass(frozen=True, slots=True)
class Fine(CachePolicy):
    size: int = 1
    def plan(self, view): return whole(view)

FINE = replace(
    LLADA, name="fine", model_types=("fine",), architectures=("Fine",), presets={},
    config=lambda raw: replace(LLADA.config(raw), family="fine"),
)
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Install]:
    """Installs a package: its name, its entry points by group, and the text of its module `NAME_module`."""
    with ExitStack() as stack:

        def write(name: str, groups: Mapping[str, Mapping[str, str]], text: str = "") -> None:
            folder = tmp_path / name
            write_package(folder, name, "0.3", groups, {f"{name}_module": HEAD + text})
            stack.enter_context(installed(folder))

        yield write


def table() -> DepthLookup:
    return DepthLookup({})


BAD_POLICIES = {
    "number": ("X = 5", "it provides an object of type int"),
    "object": ("X = Fine()", "it provides an object of type Fine"),
    "other class": ("class X: pass", "it provides the class X"),
    "no dataclass": (
        "class X(CachePolicy):\n    def plan(self, view): return whole(view)",
        "X is not a dataclass",
    ),
    "mutable": (
        "@dataclass\nclass X(CachePolicy):\n    def plan(self, view): return whole(view)",
        "X is a dataclass that is not frozen",
    ),
    "abstract": ("@dataclass(frozen=True)\nclass X(CachePolicy): pass", "X does not define plan"),
    "no default": (
        "@dataclass(frozen=True)\nclass X(CachePolicy):\n    rows: int\n    def plan(self, view): return whole(view)",
        "field 'rows' of X has no default",
    ),
    "one setting twice": (
        "@dataclass(frozen=True)\nclass X(Fine):\n    other: int = field(default=1, metadata={'setting': 'size'})",
        "two fields of X are the setting 'size'",
    ),
    "two inner policies": (
        "@dataclass(frozen=True)\nclass X(Fine):\n    a: CachePolicy = Fine()\n    b: CachePolicy = Fine()",
        r"X has several fields of type CachePolicy \(a, b\)",
    ),
    "unknown types": (
        "@dataclass(frozen=True)\nclass X(Fine):\n    rows: 'Unheard' = 1",
        r"the types of X's fields cannot be read \(NameError: name 'Unheard' is not defined\)",
    ),
    "bad defaults": (
        "@dataclass(frozen=True)\nclass X(Fine):\n    def __post_init__(self): raise KeyError('size')",
        r"X\(\) and its traits raised KeyError: 'size'",
    ),
    "bad traits": (
        "@dataclass(frozen=True)\nclass X(Fine):\n    traits = 'all'",
        "the traits of X are an object of type str, not Traits",
    ),
    "bad kinds": (
        "@dataclass(frozen=True)\nclass X(Fine):\n    traits = Traits(kinds=('causal',))",
        r"the kinds of X's traits are \('causal',\), not some of masked, uniform, block_causal",
    ),
    "import error": ("import module_that_nobody_has", "loading it raised ModuleNotFoundError: No module named"),
    "error on import": ("raise OSError('no device')", "loading it raised OSError: no device"),
    "no such attribute": ("", "loading it raised AttributeError: .*has no attribute 'X'"),
}


@pytest.mark.few(7)
@pytest.mark.parametrize("name", BAD_POLICIES)
def test_a_policy_that_is_none(name: str, install: Install, caplog: pytest.LogCaptureFixture) -> None:
    text, found = BAD_POLICIES[name]
    install("bad", {POLICIES: {"broken": "bad_module:X"}}, text)
    install("good", {POLICIES: {"fine": "good_module:Fine"}})
    entry = r"package 'bad' 0\.3 \(entry point 'broken = bad_module:X' of 'remask\.policies'\)"
    for spec in ("broken", "bicache+broken"):
        for _ in range(2):
            with pytest.raises(PluginError, match=f"^{entry}: {found}.*; expected .*Correct the package or uninstall"):
                parse(spec, None, table)
    assert parse("none", None, table) == Dense()
    assert parse("bicache+fine", {"size": 3}, table).inner.size == 3  # type: ignore[attr-defined]
    for _ in range(2):
        assert "fine" in names_for("masked")
        assert "broken" not in names_for("masked")
    assert "broken" in policy_names()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, "said once"
    assert "package 'bad' 0.3" in warnings[0]


def test_a_name_that_is_taken(install: Install) -> None:
    install("one", {POLICIES: {"reuse": "one_module:Fine", "shared": "one_module:Fine"}})
    install("two", {POLICIES: {"shared": "two_module:Fine", "own": "two_module:Fine"}})
    with pytest.raises(
        PluginError, match=r"'reuse' is provided by remask itself and by package 'one' 0\.3 .*uninstall"
    ):
        parse("reuse", None, table)
    with pytest.raises(PluginError, match=r"'shared' is provided by package '(one|two)'.* and by package '(one|two)'"):
        parse("shared", None, table)
    assert "own" in names_for("masked")
    assert {"reuse", "shared"} & set(names_for("masked")) == set()
    parse("bicache+own", None, table)
    assert "one_module" not in sys.modules, "nothing of a contested name is imported"


def test_a_name_that_no_spec_can_hold(install: Install) -> None:
    install("bad", {POLICIES: {"a,b": "bad_module:Fine"}})
    with pytest.raises(PluginError, match=r"package 'bad' 0\.3 .*: its name is 'a,b'; expected letters, digits"):
        parse("a,b", None, table)
    assert "a,b" not in names_for("masked")


def test_a_constructor_that_refuses_settings_in_words_of_its_own(install: Install) -> None:
    text = "@dataclass(frozen=True)\nclass X(Fine):\n    def __post_init__(self): 1 / self.size"
    install("odd", {POLICIES: {"odd": "odd_module:X"}}, text)
    parse("odd", {"size": 2}, table)
    with pytest.raises(ConfigError, match=r"package 'odd' 0\.3 .* refuses the settings {'size': 0}: ZeroDivisionError"):
        parse("odd", {"size": 0}, table)


def test_a_policy_of_a_package_may_stand_before_others(install: Install) -> None:
    text = (
        "@dataclass(frozen=True)\nclass X(CachePolicy):\n    base: CachePolicy = Fine()\n    size: int = 7\n"
        "    def plan(self, view): return self.base.plan(view)"
    )
    install("outer", {POLICIES: {"outer": "outer_module:X", "fine": "outer_module:Fine"}}, text)
    policy: Any = parse("bicache+outer+fine", {"size": 2, "fine.size": 3}, table)
    assert (policy.inner.size, policy.inner.base.size) == (2, 3)
    with pytest.raises(ConfigError, match=r"'fine' cannot wrap another policy; only bicache, .*outer can"):
        parse("fine+outer", None, table)


def test_a_policy_that_owns_the_prefix_does_not_stand_inside_bicache(install: Install) -> None:
    text = "@dataclass(frozen=True)\nclass X(Fine):\n    def boundary(self, prefix, canvas, layers): return layers"
    install("owner", {POLICIES: {"owner": "owner_module:X"}}, text)
    with pytest.raises(ConfigError, match="bicache and owner would both own the shared prefix"):
        parse("bicache+owner", None, table)


FAMILY = {"model_type": "fine"}
BAD_FAMILIES = {
    "number": ("X = 5", "it provides an object of type int; expected an object of type remask.families"),
    "name": ("X = replace(FINE, name='other')", "its name is 'other'; expected the entry point's name, 'broken'"),
    "names": (
        "X = replace(FINE, name='broken', names={})",
        "its 'names' is an object of type dict; expected a TensorNames",
    ),
    "config": ("X = replace(FINE, name='broken', config=None)", "its 'config' is .*NoneType; expected a function"),
    "types": ("X = replace(FINE, name='broken', model_types='fine')", "its 'model_types' is 'fine'; expected a tuple"),
    "nothing": (
        "X = replace(FINE, name='broken', model_types=(), architectures=())",
        "it claims no model; expected a value in 'model_types' or 'architectures'",
    ),
    "taken": (
        "X = replace(FINE, name='broken', model_types=('LLaDA',))",
        "its 'model_types' claims llada, which remask's family 'llada' has; expected values that no other",
    ),
    "presets": ("X = replace(FINE, name='broken', presets=[1])", r"its 'presets' is \[1\]; expected a mapping"),
    "preset of another": (
        "X = replace(FINE, name='broken', presets={'a': LLADA.presets['llada-tiny']})",
        "its preset 'a' is wrong: 'family' is 'llada', and the family's name is 'broken'",
    ),
    "preset taken": (
        "X = replace(FINE, name='broken', presets={'llada-8b': LLADA.presets['llada-tiny']})",
        "its preset 'llada-8b' has the name of one of remask's",
    ),
    "import error": ("import module_that_nobody_has", "loading it raised ModuleNotFoundError"),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", BAD_FAMILIES)
def test_a_family_that_is_none(name: str, install: Install) -> None:
    text, found = BAD_FAMILIES[name]
    install("bad", {FAMILIES: {"broken": "bad_module:X"}}, text)
    install("good", {FAMILIES: {"fine": "good_module:FINE"}})
    entry = r"package 'bad' 0\.3 \(entry point 'broken = bad_module:X' of 'remask\.families'\)"
    with pytest.raises(PluginError, match=f"^{entry}: {found}"):
        REGISTRY.get("broken")
    with pytest.raises(PluginError, match=f"^{entry}: {found}"):
        family_of({"model_type": "Broken"})
    assert family_of(FAMILY).name == "fine"
    assert family_of({"architectures": ["Fine"]}).name == "fine"
    assert family_of({"model_type": "LLaDA"}).name == "llada"
    assert preset("llada-tiny").family == "llada"
    with pytest.raises(UnknownNameError, match=r"Unknown model_type 'fin'. Did you mean 'fine'\?"):
        family_of({"model_type": "fin"})


RULES = {
    "no rule": ("X = 3", "an object of type int"),
    "another name": ("X = Remasking('y', 'It does.')", "name='y'"),
    "it edits": ("X = Remasking('x', 'It does.', edits=True)", "edits=True"),
    "another kind": ("X = Remasking('x', 'It does.', kinds=('uniform',))", "kinds=('uniform',)"),
    "parameters of another kind": ("X = Remasking('x', 'It does.', config=int)", "config=<class 'int'>"),
    "parameters without values": (
        "from dataclasses import make_dataclass\n"
        "X = Remasking('x', 'It does.', config=make_dataclass('C', [('a', int, 1)], frozen=True))",
        "config=<class 'types.C'>",
    ),
    "a measure of another kind": ("X = Remasking('x', 'It does.', measure='entropy')", "measure='entropy'"),
    "broken": ("1 / 0", "loading it raised ZeroDivisionError"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_is_none(name: str, install: Install) -> None:
    text, problem = RULES[name]
    install("bad", {"remask.remasking": {"x": "bad_module:X"}}, f"from remask.denoising.rules import Remasking\n{text}")
    with pytest.raises(PluginError, match=re.escape(problem)):
        SamplingParams(remasking="x")
    assert "x" not in names_on("masked"), "lists leave it out"
    SamplingParams(remasking="entropy")


def test_a_rule_that_never_ends_a_block_ends_its_own_request(install: Install) -> None:
    text = "def begin(block): return lambda step: step.positions[:0]\nX = Remasking('x', 'It does not.', begin=begin)"
    install(
        "idle", {"remask.remasking": {"x": "idle_module:X"}}, f"from remask.denoising.rules import Remasking\n{text}"
    )
    params = SamplingParams(max_tokens=8, steps=4, remasking="x")
    results = run(make_engine(), [Work(Request("x", [1, 2], params), Dense()), Work(request("good"), Dense())])
    assert "remasking 'x' chose none of 8 open positions in step 4" in str(results["x"].error)
    assert results["good"].error is None


def test_a_model_that_two_families_claim(install: Install) -> None:
    text = "X = replace(FINE, name='second')"
    install("one", {FAMILIES: {"fine": "one_module:FINE"}})
    install("two", {FAMILIES: {"second": "two_module:X", "llada": "two_module:X"}}, text)
    with pytest.raises(PluginError, match=r"model_type fine is claimed by package 'one' 0\.3 .* and by package 'two'"):
        family_of(FAMILY)
    with pytest.raises(PluginError, match=r"'llada' is provided by remask itself and by package 'two' 0\.3"):
        family_of({"model_type": "llada"})
    assert family_of({"model_type": "Dream"}).name == "dream"


def test_two_presets_of_one_name(install: Install) -> None:
    def text(name: str) -> str:
        shape = f"replace(LLADA.presets['llada-tiny'], family='{name}')"
        return f"X = replace(FINE, name='{name}', model_types=('{name}',), architectures=(), presets={{'p': {shape}}})"

    install("one", {FAMILIES: {"first": "one_module:X"}}, text("first"))
    assert preset("p").family == "first"
    install("two", {FAMILIES: {"second": "two_module:X"}}, text("second"))
    with pytest.raises(PluginError, match=r"preset 'p' is provided by package 'one' 0\.3 .* and by package 'two' 0\.3"):
        preset("p")
    assert preset("dream-tiny").family == "dream"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("lambda raw: raw['rows']", "raised KeyError on config.json: 'rows'"),
        ("lambda raw: raw", "made an object of type dict of config.json; expected ModelConfig"),
        ("LLADA.config", "cannot execute: 'family' is 'llada', and the family's name is 'fine'"),
        (
            "lambda raw: replace(LLADA.config(raw), family='fine', qk_norm='head')",
            "cannot execute: it has the tensor 'q_norm', which the family's 'names' leaves out",
        ),
        (
            "lambda raw: replace(LLADA.config(raw), family='fine', kind='uniform')",
            "cannot execute: 'kind' is 'uniform', and 'noise' is None",
        ),
    ],
)
def test_configurations_that_a_family_reads_wrongly(config: str, problem: str, install: Install) -> None:
    from tests.checkpoint.checkpoints import LLADA

    install("bad", {FAMILIES: {"fine": "bad_module:X"}}, f"X = replace(FINE, config={config})")
    with pytest.raises(CheckpointError, match=rf"package 'bad' 0\.3 .*{problem}"):
        family_of(FAMILY).config(LLADA)


def test_the_command_line_names_the_package(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("bad", {POLICIES: {"broken": "bad_module:X"}}, "X = 5")
    model = ["--model", "llada-tiny", "--load-format", "dummy", "--dtype", "float32"]
    assert main(["--quiet", "generate", *model, "--cache", "broken", "--prompt", "x"]) != 0
    assert "package 'bad' 0.3 (entry point 'broken = bad_module:X'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raise KeyError('x')", "loading it raised KeyError"),
        ("X = ['generate']", "it provides an object of type list"),
        ("X = {'own': 'module'}", "it provides an object of type dict"),
        ("from remask.cli.commands import Command\nX = {'chat': Command('bad_module', '')}", "the command 'chat'"),
    ],
)
def test_commands_that_are_none_leave_the_others(
    text: str, problem: str, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("bad", {"remask.commands": {"bad": "bad_module:X"}}, text)
    found = all_commands()
    assert found["chat"].module == "remask.cli.chat"
    assert "own" not in found
    assert "package 'bad' 0.3 (entry point 'bad = bad_module:X' of 'remask.commands')" in caplog.text
    assert problem in caplog.text


def test_a_command_of_two_packages(install: Install) -> None:
    text = "from remask.cli.commands import Command\nX = {'own': Command('one_module', '')}"
    install("one", {"remask.commands": {"one": "one_module:X"}}, text)
    assert all_commands()["own"].module == "one_module"
    install("two", {"remask.commands": {"two": "two_module:X"}}, text)
    with pytest.raises(PluginError, match=r"package 'two' 0\.3 .*provides the command 'own', which another package"):
        all_commands()


def test_the_server_goes_on_without_it(install: Install) -> None:
    raising = "@dataclass(frozen=True)\nclass Y(Fine):\n    def check(self, circumstances): raise KeyError('layers')"
    install("bad", {POLICIES: {"broken": "bad_module:X", "raising": "bad_module:Y"}}, f"X = 5\n{raising}")
    with serving(make_llm("none")) as running:
        refused = running.ask(cache="broken")
        assert refused.status_code == 400
        assert "package 'bad' 0.3" in refused.json()["error"]["message"]
        page = running.client.get("/playground/example").json()
        assert "block-dual" in page["policies"]
        assert {"broken", "raising"} & set(page["policies"]) == set()
        assert running.ask().status_code == 200


def test_a_plan_that_fails_ends_its_own_request(install: Install) -> None:
    text = "@dataclass(frozen=True)\nclass X(Fine):\n    def plan(self, view): raise KeyError('rows')"
    install("bad", {POLICIES: {"failing": "bad_module:X"}}, text)
    llm = LLM("llada-tiny", load_format="dummy", dtype="float32")
    params = SamplingParams(max_tokens=4)
    (failed,) = llm.generate([[1, 2]], params, cache="failing")
    assert failed.finish_reason == "error"
    (fine,) = llm.generate([[1, 2]], params)
    assert fine.finish_reason == "length"


@pytest.mark.parametrize("given", [5, 1.5, ["none"], Dense, object()])
def test_what_is_neither_a_name_nor_a_policy(given: Any) -> None:
    with pytest.raises(
        RemaskError, match=r"^cache (must be the name of a policy or a CachePolicy object|is the class)"
    ):
        parse(given, None, table)


def test_settings_beside_an_object() -> None:
    llm = LLM("llada-tiny", load_format="dummy", dtype="float32", cache=Dense())
    assert (llm.session.cache, llm.session.cache_name) == (Dense(), "none")
    with pytest.raises(ConfigError, match="is for a policy that is named; give an object of type Dense its settings"):
        llm.generate([[1]], cache=Dense(), cache_config={"depth": 1})
    with pytest.raises(ConfigError, match="is for a policy that is named"):
        llm.generate([[1]], cache_config={"depth": 1})
    with pytest.raises(ConfigError, match="is for a policy that is named"):
        LLM("llada-tiny", load_format="dummy", dtype="float32", cache=Dense(), cache_config={"depth": 1})
