"""The bundled models' folders: complete, in the layout of their family, with tokenizers that read any text."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import remask
from remask.checkpoint.load import read_config
from remask.tasks import relay, tariff, transit
from remask.tasks.workload import Message

ROOT = Path(remask.__file__).parent
FOLDERS = ("bundled", "bundled_tariff", "bundled_transit", "bundled_uniform")
LLADAS = FOLDERS[:3]
BOTH = tariff.TariffSettings(kinds=tariff.KINDS)
EACH = pytest.mark.parametrize("folder", FOLDERS)
EACH_LLADA = pytest.mark.parametrize("folder", LLADAS)


@cache
def config(folder: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / folder / "config.json").read_text())
    return loaded


@cache
def tokenizer(folder: str) -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(ROOT / folder)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def encode(folder: str, text: str) -> list[int]:
    ids: list[int] = tokenizer(folder)(text, add_special_tokens=False)["input_ids"]
    return ids


def chat(folder: str, messages: list[Message], *, waiting: bool = False) -> list[int]:
    text = tokenizer(folder).apply_chat_template(messages, tokenize=False, add_generation_prompt=waiting)
    return encode(folder, str(text))


@EACH
def test_files(folder: str) -> None:
    names = {"config.json", "remask.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert names <= {path.name for path in (ROOT / folder).iterdir()}
    assert (ROOT / folder / "model.safetensors").stat().st_size < (8 if folder == "bundled_transit" else 4) << 20


@EACH_LLADA
def test_config_has_what_a_llada_loader_reads(folder: str) -> None:
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
        "weight_tying": folder == "bundled_transit",
        "rms_norm_eps": 1e-05,
    }
    told = config(folder)
    assert {key: told[key] for key in expected} == expected
    assert told["embedding_size"] == told["vocab_size"] == len(tokenizer(folder))
    # An `auto_map` would make transformers ask whether to run code that the folder does not hold.
    assert "auto_map" not in told


@EACH_LLADA
def test_tensors_are_those_of_a_llada_in_float16_and_finite(folder: str) -> None:
    told = config(folder)
    width, hidden, vocab = (told[key] for key in ("d_model", "mlp_hidden_size", "vocab_size"))
    block = {
        **{name: [width] for name in ("attn_norm", "ff_norm")},
        **{name: [width, width] for name in ("q_proj", "k_proj", "v_proj", "attn_out")},
        **{name: [hidden, width] for name in ("ff_proj", "up_proj")},
        "ff_out": [width, hidden],
    }
    expected = {f"blocks.{layer}.{name}": shape for layer in range(told["n_layers"]) for name, shape in block.items()}
    expected |= {"wte": [vocab, width], "ln_f": [width]} | ({} if told["weight_tying"] else {"ff_out": [vocab, width]})
    with safe_open(ROOT / folder / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {f"model.transformer.{name}.weight": shape for name, shape in expected.items()}
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.float16"}


def test_the_uniform_models_config_is_that_of_the_published_ones_but_for_its_sizes() -> None:
    expected = {
        "architectures": ["GiddForDiffusionLM"],
        "model_type": "gidd",
        "attention_bias": True,
        "mlp_bias": True,
        "use_qk_norm": True,
        "attn_soft_cap": 30.0,
        "weight_scaling": 1.0,
        "noise_type": 1000.0,
        "min_log_snr": -9.0,
        "max_log_snr": 9.0,
        "rms_norm_eps": 1e-06,
    }
    told = config("bundled_uniform")
    assert {key: told[key] for key in expected} == expected
    assert "auto_map" not in told
    _, shape = read_config(ROOT / "bundled_uniform")
    assert (shape.kind, shape.sink, shape.qk_norm, shape.mlp) == ("uniform", "learned", "whole", "relu2")
    assert shape.structured_attention
    assert 500_000 < shape.parameters < 2_000_000


def test_the_uniform_model_has_its_twins_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (ROOT / "bundled_uniform" / name).read_bytes() == (ROOT / "bundled" / name).read_bytes()
    for name in ("vocab_size", "mask_token_id", "eos_token_id", "pad_token_id"):
        assert config("bundled_uniform")[name] == config("bundled")[name]


@EACH_LLADA
def test_special_tokens(folder: str) -> None:
    told, own = config(folder), tokenizer(folder)
    assert (own.mask_token, own.mask_token_id) == ("<|mdm_mask|>", told["mask_token_id"])
    assert (own.eos_token, own.eos_token_id) == ("<|endoftext|>", told["eos_token_id"])
    assert own.pad_token_id == own.eos_token_id == told["pad_token_id"]
    for marker in ("<|mdm_mask|>", "<|endoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"):
        assert len(encode(folder, marker)) == 1
        assert str(own.decode(encode(folder, f"oak {marker}"), skip_special_tokens=True)).strip() == "oak"


def test_every_word_of_a_task_is_one_token() -> None:
    for route in relay.make_workload(30, 10, 0):
        assert len(encode("bundled", route.reference)) == relay.HOPS
        # A good, a town and a mark each, after "Goods" and its colon.
        assert len(encode("bundled", route.prompt.text)) == 2 + 3 * len(route.prompt.rows)
    for order in tariff.make_workload(30, 10, 0, BOTH):
        assert len(encode("bundled_tariff", order.reference)) == len(order.reference.split())
        # A title, a name and a mark each, after "Orders" and its colon.
        assert len(encode("bundled_tariff", order.prompt.text)) == 2 + 3 * len(order.prompt.orders)
    texts = [" ".join(transit.STOPS)]
    for ride in transit.make_workload(30, 10, seed=0, rows=64):
        texts += [ride.prompt.text, ride.question.text, ride.reference]
    for text in texts:
        ids = encode("bundled_transit", text)
        assert tokenizer("bundled_transit").unk_token_id not in ids
        assert len(ids) == len(text.split())
        assert tokenizer("bundled_transit").decode(ids) == text


@pytest.mark.parametrize("folder", ["bundled", "bundled_tariff"])
@given(text=strategies.text())
def test_any_text_is_read_and_written(folder: str, text: str) -> None:
    for each in (text, "héllo  wörld\n\n 12 3,4\t日本 😀 ", " rope", "Lima figs  figs", "\r\n", "lamps"):
        assert tokenizer(folder).decode(encode(folder, each)) == each


def test_the_transit_tokenizer_forgives_case_and_spacing_and_reads_unknown_words_as_one_token_each() -> None:
    assert encode("bundled_transit", "From Oak go 2, where am I?") == encode(
        "bundled_transit", "from oak go 2 , where am i ?"
    )
    first, unknown, last = encode("bundled_transit", "from nowhere go")
    assert unknown == tokenizer("bundled_transit").unk_token_id
    assert unknown not in (first, last)


def rides(turns: int) -> list[Message]:
    """A conversation about one line with `turns` questions, all but the last answered."""
    rng = random.Random(turns)
    prompt = transit.draw_prompt(rng)
    messages: list[Message] = [{"role": "system", "content": prompt.text}]
    for turn in range(turns):
        question = transit.draw_question(rng, prompt)
        messages.append({"role": "user", "content": question.text})
        if turn < turns - 1:
            messages.append({"role": "assistant", "content": transit.reference_response(prompt, question)})
    return messages


CHATS = [("bundled_transit", rides(turns), "<|start_header_id|> assistant <|end_header_id|>") for turns in (1, 2, 4)]
CHATS += [
    ("bundled_tariff", request.messages, "<|start_header_id|>assistant<|end_header_id|>\n\n")
    for request in tariff.make_workload(6, 3, 1, BOTH)
]


@pytest.mark.parametrize(("folder", "messages", "end"), CHATS, ids=lambda value: value if value in FOLDERS else "")
def test_messages_before_the_last_turn_are_a_token_prefix(folder: str, messages: list[Message], end: str) -> None:
    head, whole = chat(folder, messages[:-1]), chat(folder, messages, waiting=True)
    assert whole[: len(head)] == head
    assert whole.count(tokenizer(folder).bos_token_id) == 1
    assert str(tokenizer(folder).decode(whole)).endswith(end)


@pytest.mark.parametrize(
    ("folder", "messages", "response"),
    [
        ("bundled_tariff", tariff.make_workload(1, 1, seed=0)[0].messages, 2 * tariff.TariffSettings().asked),
        ("bundled_transit", transit.make_workload(1, 1, seed=0)[0].messages, 16),
    ],
    ids=["tariff", "transit"],
)
def test_prefix_ratio_of_the_default_workload(folder: str, messages: list[Message], response: int) -> None:
    head, whole = chat(folder, messages[:-1]), chat(folder, messages, waiting=True)
    assert 0.75 <= len(head) / (len(whole) + response) <= 0.95
