"""The bundled transit model's folder: complete, in LLaDA's layout, with a tokenizer that reproduces its task."""

import json
import random
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import remask
from remask.tasks import transit
from remask.tasks.workload import Message

FOLDER = Path(remask.__file__).parent / "bundled_transit"


@pytest.fixture(scope="module")
def config() -> dict[str, object]:
    loaded: dict[str, object] = json.loads((FOLDER / "config.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(FOLDER)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def conversation(turns: int) -> list[Message]:
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


def test_files() -> None:
    names = {"config.json", "remask.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert names <= {path.name for path in FOLDER.iterdir()}
    assert (FOLDER / "model.safetensors").stat().st_size < 8 << 20


def test_config_has_what_a_llada_loader_reads(config: dict[str, object]) -> None:
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
        "weight_tying": True,
        "max_sequence_length": 1024,
        "rms_norm_eps": 1e-05,
    }
    assert {key: config[key] for key in expected} == expected
    for key in ("d_model", "n_heads", "n_kv_heads", "n_layers", "mlp_hidden_size", "vocab_size", "rope_theta"):
        assert key in config
    assert config["embedding_size"] == config["vocab_size"]
    assert int(str(config["n_layers"])) >= 8
    # An `auto_map` would make transformers ask whether to run code that the folder does not hold.
    assert "auto_map" not in config


def test_tensors(config: dict[str, object]) -> None:
    width, hidden, vocab, layers = (
        int(str(config[key])) for key in ("d_model", "mlp_hidden_size", "vocab_size", "n_layers")
    )
    block = {
        "attn_norm": [width],
        "q_proj": [width, width],
        "k_proj": [width, width],
        "v_proj": [width, width],
        "attn_out": [width, width],
        "ff_norm": [width],
        "ff_proj": [hidden, width],
        "up_proj": [hidden, width],
        "ff_out": [width, hidden],
    }
    expected = {f"blocks.{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()}
    expected |= {"wte": [vocab, width], "ln_f": [width]}
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  (no mapping)
        finite = all(bool(file.get_tensor(name).isfinite().all()) for name in file.keys())  # noqa: SIM118
    assert shapes == {f"model.transformer.{name}.weight": shape for name, shape in expected.items()}
    assert finite


def test_special_tokens(config: dict[str, object], tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == config["vocab_size"]
    assert (tokenizer.mask_token, tokenizer.mask_token_id) == ("<|mdm_mask|>", config["mask_token_id"])
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", config["eos_token_id"])
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == config["pad_token_id"]
    for marker in ("<|mdm_mask|>", "<|endoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"):
        assert len(encode(tokenizer, marker)) == 1
        assert tokenizer.decode(encode(tokenizer, f"oak {marker}"), skip_special_tokens=True) == "oak"


def test_tokenizer_round_trips_every_text_of_the_task(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [" ".join(transit.STOPS)]
    for request in transit.make_workload(30, 10, seed=0, rows=64):
        texts += [request.prompt.text, request.question.text, request.reference]
    for text in texts:
        ids = encode(tokenizer, text)
        assert tokenizer.unk_token_id not in ids
        assert len(ids) == len(text.split())
        assert tokenizer.decode(ids) == text


def test_tokenizer_forgives_case_and_spacing(tokenizer: PreTrainedTokenizerFast) -> None:
    assert encode(tokenizer, "From Oak go 2, where am I?") == encode(tokenizer, "from oak go 2 , where am i ?")


def test_unknown_words_are_one_token_each(tokenizer: PreTrainedTokenizerFast) -> None:
    first, unknown, last = encode(tokenizer, "from nowhere go")
    assert unknown == tokenizer.unk_token_id
    assert tokenizer.unk_token_id not in (first, last)


@pytest.mark.parametrize("turns", [1, 2, 4])
def test_messages_before_the_last_turn_are_a_token_prefix(tokenizer: PreTrainedTokenizerFast, turns: int) -> None:
    messages = conversation(turns)
    head = encode(tokenizer, str(tokenizer.apply_chat_template(messages[:-1], tokenize=False)))
    whole = encode(tokenizer, str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)))
    assert whole[: len(head)] == head
    # The system message, with one BOS before it, four turn markers and the role around it.
    assert len(head) >= len(messages[0]["content"].split()) + 5
    assert whole.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(whole[-3:]) == "<|start_header_id|> assistant <|end_header_id|>"


def test_prefix_ratio_of_the_default_workload(tokenizer: PreTrainedTokenizerFast) -> None:
    request = transit.make_workload(1, 1, seed=0)[0]
    head = encode(tokenizer, str(tokenizer.apply_chat_template(request.messages[:-1], tokenize=False)))
    whole = str(tokenizer.apply_chat_template(request.messages, tokenize=False, add_generation_prompt=True))
    assert 200 <= len(head) <= 350
    assert 0.75 <= len(head) / (len(encode(tokenizer, whole)) + 16) <= 0.95
