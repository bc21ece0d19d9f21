import math
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from remask.checkpoint import load
from remask.checkpoint.load import load_weights, read_config
from remask.errors import CheckpointError
from remask.machine import progress
from tests.checkpoint.checkpoints import DREAM, GIDD, LLADA, SDAR, random_tensors, weights_of, write

CPU = torch.device("cpu")


_LLAMA = {
    "attn_norm": ["input_layernorm.weight"],
    "qkv": [f"self_attn.{name}_proj.weight" for name in "qkv"],
    "out": ["self_attn.o_proj.weight"],
    "ffn_norm": ["post_attention_layernorm.weight"],
    "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "down": ["mlp.down_proj.weight"],
}
_NORMS = {"q_norm": ["self_attn.q_norm.weight"], "k_norm": ["self_attn.k_norm.weight"]}
# A configuration, the names of embedding, norm and output matrix, the beginning of a layer's, and those by field.
PLACES: dict[str, tuple[dict[str, Any], tuple[str, str, str], str, dict[str, list[str]]]] = {
    "llada": (
        LLADA,
        ("model.transformer.wte", "model.transformer.ln_f", "model.transformer.ff_out"),
        "model.transformer.blocks.{}.",
        {
            "attn_norm": ["attn_norm.weight"],
            "qkv": ["q_proj.weight", "k_proj.weight", "v_proj.weight"],
            "out": ["attn_out.weight"],
            "ffn_norm": ["ff_norm.weight"],
            "gate_up": ["ff_proj.weight", "up_proj.weight"],
            "down": ["ff_out.weight"],
        },
    ),
    "dream": (
        DREAM,
        ("model.embed_tokens", "model.norm", "lm_head"),
        "model.layers.{}.",
        _LLAMA | {"qkv_bias": [f"self_attn.{name}_proj.bias" for name in "qkv"]},
    ),
    "sdar": (SDAR, ("model.embed_tokens", "model.norm", "lm_head"), "model.layers.{}.", _LLAMA | _NORMS),
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", PLACES)
def test_tensors_arrive_in_their_places(tmp_path: Path, name: str, shards: int) -> None:
    raw, (embed, norm, head), stem, places = PLACES[name]
    held = random_tensors(raw)
    weights = weights_of(write(tmp_path, raw, held, shards=shards))
    assert torch.equal(weights.embed, held[f"{embed}.weight"])
    assert torch.equal(weights.norm, held[f"{norm}.weight"])
    assert torch.equal(weights.head, held[f"{head}.weight"])
    for number, layer in enumerate(weights.layers):
        assert layer.named_tensors().keys() == places.keys()
        for field, names in places.items():
            expected = torch.cat([held[stem.format(number) + each] for each in names])
            assert torch.equal(getattr(layer, field), expected), field


@pytest.mark.parametrize(
    ("stored", "asked"),
    [(torch.float16, torch.float32), (torch.float32, torch.bfloat16), (torch.float64, torch.float16)],
)
def test_types_are_converted_on_the_way(tmp_path: Path, stored: torch.dtype, asked: torch.dtype) -> None:
    held = {name: tensor.to(stored) for name, tensor in random_tensors(LLADA).items()}
    weights = weights_of(write(tmp_path, LLADA, held), asked)
    assert {tensor.dtype for tensor in weights.tensors()} == {asked}
    assert torch.equal(weights.embed, held["model.transformer.wte.weight"].to(asked))


def test_a_tied_head_is_not_in_the_file_or_is_ignored(tmp_path: Path) -> None:
    tied = LLADA | {"weight_tying": True}
    without = weights_of(write(tmp_path / "without", tied, random_tensors(LLADA | {"weight_tying": True})))
    copied = weights_of(write(tmp_path / "copied", tied, random_tensors(LLADA)))
    assert without.head is without.embed
    assert copied.head is copied.embed
    with pytest.raises(CheckpointError, match=r"1 missing: model\.transformer\.ff_out\.weight \[40, 16\]"):
        weights_of(write(tmp_path / "untied", LLADA, random_tensors(LLADA | {"weight_tying": True})))


def test_all_that_does_not_fit_is_listed_before_any_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = random_tensors(LLADA)
    del held["model.transformer.ln_f.weight"]
    del held["model.transformer.blocks.1.q_proj.weight"]
    held["model.transformer.blocks.2.q_proj.weight"] = torch.zeros(3)
    held["model.transformer.wte.weight"] = torch.zeros(41, 16)
    held["model.transformer.blocks.0.attn_norm.weight"] = torch.zeros(16, dtype=torch.int8)
    folder = write(tmp_path, LLADA, held, shards=2)
    monkeypatch.setattr(load, "empty_weights", lambda *_: pytest.fail("memory was taken before the check"))
    with pytest.raises(CheckpointError) as caught:
        weights_of(folder)
    for line in (
        "2 missing: model.transformer.ln_f.weight [16]; model.transformer.blocks.1.q_proj.weight [16, 16]\n",
        "1 unexpected: model.transformer.blocks.2.q_proj.weight [3]\n",
        "1 misshapen: model.transformer.wte.weight is [41, 16], config.json asks for [40, 16]\n",
        "1 of a type other than F64, F32, F16, BF16: model.transformer.blocks.0.attn_norm.weight is I8\n",
    ):
        assert line in str(caught.value)


def test_long_lists_are_cut_with_a_count(tmp_path: Path) -> None:
    held = random_tensors(LLADA) | {f"extra.{number}": torch.zeros(1) for number in range(50)}
    with pytest.raises(CheckpointError, match=r"50 unexpected: extra.*; and 30 more"):
        weights_of(write(tmp_path, LLADA, held))


@pytest.mark.parametrize("keep", [0, 5, 200, -7])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    folder = write(tmp_path, LLADA, random_tensors(LLADA), shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors cannot be read.*truncated"):
        weights_of(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, LLADA, random_tensors(LLADA), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names 1 of 3 shards.*model-00002-of-00003\.safetensors"):
        weights_of(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "JSON list where an object is expected"),
        ("{}", "'weight_map' must be an object"),
        ('{"weight_map": {"a": 1}}', "'weight_map' must be an object"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "outside its folder: '../secret.safetensors'"),
    ],
)
def test_a_malformed_index_is_named(tmp_path: Path, index: str, message: str) -> None:
    folder = write(tmp_path, LLADA, random_tensors(LLADA), shards=2)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json") as caught:
        weights_of(folder)
    assert message in str(caught.value)


def test_a_folder_without_safetensors_says_what_is_there(tmp_path: Path) -> None:
    folder = write(tmp_path, LLADA, random_tensors(LLADA))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"weight files there: pytorch_model\.bin.*safe_serialization"):
        weights_of(folder)


class _Watch:
    """Opens files for `load` and counts how many of the tensors that they hand out are alive at once."""

    def __init__(self) -> None:
        self.alive = self.most = self.reads = 0

    def __call__(self, file: Path, **_: object) -> "_Watch":
        self._held = load_file(file)
        return self

    def __enter__(self) -> "_Watch":
        return self

    def __exit__(self, *_: object) -> None:
        del self._held

    def get_tensor(self, name: str) -> Tensor:
        tensor = self._held[name].clone()
        self.reads += 1
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor, self._freed)
        return tensor

    def _freed(self) -> None:
        self.alive -= 1


def test_one_tensor_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = _Watch()
    monkeypatch.setattr("remask.checkpoint.load.open_weight_file", watch)
    held = random_tensors(LLADA)
    weights = weights_of(write(tmp_path, LLADA, held, shards=2))
    assert torch.equal(weights.embed, held["model.transformer.wte.weight"])
    assert (watch.reads, watch.most, watch.alive) == (len(held), 1, 0)


# In a process of its own, whose memory nothing else moves. Measured while each file is still open, and not by the
# operating system's high-water mark, which the import of torch has raised before.
_PEAK = """
import os, sys, torch
from contextlib import contextmanager
from pathlib import Path
from remask.checkpoint import load
def resident(): return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
seen = []
opened = load.open_weight_file
@contextmanager
def watched(*args, **kwargs):
    with opened(*args, **kwargs) as file:
        yield file
        seen.append(resident())
load.open_weight_file = watched
folder = Path(sys.argv[1])
family, config = load.read_config(folder)
before = resident()
weights = load.load_weights(folder, family, config, torch.float32, torch.device("cpu"), progress=False)
print(weights.nbytes, max(seen) - before)
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: reads /proc")
def test_the_peak_of_memory_is_one_model(tmp_path: Path) -> None:
    wide, inner = 1024, 4096
    config = LLADA | {"d_model": wide, "n_heads": 16, "n_kv_heads": 16, "mlp_hidden_size": inner}
    shapes = {"q_proj": (wide, wide), "k_proj": (wide, wide), "v_proj": (wide, wide), "attn_out": (wide, wide)}
    shapes |= {"ff_proj": (inner, wide), "up_proj": (inner, wide), "ff_out": (wide, inner)}
    held = {f"model.transformer.blocks.{i}.{name}.weight": torch.ones(shapes[name]) for i in (0, 1) for name in shapes}
    held |= {f"model.transformer.blocks.{i}.{n}_norm.weight": torch.ones(wide) for i in (0, 1) for n in ("attn", "ff")}
    held |= {f"model.transformer.{name}.weight": torch.ones(40, wide) for name in ("wte", "ff_out")}
    held["model.transformer.ln_f.weight"] = torch.ones(wide)
    folder = write(tmp_path, config, held)
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(folder)], capture_output=True, text=True, check=True, timeout=120
    )
    model, grown = map(int, done.stdout.split())
    assert model > 128e6
    # One model and its largest tensor (17 MB), where a second copy would make it two.
    assert 0.5 * model < grown < 1.4 * model


def test_progress_goes_to_stderr_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0)
    monkeypatch.setattr(load, "_MAX_MAPPED_BYTES", 1)
    folder = write(tmp_path, LLADA, random_tensors(LLADA))
    family, config = read_config(folder)
    load_weights(folder, family, config, torch.float32, CPU, progress=False)
    assert capsys.readouterr() == ("", "")
    load_weights(folder, family, config, torch.float32, CPU)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"(loading weights: \d+ %, 0 s\n)+", err)


@pytest.mark.parametrize("scaling", ["fan_in", "fan_out", 0.3])
@pytest.mark.parametrize("tied", [False, True])
def test_gidds_constant_factors_are_taken_into_the_weights(tmp_path: Path, tied: bool, scaling: str | float) -> None:
    raw = GIDD | {"weight_scaling": scaling, "tie_word_embeddings": tied, "resid_scale": 3.0, "intermediate_size": 24}
    held = random_tensors(raw)
    weights = weights_of(write(tmp_path, raw, held))

    def linear(name: str) -> Tensor:
        tensor = held[f"{name}.weight"]
        inputs, outputs = tensor.shape[1], tensor.shape[0]
        return tensor * {"fan_in": 1 / math.sqrt(inputs), "fan_out": 1 / math.sqrt(outputs), 0.3: 0.3}[scaling]

    residual = 3.0 / 2
    assert torch.equal(weights.embed, held["model.embed_tokens.weight"])
    assert torch.equal(weights.norm, 1 + held["model.norm.weight"])
    head = weights.embed if tied else held["lm_head.weight"] * 0.5
    assert torch.equal(weights.head, head)
    for number, layer in enumerate(weights.layers):
        stem = f"model.layers.{number}."
        expected = {
            "attn_norm": 1 + held[f"{stem}attn_layernorm.weight"],
            "ffn_norm": 1 + held[f"{stem}mlp_layernorm.weight"],
            "q_norm": 1 + held[f"{stem}self_attn.q_norm.weight"],
            "k_norm": 1 + held[f"{stem}self_attn.k_norm.weight"],
            "sink_k": held[f"{stem}self_attn.k_bias"],
            "sink_v": held[f"{stem}self_attn.v_bias"],
            "qkv": torch.cat([linear(f"{stem}self_attn.{name}_proj") for name in "qkv"]),
            "out": linear(f"{stem}self_attn.o_proj") * residual,
            "gate_up": linear(f"{stem}mlp.up_proj"),
            "up_bias": held[f"{stem}mlp.up_proj.bias"],
            "down": linear(f"{stem}mlp.down_proj") * residual,
            "down_bias": held[f"{stem}mlp.down_proj.bias"] * residual,
        }
        assert layer.qkv_bias is None
        for field, tensor in expected.items():
            torch.testing.assert_close(getattr(layer, field), tensor)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_names_its_tensor(
    tmp_path: Path, stored: torch.dtype, asked: torch.dtype, value: float
) -> None:
    held = {name: tensor.to(stored) for name, tensor in random_tensors(LLADA).items()}
    name = "model.transformer.blocks.1.up_proj.weight"
    held[name].view(-1)[held[name].numel() - 1] = value
    with pytest.raises(
        CheckpointError, match=rf"The tensor '{name}' in .*safetensors holds 1 values of 384 that are NaN"
    ):
        weights_of(write(tmp_path, LLADA, held), asked)


def test_the_check_can_be_left_out(tmp_path: Path) -> None:
    held = random_tensors(LLADA)
    held["model.transformer.ln_f.weight"][3] = math.nan
    folder = write(tmp_path, LLADA, held)
    with pytest.raises(CheckpointError, match=r"'model\.transformer\.ln_f\.weight'.*--skip-weight-check"):
        weights_of(folder)
    family, config = read_config(folder)
    weights = load_weights(folder, family, config, torch.float32, CPU, progress=False, check=False)
    assert weights.norm.isnan().tolist() == [place == 3 for place in range(16)]


def test_finite_values_that_the_asked_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    held = random_tensors(LLADA)
    held["model.transformer.wte.weight"][5, 7] = -1e6
    folder = write(tmp_path, LLADA, held)
    assert weights_of(folder, torch.bfloat16).embed[5, 7] == torch.tensor(-1e6).bfloat16()
    with pytest.raises(
        CheckpointError, match=r"wte.*become infinite as float16; the largest is 1e\+06.*--dtype bfloat16"
    ):
        weights_of(folder, torch.float16)


def test_the_largest_finite_values_load(tmp_path: Path) -> None:
    held = random_tensors(LLADA)
    most = torch.finfo(torch.float32).max
    held["model.transformer.wte.weight"][0, :2] = torch.tensor([most, -most])
    assert weights_of(write(tmp_path, LLADA, held)).embed[0, :2].tolist() == [most, -most]


def test_the_check_takes_no_memory_of_the_size_of_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "isfinite", _small(torch.isfinite))
    weights_of(write(tmp_path, LLADA, random_tensors(LLADA)))


def _small(function: Any) -> Any:
    def called(tensor: Tensor) -> Tensor:
        assert tensor.numel() == 1
        found: Tensor = function(tensor)
        return found

    return called


@pytest.mark.parametrize("layers", [22, 4096])
def test_more_layers_than_tensors_are_refused_without_listing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    folder = write(tmp_path, LLADA | {"n_layers": layers}, random_tensors(LLADA))
    family, config = read_config(folder)
    monkeypatch.setattr(type(family), "tensors", lambda *_: pytest.fail("the tensors were listed"))
    with pytest.raises(
        CheckpointError, match=rf"describes {layers} layers, and its files list 21 tensors in all"
    ) as caught:
        load_weights(folder, family, config, torch.bfloat16, CPU, progress=False)
    assert "Its weights need " in str(caught.value)
    assert " as bfloat16; the tensors in the files need 10.4 kB." in str(caught.value)


def test_the_memory_that_is_asked_for_stands_beside_the_list(tmp_path: Path) -> None:
    folder = write(tmp_path, LLADA | {"mlp_hidden_size": 2**20}, random_tensors(LLADA))
    with pytest.raises(CheckpointError, match=r"misshapen.*\nIts weights need 402\.7 MB as float32; .* need 20\.8 kB"):
        weights_of(folder)
