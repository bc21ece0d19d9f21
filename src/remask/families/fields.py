"""Typed access to the keys of a checkpoint's configuration. Errors name the key, its value and what is supported."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from remask.checks.values import SHOWN, is_real, is_whole
from remask.errors import CheckpointError
from remask.model.config import RopeScaling

# The largest sizes that a configuration may name. They are far above every published model's, and small enough that
# what the loader lists or allocates before it has seen a tensor stays small.
SIZE = 2**20  # of whatever has no bound of its own: positions, and the widths and heads of a layer
LAYERS, EXPERTS = 2**12, 2**12
VOCAB = 2**24  # token ids below it are exact in float32, in which the sampler hands them over
BLOCK = 2**10  # of a block-causal model's blocks, as pages hold whole blocks

NO_MASK = -1  # `ModelConfig.mask_id` of a model that has none
WHOLE, NEAR = "full_attention", "sliding_attention"  # kinds of layers, as of `layer_types`
SPELLINGS = ("rope_scaling", "rope_parameters")  # objects with parameters of RoPE, in transformers 4 and 5
ORIGINAL = "original_max_position_embeddings"
GROWTH = "llama_4_scaling_beta"  # of queries, by the position; a default says that a family's code knows it
_SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", ORIGINAL, "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
    "llama3": ("factor", ORIGINAL, "low_freq_factor", "high_freq_factor"),
}
"""The ways to scale positions that the transformer has, with their keys."""


def _shown(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


class Fields:
    """The keys of one JSON object, which is named `where` in errors. `null` counts as absent.

    Keys that are absent have the value that `defaults` gives them. All methods raise `CheckpointError` on values that
    cannot be used.
    """

    def __init__(self, where: str, raw: Mapping[str, Any], **defaults: Any) -> None:
        self._where, self._raw, self._defaults = where, raw, defaults

    def get(self, key: str) -> Any:
        """The value of a key as it is; None: there is none."""
        value = self._raw.get(key)
        return self._defaults.get(key) if value is None else value

    def unfit(self, key: str, supported: str) -> CheckpointError:
        """The error for a key whose value cannot be used. `supported` describes the values that can."""
        if self._raw.get(key) is None:
            return CheckpointError(f"{self._where}: the key {key!r} is missing; supported: {supported}.")
        return CheckpointError(f"{self._where}: {key!r} is {_shown(self._raw[key])}; supported: {supported}.")

    # Where a key is absent, the methods below give `default`, and raise without one.

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = SIZE) -> int:
        """A whole number from `least` to `most`."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not is_whole(value, least, most):
            raise self.unfit(key, f"an integer from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self.get(key)
        value = default if value is None else value
        if not is_real(value, 0) or value == 0:
            raise self.unfit(key, "a positive, finite number")
        return float(value)

    def switched(self, key: str, default: float) -> float | None:
        """A positive, finite number of what `null` switches off (None). Where the key is absent: `default`."""
        return None if key in self._raw and self._raw[key] is None else self.number(key, default)

    def real(self, key: str) -> float:
        """A finite number of either sign."""
        value = self.get(key)
        if not is_real(value, -math.inf):
            raise self.unfit(key, "a finite number")
        return float(value)

    def scaling(self, key: str) -> float | Literal["fan_in", "fan_out"]:
        """Scale of linear layers: "fan_in", "fan_out", or a positive number."""
        value = self.get(key)
        if value == "fan_in":
            return "fan_in"
        if value == "fan_out":
            return "fan_out"
        if isinstance(value, str):
            raise self.unfit(key, '"fan_in", "fan_out" or a positive number')
        return self.number(key)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.unfit(key, "true or false")
        return value

    def only(self, key: str, supported: object, *, optional: bool = False) -> None:
        """Refuse every value of `key` but one, for switches that the transformer does not have.

        An `optional` key may be absent, which means the supported value.
        """
        value = self.get(key)
        if not (value == supported or (value is None and optional)):
            raise self.unfit(key, f"{_shown(supported)} (the transformer has no other form of it)")

    def token(self, key: str, vocab: int, default: int | None = None) -> int:
        """A token id of a vocabulary of `vocab` ids."""
        value = self.get(key)
        value = default if value is None else value
        if not is_whole(value, 0, vocab - 1):
            raise self.unfit(key, f"a token id below {vocab}, the vocabulary's size")
        return value

    def mask(self, vocab: int) -> int:
        """The mask token's id, below `vocab`. Raises where nobody says it, or says another."""
        if self.get("mask_token_id") is None:
            raise CheckpointError(
                f"{self._where}: the key 'mask_token_id' is missing; supported: a token id, or a 'mask_token' in the "
                "tokenizer's files. Give the id that the model was trained with: --hf-overrides "
                "'{\"mask_token_id\": ID}' (hf_overrides)."
            )
        return self.token("mask_token_id", vocab)

    def tokens(self, key: str, vocab: int) -> tuple[int, ...]:
        """Token ids, given as one id, a list of ids, or not at all: -1 alone stands for none."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        ids = [] if ids == [-1] else ids
        if not all(is_whole(i, 0, vocab - 1) for i in ids):
            raise self.unfit(key, f"a token id below {vocab}, the vocabulary's size, a list of them, or -1 for none")
        return tuple(ids)

    def head_dim(self, hidden: str, heads: str) -> int:
        """Width of a head, from the keys of the hidden size and the number of heads. RoPE needs an even one.

        A `head_dim` that says another is refused.
        """
        width, rest = divmod(self.integer(hidden), self.integer(heads))
        if rest or width % 2:
            raise self.unfit(heads, f"a divisor of {hidden!r} = {self.integer(hidden)} that leaves an even head width")
        self.only("head_dim", width, optional=True)
        return width

    def rope(
        self,
        head_dim: int,
        share: float | None = None,
        *,
        positions: str = "max_position_embeddings",
        nested_leads: bool = False,
    ) -> dict[str, Any]:
        """The fields of `ModelConfig` that say how RoPE turns a head, and how many positions it reaches.

        Keys may stand in this object or, as transformers 5 writes them, in `rope_parameters`, which is followed with
        `nested_leads`, and must be alike without it; but `positions`, the key of the model's length, in this one alone.
        `share` is what the family's class takes where `partial_rotary_factor` is absent; None: it turns all channels.
        """
        if head_dim % 2:
            raise self.unfit("head_dim", "an even number, as RoPE turns channels in pairs")
        nested = self._rope_objects()
        outer = [] if nested_leads and self.get(SPELLINGS[1]) else [self]
        theta = self._said_once("rope_theta", nested, outer).number("rope_theta")
        partial = self._said_once("partial_rotary_factor", nested, outer)
        if share is None:
            partial.only("partial_rotary_factor", 1, optional=True)
        turned = partial.rotary_dim("partial_rotary_factor", head_dim, share or 1.0)
        self.only("rotary_dim", turned or head_dim, optional=True)
        reach = self.integer(positions)
        length = self._said_once(ORIGINAL, nested, [self]).integer(ORIGINAL, reach)
        scalings = [inner.scaling_of(length, reach) for inner in nested]
        if scalings[1:] and scalings[0] != scalings[1]:
            raise self.unfit(SPELLINGS[0], f"what {SPELLINGS[1]!r} says, {_shown(self._raw[SPELLINGS[1]])}")
        scaling = scalings[0] if scalings else None
        if scaling is not None and scaling.kind == "yarn":
            if theta <= 1:
                raise self.unfit("rope_theta", "a number above 1, where YaRN scales positions")
            reach = max(reach, min(SIZE, int(scaling.length * scaling.factor)))
        return {"rope_theta": theta, "rotary_dim": turned, "rope_scaling": scaling, "max_length": reach}

    def unscaled(self) -> None:
        """Refuse positions that are scaled, of a family whose authors' code scales none."""
        for inner in self._rope_objects():
            if inner.kind() != "default":
                raise inner.unfit(inner.named, '"default": the code of this family scales no positions')

    def _rope_objects(self) -> "list[_Rope]":
        """The objects under either spelling, which hold parameters of RoPE."""
        for key in SPELLINGS:
            if self.get(key) and not isinstance(self._raw[key], Mapping):
                raise self.unfit(key, 'null, or an object with "rope_type"')
        grows = {GROWTH: self._defaults[GROWTH]} if GROWTH in self._defaults else {}
        return [_Rope(f"{self._where}, {key!r}", self._raw[key], **grows) for key in SPELLINGS if self.get(key)]

    def _said_once(self, key: str, nested: "Sequence[Fields]", outer: "Sequence[Fields]") -> "Fields":
        """The object that has `key`: this one, or one of those `nested` in it. Raises where two differ.

        `outer` is this one, or empty if it only speaks where those say nothing.
        """
        places = [*outer, *nested]
        if not any(fields._raw.get(key) is not None for fields in places):
            places = [self, *nested]
        sources = [fields for fields in places if fields._raw.get(key) is not None]
        for other in sources[1:]:
            first = sources[0]
            if other._raw[key] != first._raw[key]:
                raise other.unfit(key, f"the {_shown(first._raw[key])} that {first._where} has for the same key")
        return sources[0] if sources else places[-1]

    def experts(self) -> int:
        """Routed experts of a layer: `num_experts`, or `num_local_experts` as transformers 5 writes it."""
        key = "num_experts" if self._raw.get("num_local_experts") is None else "num_local_experts"
        count = self.integer(key, most=EXPERTS)
        self.only("num_experts", count, optional=True)
        return count

    def all_attended(self) -> None:
        """Refuse layers that attend to a window of positions. A size alone, `sliding_window`, is not in use."""
        self.only("use_sliding_window", False, optional=True)
        layers = self.get("layer_types")
        if layers is not None and not (isinstance(layers, list) and all(kind == WHOLE for kind in layers)):
            raise self.unfit("layer_types", 'a list of "full_attention"')

    def near_layers(self, kinds: Any, layers: int) -> tuple[int, ...]:
        """The layers with windows, by the `kinds` of all `layers`, as `layer_types` says them."""
        if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {WHOLE, NEAR}:
            raise self.unfit("layer_types", f"a list of {layers} times {WHOLE!r} or {NEAR!r}")
        return tuple(layer for layer, kind in enumerate(kinds) if kind == NEAR)

    def rotary_dim(self, key: str, head_dim: int, default: float = 1.0) -> int | None:
        """Channels of a head that RoPE turns, from the key of their share; None: all of them."""
        share = self.get(key)
        share = default if share is None else share
        if not is_real(share, 0) or share > 1 or int(head_dim * share) % 2 or int(head_dim * share) < 2:
            raise self.unfit(key, f"a share up to 1 of the head's {head_dim} channels that leaves an even number")
        turned = int(head_dim * share)
        return None if turned == head_dim else turned

    def kv_heads(self, key: str, heads: int) -> int:
        """Number of key and value heads, which divides `heads`. Where the key is absent it is `heads`."""
        value = self.integer(key, heads)
        if heads % value:
            raise self.unfit(key, f"a divisor of the {heads} attention heads")
        return value

    def block(self, key: str, default: int | None = None) -> int | None:
        """The block length that a block-causal model was trained with; `default` where the key is absent."""
        return default if self.get(key) is None else self.integer(key, most=BLOCK)

    def shape(
        self,
        head_dim: int,
        *,
        width: str | None = "intermediate_size",
        share: float | None = None,
        windows: bool = False,
        nested_leads: bool = False,
        masked: bool = True,
    ) -> dict[str, Any]:
        """The fields of `ModelConfig` that most configurations hold under the same keys.

        `width` is the key of the width of a dense layer's MLP; None: no layer is dense. `share` and
        `nested_leads` are as of `rope`. The family takes keys of `windows`, and lets rows see beyond them. A model that
        is not `masked` has no mask token.
        """
        if not windows:
            self.all_attended()
        vocab, heads = self.integer("vocab_size", most=VOCAB), self.integer("num_attention_heads")
        return {
            "layers": self.integer("num_hidden_layers", most=LAYERS),
            "hidden": self.integer("hidden_size"),
            "heads": heads,
            "kv_heads": self.kv_heads("num_key_value_heads", heads),
            "head_dim": head_dim,
            "intermediate": 0 if width is None else self.integer(width),
            "vocab": vocab,
            **self.rope(head_dim, share, nested_leads=nested_leads),
            "norm_eps": self.number("rms_norm_eps"),
            "mask_id": self.mask(vocab) if masked else NO_MASK,
            "stop_ids": tuple(dict.fromkeys(self.tokens("eos_token_id", vocab))),
            "tied": self.flag("tie_word_embeddings", False),
        }


class _Rope(Fields):
    """An object with parameters of RoPE."""

    @property
    def named(self) -> str:
        """The key that names the way in which positions are scaled."""
        return "type" if self.get("rope_type") is None and self.get("type") is not None else "rope_type"

    def kind(self) -> str:
        """That way. Keys that it does not have are refused, as are ways that the transformer does not have."""
        kind = str(self.get(self.named) or "default")
        if kind not in _SCALINGS:
            raise self.unfit(self.named, f"{', '.join(_SCALINGS)} (the transformer has no other scaling of positions)")
        self.only("type", kind, optional=True)
        known = ("rope_type", "type", "rope_theta", "partial_rotary_factor", *_SCALINGS[kind])
        known += (GROWTH, "max_position_embeddings") if GROWTH in self._defaults else ()
        for key, value in self._raw.items():
            if key not in known and value is not None:
                raise self.unfit(key, f"the keys {', '.join(known)}, where {self.named!r} is {kind!r}")
        return kind

    def scaling_of(self, length: int, reach: int) -> RopeScaling | None:
        """What it makes of positions, of which the model was first trained on `length`, and then on `reach`."""
        kind = self.kind()
        if kind == "yarn":
            factor = self.number("factor", reach / length)
            return RopeScaling(
                kind="yarn",
                factor=factor,
                length=length,
                slow=self.number("beta_slow", 1.0),
                fast=self.number("beta_fast", 32.0),
                whole=self.flag("truncate", True),
                gain=self.number("attention_factor", self._gain(factor)),
                growth=self.number(GROWTH) if self.get(GROWTH) else 0.0,
            )
        if kind == "llama3":
            slow, fast = self.number("low_freq_factor"), self.number("high_freq_factor")
            if fast <= slow:
                raise self.unfit("high_freq_factor", f"a number above 'low_freq_factor', {slow}")
            return RopeScaling(kind="llama3", factor=self.number("factor"), length=length, slow=slow, fast=fast)
        factor = 1.0 if kind == "default" else self.number("factor")
        # "dynamic" scales nothing on canvases of up to `max_position_embeddings`, and there are no longer ones.
        return RopeScaling(kind="linear", factor=factor) if kind == "linear" else None

    def _gain(self, factor: float) -> float:
        """YaRN's factor of cosines and sines."""
        scales = [self.get(key) and self.number(key) for key in ("mscale", "mscale_all_dim")]
        log = 0.1 * math.log(max(factor, 1))
        return (1 + scales[0] * log) / (1 + scales[1] * log) if all(scales) else 1 + log
