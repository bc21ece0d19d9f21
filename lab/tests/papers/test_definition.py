"""The tables' definitions: all are whole, and what cannot be is refused by name."""

from pathlib import Path

import pytest
from lab.tests.papers.tables import SMALL, small_table

from remask.denoising.rules import RULES
from remask.errors import ConfigError, UnknownNameError
from remask.policies import parse
from remask.policies.bicache import DepthLookup
from remask.request.sampling_params import SamplingParams
from remask_lab.papers.definition import SCALES, load_table, resolve, table_names
from remask_lab.papers.show import published

NAMED = {
    *(f"bicache-{n}" for n in (1, 3, 4, 5)),
    *(f"dkv-{n}" for n in (1, 2, 3, 4)),
    *("dllm-main", "dllm-comparison", "dllm-autoregressive"),
    *(f"thesis-{n}" for n in ("6-1", "6-2", "6-9", "6-10", "6-11", "6-12", "figure-6-4", "figure-6-5", "b-1")),
    "corrections",
}


def test_every_table_is_there_in_order_of_its_number() -> None:
    names = table_names()
    assert set(names) == NAMED
    assert names.index("thesis-6-2") < names.index("thesis-6-9") < names.index("thesis-6-10")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_row_of_ours_can_be_asked_for(name: str, scale: str) -> None:
    table = load_table(name)
    assert any(any(row.published.values()) for row in table.rows) is (table.setting is not None)
    points = []
    for row in table.rows:
        assert row.published or row.missing is None
        if row.missing is None:
            cell = resolve(table, row, scale, table.scales[scale])
            if cell.sampling.get("remasking") != "slowfast" or "slowfast" in RULES.names():
                assert cell.params.max_tokens > 0
            parse(cell.cache, cell.settings, lambda: DepthLookup({}))
            points.append(cell)
    assert len(points) > 1


def test_published_numbers_are_read_as_they_stand(tmp_path: Path) -> None:
    table = small_table(tmp_path)
    assert table.row("half").published == {"X": (90.61, None), "Y": (1.5, -2.0)}
    assert [metric.text(-2.0) for metric in table.metrics] == ["-2.0 tok/s", "(-2.0 %)"]
    assert table.metrics[0].text(1200) == "1,200 tok/s"
    with pytest.raises(UnknownNameError, match=r"Unknown row of small 'halve'\. Did you mean 'half'"):
        table.row("halve")


def test_identity_goes_with_what_is_measured_and_not_with_published_numbers(tmp_path: Path) -> None:
    table = small_table(tmp_path)
    assert small_table(tmp_path, SMALL.replace("90.61", "90.6").replace("A note", "Another")).identity == table.identity
    assert small_table(tmp_path, SMALL.replace("steps = 0.5", "steps = 0.25")).identity != table.identity
    assert small_table(tmp_path, SMALL.replace("requests = 3", "requests = 4")).identity != table.identity


def test_a_row_differs_from_its_scale(tmp_path: Path) -> None:
    table = small_table(tmp_path)
    half, shorter = table.row("half"), table.row("shorter")
    cell = resolve(table, half, "bundled", table.scales["bundled"])
    assert (cell.params.steps, cell.baseline and cell.baseline.params.steps) == (4, 8)
    small, large = (resolve(table, shorter, scale, table.scales[scale]) for scale in SCALES)
    assert (small.workload["prompt_tokens"], small.params.block_length) == (2, None)
    assert (large.workload["prompt_tokens"], large.params.block_length) == (4, 4)
    assert resolve(table, table.rows[0], "bundled", table.scales["bundled"]).baseline is None


def test_a_table_of_ours_alone_has_no_published_numbers(tmp_path: Path) -> None:
    head, rest = SMALL.split("[published]")[0], SMALL[SMALL.index("[scales.bundled]") : SMALL.index("[[rows]]")]
    rows = '[[rows]]\nname = "none"\n[[rows]]\nname = "reuse"\ncache = "reuse"\n'
    table = small_table(tmp_path, head + rest + rows)
    assert (table.setting, table.columns, table.metrics) == (None, (), ())
    assert [row.published for row in table.rows] == [{}, {}]
    assert "Ours alone; it belongs to A paper, table 1." in published(table)
    with pytest.raises(ConfigError, match="Unknown column in row 'none' 'X'"):
        small_table(tmp_path, head + rest + rows.replace('"none"', '"none"\npublished.X = [1]'))
    with pytest.raises(ConfigError, match="'published' is missing"):
        small_table(tmp_path, SMALL[: SMALL.index("[[rows]]")] + rows)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "masked"', 'kind = "causal"', "Unknown kind 'causal'"),
        ("steps = 0.5", "step = 0.5", "Unknown key of row 'half' 'step'. Did you mean 'steps'"),
        ('title = "A small table"', "", "title"),
        ("[scales.paper]", "[scales.large]", "scales are bundled, large; a table has bundled and paper"),
        ('"random", requests = 3', '"words", requests = 3', "Unknown workload 'words'"),
        ("X = [90.61, nan]", "X = [90.61, nan, 3]", "X has 3 numbers for 2 metrics"),
        ("X = [90.61, nan]", "Z = [90.61, nan]", "Unknown column in row 'half' 'Z'"),
        ('name = "half again"', 'name = "half"', "two rows have one name"),
        ('cache = "reuse"', 'measure = "guess"', "Unknown measure of row 'shorter' 'guess'"),
        ('cache = "reuse"', 'measure = "operations"', "operation goes with the measure 'operations'"),
        ('cache = "reuse"', "concurrency = 4", "concurrency is not that of its baseline 'nothing'"),
        ('name = "nothing"', 'name = "nothing"\nconcurrency = 0', "concurrency takes numbers from 1"),
        ('cache = "reuse"', 'baseline = "elsewhere"', "its baseline 'elsewhere' has nothing of ours"),
        ("at.bundled.workload", "at.bundled.cache", "at takes bundled, paper, each with sampling and workload"),
        ('setting = "a machine"', 'setting = "a machine"\nyear = 2026', "published: unknown year"),
        ('name = "nothing"', "", "'name' is missing"),
        ("[published]", "[published", "small.toml"),
    ],
)
def test_what_a_table_cannot_say(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SMALL
    with pytest.raises(ConfigError, match=r"small\.toml") as caught:
        small_table(tmp_path, SMALL.replace(old, new, 1))
    assert message in str(caught.value)


@pytest.mark.parametrize("table", ["thesis-6-1", "thesis-6-10", "thesis-figure-6-4"])
def test_presets_are_what_the_tables_run_at_the_paper_s_scale(table: str) -> None:
    definition = load_table(table)
    seen = set()
    for row in definition.rows:
        params = resolve(definition, row, "paper", definition.scales["paper"]).params
        preset = f"s{params.steps_per_block}/b{params.block_length}"
        given = {
            "uniform": {"preset": preset, "canvas_length": 2048},
            "max_tokens": params.max_tokens,
            "ignore_eos": True,
        }
        own = SamplingParams.from_mapping(given)
        assert (own.steps_per_block, own.block_length, own.uniform.tokens_per_step) == (
            params.steps_per_block,
            params.block_length,
            params.uniform.tokens_per_step,
        )
        seen.add(preset)
    assert seen <= {"s32/b32", "s512/b512"}
