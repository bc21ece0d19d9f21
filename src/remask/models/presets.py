"""Named shapes for `--load-format dummy`: those of the published models, and small ones for benchmarks and tests."""

from remask.errors import UnknownNameError
from remask.models.config import ModelConfig

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
)

PRESETS = {
    "llada-8b": _LLADA_8B,
    "llada-1.5": _LLADA_8B,
    "dream-7b": _DREAM_7B,
    "diffucoder-7b": _DREAM_7B,
    "llada-100m": _LLADA_100M,
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
