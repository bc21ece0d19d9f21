import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from remask.errors import CheckpointError, UnknownNameError
from remask.models import load, source
from remask.models.load import load_weights, read_config
from remask.models.source import resolve
from remask.models.weights import Weights
from tests.models.checkpoints import DREAM, LLADA, dream_tensors, llada_tensors, write

CPU = torch.device("cpu")


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    family, config = read_config(folder)
    return load_weights(folder, family, config, dtype, CPU, progress=False)


@pytest.mark.parametrize("shards", [1, 3])
def test_llada_tensors_arrive_in_their_places(tmp_path: Path, shards: int) -> None:
    held = llada_tensors()
    weights = loaded(write(tmp_path, LLADA, held, shards=shards))
    assert torch.equal(weights.embed, held["model.transformer.wte.weight"])
    assert torch.equal(weights.norm, held["model.transformer.ln_f.weight"])
    assert torch.equal(weights.head, held["model.transformer.ff_out.weight"])
    for number, layer in enumerate(weights.layers):
        of = {name.split(f"blocks.{number}.")[-1]: tensor for name, tensor in held.items()}
        assert torch.equal(layer.attn_norm, of["attn_norm.weight"])
        assert torch.equal(layer.qkv, torch.cat([of[f"{name}_proj.weight"] for name in "qkv"]))
        assert layer.qkv_bias is None
        assert torch.equal(layer.out, of["attn_out.weight"])
        assert torch.equal(layer.ffn_norm, of["ff_norm.weight"])
        assert torch.equal(layer.gate_up, torch.cat([of["ff_proj.weight"], of["up_proj.weight"]]))
        assert torch.equal(layer.down, of["ff_out.weight"])


@pytest.mark.parametrize("shards", [1, 3])
def test_dream_tensors_arrive_in_their_places(tmp_path: Path, shards: int) -> None:
    held = dream_tensors()
    weights = loaded(write(tmp_path, DREAM, held, shards=shards))
    assert torch.equal(weights.embed, held["model.embed_tokens.weight"])
    assert torch.equal(weights.norm, held["model.norm.weight"])
    assert torch.equal(weights.head, held["lm_head.weight"])
    for number, layer in enumerate(weights.layers):
        of = {name.split(f"layers.{number}.")[-1]: tensor for name, tensor in held.items()}
        assert torch.equal(layer.attn_norm, of["input_layernorm.weight"])
        assert torch.equal(layer.qkv, torch.cat([of[f"self_attn.{name}_proj.weight"] for name in "qkv"]))
        assert layer.qkv_bias is not None
        assert torch.equal(layer.qkv_bias, torch.cat([of[f"self_attn.{name}_proj.bias"] for name in "qkv"]))
        assert torch.equal(layer.out, of["self_attn.o_proj.weight"])
        assert torch.equal(layer.ffn_norm, of["post_attention_layernorm.weight"])
        assert torch.equal(layer.gate_up, torch.cat([of["mlp.gate_proj.weight"], of["mlp.up_proj.weight"]]))
        assert torch.equal(layer.down, of["mlp.down_proj.weight"])


@pytest.mark.parametrize(
    ("stored", "asked"),
    [(torch.float16, torch.float32), (torch.float32, torch.bfloat16), (torch.float64, torch.float16)],
)
def test_types_are_converted_on_the_way(tmp_path: Path, stored: torch.dtype, asked: torch.dtype) -> None:
    held = {name: tensor.to(stored) for name, tensor in llada_tensors().items()}
    weights = loaded(write(tmp_path, LLADA, held), asked)
    assert {tensor.dtype for tensor in weights.tensors()} == {asked}
    assert torch.equal(weights.embed, held["model.transformer.wte.weight"].to(asked))


def test_a_tied_head_is_not_in_the_file_or_is_ignored(tmp_path: Path) -> None:
    tied = LLADA | {"weight_tying": True}
    without = loaded(write(tmp_path / "without", tied, llada_tensors(tied=True)))
    copied = loaded(write(tmp_path / "copied", tied, llada_tensors()))
    assert without.head is without.embed
    assert copied.head is copied.embed
    with pytest.raises(CheckpointError, match=r"1 missing: model\.transformer\.ff_out\.weight \[40, 16\]"):
        loaded(write(tmp_path / "untied", LLADA, llada_tensors(tied=True)))


def test_all_that_does_not_fit_is_listed_before_any_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = llada_tensors()
    del held["model.transformer.ln_f.weight"]
    del held["model.transformer.blocks.1.q_proj.weight"]
    held["model.transformer.blocks.2.q_proj.weight"] = torch.zeros(3)
    held["model.transformer.wte.weight"] = torch.zeros(41, 16)
    held["model.transformer.blocks.0.attn_norm.weight"] = torch.zeros(16, dtype=torch.int8)
    folder = write(tmp_path, LLADA, held, shards=2)
    monkeypatch.setattr(load, "empty_weights", lambda *_: pytest.fail("memory was taken before the check"))
    with pytest.raises(CheckpointError) as caught:
        loaded(folder)
    for line in (
        "2 missing: model.transformer.ln_f.weight [16]; model.transformer.blocks.1.q_proj.weight [16, 16]\n",
        "1 unexpected: model.transformer.blocks.2.q_proj.weight [3]\n",
        "1 misshapen: model.transformer.wte.weight is [41, 16], config.json asks for [40, 16]\n",
        "1 of a type other than F64, F32, F16, BF16: model.transformer.blocks.0.attn_norm.weight is I8\n",
    ):
        assert line in str(caught.value)


def test_long_lists_are_cut_with_a_count(tmp_path: Path) -> None:
    held = llada_tensors() | {f"extra.{number}": torch.zeros(1) for number in range(50)}
    with pytest.raises(CheckpointError, match=r"50 unexpected: extra.*; and 30 more"):
        loaded(write(tmp_path, LLADA, held))


def test_names_of_the_other_family_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"(?s)21 missing.*27 unexpected"):
        loaded(write(tmp_path, LLADA, dream_tensors()))


@pytest.mark.parametrize("keep", [0, 5, 200, -7])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    folder = write(tmp_path, LLADA, llada_tensors(), shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors cannot be read.*truncated"):
        loaded(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, LLADA, llada_tensors(), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names 1 of 3 shards.*model-00002-of-00003\.safetensors"):
        loaded(folder)


def test_a_shard_without_what_the_index_promises_is_a_missing_tensor(tmp_path: Path) -> None:
    folder = write(tmp_path, LLADA, llada_tensors(), shards=2)
    shard = folder / "model-00001-of-00002.safetensors"
    held = load_file(shard)
    del held["model.transformer.wte.weight"]
    save_file(held, shard)
    with pytest.raises(CheckpointError, match=r"1 missing: model\.transformer\.wte\.weight"):
        loaded(folder)


def test_the_index_says_which_of_two_copies_counts(tmp_path: Path) -> None:
    held = llada_tensors()
    folder = write(tmp_path, LLADA, held, shards=2)
    other = folder / "model-00002-of-00002.safetensors"
    save_file(load_file(other) | {"model.transformer.wte.weight": torch.zeros(40, 16)}, other)
    assert torch.equal(loaded(folder).embed, held["model.transformer.wte.weight"])


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
    folder = write(tmp_path, LLADA, llada_tensors(), shards=2)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json") as caught:
        loaded(folder)
    assert message in str(caught.value)


def test_a_folder_without_safetensors_says_what_is_there(tmp_path: Path) -> None:
    folder = write(tmp_path, LLADA, llada_tensors())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"weight files there: pytorch_model\.bin.*safe_serialization"):
        loaded(folder)


class _Pieces:
    """Counts how many stored tensors are alive at once, through what `safe_open` hands out."""

    alive = most = reads = 0


def test_one_tensor_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Piece(Tensor):
        def __del__(self) -> None:
            pieces.alive -= 1

    pieces, opened = _Pieces(), load.safe_open

    class Watched:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._file = opened(*args, **kwargs)

        def __enter__(self) -> "Watched":
            self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def get_tensor(self, name: str) -> Tensor:
            pieces.reads += 1
            pieces.alive += 1
            pieces.most = max(pieces.most, pieces.alive)
            return self._file.get_tensor(name).as_subclass(Piece)

    monkeypatch.setattr(load, "safe_open", Watched)
    held = llada_tensors()
    weights = loaded(write(tmp_path, LLADA, held, shards=2))
    assert torch.equal(weights.embed, held["model.transformer.wte.weight"])
    assert pieces.reads == len(held)
    assert pieces.most == 1


_PEAK = """
import resource, sys, torch
from pathlib import Path
from remask.models.load import load_weights, read_config
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
folder = Path(sys.argv[1])
family, config = read_config(folder)
before = peak()
weights = load_weights(folder, family, config, torch.float32, torch.device("cpu"), progress=False)
print(weights.nbytes, peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes, and of resident pages, on Linux")
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


def test_the_bar_goes_to_stderr_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, LLADA, llada_tensors())
    family, config = read_config(folder)
    load_weights(folder, family, config, torch.float32, CPU, progress=False)
    assert capsys.readouterr() == ("", "")
    load_weights(folder, family, config, torch.float32, CPU)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Loading weights: 100%" in err


def test_stop_ids_of_the_generation_config_are_added(tmp_path: Path) -> None:
    folder = write(tmp_path, DREAM, dream_tensors())
    (folder / "generation_config.json").write_text('{"eos_token_id": [37, 38]}')
    family, config = read_config(folder)
    assert family.name == "dream"
    assert config.stop_ids == (38, 37)
    (folder / "generation_config.json").write_text('{"eos_token_id": 99}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: 'eos_token_id' is 99.*below 40"):
        read_config(folder)


def test_an_unknown_model_type_lists_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"model_type 'gpt2'.*Available: Dream, llada"):
        read_config(write(tmp_path, {"model_type": "gpt2"}, llada_tensors()))


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "not valid JSON"), ("{", "not valid JSON"), ("[1]", "JSON list"), ("[" * 100_000, "not valid JSON")],
    ids=["empty", "open", "list", "deep"],
)
def test_a_malformed_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"(?s)config\.json.*{message}"):
        read_config(tmp_path)


def test_a_config_that_is_not_text_or_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)


def test_an_unfit_config_names_its_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config(write(tmp_path, LLADA | {"alibi": True}, llada_tensors()))
    assert str(tmp_path) in str(caught.value)
    assert "'alibi' is true; supported: false" in str(caught.value)


def test_a_local_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    assert resolve(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Path("org/name")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/nowhere/at/all", "no such folder"),
        ("./missing", "no such folder"),
        ("missing", "no such folder, and not a hub id.*'bundled'"),
        ("", "no such folder|is a file"),
        ("a/b/c", "no such folder"),
        ("llada-8b", "preset.*--load-format dummy"),
    ],
)
def test_what_is_neither_a_folder_nor_a_hub_id_never_asks_the_hub(
    model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(CheckpointError, match=message):
        resolve(model)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="is a file. Give the folder"):
        resolve(str(file))


def test_a_hub_id_fetches_data_and_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(model: str, allow_patterns: list[str]) -> str:
        asked.update(model=model, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(source, "snapshot_download", download)
    assert resolve("GSAI-ML/LLaDA-8B-Instruct") == tmp_path
    assert asked["model"] == "GSAI-ML/LLaDA-8B-Instruct"
    wanted = ["model-00001-of-00006.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"]
    wanted += ["vocab.json", "merges.txt", "generation_config.json", "chat_template.jinja", "tokenizer.model"]
    unwanted = ["modeling_llada.py", "pytorch_model.bin", "weights.pt", "README.md", "model.gguf"]
    taken = [name for name in wanted + unwanted if any(Path(name).match(pattern) for pattern in asked["patterns"])]
    assert taken == wanted


@pytest.mark.parametrize("error", [ConnectionError("no route"), ValueError("bad id"), RuntimeError("unknown")])
def test_a_hub_that_does_not_answer_is_a_clear_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(model: str, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr(source, "snapshot_download", download)
    with pytest.raises(CheckpointError, match=rf"(?s)'org/name' is neither a local folder.*{error}.*network"):
        resolve("org/name")


def test_bundled_is_the_folder_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "files", lambda _: tmp_path)
    with pytest.raises(CheckpointError, match="bundled model is not in this installation"):
        resolve("bundled")
    (tmp_path / "bundled").mkdir()
    (tmp_path / "bundled" / "config.json").write_text(json.dumps(LLADA))
    assert resolve("bundled") == tmp_path / "bundled"
