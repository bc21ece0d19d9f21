"""Sumi-7B: uniform diffusion trained from scratch on the architecture of Llama, whose canvas is denoised as a whole.

Names of tensors and keys are those of the authors' published files. No published weights were loaded.
"""

from collections.abc import Mapping
from typing import Any

from remask.denoising.noise import Noise
from remask.families import qwen
from remask.families.family import Family
from remask.families.fields import NO_MASK, Fields
from remask.families.shapes import shapes_of
from remask.model.config import ModelConfig

LOWEST, HIGHEST = -9.0, 9.0  # log-SNRs of the authors' code; no key of config.json says them
UNIFORM = 1000.0  # the shift of noise that holds no mask


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    """The shape by a `config.json`. Its end and begin tokens are the anchor of the noise."""
    fields = Fields("config.json (sumi)", raw, rms_norm_eps=1e-6)
    fields.only("attention_bias", False, optional=True)
    fields.only("mask_token_id", None, optional=True)
    width = fields.integer("head_dim", least=2) if fields.get("head_dim") else None
    shape = qwen.shape(fields, width or fields.head_dim(), masked=False)
    vocab = shape["vocab"]
    anchor = fields.token("eos_token_id", vocab), fields.token("bos_token_id", vocab)
    qkv_bias = fields.flag("add_qkv_bias", False)
    return ModelConfig(family="sumi", qkv_bias=qkv_bias, noise=noise_of(vocab, anchor), **_SWITCHES, **shape)


def noise_of(vocab_size: int, anchor: tuple[int, int]) -> Noise:
    """Uniform noise over all `vocab_size` tokens, including special ones. `anchor` are the ids of EOS and BOS."""
    return Noise(UNIFORM, LOWEST, HIGHEST, vocab=vocab_size, mask_id=NO_MASK, anchor=anchor)


def _read_generation(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Sampling parameters of the authors' generation config, and its keys that no parameter expresses.

    Their temperature applies without `do_sample`, and only the adaptive sampler reads `tokens_per_step`.
    """
    unread = {key: value for key, value in raw.items() if value is not None}
    if unread.get("sampler") != "adaptive":
        unread.pop("tokens_per_step", None)
    sampling = {ours: unread.pop(theirs) for theirs, ours in _COMMON.items() if theirs in unread}
    uniform = {ours: unread.pop(theirs) for theirs, ours in _UNIFORM.items() if theirs in unread}
    return sampling | ({"uniform": uniform} if uniform else {}), sorted(unread)


_COMMON = {"temperature": "temperature", "num_denoising_steps": "steps_per_block"}
_EQUAL_NAMES = (
    *("sampler", "schedule", "min_log_snr", "max_log_snr", "tokens_per_step", "canvas_length"),
    *("frozen", "denoise_end"),
)
_UNIFORM = {name: name for name in _EQUAL_NAMES} | {"anchor_eosbos": "anchor", "trim_at_eos": "trim"}

_SWITCHES: Mapping[str, Any] = {"kind": "uniform", "sink": "zero", "structured_attention": False}

SUMI = Family(
    name="sumi",
    model_types=("sumi",),
    architectures=("SumiForMaskGeneration",),
    names=qwen.NAMES,
    config=_config,
    read_generation=_read_generation,
    harmless=frozenset({"uniform_diffusion_beta_is", "uniform_diffusion_z_loss_strength"}),
    presets=shapes_of(
        "sumi",
        {"sumi-7b": {"noise": noise_of(100278, (100257, 100256))}, "sumi-tiny": {"noise": noise_of(256, (250, 249))}},
        **_SWITCHES,
    ),
)
