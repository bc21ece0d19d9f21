import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from remask.cli import main
from remask.cli.commands import MODEL_EXAMPLES
from remask.engine.capacity import weight_bytes
from remask.families import family_of, preset
from tests.checkpoint import checkpoints


def inspect(tmp_path: Path, lines: list[dict[str, Any]], *options: str) -> int:
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    model = ["--model", "sdar-tiny", "--load-format", "dummy", "--dtype", "float32", "--cache", "exact"]
    return main(["--quiet", "inspect", "store", "--input", str(file), *model, "--page-size", "8", *options])


def lines(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt_token_ids": [*range(40), 50 + n], "sampling": {"max_tokens": 7, "ignore_eos": True}}
        for n in range(count)
    ]


def test_a_shared_prompt_is_held_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(tmp_path, lines(3), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    layers = 2
    full, end = told["fullest"], told["end"]
    # Canvases of 48 tokens: five pages of prompt, read by all and kept by the store, and one of each's own.
    assert full["used"] == layers * (5 + 3)
    assert full["shared"] == layers * 5
    assert full["references"] == layers * (4 * 5 + 3)
    assert {holder["name"]: holder["found"] for holder in full["holders"]} == {"1": 0, "2": 40, "3": 40, "pages": 0}
    assert full["wasted"] == 0
    # What the requests generated completes a page each, which stays for a next turn.
    assert end["used"] == end["references"] == layers * (5 + 3)
    assert (end["hit_tokens"], end["asked_tokens"]) == (80, 120)
    # Who shares which pages.
    chain = [part for part in full["stored"] if part["readers"] == ["1", "2", "3"]]
    assert [part["tokens"] for part in chain] == [8, 16, 24, 32, 40]
    assert [part["parent"] for part in chain] == [None, *(part["id"] for part in chain[:-1])]
    assert all(part["table"]["references"] == [4] for part in chain), "three requests and the store"
    shared = [part["table"]["pages"][0] for part in chain]
    holders = {holder["name"]: holder for holder in full["holders"]}
    for name in "123":
        pages = [page for table in holders[name]["tables"] for page in table["pages"]]
        assert set(shared) <= set(pages)
        assert len(pages) == 6
    # The next turns branch off behind the prompt.
    ends = [part for part in end["stored"] if part["tokens"] == 48]
    assert len(ends) == 3
    assert {part["parent"] for part in ends} == {chain[-1]["id"]}
    assert all(part["readers"] == [] for part in end["stored"])


def test_requests_are_named_by_their_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: list[Any] = ["a long name of a request", 7, None, "7"]
    asked = [{"id": name, **line} for name, line in zip(names, lines(4), strict=True)]
    assert inspect(tmp_path, asked[:3], "--json") == 0
    holders = [holder["name"] for holder in json.loads(capsys.readouterr().out)["fullest"]["holders"]]
    assert holders == ["a long name of a request", "7", "3", "pages"]
    assert inspect(tmp_path, asked[:3]) == 0
    told = capsys.readouterr().out
    assert "  a long name of a request        48" in told
    assert ": a long name of a request, 7, 3" in told
    assert "When the memory was fullest" in told
    assert "80 of 120 tokens asked for were found" in told
    assert inspect(tmp_path, asked) == 2
    assert "line 4: id '7' is used by line 2 too; ids must differ" in capsys.readouterr().err


def test_nested_prefixes_are_a_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "requests.jsonl"
    asked: list[dict[str, Any]] = [
        {"prompt_token_ids": [*range(length), 99], "prefix_length": length, "sampling": {"max_tokens": 4}}
        for length in (40, 16, 24)
    ]
    asked[2]["prompt_token_ids"][0] = 7
    file.write_text("\n".join(map(json.dumps, asked)) + "\n")
    model = ["--model", "llada-tiny", "--load-format", "dummy", "--dtype", "float32", "--cache", "reuse"]
    assert main(["--quiet", "inspect", "store", "--input", str(file), *model, "--page-size", "8"]) == 0
    text = capsys.readouterr().out.split("At the end:")[0]
    tree = [line for line in text.splitlines() if " tokens, layers " in line]
    assert [(len(line) - len(line.lstrip()), line.split()[1], line.split()[-1]) for line in tree] == [
        (2, "16", "2"),
        (4, "40", "1"),
        (2, "24", "3"),
    ]
    assert "layers 0-1: pages" in tree[0]
    assert "(held by 2)" in tree[0]


def test_unused_slots_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = {"prompt_token_ids": [1, 2], "sampling": {"max_tokens": 2, "ignore_eos": True}}
    assert inspect(tmp_path, [short], "--json") == 0
    full = json.loads(capsys.readouterr().out)["fullest"]
    assert (full["slots"], full["wasted"], full["utilisation"]) == (16, 8, 0.5)


def test_a_bad_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(tmp_path, [*lines(1), {"prompt_token_ids": []}]) == 2
    assert "line 2: the prompt is empty" in capsys.readouterr().err


def test_a_preset_is_told_without_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "model", "llada2-mini", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    config = preset("llada2-mini")
    assert (told["family"], told["kind"], told["block_length"]) == ("llada2", "block_causal", 32)
    assert (told["parameters"], told["active_parameters"]) == (config.parameters, config.active_parameters)
    assert told["mixture"]["experts"] == 256
    assert told["mixture"]["router"]["kept_groups"] == 4
    # 19 routers and their biases stay float32.
    routers = 19 * 256 * (config.hidden + 1)
    assert told["weight_bytes"]["bfloat16"] == 2 * config.parameters + 2 * routers
    assert told["weight_bytes"]["float32"] == 4 * config.parameters
    assert told["kv_bytes"]["bfloat16"] == 2 * 20 * 2 * 4 * 128
    assert told["stored"] == {}
    assert told["policies"] == ["none", "exact"]


@pytest.mark.parametrize(
    ("raw", "feed_forward"),
    [
        (
            checkpoints.LLADA_MOE,
            "2 of 6 experts of 6, a shared one of 10, softmax router; 1 of 2 layers dense, 24 wide",
        ),
        (checkpoints.LLADA2, "a shared one of 12, sigmoid router over 2 of 3 groups; 1 of 2 layers dense, 24 wide"),
        (checkpoints.LLADA, "24 wide"),
    ],
)
def test_a_folder_is_told_from_its_headers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], raw: dict[str, Any], feed_forward: str
) -> None:
    folder = checkpoints.write(tmp_path, raw, checkpoints.random_tensors(raw), shards=2)
    assert main(["inspect", "model", str(folder)]) == 0
    told = capsys.readouterr().out
    parameters = family_of(raw).config(raw).parameters
    assert f"{feed_forward}\n  {parameters:,} parameters, of which " in told
    assert f"in the files: {parameters:,} F32" in told
    assert "cache policies: none, " in told


@pytest.mark.parametrize("example", MODEL_EXAMPLES)
def test_the_examples_of_its_help_run(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(example)[1:]) == 0
    assert "parameters" in capsys.readouterr().out


def test_a_folder_whose_tensors_do_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = checkpoints.random_tensors(checkpoints.SDAR_MOE)
    held = {name: tensor for name, tensor in held.items() if "experts.4.up" not in name}
    folder = checkpoints.write(tmp_path, checkpoints.SDAR_MOE, held)
    assert main(["inspect", "model", str(folder)]) == 2
    assert "1 missing: model.layers.1.mlp.experts.4.up_proj.weight [6, 16]" in capsys.readouterr().err
    assert main(["inspect", "model", str(tmp_path / "nowhere")]) == 2


def told_of(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["inspect", "model", *options, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_few_bits_stand_beside_the_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    told = told_of(capsys, "llada-8b", "--memory", "16")
    assert told["kv_tokens"]["bfloat16"] is None
    assert told["kv_bytes"]["int8"] == told["kv_bytes"]["int4"] == told["kv_bytes"]["bfloat16"]
    for kind in ("int8", "int4"):
        assert told["weight_bytes"][kind] == weight_bytes(preset("llada-8b"), torch.bfloat16, quantization=kind)
    assert 4000 < told["kv_tokens"]["int8"] < told["kv_tokens"]["int4"] < 20_000
    assert main(["inspect", "model", "llada-8b", "--memory", "16"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"as bfloat16: weights 16.03 GB, .*; does not fit\n", said)
    assert re.search(r"as int8: weights 9\.0[67] GB, K/V 524.3 kB a token; room for [\d,]+ tokens\n", said)


def test_memory_of_an_8b_of_three_modes_is_told_without_weights(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by hand from the published shape: 34 layers of 4,096, 8 heads of K/V of 128, feed-forwards of 14,336."""
    usual = torch.empty

    def shape_alone(*size: Any, device: torch.device, **more: Any) -> torch.Tensor:
        assert device.type == "meta", "a weight was allocated"
        return usual(*size, device=device, **more)

    monkeypatch.setattr(torch, "empty", shape_alone)
    told = told_of(capsys, "nemotron-labs-diffusion-8b", "--memory", "24")
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336 + 2)
    assert told["parameters"] == told["active_parameters"] == 34 * layer + 4096 + 2 * 131072 * 4096
    assert told["weight_bytes"]["bfloat16"] == 2 * told["parameters"]
    assert told["kv_bytes"]["bfloat16"] == 34 * 2 * 8 * 128 * 2
    assert told["max_length"] == 262144
    room = 0.9 * 24e9 - told["weight_bytes"]["bfloat16"]
    assert 0.5 * room < told["kv_tokens"]["bfloat16"] * told["kv_bytes"]["bfloat16"] < room
    assert told["policies"] == ["none", "exact"]
    halves = told_of(capsys, "nemotron-labs-diffusion-8b", "--memory", "24", "--tensor-parallel", "2")
    assert halves["kv_bytes"]["bfloat16"] * 2 == told["kv_bytes"]["bfloat16"]
    kept = 2 * (131072 + 34 * 2 + 1) * 4096  # the embedding and the norms, which all ranks have
    assert 2 * (halves["weight_bytes"]["bfloat16"] - kept) == told["weight_bytes"]["bfloat16"] - kept


def test_what_fits_on_so_many_devices_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["llada2-flash", "--memory", "80", "--tensor-parallel"]
    one, four = told_of(capsys, *options, "1"), told_of(capsys, *options, "4")
    assert (one["memory_bytes"], one["ranks"], four["ranks"]) == (80 * 10**9, 1, 4)
    assert one["kv_tokens"] == dict.fromkeys(("float32", "bfloat16", "float16", "int8", "int4"), None) | {
        "int4": one["kv_tokens"]["int4"]
    }
    assert four["kv_tokens"]["float32"] is None
    assert four["kv_bytes"]["bfloat16"] * 4 == one["kv_bytes"]["bfloat16"] == 2 * 32 * 4 * 128 * 2
    weights, tokens = four["weight_bytes"]["bfloat16"], four["kv_tokens"]["bfloat16"]
    assert one["weight_bytes"]["bfloat16"] / 4 < weights < one["weight_bytes"]["bfloat16"] / 3.9
    left = 0.9 * 80e9 - weights - tokens * four["kv_bytes"]["bfloat16"]
    assert 0 < left < 2e9, "for what a pass takes"
    assert main(["inspect", "model", *options, "4"]) == 0
    said = capsys.readouterr().out
    assert f"K/V 16.4 kB a token; room for {tokens:,} tokens" in said
    assert "K/V 32.8 kB a token; does not fit" in said
    assert "on each of 4 devices of 80.0 GB, with 90% of it taken" in said


def test_this_machine_is_asked_where_no_memory_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remask.cli.inspect.memory", lambda: (32 * 10**9, 1))
    assert told_of(capsys, "llada-8b")["memory_bytes"] == 32 * 10**9
    monkeypatch.setattr("remask.cli.inspect.memory", lambda: None)
    assert told_of(capsys, "llada-8b")["memory_bytes"] is None
    assert main(["inspect", "model", "llada-8b"]) == 0
    assert "devices" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["no-such"], "a2d-tiny, diffucoder-7b, diffusion-gemma-tiny, "),
        (["dream-7b", "--tensor-parallel", "8"], "28 attention heads are not a multiple of 8. Use 1 or 2 or 4 or 28"),
        (["dream-7b", "--tensor-parallel", "0"], "--tensor-parallel"),
        (["dream-7b", "--memory", "-1"], "--memory"),
        (["llada2-mini", "--tensor-parallel", "3"], "its 256 experts are not a multiple of 3"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    assert main(["inspect", "model", *options]) == 2
    assert said in capsys.readouterr().err
