"""Measuring tables: what a row becomes, what is left out, and runs that go on where they stopped."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from lab.tests.likelihood.judges import save_judge
from lab.tests.papers.tables import SMALL, bench, retuned, small_table
from lab.tests.similarity.tables import TABLE

from remask import LLM, EngineConfig, SamplingParams
from remask.errors import CheckpointError, ConfigError, RecordError
from remask_lab.bench.bench import run_bench
from remask_lab.likelihood.perplexity import Judge
from remask_lab.papers.autoregressive import Autoregressive
from remask_lab.papers.definition import ResolvedRow, load_table, resolve
from remask_lab.papers.measure import OPERATIONS, Measurer, run_table
from remask_lab.papers.show import beside, published, results_of
from remask_lab.records.record import read_record


def test_rows_stand_beside_what_was_published(tmp_path: Path) -> None:
    table = small_table(tmp_path)
    record = run_table(table, "bundled", table.scales["bundled"], bench(), tmp_path / "x.json")
    assert record.subject == "paper"
    assert record.about["settings"]["identity"] == table.identity
    assert len(record.data["rows"]) == 4, "'half again' is what 'half' is"
    results = results_of(table, record)
    assert results["half"] is results["half again"]
    assert results["half"]["work_ratio_to_none"] == 2
    assert results["shorter"]["prefix_ratio"] == pytest.approx(24 / 34)
    assert results["nothing"]["ratio_to_none"] == results["nothing"]["agreement_with_none"] == 1
    assert "use remasking 'random'" in str(results["greedy"]["left_out"])
    text = beside(table, record)
    assert "| published | X | Y |\n" in text, "one table of all would be too wide"
    assert "| ours | prefix ratio | depth | tok/s | speed | work saved |" in text
    assert "| half | 90.61 tok/s | 1.5 tok/s (-2.0 %) |\n" in text
    assert "| half | 66.7 % |" in text
    assert "| nothing | 1,200 tok/s | - |\n" in text
    assert "| nothing | 66.7 % |" in text
    assert "| elsewhere | - | 3 tok/s |\n" in text
    assert text.count("| elsewhere |") == 1, "a table leaves out rows of which it shows nothing"
    assert "elsewhere: nothing of ours. It cannot be." in text
    assert "greedy: left out. " in text
    assert "In each cell: throughput, its change." in text
    assert "`llada-tiny`" in text
    assert "max_tokens=8, steps=8; rounds 1; seed 5; float32 on " in text
    assert "torch " in text
    assert "A note." in text
    assert "| half | 90.61 tok/s | 1.5 tok/s (-2.0 %) |\n" in published(table)


def test_columns_that_are_not_run_are_marked(tmp_path: Path) -> None:
    some = SMALL.replace("concurrency = 2\n", 'concurrency = 2\ncounterparts = ["Y"]\n')
    table = small_table(tmp_path, some)
    assert table.identity == small_table(tmp_path).identity, "it says what is compared, and changes nothing measured"
    record = run_table(table, "bundled", table.scales["bundled"], bench(), tmp_path / "x.json")
    text = beside(table, record)
    assert "| published | X * | Y |\n" in text
    assert "* Not run at this scale: ours is beside Y." in text
    assert "M parameters, random weights), 3 requests" in text
    every = small_table(tmp_path, some.replace('["Y"]', '["X", "Y"]'))
    assert "| published | X | Y |\n" in beside(every, record)
    assert "at this scale" not in beside(every, record)
    assert "No published column is run at this scale" in beside(small_table(tmp_path), record)
    with pytest.raises(ConfigError, match="counterpart 'Z'"):
        small_table(tmp_path, some.replace('["Y"]', '["Z"]'))


def test_flops_stand_beside_row_layers(tmp_path: Path) -> None:
    table = small_table(tmp_path, SMALL.replace('name = "half"', 'name = "half"\nmeasure = "detailed"'))
    table = replace(table, rows=table.rows[:2])
    record = run_table(table, "bundled", table.scales["bundled"], bench(), None)
    assert results_of(table, record)["half"]["flops_saved"] == pytest.approx(2, rel=0.05)
    assert "| work saved | FLOPs saved |" in beside(table, record)


def test_a_result_keeps_what_decided_it_and_whether_the_machine_was_busy(tmp_path: Path) -> None:
    table = small_table(tmp_path)
    record = run_table(table, "bundled", table.scales["bundled"], bench(), None)
    half = results_of(table, record)["half"]
    assert set(half["sampling"]) == {each.name for each in fields(SamplingParams)} - {"seed"}
    assert half["sampling"]["steps"] == 4
    assert half["policy"] == "Dense()"
    for busy, told in ((None, False), ("others used 2 cores", True)):
        for row in record.data["rows"]:
            row["result"]["busy"] = busy if row["result"] is half else None
        assert ("was busy" in beside(table, record)) is told
    assert "so times and their ratios say little of: half, half again." in beside(table, record)


class Stopping(Measurer):
    """Counts what it measures, and is interrupted before a number of cells."""

    def __init__(self, other: Measurer, after: int) -> None:
        super().__init__(other.llm, other.rounds, other.seed)
        self.left, self.measured = after, 0

    def measure(self, cell: ResolvedRow) -> dict[str, Any]:
        if self.measured == self.left:
            raise KeyboardInterrupt
        self.measured += 1
        return super().measure(cell)


def test_an_interrupted_table_goes_on(tmp_path: Path) -> None:
    table, path, one = small_table(tmp_path), tmp_path / "x.json", bench()
    scale = table.scales["bundled"]
    with pytest.raises(KeyboardInterrupt):
        run_table(table, "bundled", scale, Stopping(one, 2), path)
    kept = read_record(path, "paper").data["rows"]
    assert len(kept) == 2
    with pytest.raises(RecordError, match="lack 'greedy'; run the same command again"):
        beside(table, read_record(path))
    rest = Stopping(one, 9)
    record = run_table(table, "bundled", scale, rest, path)
    assert rest.measured == 2
    assert record.data["rows"][:2] == kept
    content = path.read_bytes()
    assert run_table(table, "bundled", scale, Stopping(one, 0), path).data == record.data, "nothing is measured again"
    assert path.read_bytes() == content


def test_a_file_of_another_measurement_is_refused(tmp_path: Path) -> None:
    table, path, one = small_table(tmp_path), tmp_path / "x.json", bench()
    scale = table.scales["bundled"]
    record = run_table(table, "bundled", scale, one, path)
    content = path.read_bytes()
    with pytest.raises(RecordError, match=r"holds rows of another measurement .*seed"):
        run_table(table, "bundled", scale, Measurer(one.llm, 1, seed=6), path)
    with pytest.raises(RecordError, match=r"holds rows of another measurement .*model"):
        run_table(table, "bundled", scale, bench("dream-tiny"), path)
    changed = small_table(tmp_path, SMALL.replace("steps = 0.5", "steps = 0.25"))
    with pytest.raises(RecordError, match=r"holds rows of another measurement .*identity"):
        run_table(changed, "bundled", scale, one, path)
    assert path.read_bytes() == content
    with pytest.raises(RecordError, match="measured from another version of its definition; measure again"):
        beside(changed, record)
    with pytest.raises(RecordError, match="of table small, not dkv-4"):
        beside(load_table("dkv-4"), record)


def test_a_baseline_that_cannot_run_ends_the_table(tmp_path: Path) -> None:
    table = small_table(tmp_path)
    too_long = {**table.scales["bundled"].workload, "prefix_tokens": 500}
    with pytest.raises(ConfigError, match="max_model_len"):
        run_table(table, "bundled", replace(table.scales["bundled"], workload=too_long), bench(), None)


def test_depths_at_another_threshold(tmp_path: Path) -> None:
    rows = "".join(
        f'\n[[rows]]\nname = "tau {tau}"\ncache = "bicache"\ntau = {tau}\npublished = {{}}\n' for tau in (0.75, 0.999)
    )
    rows += '\n[[rows]]\nname = "own table"\ncache = "bicache"\npublished = {}\n'
    text = SMALL[: SMALL.index("[[rows]]")] + '[[rows]]\nname = "none"\npublished = {}\n' + rows
    table = retuned(small_table(tmp_path, text), model="bundled-transit")
    llm = LLM("bundled-transit", dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=3, max_model_len=128))
    scale = table.scales["bundled"]
    with pytest.raises(ConfigError, match=r"has rows by tau.*papers profile --model bundled-transit.*--similarities"):
        run_table(table, "bundled", scale, Measurer(llm, rounds=1, seed=1), None)
    measured = replace(TABLE, layers=10, tau=0.9, limits={5: (1.0, 0.95, *[0.8] * 8)})
    one = Measurer(llm, rounds=1, seed=1, similarities=measured)
    record = run_table(table, "bundled", scale, one, None)
    assert "| row | X | Y | ours: depth |" in beside(table, record)
    results = results_of(table, record)
    assert [results[f"tau {tau}"]["prefix_depth"] for tau in (0.75, 0.999)] == [10, 1]
    assert "depth=DepthLookup" in results["own table"]["policy"], "nothing is audited while it is timed"
    assert results["own table"]["audit_row_layers"] == 0
    # One that was measured for its own threshold alone has none to read at a lower one.
    one.similarities = replace(measured, limits={5: (1.0, 0.95)})
    cell = resolve(table, table.rows[1], "bundled", scale)
    assert "without --needed-layers" in one.measure(cell)["left_out"]


def test_operations_add_up(tmp_path: Path) -> None:
    table = load_table("thesis-6-2")
    scale = replace(
        table.scales["bundled"],
        workload={"name": "random", "requests": 2, "prefixes": 1, "prefix_tokens": 0, "prompt_tokens": 4},
        sampling={"max_tokens": 16, "block_length": 8, "steps_per_block": 4, "uniform": {"canvas_length": 64}},
    )
    record = run_table(table, "bundled", scale, bench("gidd-tiny"), tmp_path / "x.json")
    assert len(record.data["rows"]) == 1, "one measurement serves all operations"
    for spent in record.data["rows"][0]["result"].values():
        assert set(spent) == {*OPERATIONS, "overhead"}
        assert all(spent[name] > 0 for name in OPERATIONS)
        assert spent["total"] == pytest.approx(sum(spent[name] for name in OPERATIONS[:-1]))
    text = beside(table, record)
    assert "ours: baseline | ours: cached | ours: reduction |" in text
    timed = sum(row.missing is None for row in table.rows)
    assert text.count(" ms | ") == 2 * timed == 14, "baseline and cached"
    assert "The instruments add " in text


def test_an_autoregressive_model_of_the_same_shape(tmp_path: Path) -> None:
    one = bench()
    model = Autoregressive(one.llm, None)
    assert model.parameters == one.llm.loaded.config.parameters
    text = SMALL[: SMALL.index("[[rows]]")] + '[[rows]]\nname = "none"\npublished = {}\n'
    table = small_table(tmp_path, text + '\n[[rows]]\nname = "AR"\nmeasure = "autoregressive"\npublished = {}\n')
    record = run_table(table, "bundled", table.scales["bundled"], one, None)
    result = results_of(table, record)["AR"]
    assert result["throughput_tok_s"] > 0
    assert result["ratio_range"][0] <= result["ratio_to_none"] <= result["ratio_range"][1]
    shown = beside(table, record)
    assert "AR: random weights of our model's shape, causal (" in shown
    assert "Speed only." in shown
    assert "accuracy" not in json.dumps(result)
    with pytest.raises(CheckpointError, match=r"--ar-model '.*nowhere' cannot be loaded"):
        Autoregressive(one.llm, str(tmp_path / "nowhere"))
    named = Autoregressive(one.llm, str(save_judge(tmp_path)))
    assert named.name == str(tmp_path)
    assert named.parameters > 0


def test_an_autoregressive_answer_is_as_long_as_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's speed counts tokens up to the end token, so the causal model generates and is paid for no more."""
    asked: list[list[int]] = []

    def seconds(self: Autoregressive, workload: Any, lengths: Any, batch: int) -> float:
        asked.append(list(lengths))
        return 2.0

    monkeypatch.setattr(Autoregressive, "seconds", seconds)
    text = SMALL[: SMALL.index("[[rows]]")] + '[[rows]]\nname = "none"\npublished = {}\n'
    table = small_table(tmp_path, text + '\n[[rows]]\nname = "AR"\nmeasure = "autoregressive"\npublished = {}\n')
    one = bench()
    result = results_of(table, run_table(table, "bundled", table.scales["bundled"], one, None))["AR"]
    assert result["throughput_tok_s"] == sum(asked[0]) / 2
    assert all(lengths == asked[0] for lengths in asked)


def test_rows_of_their_own_batch_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = '[[rows]]\nname = "alone"\nbaseline = "alone"\nconcurrency = 1\npublished = {}\n'
    cached = alone.replace('name = "alone"', 'name = "cached"\ncache = "reuse"')
    table = small_table(
        tmp_path, SMALL[: SMALL.index("[[rows]]")] + '[[rows]]\nname = "two"\npublished = {}\n' + alone + cached
    )
    used: list[int] = []

    def recorded(*args: Any, **options: Any) -> Any:
        used.append(args[4].max_num_seqs)
        return run_bench(*args, **options)

    monkeypatch.setattr("remask_lab.papers.measure.run_bench", recorded)
    record = run_table(table, "bundled", table.scales["bundled"], bench(), None)
    assert used == [2, 1, 1]
    assert set(results_of(table, record)) == {"two", "alone", "cached"}
    text = beside(table, record)
    assert "at a time as many as the row says" in text
    assert "The baseline of" not in text, "each has the nearest above it that is its own"
    two, alone_row, cached_row = table.rows
    turned = replace(table, rows=(two, cached_row, alone_row))
    record.about["settings"]["identity"] = turned.identity
    assert "The baseline of 'cached' is 'alone'." in beside(turned, record)


@pytest.mark.thorough
def test_corrections_mend_poor_samples() -> None:
    table = load_table("corrections")
    table = replace(table, rows=tuple(row for row in table.rows if re.search("^Half.*, (0|16) ", row.name)))
    scale = replace(table.scales["bundled"], workload={**table.scales["bundled"].workload, "requests": 1})
    llm = LLM("bundled-uniform", dtype="float32", device="cpu")
    record = run_table(table, "bundled", scale, Measurer(llm, 1, 90210), None)
    right = {name: result["accuracy"] for name, result in results_of(table, record).items()}
    assert right == {row.name: float(", 0 " not in row.name) for row in table.rows}
    text = beside(table, record)
    assert text.startswith("| ours | tok/s | ")
    assert "nan" not in text


def test_texts_are_judged(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("figs Lima; rice Oslo; wool Rome; tea Bern\n" * 3, encoding="utf-8")
    llm = LLM("bundled-uniform", dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=2))
    judge = Judge(str(save_judge(tmp_path / "judge")), "float32")
    table = load_table("thesis-6-10")
    table = replace(table, rows=table.rows[:2])
    scale = replace(
        table.scales["bundled"],
        workload={"name": "texts", "requests": 2, "prefixes": 1, "prompt_tokens": 8},
        sampling={"max_tokens": 8, "block_length": 4, "steps_per_block": 4},
    )
    record = run_table(table, "bundled", scale, Measurer(llm, 1, 3, str(prompts), judge), None)
    for result in results_of(table, record).values():
        low, high = result["perplexity_interval"]
        assert 1 < low <= result["perplexity"] <= high
    assert record.about["settings"]["prompts"] == "prompts.txt"
    assert "| perplexity (95 % interval) |" in beside(table, record)
