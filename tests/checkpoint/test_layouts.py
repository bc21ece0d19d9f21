"""What people have on disk: shards of any index, tied or not, in any type, in fp8 of other programs, and damaged."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from remask import LLM
from remask.checkpoint.files import read_model_defaults
from remask.checkpoint.loaded import find_model
from remask.checkpoint.quantized_files import stored_quantization
from remask.checkpoint.settings import ModelSettings
from remask.cli import main
from remask.cli.inspect import inspect_model
from remask.errors import CheckpointError
from remask.model.ranks import Shard
from tests.checkpoint import adapters, checkpoints
from tests.checkpoint.checkpoints import random_tensors, same, weights_of, write

CPU = torch.device("cpu")
NEMOTRON, LLADA, SDAR_MOE = checkpoints.NEMOTRON, checkpoints.LLADA, checkpoints.SDAR_MOE
Q = "encoder.layers.0.self_attn.q_proj.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def placed(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor], files: dict[str, str]) -> Path:
    """A checkpoint whose tensors are in the files that `files` names, with an index of these."""
    checkpoints.write(folder, raw, tensors)
    (folder / SINGLE).unlink()
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


# By the number of a tensor, the file that holds it.
SHARDS: dict[str, Any] = {
    "one file": None,
    "an index of one file": lambda _: SINGLE,
    "three": lambda at: f"model-{at % 3 + 1:05}-of-00003.safetensors",
    "one a tensor": lambda at: f"model-{at + 1:05}.safetensors",
    "names of their own": lambda at: ("encoder.safetensors", "rest of it.safetensors")[at > 4],
}


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("raw", [NEMOTRON, SDAR_MOE], ids=["nemotron", "sdar-moe"])
def test_every_layout_is_the_same_model(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    raw: dict[str, Any],
    stored: torch.dtype,
    tied: bool,
    shards: str,
) -> None:
    raw = raw | {"tie_word_embeddings": tied}
    tensors = {name: each.to(stored) for name, each in checkpoints.random_tensors(raw).items()}
    plain = checkpoints.write(tmp_path / "plain", raw, {name: each.float() for name, each in tensors.items()})
    name_of = SHARDS[shards]
    if name_of is None:
        folder = checkpoints.write(tmp_path / "other", raw, tensors)
    else:
        folder = placed(tmp_path / "other", raw, tensors, {name: name_of(at) for at, name in enumerate(tensors)})
    weights = weights_of(folder)
    same(weights, weights_of(plain))
    assert (weights.head is weights.embed) == tied
    assert not caplog.records


def test_a_single_file_beside_an_index_says_which_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = checkpoints.random_tensors(LLADA)
    folder = checkpoints.write(tmp_path, LLADA, {name: each + 1 for name, each in tensors.items()}, shards=2)
    save_file(tensors, folder / SINGLE)
    with caplog.at_level(logging.WARNING):
        weights = weights_of(folder)
    assert torch.equal(weights.embed, tensors["model.transformer.wte.weight"])
    [record] = caplog.records
    assert f"in {SINGLE}, which is read, and {INDEX} of other files, which is not" in record.getMessage()


WTE = "model.transformer.wte.weight"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _moved(index: dict[str, str], _: Path) -> None:
    index[WTE] = SECOND


def _invented(index: dict[str, str], _: Path) -> None:
    index["model.transformer.extra.weight"] = FIRST


def _twice(_: dict[str, str], folder: Path) -> None:
    save_file(load_file(folder / SECOND) | {WTE: torch.zeros(41, 16)}, folder / SECOND)


def _lost(index: dict[str, str], _: Path) -> None:
    index[WTE] = "model-00003-of-00002.safetensors"


def _too_long(index: dict[str, str], _: Path) -> None:
    index[WTE] = "m" * 300 + ".safetensors"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_moved, rf"it has {WTE} in {SECOND}, and {FIRST} holds it"),
        (_invented, rf"it has model.transformer.extra.weight in {FIRST}, and no shard holds it"),
        (_twice, rf"{WTE} is in {FIRST} \[40, 16\] and {SECOND} \[41, 16\]"),
        (_lost, r"names 1 of 3 shards that are not in .*: model-00003-of-00002.safetensors"),
        (_too_long, r"names 1 of 3 shards that are not in .*: m{300}\.safetensors"),
    ],
)
def test_an_index_that_contradicts_its_shards_is_named(tmp_path: Path, damage: Any, said: str) -> None:
    folder = checkpoints.write(tmp_path, LLADA, checkpoints.random_tensors(LLADA), shards=2)
    index = json.loads((folder / INDEX).read_text())
    damage(index["weight_map"], folder)
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=said) as caught:
        weights_of(folder)
    assert str(folder / INDEX) in str(caught.value)


def test_many_contradictions_are_counted(tmp_path: Path) -> None:
    raw = LLADA | {"n_layers": 6}
    folder = checkpoints.write(tmp_path, raw, checkpoints.random_tensors(raw), shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {name: {FIRST: SECOND, SECOND: FIRST}[file] for name, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"; and {len(index['weight_map']) - 20} more\. They are of different"):
        weights_of(folder)


Block = tuple[int | None, int | None]


def coded(tensors: dict[str, Tensor], block: Block, ending: str, flat: bool = False) -> dict[str, Tensor]:
    """The matrices of layers as fp8 with a scale for each block of rows and columns, all else in bfloat16."""
    held = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or "layers" not in name:
            held[name] = tensor.bfloat16()
            continue
        rows, columns = (size or whole for size, whole in zip(block, tensor.shape, strict=True))
        codes, scales = torch.empty_like(tensor), torch.empty(-(-len(tensor) // rows), -(-tensor.shape[1] // columns))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = tensor[part].abs().max() / 448
                codes[part] = tensor[part] / scales[i, j]
        held[name] = codes.to(torch.float8_e4m3fn)
        held[name + ending] = scales.flatten() if flat else scales
    return held


def numbers(held: dict[str, Tensor], block: Block, ending: str) -> dict[str, Tensor]:
    """What codes stand for, one number after the other."""
    found = {}
    for name, tensor in held.items():
        if name + ending in held:
            rows, columns = (size or whole for size, whole in zip(block, tensor.shape, strict=True))
            scales = held[name + ending].reshape(-(-len(tensor) // rows), -1)
            whole = tensor.float()
            for i in range(len(whole)):
                for j in range(whole.shape[1]):
                    whole[i, j] *= scales[i // rows, j // columns]
            found[name] = whole
        elif not name.endswith(ending):
            found[name] = tensor.float()
    return found


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": strategy, **weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


FP8: dict[str, tuple[dict[str, Any], Block, str, bool]] = {
    "DeepSeek": ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 8]}, (8, 8), "_scale_inv", False),
    "blocks that do not divide": ({"quant_method": "fp8", "weight_block_size": [7, 10]}, (7, 10), "_scale_inv", False),
    "transformers": ({"quant_method": "fp8", "weight_block_size": None}, (None, None), "_scale_inv", True),
    "vLLM": ({"quant_method": "fp8", "activation_scheme": "static"}, (None, None), "_scale", True),
    "compressed-tensors, tensor": (compressed("tensor"), (None, None), "_scale", True),
    "compressed-tensors, channel": (compressed("channel", symmetric=True), (1, None), "_scale", False),
    "compressed-tensors, block": (compressed("block", block_structure=[8, 16]), (8, 16), "_scale", False),
}
EACH = pytest.mark.parametrize("layout", FP8)


def fp8_folder(folder: Path, raw: dict[str, Any], layout: str, shards: int = 1) -> tuple[Path, Path]:
    """A folder in fp8, and one of the numbers that it stands for."""
    asked, block, ending, flat = FP8[layout]
    held = coded(checkpoints.random_tensors(raw), block, ending, flat)
    stems = [name.removesuffix("weight") for name in held if name.endswith("q_proj.weight")]
    unread = ("input_scale", "activation_scale", "k_scale", "v_scale")
    beside = {stem + name: torch.ones(()) for stem in stems for name in unread}
    plain = checkpoints.write(folder / "plain", raw, numbers(held, block, ending))
    return checkpoints.write(folder / "fp8", raw | {"quantization_config": asked}, held | beside, shards=shards), plain


@EACH
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("raw", [NEMOTRON, LLADA, SDAR_MOE], ids=["nemotron", "llada", "sdar-moe"])
def test_fp8_becomes_the_numbers_that_it_stands_for(
    tmp_path: Path, raw: dict[str, Any], shards: int, layout: str
) -> None:
    folder, plain = fp8_folder(tmp_path, raw, layout, shards)
    same(weights_of(folder), weights_of(plain))
    same(weights_of(folder, torch.bfloat16), weights_of(plain, torch.bfloat16))


@EACH
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_read_their_parts_of_fp8(tmp_path: Path, rank: int, layout: str) -> None:
    folder, plain = fp8_folder(tmp_path, NEMOTRON, layout)
    same(weights_of(folder, shard=Shard(rank, 2)), weights_of(plain, shard=Shard(rank, 2)))


def test_blocks_are_multiplied_as_by_transformers(tmp_path: Path) -> None:
    held = coded(checkpoints.random_tensors(NEMOTRON), (8, 8), "_scale_inv")
    raw = NEMOTRON | {"quantization_config": FP8["DeepSeek"][0]}
    weights = weights_of(checkpoints.write(tmp_path, raw, held))
    oracle: Any = Fp8Dequantize(None).convert  # type: ignore[no-untyped-call]
    for number, layer in enumerate(weights.layers):
        stem = f"encoder.layers.{number}.self_attn.o_proj.weight"
        [[expected]] = oracle({name: held[name] for name in (stem, stem + "_scale_inv")}).values()
        assert torch.equal(layer.out, expected)


def test_scales_of_powers_of_two_are_read(tmp_path: Path) -> None:
    held = coded(checkpoints.random_tensors(NEMOTRON), (8, 8), "_scale_inv")
    held = {name: each.to(torch.float8_e8m0fnu) if name.endswith("_inv") else each for name, each in held.items()}
    raw = NEMOTRON | {"quantization_config": FP8["DeepSeek"][0] | {"scale_fmt": "ue8m0"}}
    plain = numbers({name: each.float() for name, each in held.items()}, (8, 8), "_scale_inv")
    ours = weights_of(checkpoints.write(tmp_path / "fp8", raw, held))
    same(ours, weights_of(checkpoints.write(tmp_path / "plain", NEMOTRON, plain)))


def test_fp8_is_told_adapted_quantized_and_answers(tmp_path: Path) -> None:
    folder, plain = fp8_folder(tmp_path, NEMOTRON, "DeepSeek", shards=2)
    assert inspect_model(str(folder)).stored["F8_E4M3"] == sum(
        layer.qkv.numel() + layer.out.numel() + layer.gate_up.numel() + layer.down.numel()
        for layer in weights_of(plain).layers
    )
    _, adapter, _ = adapters.base_and_adapted(tmp_path / "adapted", NEMOTRON, target_modules=["q_proj", "down_proj"])
    made = [find_model(ModelSettings(str(each), adapter=str(adapter))) for each in (folder, plain)]
    same(*(each.load(torch.float32, CPU).weights for each in made))
    for kind in ("int8", None):
        texts = []
        for each in (folder, plain):
            llm = LLM(str(each), dtype="float32", device="cpu", threads=1, quantization=kind)
            texts.append(llm.generate([[5, 6, 7]], {"max_tokens": 8})[0].token_ids)
        assert texts[0] == texts[1]
    few = tmp_path / "int8"
    asked = ["--quiet", "quantize", "--quantization", "int8", "--model"]
    assert main([*asked, str(folder), "--output", str(few)]) == 0
    assert main([*asked, str(plain), "--output", str(tmp_path / "plain-int8")]) == 0
    assert json.loads((few / "config.json").read_text())["quantization_config"] == {
        "quant_method": "remask",
        "version": 1,
        "kind": "int8",
    }
    kept, expected = (
        {name: each for file in sorted(path.glob("*.safetensors")) for name, each in load_file(file).items()}
        for path in (few, tmp_path / "plain-int8")
    )
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name].float(), each.float()) for name, each in expected.items())


SCALE = Q + "_scale_inv"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({SCALE: None}, rf"{Q} \[32, 16\] has no scales; supported: one, {SCALE}"),
        ({SCALE: torch.ones(4, 3)}, rf"{SCALE} is \[4, 3\], quantization_config asks for \[4, 2\]"),
        ({SCALE: torch.ones(())}, rf"{SCALE} is \[\], quantization_config asks for \[4, 2\]"),
        ({SCALE: torch.ones(4, 2).int()}, rf"{SCALE} is I32; supported: F64"),
        ({Q: torch.ones(32, 16)}, rf"{SCALE} is the scale of {Q}, which is F32"),
        ({Q: torch.ones(32, 16).to(torch.float8_e5m2)}, rf"{SCALE} is the scale of {Q}, which is F8_E5M2"),
        ({Q: None}, rf"1 missing: {Q} \[32, 16\]\n  1 unexpected: {SCALE} "),
        ({SCALE: torch.full((4, 2), torch.nan)}, rf"The tensor '{Q}' in .* NaN"),
    ],
)
def test_scales_that_are_not_as_said_are_refused_by_name(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    held = coded(checkpoints.random_tensors(NEMOTRON), (8, 8), "_scale_inv") | change
    raw = NEMOTRON | {"quantization_config": FP8["DeepSeek"][0]}
    folder = checkpoints.write(tmp_path, raw, {name: each for name, each in held.items() if each is not None})
    with pytest.raises(CheckpointError, match=said):
        weights_of(folder)


def test_two_scales_of_one_tensor_and_fp8_that_no_config_names_are_refused(tmp_path: Path) -> None:
    held = coded(checkpoints.random_tensors(NEMOTRON), (None, None), "_scale")
    raw = NEMOTRON | {"quantization_config": FP8["vLLM"][0]}
    folder = checkpoints.write(tmp_path / "two", raw, held | {SCALE: torch.ones(())})
    with pytest.raises(CheckpointError, match=rf"{Q} \[32, 16\] has 2 scales; supported: one, {SCALE} or {Q}_scale"):
        weights_of(folder)
    with pytest.raises(CheckpointError, match="of a type other than F64, F32, F16, BF16"):
        weights_of(checkpoints.write(tmp_path / "none", NEMOTRON, held))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "is quantized by GPTQ .*Load the model that it was made of, with"),
        ({"quant_method": "awq", "bits": 4}, "is quantized by AWQ .*with --quantization int4 or int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "is quantized by bitsandbytes .*or a GGUF file"),
        ({"quant_method": "quip"}, "is quantized by quip "),
        ({"bits": 4}, "is quantized by a program that it does not name"),
        ("fp8", "'quantization_config' is \"fp8\"; supported: an object"),
        ({"quant_method": "remask", "kind": "int5"}, "supported as 'kind': int8, int4, fp8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'fmt' is \"e5m2\"; supported: \"e4m3\""),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "'weight_block_size' is .*two positive integers"),
        ({"quant_method": "fp8", "weight_block_size": [0, 8]}, "'weight_block_size' is .*two positive integers"),
        (compressed("group", group_size=32), "'strategy' is \"group\"; supported: \"tensor\", \"channel\" or"),
        (compressed("tensor", num_bits=4), "group_0, 'weights': 'num_bits' is 4; supported: 8"),
        (compressed("tensor", type="int"), "'type' is \"int\"; supported: \"float\""),
        (compressed("tensor", symmetric=False), "'symmetric' is false"),
        (compressed("block"), "'block_structure' is missing"),
        (compressed("tensor") | {"format": "pack-quantized"}, "'format' is \"pack-quantized\"; supported: \"float-q"),
        (compressed("tensor") | {"config_groups": {}}, "'config_groups' is {}; supported: an object of groups"),
        (compressed("tensor") | {"config_groups": {"g": []}}, "'config_groups' is .*; supported: an object of groups"),
        (compressed("tensor") | {"transform_config": {"config_groups": {"R1": {}}}}, "'transform_config' is "),
        (compressed("tensor") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparsity_config' is "),
        (
            {**compressed("tensor"), "config_groups": {
                name: compressed(name)["config_groups"]["group_0"] for name in ("tensor", "channel")
            }},
            "groups of layers whose weights have one strategy",
        ),
    ],
)  # fmt: skip
def test_what_other_programs_quantized_is_refused_by_name(tmp_path: Path, asked: Any, said: str) -> None:
    raw = NEMOTRON | {"quantization_config": asked}
    folder = checkpoints.write(tmp_path, raw, checkpoints.random_tensors(NEMOTRON))
    with pytest.raises(CheckpointError, match=said):
        find_model(ModelSettings(str(folder)))
    with pytest.raises(CheckpointError, match=said):
        weights_of(folder)


@pytest.mark.parametrize(
    ("name", "program"),
    [("q_proj.g_idx", "GPTQ"), ("q_proj.qweight", "GPTQ or AWQ"), ("q_proj.weight.quant_map", "bitsandbytes")],
)
def test_files_of_other_programs_are_known_by_their_tensors(tmp_path: Path, name: str, program: str) -> None:
    held = checkpoints.random_tensors(NEMOTRON) | {f"encoder.layers.0.self_attn.{name}": torch.zeros(4)}
    with pytest.raises(CheckpointError, match=rf"is quantized by {program} \(\"encoder.*\.{name.split('.')[-1]}\"\)"):
        weights_of(checkpoints.write(tmp_path, NEMOTRON, held))


def test_scales_of_what_is_no_matrix_are_refused(tmp_path: Path) -> None:
    raw = NEMOTRON | {"quantization_config": {"quant_method": "remask", "kind": "int8"}}
    held = checkpoints.random_tensors(NEMOTRON) | {"x": torch.zeros(()), "x_scale": torch.zeros(())}
    with pytest.raises(CheckpointError, match=r"The int8 model in .* lacks x as a matrix"):
        weights_of(checkpoints.write(tmp_path, raw, held))


def test_files_of_another_version_are_refused(tmp_path: Path) -> None:
    """What remask writes into a folder: an older program must not take it for something else."""
    folder = write(tmp_path / "model", LLADA, random_tensors(LLADA))
    own, config = folder / "remask.json", folder / "config.json"
    own.write_text('{"version": 1, "cache": "none"}')
    assert read_model_defaults(folder) == {"cache": "none"}
    for version in (2, 0, "1", True, None):
        own.write_text(json.dumps({"version": version, "cache": "none"}))
        with pytest.raises(
            CheckpointError, match=rf"remask.json is of version {version!r}, and this program reads 1: "
        ):
            read_model_defaults(folder)
    own.unlink()
    told = {"quant_method": "remask", "kind": "x", "version": 2}
    config.write_text(json.dumps(LLADA | {"quantization_config": told}))
    with pytest.raises(
        CheckpointError, match=r"'quantization_config' in .* is of version 2, and this program reads 1:"
    ):
        stored_quantization(folder)
