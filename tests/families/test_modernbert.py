"""ModernBERT against transformers' own model, and the spellings of its configuration."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM

from remask.checkpoint.loaded import find_model
from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.tokenizer import byte_tokenizer
from remask.errors import CheckpointError
from remask.families import family_of
from remask.model.config import Sliding
from remask.plan.canvas import Canvas
from tests.checkpoint.checkpoints import MODERNBERT, write
from tests.engine.support import CPU, CheckedTransformer
from tests.engine.test_adapters import logits
from tests.goldens import a2d

MASK = 60
V5 = {key: value for key, value in MODERNBERT.items() if "rope_theta" not in key and "every_n" not in key} | {
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 160000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
"""The same as transformers 5 writes it."""


@pytest.mark.parametrize(
    ("changes", "layer_types"),
    [
        ({"num_hidden_layers": 7, "local_attention": 12}, None),
        ({"num_hidden_layers": 4, "local_attention": 3, "decoder_bias": False, "tie_word_embeddings": False}, None),
        ({"num_hidden_layers": 3, "norm_eps": 1e-3}, ["sliding_attention"] * 2 + ["full_attention"]),
        ({"num_hidden_layers": 2}, ["full_attention"] * 2),
        ({"num_hidden_layers": 2, "local_attention": 400}, ["sliding_attention"] * 2),
    ],
    ids=str,
)
def test_logits_are_those_of_transformers(
    changes: dict[str, Any], layer_types: list[str] | None, tmp_path: Path
) -> None:
    """In float64, on canvases in one pass: longer ones than a unit of rows, and one shorter than a window."""
    own: Any = ModernBertConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_attention_heads=4, max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, cls_token_id=1, eos_token_id=2, sep_token_id=2, **changes,
    )  # fmt: skip
    own.layer_types = layer_types or own.layer_types  # transformers 5.12 constructs none whose layers are all of a type
    reference = ModernBertForMaskedLM(own).double().requires_grad_(False)
    for weight in reference.parameters():
        weight.add_(torch.randn_like(weight) * 0.2)
    tensors = {name: weight.contiguous() for name, weight in reference.state_dict().items()}
    if own.tie_word_embeddings:
        del tensors["decoder.weight"]
    raw = own.to_dict() | {"mask_token_id": MASK, "architectures": ["ModernBertForMaskedLM"]}
    loaded = find_model(ModelSettings(str(write(tmp_path, raw, tensors)))).load(torch.float64, CPU)
    prompts = [torch.randint(3, MASK, (count,)).tolist() for count in (3, 40, 180)]
    found = logits(
        CheckedTransformer(loaded.config, loaded.weights), [(None, Canvas.masked(each, 14, MASK)) for each in prompts]
    )
    for ours, prompt in zip(found, prompts, strict=True):
        expected = reference(torch.tensor([prompt + [MASK] * 14])).logits[0]
        torch.testing.assert_close(ours, expected.float(), rtol=0, atol=1e-4)


def test_logits_are_those_recorded() -> None:
    recorded = a2d.logits("modernbert")
    loaded = find_model(ModelSettings(str(a2d.model_dir("modernbert")))).load(torch.float32, CPU)
    canvas = Canvas((), recorded["input_ids"], len(recorded["input_ids"]))
    (found,) = logits(CheckedTransformer(loaded.config, loaded.weights), [(None, canvas)])
    torch.testing.assert_close(found[recorded["rows"]], torch.tensor(recorded["logits"]), rtol=0, atol=1e-4)


def test_both_spellings_are_one_model() -> None:
    config = family_of(MODERNBERT).config(MODERNBERT)
    assert config.sliding == Sliding((1, 2), 4, 10000.0)
    assert config.rope_theta == 160000.0
    own = {key: value for key, value in MODERNBERT.items() if key not in ("model_type", "architectures")}
    written: Any = ModernBertConfig(**own)
    saved = written.to_dict() | {"architectures": MODERNBERT["architectures"]}
    half = {key: value for key, value in V5.items() if key != "local_attention"} | {"sliding_window": 4}
    for raw in (V5, half, saved, MODERNBERT | V5 | half):
        assert family_of(raw).config(raw) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "'layer_types' is .*a list of 4 times"),
        ({"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "'layer_types' is .*a list of 4 times"),
        ({"layer_types": [["full_attention"]] * 4}, "'layer_types' is .*a list of 4 times"),
        ({"sliding_window": 5}, "'local_attention' is 8; supported: 10"),
        ({"local_attention": None}, "the key 'local_attention' is missing"),
        ({"rope_parameters": None}, "the key 'global_rope_theta' is missing"),
        ({"local_rope_theta": 5.0}, "'local_rope_theta' is 5.0; supported: 10000.0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 3.0}}}, "'rope_parameters' is .*'sliding_attention'"),
        (
            {"rope_parameters": V5["rope_parameters"] | {"full_attention": {"rope_type": "yarn", "rope_theta": 3.0}}},
            "'rope_parameters', 'full_attention': 'rope_type' is \"yarn\"",
        ),
    ],
    ids=str,
)
def test_what_differs_or_is_missing_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        family_of(V5).config(V5 | change)


def test_the_published_mask_is_known_by_the_vocabulary() -> None:
    without = {key: value for key, value in MODERNBERT.items() if key != "mask_token_id"}
    assert family_of(without).config(without | {"vocab_size": 50368}).mask_id == 50284
    with pytest.raises(CheckpointError, match="the key 'mask_token_id' is missing"):
        family_of(without).config(without)


def test_conversations_are_those_of_bert_chat_unless_the_folder_has_a_template(tmp_path: Path) -> None:
    raw = MODERNBERT | {"vocab_size": 300, "mask_token_id": 299, "eos_token_id": 298}
    family = family_of(raw)
    tensors = {slot.name: torch.zeros(slot.shape) for slot in family.tensors(family.config(raw))}
    folder = write(tmp_path, raw, tensors)
    byte_tokenizer(300, 299, [298])._backend.backend_tokenizer.save(str(folder / "tokenizer.json"))
    settings = ModelSettings(str(folder), reads="chat")
    found = find_model(settings)
    turns = [("system", "S"), ("user", "Q1"), ("assistant", "A1"), ("user", "Q2")]
    messages = [{"role": role, "content": text} for role, text in turns]
    assert found.tokenizer is not None
    assert found.tokenizer.render_chat(messages) == (
        "[SYS]\nS\n[/SYS]\n\n[Question]\nQ1\n[/Question]\n\n[Answer]\nA1\n[/Answer]\n\n"
        "[Question]\nQ2\n[/Question]\n\n[Answer]\n"
    )
    assert found.tokenizer.render_chat(messages[1:2]) == "[Question]\nQ1\n[/Question]\n\n[Answer]\n"
    assert found.sampling == {"stop": ["[/Answer]"]}
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    found = find_model(settings)
    assert found.tokenizer is not None
    assert (found.tokenizer.render_chat(messages), found.sampling) == ("S", {})
