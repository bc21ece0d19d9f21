"""`remask analyze memory`: the table, the record, the picture, and what it refuses."""

import json
from pathlib import Path

import pytest

from remask.cli import main
from remask.policies import names_for
from remask_lab.records.record import read_record

SHAPE = ["--prefix-tokens", "20", "--prompt-tokens", "6", "--max-tokens", "8", "--requests", "3"]


def memory(*options: str) -> int:
    return main(["--quiet", "analyze", "memory", "--load-format", "dummy", "--dtype", "float32", *SHAPE, *options])


def test_every_policy_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plots = tmp_path / "memory.json", tmp_path / "plots"
    compositions = ("bicache+block-dual", "bicache+dllm-cache", "bicache+dkv-decode")
    settings = {name: {"depth": 1} for name in ("bicache", *compositions)} | {"elastic-cache": {"window": 4}}
    chosen = ["--cache-config", json.dumps(settings), "--output", str(output), "--plots", str(plots)]
    assert memory("--model", "llada-tiny", *chosen) == 0
    record = read_record(output, "analyze memory")
    assert record.about["settings"]["prefix_tokens"] == 20
    rows = {row["cache"]: row for row in record.data["rows"]}
    assert set(rows) == {*names_for("masked"), *compositions, "none, random order"}
    for row in rows.values():
        assert row["measured"] == row["formula_total"] + row["unused"]
        assert row["share"] == row["measured"] / row["weights"]
    positions = 3 * 34 * 2 * 64 * 4  # of three canvases, in two layers
    assert rows["none"]["formula"] == {"kv": 2 * positions, "outputs": 0, "states": 0, "store": 0, "boundary": 0}
    assert rows["dllm-cache"]["formula_total"] == 4 * positions
    # At depth 1 of 2 the second layer reads the stored K/V too.
    assert rows["bicache"]["formula"]["kv"] == 2 * (positions - 3 * 20 * 2 * 64 * 4)
    assert (plots / "memory.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert all(f"| {name} |" in out for name in rows)
    assert f"{max(rows, key=lambda name: rows[name]['measured'])} holds most" in out


def test_what_cannot_be_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    settings = json.dumps({name: {"depth": 1} for name in ("bicache", "bicache+block-dual")})
    chosen = ["--caches", "none,bicache", "--cache-config", settings]
    assert memory("--model", "dream-tiny", *chosen) == 2
    assert "names 'bicache+block-dual', which is not measured; measured are none, bicache" in capsys.readouterr().err


def test_left_out_policies_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    depths = {f"bicache{inner}": {"depth": 1} for inner in ("", "+block-dual", "+dllm-cache", "+dkv-decode")}
    settings = json.dumps(depths | {"elastic-cache": {"window": 4}})
    assert memory("--model", "dream-tiny", "--cache-config", settings) == 0
    assert "Left out: dkv-greedy: " in capsys.readouterr().out
