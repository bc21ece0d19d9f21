"""Kept figures: which are stale by what they were made of, and how the command makes them anew."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remask.errors import ConfigError
from remask_lab.pages import caches, figures
from remask_lab.pages.figures import ALLOWED, FRESH, INPUTS, MAKING, STALE, Figure, digest, main, make, note, states
from remask_lab.pages.page import ROOT
from remask_lab.records.record import Record, write_record

CODE = '"""What it does."""\n\ndef f(x):\n    """One more."""\n    return x + 1  # a comment\n'
FILE = "benchmarks/results/a.json"
WRITES = "python -c \"import sys; open('{out}', 'w').write(open('src/remask/a.py').read())\""
RESULT = Figure(FILE, WRITES, 1, ("src/remask/a.py", "src/remask/model"))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of one module, a model of two files and one figure."""
    for name, text in (("a.py", CODE), ("model/weights", "1"), ("model/README.md", "what it is")):
        path = tmp_path / "src" / "remask" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    monkeypatch.setattr(figures, "OWN_PAGES", ())
    monkeypatch.setattr(figures, "all_figures", lambda _: [RESULT])
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "same"),
    [
        ("a.py", CODE.replace("a comment", "another").replace("One more.", "One less.").replace("\n\n", "\n"), True),
        ("a.py", CODE.replace("+ 1", "+ 2"), False),
        ("model/weights", "2", False),
        ("model/more", "1", False),
        ("model/README.md", "another text", True),
    ],
)
def test_a_figure_is_what_its_code_and_data_are(root: Path, name: str, text: str, same: bool) -> None:
    before = digest(root, RESULT)
    (root / "src" / "remask" / name).write_text(text, encoding="utf-8")
    assert (digest(root, RESULT) == before) is same
    assert digest(root, replace(RESULT, command=f"{WRITES} more")) != digest(root, RESULT)


def test_what_is_stale_is_made_and_then_fresh(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--root", str(root)]
    assert main([*own, "--check"]) == 1
    assert f"{FILE}: its inputs have changed" in capsys.readouterr().out
    assert main([*own, "--minutes", "0.5"]) == 0
    assert not (root / FILE).exists(), "it takes longer than half a minute"
    assert main(own) == 0
    assert (root / FILE).read_text(encoding="utf-8") == CODE
    assert not any((root / "benchmarks" / "results" / MAKING).iterdir())
    assert states(root, [RESULT]) == {FILE: FRESH}
    assert main([*own, "--check"]) == 0
    assert main([*own, "--list"]) == 0
    out = capsys.readouterr().out
    assert f"| {FILE} | fresh | 1 | python -c " in out
    assert "0 of 1 figures are stale; making them takes about 0 minutes" in out
    (root / FILE).write_text("edited by hand", encoding="utf-8")
    assert states(root, [RESULT]) == {FILE: STALE}
    assert main([*own, "--note", "a.json"]) == 0
    assert states(root, [RESULT]) == {FILE: FRESH}
    assert main([*own, "--note", "b.json"]) == 2
    assert "no figure's path contains 'b.json'" in capsys.readouterr().err


def test_an_interruption_leaves_what_was_there(root: Path) -> None:
    """What was measured is gone on with, unless its inputs change in between."""
    write_record(root / FILE, Record("bench", {"date": "2026-01-01"}, {}))
    before = (root / FILE).read_text(encoding="utf-8")
    step = (
        "import pathlib, sys; p = pathlib.Path(sys.argv[1]); old = p.exists(); p.write_text('half'); sys.exit(not old)"
    )
    twice = replace(RESULT, command=f'python -c "{step}" {{out}}')
    with pytest.raises(ConfigError, match="failed with status 1"):
        make(root, [twice], None)
    assert (root / FILE).read_text(encoding="utf-8") == before
    (root / "src" / "remask" / "a.py").write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="failed with status 1"):
        make(root, [twice], None)
    make(root, [twice], None)
    assert (root / FILE).read_text(encoding="utf-8") == "half"
    silent = replace(RESULT, name="benchmarks/results/b.json", command="python -c pass")
    with pytest.raises(ConfigError, match=r"its command left no b\.json"):
        make(root, [silent], None)


def test_a_stale_figure_is_kept_for_a_reason(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, gpu = ["--root", str(root)], Figure("benchmarks/results/gpu/h.json", figures.ON_GPU, 8, ())
    assert main([*own, "--allow", "nothing", "--only", "elsewhere"]) == 0
    assert figures.read_allowed(root) == {}
    assert main([*own, "--allow", 'it needs "hours"']) == 0
    assert 'reason = "it needs \\"hours\\""' in (root / ALLOWED).read_text(encoding="utf-8")
    assert main([*own, "--check"]) == 0
    assert main([*own, "--allow", "another reason"]) == 0
    assert figures.read_allowed(root) == {FILE: 'it needs "hours"'}, "the reason of before stays"
    note(root, [RESULT])
    assert main([*own, "--check"]) == 1
    assert f"{FILE}: it is fresh; take it out" in capsys.readouterr().out
    assert main([*own, "--allow", "no more"]) == 0
    assert figures.read_allowed(root) == {}
    make(root, [gpu], None)
    assert states(root, [gpu]) == {gpu.name: STALE}, "no command here makes it"
    assert "measure it by hand (, on a GPU)" in figures.problems(root, [gpu])[0]
    (root / "benchmarks" / "results" / "lost.json").write_text("{}", encoding="utf-8")
    assert main([*own, "--check"]) == 1
    assert "lost.json: no command of ours makes it" in capsys.readouterr().out


def test_a_page_that_cannot_be_written_is_no_success(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "OWN_PAGES", ("caches",))
    monkeypatch.setattr(caches, "main", lambda _: 2)
    with pytest.raises(ConfigError, match="the page 'caches' is not written"):
        make(root, [], None)


def test_a_picture_is_made_by_the_gallery(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command makes two pictures, and is run once."""
    ran: list[Any] = []
    monkeypatch.setattr(figures, "_execute", lambda _, words: ran.append(words))
    pictures = [Figure(f"docs/lab/gallery/x/{name}.png", "remask analyze drift", 1, ()) for name in "ab"]
    monkeypatch.setattr(figures, "all_figures", lambda _: pictures)
    make(root, pictures, None)
    assert ran == [["python", "-m", "remask_lab", "pages", "gallery", "--draw", "x/a.png"]]
    assert set(json.loads((root / INPUTS).read_text(encoding="utf-8"))) == {each.name for each in pictures}


@pytest.mark.thorough
def test_no_kept_figure_is_older_than_its_inputs_unless_it_is_listed() -> None:
    found = figures.problems(ROOT, figures.all_figures(ROOT))
    assert found == [], "make figures, or python -m remask_lab pages figures --allow REASON"


def test_every_figure_has_a_command_and_inputs_that_exist() -> None:
    every = figures.all_figures(ROOT)
    assert len({each.name for each in every}) == len(every)
    for each in every:
        absent = [path for path in each.inputs if not (ROOT / path).exists()]
        assert each.inputs, each.name
        assert absent == [], each.name
        assert each.elsewhere or each.name.endswith(".png") or "{out}" in each.command or "{folder}" in each.command


def test_a_figure_rests_on_its_policies_its_sampler_and_its_model() -> None:
    inputs = {each.name.removeprefix("benchmarks/results/"): set(each.inputs) for each in figures.all_figures(ROOT)}
    composed, uniform = inputs["bicache-1.bundled.json"], inputs["thesis-6-1.bundled-uniform.json"]
    assert {"src/remask/policies/bicache.py", "src/remask/policies/block.py", "src/remask/depth"} <= composed
    assert {"src/remask/sampling/masked.py", "src/remask/families/llada.py", "src/remask/bundled"} <= composed
    assert "lab/src/remask_lab/papers/tables/bicache-1.toml" in composed
    assert {"src/remask/sampling/uniform.py", "src/remask/policies/on_device.py"} <= uniform
    assert not {"src/remask/sampling/masked.py", "src/remask/policies/bicache.py"} & uniform
    assert "src/remask/sampling/slowfast.py" in inputs["dllm-autoregressive.bundled-transit.json"]
    assert "src/remask/policies" in inputs["docs/lab/gallery/ratio-bundled/grid-load.png"]
    assert {"lab/src/remask_lab/subjects/drift.py"} <= inputs["drift/s32.masked.json"]
    assert "src/remask/policies/elastic.py" in inputs["caches/bundled-transit.0.json"], "settings stand behind its name"
    assert {"src/remask/policies/bicache.py", "src/remask/depth"} <= inputs["real-weights/town-depths.json"]
    assert {"src/remask/bundled_tariff", "lab/src/remask_lab/bench/bench.py"} <= inputs[
        "docs/lab/gallery/tariff/demo.png"
    ]
    assert "src/remask/depth" in inputs["docs/lab/gallery/profile-bundled/depth.png"]


def test_every_path_that_a_policy_rests_on_is_there() -> None:
    """A path that was renamed would make its figures fresh."""
    paths = set(figures._of_policies(figures.POLICY_FILES)) | {
        each for own in figures.COMMANDS.values() for each in own
    }
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []
