"""docs/lab/results.md: made from result files alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from lab.tests.papers.tables import SMALL, bench, small_table

from remask import EngineConfig, SamplingParams
from remask_lab.bench.bench import run_bench
from remask_lab.bench.contenders import Contender
from remask_lab.bench.workload import random_workload
from remask_lab.gpu.results import read_kept
from remask_lab.pages import results
from remask_lab.pages.page import PAGES, README, RESULTS
from remask_lab.papers import definition
from remask_lab.papers.measure import run_table
from remask_lab.records.record import Record, write_record


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the result of one small table, which is the only one."""
    (tmp_path / "tables").mkdir()
    table = small_table(tmp_path / "tables")
    monkeypatch.setattr(definition, "FOLDER", tmp_path / "tables")
    kept = tmp_path / "results"
    kept.mkdir()
    run_table(table, "bundled", table.scales["bundled"], bench(), kept / "small.llada-tiny.json")
    return kept


def edit(path: Path, **about: Any) -> Path:
    content = json.loads(path.read_text(encoding="utf-8"))
    content["about"] |= about
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def made(folder: Path, readme: str = "") -> tuple[int, str]:
    page, quoting = folder.parent / "page.md", folder.parent / "README.md"
    quoting.write_text(readme, encoding="utf-8")
    status = results.main(["--results", str(folder), "--output", str(page), "--readme", str(quoting)])
    return status, page.read_text(encoding="utf-8") if page.exists() else ""


def test_the_committed_page_is_made_from_the_committed_files() -> None:
    made = results.page(results.read_all(RESULTS))
    assert made == PAGES["results"].read_text(encoding="utf-8"), "run python -m remask_lab pages results"


def test_the_committed_readme_quotes_the_committed_files() -> None:
    text = README.read_text(encoding="utf-8")
    found = results.update_quotes(text, results.read_all(RESULTS), read_kept(RESULTS / "gpu"))
    assert found == text, "run python -m remask_lab pages results"
    assert results.QUOTED.search(text), "it quotes one at least"


def test_a_table_with_its_conditions(folder: Path) -> None:
    status, text = made(folder)
    assert status == 0
    assert "## small: A small table" in text
    assert "`llada-tiny`" in text
    assert "float32 on " in text
    assert "###" not in text
    assert "Measured with" not in text


def test_two_files_of_one_table_stand_apart(folder: Path) -> None:
    table = small_table(folder.parent / "tables")
    other = folder / "small.dream-tiny.json"
    run_table(table, "bundled", table.scales["bundled"], bench("dream-tiny"), other)
    status, text = made(folder)
    assert status == 0
    assert text.count("| nothing |") == 4, "each has a table of what was published and one of ours"
    assert "### dream-tiny, float32 on " in text
    assert "(small.llada-tiny.json)" in text


def test_what_several_tables_say_stands_at_the_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, alone = made(folder)
    monkeypatch.setattr(results, "SEVERAL", 2)
    content = json.loads((folder / "small.llada-tiny.json").read_text(encoding="utf-8"))
    content["about"]["machine"]["cpu"] = "another"
    (folder / "small.other.json").write_text(json.dumps(content), encoding="utf-8")
    _, text = made(folder)
    head, tables = text.split("## small: A small table")
    assert "\n- All: No published column is run at this scale: " in head
    assert " A note. seed " in head
    assert alone.count("A note.") == text.count("A note.") == 1
    assert tables.count("float32 on ") == 4, "two headings, and two processors that differ"
    assert "float32 on " not in head


def test_a_table_without_results_shows_what_was_published(folder: Path) -> None:
    (folder / "small.llada-tiny.json").unlink()
    status, text = made(folder)
    assert status == 0
    assert "| half | 90.61 tok/s | 1.5 tok/s (-2.0 %) |" in text
    assert "`python -m remask_lab papers small` makes them" in text


def test_another_version_of_the_package_is_marked(folder: Path) -> None:
    path = folder / "small.llada-tiny.json"
    versions = json.loads(path.read_text(encoding="utf-8"))["about"]["versions"]
    edit(path, versions=versions | {"remask": "0.0.9"})
    status, text = made(folder)
    assert status == 0
    assert "**Measured with remask 0.0.9; this is " in text


def test_benches_are_shown_too(folder: Path) -> None:
    llm = bench().llm
    workload = random_workload(
        llm, requests=2, sampling=SamplingParams(max_tokens=4), prefix_tokens=16, prompt_tokens=4
    )
    engine = EngineConfig(max_num_seqs=2, max_model_len=64)
    record = run_bench(llm, workload, [Contender("none", llm.session.policy("none"))], 1, engine, progress=False)
    write_record(folder / "plain.json", record)
    status, text = made(folder, "# x\n\n<!-- table: plain.json -->\nold\n<!-- end of table -->\n\nmore\n")
    assert status == 0
    assert "## plain\n" in text
    assert "| none " in text
    readme = (folder.parent / "README.md").read_text(encoding="utf-8")
    assert re.search(r"plain\.json -->\n\| cache .*\| none .*\n<!-- end of table -->\n\nmore\n$", readme, re.DOTALL)
    assert "old" not in readme


def test_depths_under_variants_of_a_prompt_are_shown(folder: Path) -> None:
    data = {
        "tau": 0.97,
        "tasks": [{"task": "relay", "mean": {"50": 1.5, "80": 2.0}}],
        "system_prompts": {"prompts": 8, "changed": 0.49, "spread": {"50": 0.5, "80": 0.25}},
    }
    about = {"model": "m", "layers": 9, "machine": {"dtype": "float32"}, "commit": "c", "date": "2026-01-01"}
    about["settings"] = {"samples": 16, "ratios": [50, 80], "system_prompts": 8}
    write_record(folder / "depth.m.json", Record("analyze depth", about, data))
    status, text = made(folder)
    assert status == 0
    assert "| 50 % | 1.50 | 0.500 |\n| 80 % | 2.00 | 0.250 |" in text
    assert "differ in 49 % of their tokens, a standard deviation of 0.375 layers on average over the ratios" in text


def test_a_readme_that_quotes_no_result_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("missing.json", "small.llada-tiny.json"):
        status, _ = made(folder, f"<!-- table: {name} -->\n\n<!-- end of table -->\n")
        assert status == 2
        assert f"the README quotes {name}, which is no result file of 'remask bench'" in capsys.readouterr().err


def test_a_readme_whose_table_has_no_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = made(folder, "<!-- table: small.llada-tiny.json -->\nold\n")
    assert (status, text) == (2, ""), "no page is written"
    assert "the README begins 1 tables and ends 0" in capsys.readouterr().err


def test_what_cannot_be_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "small.llada-tiny.json"
    content = path.read_text(encoding="utf-8")

    def refused() -> str:
        status, text = made(folder)
        assert (status, text) == (2, ""), "no page is written"
        return capsys.readouterr().err

    path.write_text(content.replace("remask-record-1", "remask-record-0"), encoding="utf-8")
    assert "small.llada-tiny.json' is no result file of this version" in refused()
    path.write_text(content.replace('"subject": "paper"', '"subject": "eval tasks"'), encoding="utf-8")
    assert "holds 'eval tasks'; the page shows 'paper', 'bench', 'analyze depth'" in refused()
    path.write_text(content.replace('"table": "small"', '"table": "large"'), encoding="utf-8")
    assert "small.llada-tiny.json is of table 'large', which is none of ours" in refused()
    path.write_text(content, encoding="utf-8")
    small_table(folder.parent / "tables", SMALL.replace("steps = 0.5", "steps = 0.25"))
    assert "small.llada-tiny.json: these results of table small were measured from another version" in refused()
    assert results.main(["--results", str(folder / "none")]) == 2
    assert "there is no folder of results" in capsys.readouterr().err
