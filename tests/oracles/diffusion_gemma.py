"""DiffusionGemma by transformers' own model and decoding, with the draws of remask in the place of its own."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, LogitsProcessorList
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSamplerConfig,
)
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaRMSNorm

from tests.oracles import philox

VOCAB, EOS, PAD = 61, 1, 0
_NEAR, _FAR = "sliding_attention", "full_attention"
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "sliding_window": 6,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 12,
    "max_position_embeddings": 256,
    "layer_types": [_NEAR, _NEAR, _FAR],
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": EOS,
}
_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
SHAPES: dict[str, dict[str, Any]] = {
    "windows shorter than a canvas": {},
    "one expert": {"num_experts": 1, "top_k_experts": 1},
    "every expert": {"num_experts": 3, "top_k_experts": 3},
    "windows longer than all": {"sliding_window": 200},
    "windows of two": {"sliding_window": 2},
    "all layers see everything": {"layer_types": [_FAR, _FAR]},
    "mixed layers": {"layer_types": [_FAR, _NEAR, _NEAR, _FAR, _FAR], "num_key_value_heads": 1},
    "as many heads of K/V": {"num_key_value_heads": 4, "num_global_key_value_heads": 2, "head_dim": 12},
    "equal heads": {"num_key_value_heads": 2, "num_global_key_value_heads": 2, "global_head_dim": 8},
    "a low cap": {"final_logit_softcapping": 0.7},
    "all channels turn": {
        "rope_parameters": {
            _NEAR: {"rope_type": "default", "rope_theta": 100.0},
            _FAR: {"rope_type": "proportional", "partial_rotary_factor": 1.0, "factor": 2.0, "rope_theta": 5000.0},
        }
    },
    "canvases of 3": {"canvas_length": 3, "sliding_window": 2, "rms_norm_eps": 1e-3},
}
"""Small configurations, by what is special about them."""


@dataclass(frozen=True)
class Oracle:
    """A random model, and the folder that it was saved to."""

    model: Any
    folder: Path

    @property
    def canvas(self) -> int:
        """Positions of a canvas."""
        return int(self.config.canvas_length)

    @property
    def config(self) -> Any:
        """Its configuration."""
        return self.model.config


def make(name: str, folder: Path, seed: int = 0, vocab: int = VOCAB, told: float = 1.0, eos: int = EOS) -> Oracle:
    """A model of one of `SHAPES`, saved to `folder`. Every tensor is random, gains and factors too.

    `told` scales what rows take in of the pass before. Where it is large, rounding errors grow tenfold in each step.
    """
    changes = dict(SHAPES[name])
    length = changes.pop("canvas_length", 8)
    layers = changes.get("layer_types", _TEXT["layer_types"])
    text = _TEXT | {"vocab_size": vocab, "eos_token_id": eos, "num_hidden_layers": len(layers)}
    config: Any = DiffusionGemmaConfig(text_config=text | changes, vision_config=_VISION, canvas_length=length)
    model: Any = DiffusionGemmaForBlockDiffusion(config)
    model.eval().requires_grad_(False)
    model.set_experts_implementation("eager")  # the grouped kernel knows no float64
    generator = torch.Generator().manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator)

    for part in (model.model.decoder, model.model.encoder.language_model):
        for each, parameter in part.named_parameters():
            if "layer_scalar" in each or parameter.dim() > 1:
                continue
            parameter.copy_(1 + 0.3 * noise(parameter))
        for layer in part.layers:
            layer.layer_scalar.copy_(1 + 0.2 * noise(layer.layer_scalar))
    for parameter in model.model.decoder.parameters():
        if parameter.dim() > 1:
            parameter.copy_(noise(parameter) / parameter.shape[-1] ** 0.5)
    model.model.decoder.self_conditioning.down_proj.weight.mul_(told)
    model.save_pretrained(folder)
    return Oracle(model, folder)


def logits(
    oracle: Oracle, prompt: Sequence[int], canvases: Sequence[Sequence[int]], before: Tensor | None = None
) -> Tensor:
    """Logits [C, V] of the last of `canvases`, in float64; those before it are committed one by one.

    `before` [C, V] are logits that the canvas is conditioned on; None: the first step.
    """
    model, cache = oracle.model.double(), None
    with mock.patch.object(DiffusionGemmaRMSNorm, "forward", _exact_norm):
        for each in (prompt, *canvases[:-1]):
            cache = model.model.encoder(input_ids=torch.tensor([list(each)]), past_key_values=cache).past_key_values
        found: Tensor = model(
            past_key_values=cache,
            decoder_input_ids=torch.tensor([list(canvases[-1])]),
            self_conditioning_logits=None if before is None else before[None],
        ).logits[0]
    model.float()
    return found


def _exact_norm(self: DiffusionGemmaRMSNorm, hidden_states: Tensor) -> Tensor:
    """Theirs in the dtype of its input: they round to float32 whatever that is."""
    normed: Tensor = self._norm(hidden_states)
    return normed * self.weight if self.with_scale else normed


def decode(oracle: Oracle, prompt: Sequence[int], sampling: dict[str, Any]) -> tuple[list[int], int]:
    """The tokens of all canvases, and how many passes denoised them.

    `sampling` is as of remask, and `seed` is in it.
    """
    own, seed = sampling.get("renoising", {}), sampling["seed"]
    length, vocab = oracle.canvas, int(oracle.config.text_config.vocab_size)
    steps, passes = sampling.get("steps_per_block", 48), 0
    canvases = -(-sampling["max_tokens"] // length)
    given = sampling.get("temperature", 0.0)
    usual = {"t_max": own.get("t_max", 0.8), "t_min": own.get("t_min", 0.4)}
    made: Any = DiffusionGemmaGenerationConfig
    asked = made(
        max_new_tokens=sampling["max_tokens"],
        max_denoising_steps=steps,
        sampler_config=EntropyBoundSamplerConfig(entropy_bound=own.get("entropy_bound", 0.1)),
        stability_threshold=own.get("stability_threshold", 1),
        confidence_threshold=own.get("confidence_threshold", 0.005),
        eos_token_id=None if sampling.get("ignore_eos") else EOS,
        pad_token_id=None,
        **({} if given else usual),
    )
    first = np.random.default_rng([seed, 0]).integers(0, vocab, canvases * length)
    begun, drawn = 0, 0

    def multinomial(chances: Tensor, num_samples: int) -> Tensor:
        nonlocal drawn
        assert num_samples == 1
        start = len(prompt) + (begun - 1) * length
        uniform = torch.from_numpy(philox.uniform(seed, drawn, list(range(start, start + length)), vocab))
        drawn += 1
        return (chances.double().log() - (-uniform.log()).log()).argmax(dim=-1, keepdim=True)

    def randint(low: int, high: int, size: tuple[int, int], device: torch.device) -> Tensor:
        """The noise that a canvas begins with, or that a step leaves."""
        nonlocal begun
        assert (low, high, size) == (0, vocab, (1, length))
        if drawn == starts.get(begun):
            noise = first[begun * length : (begun + 1) * length]
            begun += 1
        else:
            noise = np.random.default_rng([seed, 1, drawn - 1]).integers(0, vocab, length)
        return torch.from_numpy(noise)[None].to(device)

    starts = {0: 0}

    def forward(*inputs: Any, **named: Any) -> Any:
        nonlocal passes
        passes += 1
        return plain(*inputs, **named)

    plain, prepare = oracle.model.forward, oracle.model._prepare_denoiser_inputs

    def prepared(*inputs: Any, **named: Any) -> Any:
        starts[begun] = drawn
        return prepare(*inputs, **named)

    with (
        mock.patch("torch.compiler.cudagraph_mark_step_begin"),  # which imports half of the compiler
        mock.patch("torch.multinomial", multinomial),
        mock.patch("torch.randint", randint),
        mock.patch.object(oracle.model, "forward", forward),
        mock.patch.object(oracle.model, "_prepare_denoiser_inputs", prepared),
    ):
        processors = LogitsProcessorList([_Constant(given)]) if given else None
        if given:
            asked.t_min = asked.t_max = None
        found = _generate(oracle, prompt, asked, processors)
    return found[len(prompt) :], passes


def _generate(oracle: Oracle, prompt: Sequence[int], asked: Any, processors: Any) -> list[int]:
    usual = type(asked)._get_default_generation_params
    if processors is None:
        found = oracle.model.generate(torch.tensor([list(prompt)]), generation_config=asked)
    else:
        without = {name: value for name, value in usual().items() if name not in ("t_min", "t_max")}
        with mock.patch.object(type(asked), "_get_default_generation_params", return_value=without):
            found = oracle.model.generate(
                torch.tensor([list(prompt)]), generation_config=asked, logits_processor=processors
            )
    return [int(token) for token in found.sequences[0]]


class _Constant:
    """One temperature in all steps."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor, cur_step: Tensor) -> Tensor:  # noqa: ARG002
        """As of a processor of transformers."""
        return scores / self.temperature


def prompt_of(rng: random.Random, vocab: int = VOCAB) -> list[int]:
    """A random prompt; EOS may be in it."""
    return [rng.randrange(vocab) for _ in range(rng.randint(1, 24))]
