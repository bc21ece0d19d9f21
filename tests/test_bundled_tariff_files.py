"""The bundled model's folder: complete, in the layout of LLaDA, with a tokenizer that reads and writes any text."""

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import remask
from remask.tasks import tariff
from remask.tasks.workload import Message

FOLDER = Path(remask.__file__).parent / "bundled_tariff"
CONFIG: dict[str, object] = json.loads((FOLDER / "config.json").read_text())
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)
assert isinstance(TOKENIZER, PreTrainedTokenizerFast)
BOTH = tariff.TariffSettings(kinds=tariff.KINDS)


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


def chat(messages: list[Message], *, waiting: bool) -> list[int]:
    return encode(str(TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=waiting)))


def test_files() -> None:
    names = {"config.json", "remask.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert names <= {path.name for path in FOLDER.iterdir()}
    assert (FOLDER / "model.safetensors").stat().st_size < 4 << 20


def test_config_has_what_a_llada_loader_reads() -> None:
    expected = {
        "model_type": "llada",
        "architectures": ["LLaDAModelLM"],
        "block_type": "llama",
        "layer_norm_type": "rms",
        "activation_type": "silu",
        "rope": True,
        "include_bias": False,
        "include_qkv_bias": False,
        "scale_logits": False,
        "input_emb_norm": False,
        "weight_tying": False,
        "rms_norm_eps": 1e-05,
    }
    assert {key: CONFIG[key] for key in expected} == expected
    assert CONFIG["embedding_size"] == CONFIG["vocab_size"] == len(TOKENIZER)
    # An `auto_map` would make transformers ask whether to run code that the folder does not hold.
    assert "auto_map" not in CONFIG


def test_weights_are_float16_and_finite() -> None:
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.float16"}
    embeddings = [list(tensors[f"model.transformer.{name}.weight"].shape) for name in ("wte", "ff_out")]
    assert embeddings == [[CONFIG["vocab_size"], CONFIG["d_model"]]] * 2


def test_special_tokens() -> None:
    assert (TOKENIZER.mask_token, TOKENIZER.mask_token_id) == ("<|mdm_mask|>", CONFIG["mask_token_id"])
    assert (TOKENIZER.eos_token, TOKENIZER.eos_token_id) == ("<|endoftext|>", CONFIG["eos_token_id"])
    assert TOKENIZER.pad_token_id == TOKENIZER.eos_token_id == CONFIG["pad_token_id"]
    for marker in ("<|mdm_mask|>", "<|endoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"):
        assert len(encode(marker)) == 1
        assert TOKENIZER.decode(encode(f"rope {marker}"), skip_special_tokens=True) == "rope "


def test_every_word_of_the_task_is_one_token() -> None:
    for request in tariff.make_workload(30, 10, 0, BOTH):
        assert len(encode(request.reference)) == len(request.reference.split())
        system = request.prompt.text
        # A title, a name and a mark each, after "Orders" and its colon.
        assert len(encode(system)) == 2 + 3 * len(request.prompt.orders)


@given(strategies.text())
def test_any_text_is_read_and_written(text: str) -> None:
    assert TOKENIZER.decode(encode(text)) == text


@pytest.mark.parametrize("text", ["héllo  wörld\n\n 12 3,4\t日本 😀 ", " rope", "Rope rope  rope", "\r\n", "lamps"])
def test_texts_beyond_the_vocabulary(text: str) -> None:
    assert TOKENIZER.decode(encode(text)) == text


def test_messages_before_the_question_are_a_token_prefix() -> None:
    for request in tariff.make_workload(6, 3, 1, BOTH):
        head, whole = chat(request.messages[:-1], waiting=False), chat(request.messages, waiting=True)
        assert whole[: len(head)] == head
        assert whole.count(TOKENIZER.bos_token_id) == 1
        assert TOKENIZER.decode(whole[-4:]) == "<|start_header_id|>assistant<|end_header_id|>\n\n"


def test_prefix_ratio_of_the_default_workload() -> None:
    request = tariff.make_workload(1, 1, seed=0)[0]
    head, whole = chat(request.messages[:-1], waiting=False), chat(request.messages, waiting=True)
    assert 0.75 <= len(head) / (len(whole) + 2 * tariff.TariffSettings().asked) <= 0.9
