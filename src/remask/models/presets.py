"""Named shapes for `--load-format dummy`: those of the published models, and small ones for benchmarks and tests."""

from dataclasses import replace

from remask.core.noise import Noise
from remask.errors import UnknownNameError
from remask.models.config import ModelConfig
from remask.models.families import dream

_LLADA_8B = ModelConfig(
    family="llada",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=32,
    head_dim=128,
    intermediate=12288,
    vocab=126464,
    max_length=4096,
    rope_theta=500_000.0,
    norm_eps=1e-5,
    mask_id=126336,
    stop_ids=(126081, 126348),
)

_DREAM_7B = ModelConfig(
    family="dream",
    layers=28,
    hidden=3584,
    heads=28,
    kv_heads=4,
    head_dim=128,
    intermediate=18944,
    vocab=152064,
    max_length=131072,
    rope_theta=1_000_000.0,
    norm_eps=1e-6,
    mask_id=151666,
    stop_ids=(151643, 151645),
    qkv_bias=True,
    shift=1,
    sampling=dream.SAMPLING,
)

# Tied, so that of its 138 million parameters all but 25 are in the layers.
_LLADA_100M = ModelConfig(
    family="llada",
    layers=16,
    hidden=768,
    heads=12,
    kv_heads=12,
    head_dim=64,
    intermediate=2048,
    vocab=32000,
    max_length=4096,
    rope_theta=500_000.0,
    norm_eps=1e-5,
    mask_id=31999,
    stop_ids=(31998,),
    tied=True,
)

_GIDD_NOISE = Noise(shift=1000.0, min_log_snr=-9.0, max_log_snr=9.0, vocab=131072, mask_id=3)
_GIDD_UNIF_3B = ModelConfig(
    family="gidd",
    layers=19,
    hidden=3072,
    heads=24,
    kv_heads=24,
    head_dim=128,
    intermediate=12288,
    vocab=131072,
    max_length=2048,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    mask_id=3,
    stop_ids=(1,),
    kind="uniform",
    qk_norm="whole",
    sink=True,
    score_cap=30.0,
    mlp="relu2",
    mlp_bias=True,
    noise=_GIDD_NOISE,
)
_GIDD_UNIF_10B = replace(_GIDD_UNIF_3B, layers=34, hidden=4608, heads=36, kv_heads=36, intermediate=18432)
_GIDD_MASK_3B = replace(_GIDD_UNIF_3B, layers=18, noise=replace(_GIDD_NOISE, shift=-1000.0))
_GIDD_100M = replace(
    _GIDD_UNIF_3B,
    layers=14,
    hidden=768,
    heads=12,
    kv_heads=12,
    head_dim=64,
    intermediate=3072,
    vocab=8192,
    noise=replace(_GIDD_NOISE, vocab=8192),
)
_GIDD_TINY = replace(
    _GIDD_100M,
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=4,
    head_dim=16,
    intermediate=160,
    vocab=256,
    max_length=128,
    noise=replace(_GIDD_NOISE, vocab=256),
)

_SDAR_4B = ModelConfig(
    family="sdar",
    layers=36,
    hidden=2560,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=9728,
    vocab=151936,
    max_length=32768,
    rope_theta=1_000_000.0,
    norm_eps=1e-6,
    mask_id=151669,
    stop_ids=(151643, 151645),
    kind="block_causal",
    qk_norm="head",
    block_length=4,
)
_SDAR_8B = replace(_SDAR_4B, hidden=4096, intermediate=12288)
# As its base, Qwen3-1.7B, whose embedding is tied; the checkpoint's own config.json decides for a real one.
_SDAR_1_7B = replace(_SDAR_4B, layers=28, hidden=2048, heads=16, intermediate=6144, tied=True)
_SDAR_100M = replace(
    _SDAR_4B,
    layers=16,
    hidden=768,
    heads=12,
    kv_heads=6,
    head_dim=64,
    intermediate=2048,
    vocab=32000,
    max_length=4096,
    mask_id=31999,
    stop_ids=(31998,),
    tied=True,
)
_SDAR_TINY = replace(
    _SDAR_100M,
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=160,
    vocab=256,
    max_length=512,
    mask_id=255,
    stop_ids=(250,),
)

# Qwen2.5-7B's shape.
_FAST_DLLM_V2_7B = replace(
    _DREAM_7B,
    family="fast-dllm-v2",
    max_length=32768,
    mask_id=151665,
    stop_ids=(151643, 151645),
    kind="block_causal",
    block_length=32,
)
_FAST_DLLM_V2_TINY = replace(
    _SDAR_TINY, family="fast-dllm-v2", head_dim=16, qk_norm=None, qkv_bias=True, shift=1, block_length=8
)

_LLADA_TINY = ModelConfig(
    family="llada",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=4,
    head_dim=16,
    intermediate=160,
    vocab=256,
    max_length=512,
    rope_theta=500_000.0,
    norm_eps=1e-5,
    mask_id=255,
    stop_ids=(250,),
)

_DREAM_TINY = ModelConfig(
    family="dream",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=160,
    vocab=256,
    max_length=512,
    rope_theta=1_000_000.0,
    norm_eps=1e-6,
    mask_id=255,
    stop_ids=(250,),
    qkv_bias=True,
    shift=1,
    sampling=dream.SAMPLING,
)

PRESETS = {
    "llada-8b": _LLADA_8B,
    "llada-1.5": _LLADA_8B,
    "dream-7b": _DREAM_7B,
    "diffucoder-7b": _DREAM_7B,
    "llada-100m": _LLADA_100M,
    "gidd-unif-3b": _GIDD_UNIF_3B,
    "gidd-unif-10b": _GIDD_UNIF_10B,
    "gidd-mask-3b": _GIDD_MASK_3B,
    "gidd-100m": _GIDD_100M,
    "gidd-tiny": _GIDD_TINY,
    "sdar-1.7b": _SDAR_1_7B,
    "sdar-4b": _SDAR_4B,
    "sdar-8b": _SDAR_8B,
    "sdar-100m": _SDAR_100M,
    "sdar-tiny": _SDAR_TINY,
    "fast-dllm-v2-7b": _FAST_DLLM_V2_7B,
    "fast-dllm-v2-tiny": _FAST_DLLM_V2_TINY,
    "llada-tiny": _LLADA_TINY,
    "dream-tiny": _DREAM_TINY,
}


def preset(name: str) -> ModelConfig:
    """The shape called `name`.

    Raises:
        UnknownNameError: there is no preset of that name.
    """
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS)
    return PRESETS[name]
