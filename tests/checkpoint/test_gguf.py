"""GGUF files: the same model as its safetensors checkpoint, and one sentence on each kind of damage."""

import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from remask import LLM
from remask.checkpoint import gguf_header as header
from remask.checkpoint import gguf_tensors as tensors
from remask.checkpoint.fingerprint import fingerprint
from remask.checkpoint.gguf_header import read_header
from remask.checkpoint.gguf_tensors import OpenGGUF, locate
from remask.checkpoint.load import check_tensors, read_config
from remask.checkpoint.loaded import find_model
from remask.checkpoint.quantized_files import save_quantized
from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.tokenizer import load_tokenizer
from remask.cli import main
from remask.errors import CheckpointError, ConfigError
from remask.families import family_of
from remask.model.arithmetic import frequencies
from remask.model.config import RopeScaling
from remask.model.quantized import QuantizedMatrix
from tests import goldens
from tests.checkpoint import checkpoints
from tests.checkpoint.checkpoints import same, weights_of
from tests.live_bytes import LiveBytes

FILES = goldens.ROOT / "gguf"
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("file", "model", "rounded"),
    [
        ("llada-f32", "llada", torch.float32),
        ("llada_gqa-f16", "llada_gqa", torch.float16),
        ("dream-f16", "dream", torch.float16),
    ],
)
def test_a_file_is_the_model_that_it_was_made_of(file: str, model: str, rounded: torch.dtype) -> None:
    path, folder = FILES / f"{file}.gguf", goldens.model_dir(model)
    assert read_config(path)[1] == read_config(folder)[1]
    for (*key, own), (*its, tensor) in zip(
        weights_of(path).named_tensors(), weights_of(folder).named_tensors(), strict=True
    ):
        vector = tensor.dim() == 1  # these stay float32 in such files
        assert key == its
        assert torch.equal(own, tensor if vector else tensor.to(rounded).float()), key


def test_a_file_decodes_as_recorded() -> None:
    run = goldens.runs("llada_baseline")[0]
    line = goldens.request_line(run, "x")
    with LLM(str(FILES / "llada-f32.gguf"), dtype="float32") as llm:
        [answer] = llm.generate([line["prompt_token_ids"]], line["sampling"], cache=line["cache"])
    assert list(answer.token_ids) == run["output_ids"]


@pytest.mark.parametrize(("file", "model"), [("llada_gqa-f16", "llada_gqa"), ("dream-f16", "dream")])
def test_a_rounded_file_decodes_as_a_folder_of_its_numbers(tmp_path: Path, file: str, model: str) -> None:
    given, folder = goldens.model_dir(model), tmp_path / model
    folder.mkdir()
    shutil.copy(given / "config.json", folder)
    held = load_file(given / "model.safetensors")
    rounded = {name: each.half().float() if each.dim() == 2 else each for name, each in held.items()}
    save_file(rounded, folder / "model.safetensors")
    line = goldens.request_line(goldens.runs(f"{model}_baseline")[0], "x")
    answers = []
    for path in (FILES / f"{file}.gguf", folder):
        with LLM(str(path), dtype="float32") as llm:
            [answer] = llm.generate([line["prompt_token_ids"]], line["sampling"], cache=line["cache"])
        answers.append(list(answer.token_ids))
    assert answers[0] == answers[1]


def add_keys(writer: gguf.GGUFWriter, keys: dict[str, Any], ahead: str = "") -> None:
    adders: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in keys.items():
        adders[type(value)](f"{ahead}{key}", value)


def written(writer: gguf.GGUFWriter, target: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def rewritten(target: Path, kind: Type, like: str = "llada-f32", **changed: Any) -> Path:
    """A file of the library's own writer, as the golden one but with matrices of another type."""
    reader = gguf.GGUFReader(FILES / f"{like}.gguf")
    writer = gguf.GGUFWriter(target, changed.pop("architecture", str(reader.fields["general.architecture"].contents())))
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = changed.pop(key, field.contents())
        if value is not None:
            writer.add_key_value(key, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    add_keys(writer, changed)
    for each in reader.tensors:
        matrix = each.data.ndim == 2
        data = gguf.quantize(np.array(each.data), kind) if matrix else np.array(each.data)
        writer.add_tensor(each.name, data, raw_dtype=kind if matrix else None)
    return written(writer, target)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1])
def test_int4_keeps_the_codes_of_blocks_of_four_bits(tmp_path: Path, kind: Type) -> None:
    path = rewritten(tmp_path / "x.gguf", kind)
    name = "blk.0.ffn_down.weight"
    with OpenGGUF(path) as file:
        codes = file.read(name, None, "int4")
        numbers = file.read(name, None, None)
    assert not isinstance(codes, Tensor)
    assert isinstance(numbers, Tensor)
    assert codes.zeros is not None
    steps, zeros = (each.repeat_interleave(32, dim=1) for each in (codes.scales, codes.zeros))
    again = (codes.values.float() - 8) * steps + zeros
    assert float((again - numbers).abs().max()) <= float(numbers.abs().max()) * 2**-7  # scales have eight bits
    matrix = weights_of(path, quantization="int4").layers[0].down
    assert isinstance(matrix, QuantizedMatrix)
    x = torch.eye(160)
    assert torch.allclose(matrix.product(x).T, again, atol=float(numbers.abs().max()) * 2**-7)


@pytest.mark.parametrize("kind", [Type.BF16, Type.Q4_0, Type.Q5_0, Type.Q5_1, Type.Q8_0])
def test_other_types_are_unpacked(tmp_path: Path, kind: Type) -> None:
    given = weights_of(FILES / "llada-f32.gguf")
    for tensor, other in zip(weights_of(rewritten(tmp_path / "x.gguf", kind)).tensors(), given.tensors(), strict=True):
        assert float((tensor - other).abs().max()) <= float(other.abs().max()) / 7
    assert 160 * 64 < weights_of(tmp_path / "x.gguf", quantization="int8").layers[0].down.nbytes <= (160 + 12) * 64


DOWN = "blk.0.ffn_down.weight"


def with_one(target: Path, kind: Type, raw: np.ndarray[Any, Any], name: str = DOWN) -> Path:
    """A file of one tensor, whose bytes are `raw` [..., rows, bytes of a row]."""
    writer = gguf.GGUFWriter(target, "dream")
    writer.add_tensor(name, raw, raw_dtype=kind)
    return written(writer, target)


def test_biases_of_interleaved_heads_are_reordered_as_their_rows(tmp_path: Path) -> None:
    """llama.cpp's converter permutes the biases of Q and K, too."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    add_keys(writer, {"attention.head_count": 4, "attention.head_count_kv": 2}, "llama.")
    names = ("attn_q", "attn_k", "attn_v")
    for name, size in zip(names, (64, 32, 32), strict=True):
        numbers = np.random.default_rng(0).normal(size=(size, 32)).astype(np.float32)
        writer.add_tensor(f"blk.0.{name}.weight", numbers)
        writer.add_tensor(f"blk.0.{name}.bias", numbers[:, 0].copy())
    with OpenGGUF(written(writer, tmp_path / "x.gguf")) as file:
        for name in names:
            rows = file.read(f"blk.0.{name}.weight", None, None)
            bias = file.read(f"blk.0.{name}.bias", None, None)
            assert isinstance(rows, Tensor)
            assert isinstance(bias, Tensor)
            assert torch.equal(bias, rows[:, 0])


def mixed(target: Path, kinds: dict[str, Type], raw: dict[str, np.ndarray[Any, Any]], **rope: float) -> Path:
    """A Dream model of one layer, 256 wide; `raw` has the bytes or the numbers of each matrix."""
    writer = gguf.GGUFWriter(target, "dream")
    add_keys(writer, {
        "block_count": 1, "embedding_length": 256, "feed_forward_length": 512, "context_length": 64, "vocab_size": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6, **{f"rope.{key}": number for key, number in rope.items()},
    }, "dream.")  # fmt: skip
    add_keys(writer, {"tokenizer.ggml.mask_token_id": 63})
    for name, content in raw.items():
        writer.add_tensor(f"{name}.weight", content, raw_dtype=kinds.get(name))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(256, np.float32))
    for name, width in (("q", 256), ("k", 128), ("v", 128)):
        writer.add_tensor(f"blk.0.attn_{name}.bias", np.zeros(width, np.float32))
    return written(writer, target)


@pytest.mark.parametrize("key", ["scaling.factor", "scale_linear"])
def test_a_factor_without_a_type_scales_positions_linearly(tmp_path: Path, key: str) -> None:
    """llama.cpp takes linear scaling where a file names no type."""
    path = tmp_path / "x.gguf"
    assert read_config(mixed(path, {}, {}, **{key: 2.0}))[1].rope_scaling == RopeScaling("linear", 2.0)
    assert read_config(mixed(path, {}, {}, **{key: 1.0}))[1] == read_config(mixed(path, {}, {}))[1]
    scaled: dict[str, Any] = {f"llada.rope.{key}": 2.0}
    with pytest.raises(CheckpointError, match=rf"'llada\.rope\.{key}' is 2\.0; supported: 1 "):
        read_config(rewritten(tmp_path / "llada.gguf", Type.F32, **scaled))


def test_a_model_of_mixed_k_quants_is_the_one_of_its_numbers(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    shapes = {"token_embd": (64, 256), "output": (64, 256)} | {
        f"blk.0.{name}": shape
        for name, shape in {
            "attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256),
            "ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512),
        }.items()
    }  # fmt: skip
    # As in files named Q4_K_M.
    six = ("output", "blk.0.attn_v", "blk.0.ffn_down")
    kinds = {name: Type.Q6_K if name in six else Type.Q4_K for name in shapes}
    raw = {}
    for name, (rows, columns) in shapes.items():
        width = gguf.GGML_QUANT_SIZES[kinds[name]][1]
        blocks = drawn.integers(0, 256, (rows, columns // 256, width), dtype=np.uint8)
        # The block's own scales are to be finite: the last number, or the first two.
        place = slice(-2, None) if kinds[name] == Type.Q6_K else slice(0, 4)
        count = blocks[..., place].shape[-1] // 2
        blocks[..., place] = drawn.uniform(1e-5, 1e-4, (*blocks.shape[:2], count)).astype(np.float16).view(np.uint8)
        raw[name] = blocks.reshape(rows, -1)
    numbers = {name: gguf.dequantize(each, kinds[name]) for name, each in raw.items()}
    given, plain = mixed(tmp_path / "k.gguf", kinds, raw), mixed(tmp_path / "f32.gguf", {}, numbers)
    same(weights_of(given), weights_of(plain))
    matrix = weights_of(given, quantization="int4").layers[0].gate_up
    assert isinstance(matrix, QuantizedMatrix)
    expected = torch.from_numpy(np.concatenate((numbers["blk.0.ffn_gate"], numbers["blk.0.ffn_up"])))
    error = (matrix.product(torch.eye(256)).T - expected).abs().max()
    assert float(error) <= float(expected.abs().max()) * 2**-7  # codes are kept, and scales have eight bits


PACKED = [kind for kind in Type if kind.name not in ("F64", "F32", "F16", "BF16")]


@pytest.mark.parametrize("kind", PACKED, ids=[kind.name for kind in PACKED])
def test_a_type_is_unpacked_as_by_the_library_or_refused(tmp_path: Path, kind: Type) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (3, 2 * gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    path = with_one(tmp_path / "x.gguf", kind, raw)
    try:
        with np.errstate(all="ignore"):
            expected = gguf.dequantize(raw, kind)
    except NotImplementedError:
        assert locate(path)[DOWN].itemsize is None
        return
    with OpenGGUF(path) as file:
        numbers = file.read(DOWN, None, None)
    assert isinstance(numbers, Tensor)
    assert np.array_equal(numbers.numpy(), expected, equal_nan=True)


def of_a_causal_model(target: Path, raw: dict[str, Any], held: dict[str, Tensor], **rope: Any) -> Path:
    """A file of `held`, of the model that the A2D in `raw` was made of, as llama.cpp's converter would write it."""
    kind = raw["model_type"].removeprefix("a2d-")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], raw["num_hidden_layers"])
    writer = gguf.GGUFWriter(target, kind)
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_vocab_size(raw["vocab_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_eos_token_id(raw["eos_token_id"])
    add_keys(writer, rope, f"{kind}.rope.")
    if kind == "qwen3":
        writer.add_key_length(raw["head_dim"])
        writer.add_value_length(raw["head_dim"])
    for name, tensor in held.items():
        called = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        writer.add_tensor(called, tensor.float().numpy())
    return written(writer, target)


def overrides(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: raw[key] for key in ("model_type", "mask_token_id", "right_shift_logits")}


def an_a2d(kind: str, **more: Any) -> dict[str, Any]:
    return checkpoints.A2D | {"model_type": f"a2d-{kind}", **({"head_dim": 16} if kind == "qwen3" else {}), **more}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_file_of_qwens_is_an_a2d_by_the_keys_laid_over_it(tmp_path: Path, kind: str) -> None:
    raw = an_a2d(kind)
    tensors = checkpoints.random_tensors(raw)
    folder = checkpoints.write(tmp_path / "folder", raw, tensors)
    file = of_a_causal_model(tmp_path / "file.gguf", raw, tensors)
    with pytest.raises(CheckpointError, match="autoregressive"):
        read_config(file)
    ours = find_model(ModelSettings(str(file), hf_overrides=overrides(raw)))
    theirs = find_model(ModelSettings(str(folder)))
    assert ours.config == theirs.config
    same(*(each.load(torch.float32, CPU).weights for each in (ours, theirs)))


YARN = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32}
SCALED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"scaling.type": "linear", "scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "linear by the old key": ({"scale_linear": 2.5}, {"rope_type": "linear", "factor": 2.5}),
    "none": ({"scaling.type": "none", "scaling.factor": 4.0}, {"rope_type": "default"}),
    "yarn": (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
    "yarn of the whole length": (
        {"scaling.type": "yarn", "scaling.factor": 2.0, "scaling.finetuned": 1},
        {"rope_type": "yarn", "factor": 2.0},
    ),
    "yarn with its bounds": (
        {**YARN, "scaling.yarn_beta_fast": 16.0, "scaling.yarn_beta_slow": 2.0, "scaling.attn_factor": 1.0},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
        },
    ),
}


@pytest.mark.parametrize("scaled", SCALED)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_scaled_positions_are_those_of_the_checkpoint(tmp_path: Path, kind: str, scaled: str) -> None:
    keys, rope = SCALED[scaled]
    raw = an_a2d(kind, rope_scaling=rope)
    file = of_a_causal_model(tmp_path / "x.gguf", raw, {}, **keys)
    assert read_config(file, overrides(raw))[1] == replace(family_of(raw).config(raw), tied=True)


# Llama 3.1, Llama 3.2, and numbers that no published model has.
LLAMA3 = {
    "3.1": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "3.2": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "own": {"factor": 3.5, "low_freq_factor": 1.0, "high_freq_factor": 9.5, "original_max_position_embeddings": 5000},
    "low": {"factor": 8.0, "low_freq_factor": 1.7, "high_freq_factor": 4.1, "original_max_position_embeddings": 6001},
}


def slowed(rope: dict[str, Any], head_dim: int, theta: float) -> Tensor:
    """What llama.cpp's converter writes, by transformers' frequencies."""
    theirs = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "rope_theta": theta, **rope},
    )
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    plain = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return (plain / inverse.double()).float().clamp(min=1)


def a_llama(**more: Any) -> dict[str, Any]:
    return an_a2d("llama", hidden_size=256, rope_theta=500000.0, max_position_embeddings=131072, **more)


@pytest.mark.parametrize("rope", LLAMA3)
def test_slowed_pairs_of_channels_are_llamas_scaling(tmp_path: Path, rope: str) -> None:
    raw, given = a_llama(), LLAMA3[rope]
    held = checkpoints.random_tensors(raw)
    file = of_a_causal_model(tmp_path / "x.gguf", raw, held | {"rope_freqs.weight": slowed(given, 64, 500000.0)})
    family, config = read_config(file, overrides(raw))
    expected = family_of(raw).config(raw | {"rope_scaling": {"rope_type": "llama3", **given}})
    if rope != "low":  # of which a multiple says the same
        assert config == replace(expected, tied=True)
    ours, theirs = (frequencies(each, CPU) for each in (config, expected))
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=0)
    check_tensors(file, family, config, torch.float32)


def test_pairs_that_nothing_slows_are_not_scaled(tmp_path: Path) -> None:
    raw = a_llama()
    file = of_a_causal_model(tmp_path / "x.gguf", raw, {"rope_freqs.weight": torch.ones(32)})
    assert read_config(file, overrides(raw))[1].rope_scaling is None


USUAL = slowed(LLAMA3["3.1"], 64, 500000.0)
LONGROPE = torch.linspace(1, 40, 32)


@pytest.mark.parametrize(
    ("factors", "keys", "said"),
    [
        (LONGROPE, {}, r"'rope_freqs\.weight' \[32\] slows pairs of channels otherwise than Llama 3\.1"),
        (LONGROPE.flip(0), {}, "otherwise than Llama 3"),
        (torch.where(USUAL < 8, 1, USUAL), {}, "too few of them to tell"),
        (torch.where(USUAL < 7.9, USUAL**0.8, USUAL), {}, "otherwise"),  # grows, but not linearly
        (USUAL[:31], {}, r"'rope_freqs\.weight' \[31\]"),
        (USUAL / 2, {}, "otherwise"),
        (torch.where(USUAL > 7, torch.nan, USUAL), {}, "otherwise"),
        (torch.where(USUAL > 7, torch.inf, USUAL), {}, "otherwise"),
        (USUAL.reshape(4, 8), {}, r"is F32 \[4, 8\]; supported: a row of F32"),
        (USUAL, YARN, r"scaling\.type' is \"yarn\"; supported: \"none\" beside the tensor"),
        (
            None,
            {"scaling.type": "longrope", "scaling.factor": 4.0},
            r"'llama\.rope\.scaling\.type' is \"longrope\"; supported: n",
        ),
        (None, {"scaling.type": "yarn"}, r"the key 'llama\.rope\.scaling\.factor' is missing"),
        (None, {**YARN, "scaling.factor": 0.0}, r"'llama\.rope\.scaling\.factor' is 0\.0; supported: a positive"),
        (None, {**YARN, "scaling.attn_factor": 0.5}, r"'llama\.rope\.scaling\.attn_factor' is 0\.5; supported: 1"),
        (None, {**YARN, "scaling.yarn_log_multiplier": 0.1}, r"yarn_log_multiplier' is 0\.1; supported: 0"),
        (None, {**YARN, "scaling.original_context_length": 2**30}, "'original_max_position_embeddings' is 1073741824"),
    ],
)
def test_other_scaling_is_refused(tmp_path: Path, factors: Tensor | None, keys: dict[str, Any], said: str) -> None:
    """By factors, by keys, or by both at once."""
    raw = a_llama()
    held = {} if factors is None else {"rope_freqs.weight": factors}
    file = of_a_causal_model(tmp_path / "x.gguf", raw, held, **keys)
    with pytest.raises(CheckpointError, match=said):
        read_config(file, overrides(raw))


def test_factors_where_llama_cpp_reads_none_are_no_weight(tmp_path: Path) -> None:
    raw = an_a2d("qwen2")
    held = checkpoints.random_tensors(raw) | {"rope_freqs.weight": torch.ones(2)}
    file = of_a_causal_model(tmp_path / "x.gguf", raw, held)
    family, config = read_config(file, overrides(raw))
    with pytest.raises(CheckpointError, match=r"1 unexpected: rope_freqs\.weight \[2\]"):
        check_tensors(file, family, config, torch.float32)


def test_experts_are_rows_of_one_tensor(tmp_path: Path) -> None:
    drawn = torch.Generator().manual_seed(0)
    layers, wide, inner, experts = 2, 32, 32, 4
    writer = gguf.GGUFWriter(tmp_path / "moe.gguf", "llada-moe")
    add_keys(writer, {
        "block_count": layers, "embedding_length": wide, "context_length": 64, "vocab_size": 40,
        "expert_count": experts, "expert_used_count": 2, "expert_feed_forward_length": inner, "attention.head_count": 4,
        "attention.head_count_kv": 4, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5e4,
    }, "llada-moe.")  # fmt: skip
    add_keys(writer, {"tokenizer.ggml.mask_token_id": 39})
    stacked: dict[str, tuple[int, ...]] = {
        "ffn_gate_exps": (experts, inner, wide),
        "ffn_up_exps": (experts, inner, wide),
    }
    stacked |= {"ffn_down_exps": (experts, wide, inner), "ffn_gate_inp": (experts, wide)}
    matrices = {f"attn_{name}": (wide, wide) for name in ("q", "k", "v", "output")}
    norms = {"attn_norm": (wide,), "ffn_norm": (wide,), "attn_q_norm": (8,), "attn_k_norm": (8,)}
    held = {"token_embd": torch.randn(40, wide, generator=drawn), "output_norm": torch.ones(wide)}
    for layer in range(layers):
        for name, shape in (stacked | matrices | norms).items():
            held[f"blk.{layer}.{name}"] = torch.randn(shape, generator=drawn)
    for name, tensor in held.items():
        writer.add_tensor(f"{name}.weight", tensor.numpy())
    written(writer, tmp_path / "moe.gguf")
    weights = weights_of(tmp_path / "moe.gguf")
    assert read_config(tmp_path / "moe.gguf")[1].tied
    for layer, own in enumerate(weights.layers):
        assert own.mixture is not None
        of = {name: held[f"blk.{layer}.{name}"] for name in stacked | matrices}
        assert torch.equal(own.mixture.gate_up, torch.cat((of["ffn_gate_exps"], of["ffn_up_exps"]), dim=1))
        assert torch.equal(own.mixture.down, of["ffn_down_exps"])
        assert torch.equal(own.qkv, torch.cat([of[f"attn_{name}"] for name in "qkv"]))


def test_experts_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_one(tmp_path / "x.gguf", Type.F32, np.zeros((8, 1, 128), np.uint8), "blk.0.ffn_up_exps.weight")
    assert len(locate(path)) == 8
    monkeypatch.setattr(tensors, "MAX_TENSORS", 7)
    with pytest.raises(CheckpointError, match=r"x\.gguf has 'blk\.0\.ffn_up_exps\.weight' \[8, 1, 32\].*more than 7"):
        locate(path)


def test_the_chat_template_is_in_the_file(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] }}|{% endfor %}"
    path = rewritten(tmp_path / "x.gguf", Type.F32, **{"tokenizer.chat_template": template})
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    assert tokenizer.chat_template == template


@pytest.mark.parametrize("file", ["llada-f32", "dream-f16"])
def test_the_tokenizer_is_in_the_file(file: str) -> None:
    tokenizer = load_tokenizer(FILES / f"{file}.gguf")
    assert tokenizer is not None
    text = "ab 12 Grüße\n"
    tokens = tokenizer.encode(text)
    assert tokens == list(text.encode())  # the vocabulary is the bytes, in their order
    assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize(("file", "before"), [("dream-f16", [254]), ("llada-f32", [])])
def test_what_converters_say_of_every_llada_is_not_followed(tmp_path: Path, file: str, before: list[int]) -> None:
    changed = {
        "tokenizer.ggml.token_type": [1] * 254 + [3, 1],
        "tokenizer.ggml.bos_token_id": 254,
        "tokenizer.ggml.add_bos_token": True,
    }
    tokenizer = load_tokenizer(rewritten(tmp_path / "x.gguf", Type.F16, file, **changed))
    assert tokenizer is not None
    assert tokenizer.encode("xy") == [*before, *b"xy"]


def test_commands_take_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "model", str(FILES / "llada-q8_0.gguf")]) == 0
    assert "Q8_0" in capsys.readouterr().out
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + bytes(40))
    assert main(["inspect", "model", str(path)]) == 2
    assert f"{path} cannot be read as GGUF: its version is 0" in capsys.readouterr().err


def test_one_tensor_is_in_memory_at_a_time() -> None:
    path = FILES / "llada-q8_0.gguf"
    weights_of(path, quantization="int8")  # the first of a process tries kernels, which takes memory
    with LiveBytes() as live:
        weights = weights_of(path, quantization="int8")
    largest = 256 * 64 * 4
    assert live.peak <= weights.nbytes + 4 * largest


def test_the_fingerprint_is_of_contents(tmp_path: Path) -> None:
    path, config = FILES / "llada-q8_0.gguf", read_config(FILES / "llada-q8_0.gguf")[1]
    copy = tmp_path / "other.gguf"
    content = bytearray(path.read_bytes())
    copy.write_bytes(content)
    assert fingerprint(config, copy) == fingerprint(config, path)
    content[-1] ^= 1
    copy.write_bytes(content)
    assert fingerprint(config, copy) != fingerprint(config, path)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    content = bytearray((FILES / "llada-f32.gguf").read_bytes())
    at = read_header(FILES / "llada-f32.gguf").tensors["blk.0.attn_q.weight"].offset
    content[at : at + 4] = struct.pack("<f", float("nan"))
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_q\.weight'.*1 values of 4096 that are NaN"):
        weights_of(path)


def test_a_quantized_copy_is_not_written_of_a_file(tmp_path: Path) -> None:
    path = FILES / "llada-f32.gguf"
    family, config = read_config(path)
    with pytest.raises(ConfigError, match="takes a folder of safetensors"):
        save_quantized(path, family, config, "int8", tmp_path / "out")


def read_without_weights(path: Path) -> None:
    family, config = read_config(path)
    check_tensors(path, family, config, torch.float32)
    load_tokenizer(path)


def _swap(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(old, new, 1)


def _at(place: int, form: str, value: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:place] + struct.pack(form, value) + content[place + struct.calcsize(form) :]


def _number(key: str, value: int) -> Callable[[bytes], bytes]:
    """Another value of a key that holds a uint32."""

    def change(content: bytes) -> bytes:
        place = content.index(key.encode()) + len(key) + 4
        return _at(place, "<I", value)(content)

    return change


def _described(ahead: int, form: str, value: int) -> Callable[[bytes], bytes]:
    """Another number in the description of a matrix, so many bytes behind its name."""
    name = b"blk.0.attn_q.weight"
    return lambda content: _at(content.index(name) + len(name) + ahead, form, value)(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: b"", "not a GGUF file: it has 0 bytes"),
        (lambda _: b"{" * 4000, "begins with b'{{{{'"),
        (lambda content: content[:30], "truncated"),
        (lambda content: content[:4000], "truncated"),
        (lambda content: content[:-1], "ends at byte 1272704, and the file has 1272703"),
        (_at(4, "<I", 9), "version is 9"),
        (_at(4, ">I", 3), "big-endian"),
        (_at(8, "<Q", 2**63), "9223372036854775808 tensors"),
        (_at(16, "<Q", 2**40), "1099511627776 keys"),
        (_at(24, "<Q", 2**60), "the name of key 1 of 23 is 1152921504606846976 long; supported: at most 256"),
        (_swap(b"general.name", b"general.n\xff\xffe"), "not UTF-8"),
        (_number("llada.feed_forward_length", 96), r"header asks for \[96, 64\]"),
        (_swap(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"), r"'blk\.0\.attn_q\.weight' is there twice"),
        (_swap(b"blk.1.attn_q.weight", b"blk.9.attn_q.weight"), r"1 missing: blk\.1\.attn_q.*1 unexpected: blk\.9"),
        (_described(0, "<I", 9), "has 9 dimensions; supported: 1 to 4"),
        (_described(4, "<Q", 0), "is empty"),
        (_described(12, "<Q", 2**62), "of type F32 ends at byte 1180591"),
        (_described(20, "<I", 99), "the type number 99, which is unknown"),
        (_described(24, "<Q", 33), "is at offset 33; supported: multiples of the alignment 32"),
        (_described(24, "<Q", 2**40), "of type F32 ends at byte 10995"),
        (_swap(b"\x05\0\0\0\0\0\0\0llada", b"\x05\0\0\0\0\0\0\0llamo"), "'general.architecture' is \"llamo\""),
        (_swap(b"llada.block_count", b"llada.clock_count"), "the key 'llada.block_count' is missing"),
        (_swap(b"llada.rope.freq_base", b"llada.rope.freq_case"), "'llada.rope.freq_base' is missing"),
        (_number("llada.block_count", 2**31), "'llada.block_count' is 2147483648; supported: an integer"),
        (_number("llada.block_count", 3000), "describes 3000 layers"),
        (_number("llada.embedding_length", 128), "'llada.rope.dimension_count' is 16; supported: 32"),
        (_number("llada.attention.head_count", 7), "a divisor"),
        (_number("llada.attention.head_count_kv", 3), "a divisor of the 4"),
        (_number("tokenizer.ggml.mask_token_id", 256), "'tokenizer.ggml.mask_token_id' is 256"),
        (_swap(b"\x04\0\0\0\0\0\0\0gpt2", b"\x04\0\0\0\0\0\0\0spm2"), "'tokenizer.ggml.model' is \"spm2\""),
        (_swap(b"\x05\0\0\0\0\0\0\0gpt-2", b"\x05\0\0\0\0\0\0\0gpt-9"), "'tokenizer.ggml.pre' is \"gpt-9\""),
    ],
)  # fmt: skip
def test_damage_is_told_in_a_sentence(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(change((FILES / "llada-f32.gguf").read_bytes()))
    with pytest.raises(CheckpointError, match=f"(?s){message}") as caught:
        read_without_weights(path)
    assert str(path) in str(caught.value)


def with_tokens(target: Path, tokens: list[str], kinds: list[int]) -> Path:
    """A file of a tokenizer alone."""
    writer = gguf.GGUFWriter(target, "dream")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])  # the writer leaves out empty lists
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    ("tokens", "kind", "message"),
    [
        (["a", "a"], 1, "holds 'a' twice; each token has one id"),
        (["a" * 513], 1, "holds a token of 513 characters; supported: at most 512"),
        (["a" * 129, "b"], 3, "calls 2 tokens control or user-defined ones, of up to 129 characters"),
        ([f"t{number}" for number in range(8193)], 4, "calls 8193 tokens control"),
    ],
)
def test_tokens_without_bounds_are_refused(tmp_path: Path, tokens: list[str], kind: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"x\.gguf: .* {message}"):
        load_tokenizer(with_tokens(tmp_path / "x.gguf", tokens, [kind] * len(tokens)))


def test_long_tokens_load(tmp_path: Path) -> None:
    special = [("a" * number) for number in range(2, 129)]
    tokenizer = load_tokenizer(with_tokens(tmp_path / "x.gguf", ["b", *special], [1] + [3] * len(special)))
    assert tokenizer is not None
    assert tokenizer.encode("a" * 128 + "b") == [127, 0]


def test_a_header_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_HEADER", 5000)
    with pytest.raises(CheckpointError, match="description of tensor 10 of 57 reaches beyond byte 5000"):
        read_header(Path(shutil.copy(FILES / "llada-f32.gguf", tmp_path / "x.gguf")))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.tuples(st.integers(0, 3), st.integers(0, 3)), content=st.binary(max_size=200))
def test_random_headers_are_refused(tmp_path: Path, counts: tuple[int, int], content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + content)
    with pytest.raises(CheckpointError, match=r"x\.gguf"):
        read_without_weights(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(st.tuples(st.integers(0, 6700), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_bytes_of_a_header_load_or_are_refused(tmp_path: Path, places: list[tuple[int, int]]) -> None:
    content = bytearray((FILES / "llada_gqa-f16.gguf").read_bytes())
    for place, value in places:
        content[place] = value
    path = tmp_path / "x.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    told = str(path)
    try:
        read_without_weights(path)
    except CheckpointError as error:
        told = str(error)
    assert str(path) in told
