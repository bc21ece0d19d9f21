import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from remask.checkpoint.adapter import WEIGHTS, read_adapter
from remask.checkpoint.load import read_config
from remask.checkpoint.loaded import LoadedModel, find_model
from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.source import ADAPTER_CONFIG as CONFIG
from remask.checks import Quantization
from remask.cli.inspect import inspect_model
from remask.errors import CheckpointError, ConfigError
from remask.families import preset
from remask.families.llada import LLADA as LLADA_FAMILY
from remask.model.ranks import Shard
from tests import goldens
from tests.checkpoint import checkpoints
from tests.checkpoint.adapters import RANK, adapted, base_and_adapted
from tests.checkpoint.checkpoints import DREAM, GIDD, LLADA, LLADA_MOE, SDAR, random_tensors, write

CPU = torch.device("cpu")
LLAMA_LIKE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    # On LLaDA `ff_out` is the last matrix of each layer, and the output matrix.
    "llada": (LLADA, ["q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out"]),
    "dream": (DREAM, LLAMA_LIKE),
    "sdar": (SDAR, LLAMA_LIKE),
    "illada": (checkpoints.ILLADA, LLAMA_LIKE),
    "a2d": (checkpoints.A2D, LLAMA_LIKE),
    "nemotron-labs-diffusion": (checkpoints.NEMOTRON, LLAMA_LIKE),
    "fast-dllm-v2": (checkpoints.FAST_DLLM_V2, LLAMA_LIKE),
    "gidd": (GIDD, ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]),
    "gidd-fan": (GIDD | {"weight_scaling": "fan_in"}, ["k_proj", "down_proj"]),
    "llada-moe": (LLADA_MOE, ["q_proj", "o_proj"]),
}


def loaded(
    folder: Path, adapter: Path | None = None, kind: Quantization | None = None, dtype: torch.dtype = torch.float32
) -> LoadedModel:
    found = find_model(ModelSettings(str(folder), adapter=None if adapter is None else str(adapter)))
    return found.load(dtype, CPU, quantization=kind)


def assert_same(one: LoadedModel, other: LoadedModel, tolerance: float = 2e-6) -> None:
    for (name, layer, got), (_, _, wanted) in zip(
        one.weights.named_tensors(), other.weights.named_tensors(), strict=True
    ):
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=1e-5, msg=f"{name} of layer {layer}")


@pytest.mark.parametrize("name", MODELS)
def test_merged_weights_are_those_of_peft(tmp_path: Path, name: str) -> None:
    raw, targets = MODELS[name]
    base, adapter, merged = base_and_adapted(tmp_path, raw, target_modules=targets)
    got = loaded(base, adapter)
    assert_same(got, loaded(merged))
    changed = [
        not torch.equal(a, b)
        for (*_, a), (*_, b) in zip(got.weights.named_tensors(), loaded(base).weights.named_tensors(), strict=True)
    ]
    assert sum(changed) >= len(got.weights.layers)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj"], "use_rslora": True},
        {"target_modules": r".*\.(0|1)\.self_attn\.[qk]_proj"},
        {"target_modules": ["v_proj"], "layers_to_transform": [1]},
        {"target_modules": ["v_proj", "o_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
        {"target_modules": LLAMA_LIKE, "exclude_modules": ["down_proj", "model.layers.0.self_attn.q_proj"]},
        {"target_modules": LLAMA_LIKE, "exclude_modules": r".*up_proj"},
        {"target_modules": LLAMA_LIKE, "rank_pattern": {"q_proj": 5, r"layers\.1\.mlp\.up_proj": 1}},
        {
            "target_modules": LLAMA_LIKE,
            "alpha_pattern": {"k_proj": 1, "layers.0.mlp.down_proj": 24},
            "use_rslora": True,
        },
        {"target_modules": LLAMA_LIKE, "fan_in_fan_out": False, "lora_dropout": 0.1},
        {"target_modules": ["model.layers.1.mlp.up_proj"], "ahead": "model."},
        {"target_modules": LLAMA_LIKE, "ahead": "model."},
        {"target_modules": ["q_proj", "lm_head"]},
    ],
)
def test_every_setting_means_what_it_means_to_peft(tmp_path: Path, settings: dict[str, Any]) -> None:
    if settings.get("target_modules") == ["model.layers.1.mlp.up_proj"]:
        settings = settings | {"target_modules": ["layers.1.mlp.up_proj"]}
    base, adapter, merged = base_and_adapted(tmp_path, DREAM, **settings)
    assert_same(loaded(base, adapter), loaded(merged))


def test_the_models_own_output_matrix_beside_its_factors_is_left_alone(tmp_path: Path) -> None:
    """PEFT saves it by default."""
    base, adapter, merged = base_and_adapted(tmp_path, DREAM, target_modules=["q_proj", "lm_head"])
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("lm_head.lora_A.weight"))
    own = {name.replace("lora_A.weight", f"base_layer.{kind}"): torch.ones(3) for kind in ("weight", "bias")}
    save_file(tensors | own, file)
    assert_same(loaded(base, adapter), loaded(merged))


def test_all_linear_as_a_word_is_every_matrix_but_the_output(tmp_path: Path) -> None:
    base, adapter, merged = base_and_adapted(tmp_path, DREAM, target_modules=LLAMA_LIKE)
    _edit(adapter, target_modules="all-linear")
    assert_same(loaded(base, adapter), loaded(merged))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_it_is_merged_before_weights_are_quantized(tmp_path: Path, kind: Quantization) -> None:
    wide = DREAM | {"hidden_size": 64, "intermediate_size": 96}
    base, adapter, merged = base_and_adapted(tmp_path, wide, target_modules=LLAMA_LIKE)
    x = torch.randn(5, 64)
    ours, theirs = loaded(base, adapter, kind), loaded(merged, kind=kind)
    for own, other in zip(ours.weights.layers, theirs.weights.layers, strict=True):
        got, wanted = (torch.nn.functional.linear(x, layer.qkv) for layer in (own, other))
        torch.testing.assert_close(got, wanted, atol=0.02, rtol=0)


def test_it_is_merged_in_float32_and_then_rounded_once(tmp_path: Path) -> None:
    base, adapter, merged = base_and_adapted(tmp_path, DREAM, target_modules=LLAMA_LIKE)
    ours, theirs = loaded(base, adapter, dtype=torch.bfloat16), loaded(merged, dtype=torch.bfloat16)
    assert_same(ours, theirs, tolerance=2**-7)
    close = [
        torch.equal(a, b)
        for (*_, a), (*_, b) in zip(ours.weights.named_tensors(), theirs.weights.named_tensors(), strict=True)
    ]
    assert sum(close) > len(close) // 2  # but for what is about halfway between two numbers


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_merges_its_part(tmp_path: Path, rank: int) -> None:
    base, adapter, merged = base_and_adapted(tmp_path, LLADA, target_modules=MODELS["llada"][1])
    whole = find_model(ModelSettings(str(merged)))
    own = find_model(ModelSettings(str(base), adapter=str(adapter)))
    ours, theirs = (each.load(torch.float32, CPU, shard=Shard(rank, 2)) for each in (own, whole))
    assert_same(ours, theirs)


@pytest.mark.parametrize("file", ["llada-f32.gguf", "llada-q8_0.gguf", "dream-f16.gguf"])
def test_a_gguf_file_takes_the_adapter_of_its_model(tmp_path: Path, file: str) -> None:
    name = file.partition("-")[0]
    folder, base = goldens.model_dir(name), goldens.ROOT / "gguf" / file
    targets = MODELS[name][1][:6]
    adapted(tmp_path, load_file(folder / "model.safetensors"), target_modules=targets)
    plain, merged = loaded(base), loaded(base, tmp_path)
    wanted = loaded(folder, tmp_path), loaded(folder)
    for rows in zip(
        plain.weights.layers, merged.weights.layers, *(each.weights.layers for each in wanted), strict=True
    ):
        for field in ("qkv", "out", "gate_up"):
            before, after, also, without = (getattr(layer, field) for layer in rows)
            torch.testing.assert_close(after - before, also - without, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("file", ["llada-q8_0.gguf", "dream-f16.gguf"])
def test_beside_a_gguf_file_it_is_what_it_is_beside_the_folder(tmp_path: Path, file: str) -> None:
    name = file.partition("-")[0]
    folder = goldens.model_dir(name)
    adapted(tmp_path, load_file(folder / "model.safetensors"), target_modules=MODELS[name][1][:6])
    found = (
        find_model(ModelSettings(str(base), adapters={"a": str(tmp_path)}))
        for base in (goldens.ROOT / "gguf" / file, folder)
    )
    ours, theirs = (each.load(torch.float32, CPU, quantization="int8").weights for each in found)
    for own, other in zip(ours.layers, theirs.layers, strict=True):
        assert own.low_rank.keys() == other.low_rank.keys() >= {"qkv", "out", "gate_up"}
        for field, changes in own.low_rank.items():
            assert torch.equal(changes["a"].dense(), other.low_rank[field]["a"].dense())
            assert changes["a"].dense().abs().max() > 0


def test_random_weights_of_a_preset_take_adapters_beside_them(tmp_path: Path) -> None:
    shapes = ((slot.name, slot.shape) for slot in LLADA_FAMILY.tensors(preset("llada-tiny")))
    adapted(tmp_path, {name: torch.zeros(shape) for name, shape in shapes}, target_modules=["attn_out"])
    found = find_model(ModelSettings("llada-tiny", load_format="dummy", adapters={"a": str(tmp_path)}))
    loaded = found.load(torch.float32, CPU)
    assert loaded.weights.adapters == {"a"}
    assert [list(layer.low_rank) for layer in loaded.weights.layers] == [["out"]] * 2


def test_the_fingerprint_is_that_of_another_model(tmp_path: Path) -> None:
    base, adapter, merged = base_and_adapted(tmp_path, DREAM, target_modules=LLAMA_LIKE)
    adapted(tmp_path / "second", random_tensors(DREAM), 1, target_modules=LLAMA_LIKE)
    copy = Path(shutil.copytree(adapter, tmp_path / "copy"))
    plain, one, again = loaded(base), loaded(base, adapter), loaded(base, copy)
    names = {plain.fingerprint, one.fingerprint, loaded(base, tmp_path / "second").fingerprint}
    assert len(names | {loaded(merged).fingerprint}) == 4
    assert again.fingerprint == one.fingerprint
    assert loaded(base, adapter, "int8").fingerprint == f"{one.fingerprint}-int8"
    _edit(copy, lora_alpha=6)
    assert loaded(base, copy).fingerprint != one.fingerprint


def test_inspect_names_it(tmp_path: Path) -> None:
    base, adapter, _ = base_and_adapted(tmp_path, DREAM, target_modules=["q_proj", "v_proj"])
    report = inspect_model(str(base), adapter=str(adapter))
    assert report.adapter is not None
    count = 2 * (RANK * (16 + 16) + RANK * (16 + 8))
    assert (report.adapter.rank, report.adapter.alpha, report.adapter.parameters) == (RANK, 5, count)
    assert "rank 3, alpha 5, 336 parameters for 4 matrices (q_proj, v_proj)" in report.text()


def _edit(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in (raw | changes).items() if value != "gone"}))


def _tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def _with(value: float) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[next(iter(tensors))][0, 0] = value
        return tensors

    return change


def _renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda at: (at / CONFIG).unlink(), f"{CONFIG} does not exist"),
    "config cut": (lambda at: (at / CONFIG).write_text('{"r": 3,'), f"{CONFIG} is not valid JSON"),
    "no weights": (lambda at: (at / WEIGHTS).unlink(), f"{WEIGHTS} does not exist"),
    "truncated": (lambda at: (at / WEIGHTS).write_bytes((at / WEIGHTS).read_bytes()[:-9]), f"{WEIGHTS} cannot be read"),
    "empty": (lambda at: (at / WEIGHTS).write_bytes(b""), f"{WEIGHTS} cannot be read"),
    "other method": (lambda at: _edit(at, peft_type="IA3"), r"'peft_type' is \"IA3\"; supported: \"LORA\""),
    "no method": (lambda at: _edit(at, peft_type="gone"), "the key 'peft_type' is missing"),
    "rank 0": (lambda at: _edit(at, r=0), "'r' is 0; supported: an integer from 1"),
    "other rank": (lambda at: _edit(at, r=4), r"are \[3, 16\] and \[16, 3\].* takes \[4, 16\] and \[16, 4\]"),
    "rank pattern 0": (lambda at: _edit(at, rank_pattern={"q_proj": 0}), "'rank_pattern' is"),
    "bad pattern": (lambda at: _edit(at, alpha_pattern={"q_(": 1}), "'alpha_pattern' is .*a regular expression"),
    "flags in a pattern": (lambda at: _edit(at, rank_pattern={"(?i)q": 1}), "'rank_pattern' is .*a regular expression"),
    "alpha": (lambda at: _edit(at, lora_alpha=math.inf), "'lora_alpha' is Infinity"),
    "dora": (lambda at: _edit(at, use_dora=True), "'use_dora' is true; supported: null or false"),
    "saved modules": (lambda at: _edit(at, modules_to_save=["lm_head"]), r"'modules_to_save' is \[\"lm_head\"\]"),
    "bias": (lambda at: _edit(at, bias="all"), '\'bias\' is "all"; supported: "none"'),
    "bias of lora": (lambda at: _edit(at, lora_bias=True), "'lora_bias' is true"),
    "replication": (lambda at: _edit(at, layer_replication=[[0, 2]]), "'layer_replication' is"),
    "tokens": (lambda at: _edit(at, trainable_token_indices=[1]), "'trainable_token_indices' is"),
    "pissa": (lambda at: _edit(at, init_lora_weights="pissa"), "'init_lora_weights' is \"pissa\""),
    "unknown key": (lambda at: _edit(at, use_novelty=True), "'use_novelty' is true"),
    "no targets": (lambda at: _edit(at, target_modules=None), "'target_modules' is missing"),
    "bad targets": (lambda at: _edit(at, target_modules=[1]), "'target_modules' is"),
    "bad expression": (lambda at: _edit(at, target_modules="q_(proj"), "'target_modules' is .*a regular expression"),
    "an expression of too large a number": (
        lambda at: _edit(at, target_modules="q_proj{99999999999999999999}"),
        "'target_modules' is .*a regular expression",
    ),
    "an expression of too many groups": (
        lambda at: _edit(at, target_modules="(" * 5000 + ")" * 5000),
        "'target_modules' is .*a regular expression",
    ),
    "unknown target": (lambda at: _edit(at, target_modules=["q_proj", "wqkv"]), "names 'wqkv', which fits no matrix"),
    "bad layers pattern": (
        lambda at: _edit(at, layers_pattern=["(?i)h"]),
        "'layers_pattern' is .*a regular expression",
    ),
    "layers": (lambda at: _edit(at, layers_to_transform="1"), "'layers_to_transform' is"),
    "a layer beside an expression": (
        lambda at: _edit(at, layers_to_transform=0, target_modules=".*q_proj"),
        "'layers_to_transform' is 0; supported: null beside",
    ),
    "no such layer": (lambda at: _edit(at, layers_to_transform=[7]), "fits no matrix"),
    "fewer layers": (lambda at: _edit(at, layers_to_transform=[0]), "has factors for .*leave out"),
    "more targets": (lambda at: _edit(at, target_modules=["q_proj", "k_proj"]), "lacks factors for .*k_proj"),
    "the embedding": (lambda at: _edit(at, target_modules=["q_proj", "embed_tokens"]), "the embedding of the model"),
    "NaN": (lambda at: _tensors(at, _with(math.nan)), "holds 1 values of .* NaN or infinite"),
    "other names": (lambda at: _tensors(at, _renamed("q_proj", "query")), "has factors for .*query.* does not have"),
    "magnitudes": (
        lambda at: _tensors(at, _renamed("lora_B.weight", "lora_magnitude_vector")),
        "holds .*lora_magnitude_vector'; supported",
    ),
    "two names": (
        lambda at: _tensors(
            at,
            lambda tensors: (
                tensors | {name.removeprefix("base_model.model."): tensor.clone() for name, tensor in tensors.items()}
            ),
        ),
        r"under two names, '(base_model\.model\.)?(model\..*q_proj)' and '(base_model\.model\.)?\2': keep",
    ),
    "no tensors": (lambda at: _tensors(at, lambda _: {}), "holds no factors"),
    "one factor": (
        lambda at: _tensors(at, lambda tensors: dict(list(tensors.items())[:-1])),
        "only one of the factors A and B of",
    ),
    "integers": (
        lambda at: _tensors(at, lambda tensors: {name: tensor.int() for name, tensor in tensors.items()}),
        "is I32; supported: F64, F32",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_adapter_ends_in_one_sentence(tmp_path: Path, fault: str) -> None:
    spoil, message = FAULTS[fault]
    base, adapter, _ = base_and_adapted(tmp_path, DREAM, target_modules=["q_proj"])
    spoil(adapter)
    with pytest.raises(CheckpointError, match=message) as raised:
        loaded(base, adapter)
    assert str(raised.value).startswith(f"The adapter {str(adapter)!r} cannot be used. ")
    assert "\n" not in str(raised.value)


def test_an_adapter_of_another_base_names_both_shapes(tmp_path: Path) -> None:
    _, adapter, _ = base_and_adapted(tmp_path / "wide", DREAM | {"hidden_size": 32}, target_modules=["q_proj"])
    _edit(adapter, base_model_name_or_path="Dream-org/Dream-v0-Instruct-7B")
    base = write(tmp_path / "base", DREAM, random_tensors(DREAM))
    with pytest.raises(
        CheckpointError, match=r"\[3, 32\] and \[32, 3\], and a matrix \[16, 16\].*Dream-v0-Instruct-7B"
    ):
        loaded(base, adapter)


@pytest.mark.parametrize("target", ["gate", "shared_expert.gate_proj", "experts.1.up_proj"])
def test_experts_and_routers_are_refused(tmp_path: Path, target: str) -> None:
    tensors = random_tensors(LLADA_MOE)
    names = [name for name in tensors if name.endswith(f"{target}.weight")]
    if not names:
        pytest.fail(f"no matrix {target}")
    adapted(tmp_path / "adapter", tensors, target_modules=[target])
    base = write(tmp_path / "base", LLADA_MOE, tensors)
    if "shared" in target:
        loaded(base, tmp_path / "adapter")
        return
    with pytest.raises(CheckpointError, match=r"an expert|the router"):
        loaded(base, tmp_path / "adapter")


def test_an_embedding_that_peft_has_changed_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(DREAM)
    adapted(tmp_path / "adapter", tensors, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(CheckpointError, match=r"holds .*lora_embedding_A"):
        loaded(write(tmp_path / "base", DREAM, tensors), tmp_path / "adapter")


def test_a_tied_output_matrix_is_not_changed(tmp_path: Path) -> None:
    tied = LLADA | {"weight_tying": True}
    tensors = random_tensors(LLADA)
    adapted(tmp_path, tensors, target_modules=["ff_out"])
    with pytest.raises(CheckpointError, match=r"'model\.transformer\.ff_out', which this llada model does not have"):
        read_adapter(str(tmp_path), read_config(write(tmp_path / "tied", tied, random_tensors(tied)))[1])


def test_beside_the_weights_the_output_matrix_stays_as_it_is(tmp_path: Path) -> None:
    base, adapter, _ = base_and_adapted(tmp_path, DREAM, target_modules=["q_proj", "lm_head"])
    with pytest.raises(CheckpointError, match=r"It changes the output matrix.*merge it with --adapter"):
        find_model(ModelSettings(str(base), adapters={"one": str(adapter)}))
    good = base_and_adapted(tmp_path / "good", DREAM, target_modules=["q_proj"])[1]
    named = {"bad": str(adapter), "good": str(good)}
    found = find_model(ModelSettings(str(base), adapters=named, skip_bad_adapters=True))
    assert list(found.adapters) == ["good"]
    assert "It changes the output matrix" in found.refusals["bad"]


@pytest.mark.parametrize("own", [torch.ones(2, 2).to(torch.float8_e4m3fn), torch.ones(0)], ids=["fp8", "empty"])
def test_beside_the_weights_the_models_own_matrix_in_the_file_is_not_read(tmp_path: Path, own: torch.Tensor) -> None:
    base, adapter, _ = base_and_adapted(tmp_path, DREAM, target_modules=["q_proj"])
    _tensors(adapter, lambda tensors: tensors | {"base_model.model.lm_head.base_layer.weight": own})
    assert list(find_model(ModelSettings(str(base), adapters={"one": str(adapter)})).adapters) == ["one"]


@pytest.mark.parametrize("name", ["no/such/folder", "./nowhere", "a b"])
def test_what_is_no_adapter_is_named(tmp_path: Path, name: str) -> None:
    base = write(tmp_path, DREAM, random_tensors(DREAM))
    with pytest.raises(CheckpointError, match=f"There is no adapter {name!r}"):
        find_model(ModelSettings(str(base), adapter=name))


def test_random_weights_take_none() -> None:
    with pytest.raises(ConfigError, match="leave load_format='dummy' out"):
        find_model(ModelSettings("llada-tiny", load_format="dummy", adapter="somewhere"))
