"""Typed access to the keys of a checkpoint's configuration. Errors name the key, its value and what is supported."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from remask.checks.values import SHOWN, is_real, is_whole, shown
from remask.errors import CheckpointError
from remask.model.config import RopeScaling

# The largest sizes in a configuration. They are far above those of published models, and bound what the loader
# allocates before it has seen a tensor.
SIZE = 2**20  # of all other sizes: positions, widths, heads
LAYERS, EXPERTS = 2**12, 2**12
VOCAB = 2**24  # token ids below it are exact in float32, in which the sampler returns them
BLOCK = 2**10  # block length of a block-causal model, as pages hold whole blocks

NO_MASK = -1  # `ModelConfig.mask_id` of a model that has none
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, as of `layer_types`
SPELLINGS = ("rope_scaling", "rope_parameters")  # objects with parameters of RoPE, in transformers 4 and 5
ORIGINAL = "original_max_position_embeddings"
_MAX_TURNS = 1e100  # `beta_fast` and `beta_slow`: the logarithm of a length by them is finite
GROWTH = "llama_4_scaling_beta"  # `RopeScaling.growth`; families whose code has it give a default for it
_SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", ORIGINAL, "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
    "llama3": ("factor", ORIGINAL, "low_freq_factor", "high_freq_factor"),
}
"""The ways to scale positions that the transformer has, with their keys."""


def _short_repr(value: object) -> str:
    """`value` as JSON, cut to `SHOWN` characters."""
    try:
        text = json.dumps(value, default=repr)
    except (TypeError, ValueError):  # keys that JSON has not, and numbers of thousands of digits, of overrides
        return shown(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


class Fields:
    """The keys of one JSON object, which is called `source` in errors. `null` counts as absent.

    Absent keys have their values in `defaults`. All methods raise `CheckpointError` if a value cannot be used.
    """

    def __init__(self, source: str, raw: Mapping[str, Any], **defaults: Any) -> None:
        self._source = source
        self._raw = raw
        self._defaults = defaults

    def get(self, key: str) -> Any:
        """The value of `key`, unchecked. Returns None if it is absent and has no default."""
        value = self._raw.get(key)
        return self._defaults.get(key) if value is None else value

    def unfit(self, key: str, supported: str) -> CheckpointError:
        """The error for a key whose value cannot be used. `supported` describes the values that can."""
        if self._raw.get(key) is None:
            return CheckpointError(f"{self._source}: the key {key!r} is missing; supported: {supported}.")
        return CheckpointError(f"{self._source}: {key!r} is {_short_repr(self._raw[key])}; supported: {supported}.")

    # If a key is absent, the methods below return `default`, or raise if there is none.

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

    def optional_number(self, key: str, default: float) -> float | None:
        """A positive, finite number, or None if the key is `null`. Returns `default` if the key is absent."""
        return None if key in self._raw and self._raw[key] is None else self.number(key, default)

    def real(self, key: str) -> float:
        """A finite number of either sign."""
        value = self.get(key)
        if not is_real(value, -math.inf):
            raise self.unfit(key, "a finite number")
        return float(value)

    def scaling(self, key: str) -> float | Literal["fan_in", "fan_out"]:
        """The scale of linear layers: "fan_in", "fan_out", or a positive number."""
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
        """Refuse every value of `key` except `supported`, for switches that the transformer does not have.

        An `optional` key may be absent, which means the supported value.
        """
        value = self.get(key)
        if not (value == supported or (value is None and optional)):
            raise self.unfit(key, f"{_short_repr(supported)} (the transformer has no other form of it)")

    def token(self, key: str, vocab_size: int, default: int | None = None) -> int:
        """A token id of a vocabulary of `vocab_size` ids."""
        value = self.get(key)
        value = default if value is None else value
        if not is_whole(value, 0, vocab_size - 1):
            raise self.unfit(key, f"a token id below {vocab_size}, the vocabulary's size")
        return value

    def mask(self, vocab_size: int) -> int:
        """The mask token's id, below `vocab_size`. Raises `CheckpointError` if the key is absent or not such an id."""
        if self.get("mask_token_id") is None:
            raise CheckpointError(
                f"{self._source}: the key 'mask_token_id' is missing; supported: a token id, or a 'mask_token' in the "
                "tokenizer's files. Give the id that the model was trained with: --hf-overrides "
                "'{\"mask_token_id\": ID}' (hf_overrides)."
            )
        return self.token("mask_token_id", vocab_size)

    def tokens(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Token ids: one id, a list of ids, or none if the key is absent or -1."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [value]
        if ids in ([None], [-1]):
            ids = []
        if not all(is_whole(token, 0, vocab_size - 1) for token in ids):
            raise self.unfit(
                key, f"a token id below {vocab_size}, the vocabulary's size, a list of them, or -1 for none"
            )
        return tuple(ids)

    def head_dim(self, hidden_key: str = "hidden_size", heads_key: str = "num_attention_heads") -> int:
        """The width of a head, from the keys of the hidden size and the number of heads. RoPE needs an even width.

        Raises `CheckpointError` if `head_dim` has another value.
        """
        hidden = self.integer(hidden_key)
        width, remainder = divmod(hidden, self.integer(heads_key))
        if remainder or width % 2:
            raise self.unfit(heads_key, f"a divisor of {hidden_key!r} = {hidden} that leaves an even head width")
        self.only("head_dim", width, optional=True)
        return width

    def rope(
        self,
        head_dim: int,
        share: float | None = None,
        *,
        positions_key: str = "max_position_embeddings",
        nested_leads: bool = False,
    ) -> dict[str, Any]:
        """The fields of `ModelConfig` for RoPE, and `max_length`, which YaRN may raise.

        Keys may be in this object or, as transformers 5 writes them, in `rope_parameters`. If both have a key, its
        values must be equal; with `nested_leads`, that of `rope_parameters` is used. `positions_key` is the key of the
        model's length, in this object. `share` is the family's default of `partial_rotary_factor`; None: the family
        rotates all channels, and refuses another value.
        """
        if head_dim % 2:
            raise self.unfit("head_dim", "an even number, as RoPE turns channels in pairs")
        nested = self._rope_objects()
        outer = [] if nested_leads and self.get(SPELLINGS[1]) else [self]
        theta = self._single_source("rope_theta", nested, outer).number("rope_theta")
        source = self._single_source("partial_rotary_factor", nested, outer)
        if share is None:
            source.only("partial_rotary_factor", 1, optional=True)
        rotary_dim = source.rotary_dim("partial_rotary_factor", head_dim, share or 1.0)
        self.only("rotary_dim", rotary_dim or head_dim, optional=True)
        max_length = self.integer(positions_key)
        length = self._single_source(ORIGINAL, nested, [self]).integer(ORIGINAL, max_length)
        scalings = [inner.scaling_of(length, max_length) for inner in nested]
        if scalings[1:] and scalings[0] != scalings[1]:
            raise self.unfit(SPELLINGS[0], f"what {SPELLINGS[1]!r} says, {_short_repr(self._raw[SPELLINGS[1]])}")
        scaling = scalings[0] if scalings else None
        if scaling is not None and scaling.kind == "yarn":
            if theta <= 1:
                raise self.unfit("rope_theta", "a number above 1, where YaRN scales positions")
            max_length = max(max_length, int(min(SIZE, scaling.length * scaling.factor)))
        return {"rope_theta": theta, "rotary_dim": rotary_dim, "rope_scaling": scaling, "max_length": max_length}

    def refuse_rope_scaling(self) -> None:
        """Refuse scaled positions, for a family whose authors' code does not scale them."""
        for inner in self._rope_objects():
            if inner.kind() != "default":
                raise inner.unfit(inner.kind_key, '"default": the code of this family scales no positions')

    def _rope_objects(self) -> "list[_Rope]":
        """The objects with parameters of RoPE, under both of their names."""
        for key in SPELLINGS:
            if self.get(key) and not isinstance(self._raw[key], Mapping):
                raise self.unfit(key, 'null, or an object with "rope_type"')
        defaults = {GROWTH: self._defaults[GROWTH]} if GROWTH in self._defaults else {}
        return [_Rope(f"{self._source}, {key!r}", self._raw[key], **defaults) for key in SPELLINGS if self.get(key)]

    def _single_source(self, key: str, nested: "Sequence[Fields]", outer: "Sequence[Fields]") -> "Fields":
        """The first object of `outer` and `nested` that has `key`. Raises `CheckpointError` if their values differ.

        `outer` is this object, or empty if this object counts only when none of `nested` has the key. If no object has
        it, the last one is returned, which raises the error or has the default.
        """
        objects = [*outer, *nested]
        if not any(fields._raw.get(key) is not None for fields in objects):
            objects = [self, *nested]
        sources = [fields for fields in objects if fields._raw.get(key) is not None]
        for source in sources[1:]:
            value = sources[0]._raw[key]
            if source._raw[key] != value:
                raise source.unfit(key, f"the {_short_repr(value)} that {sources[0]._source} has for the same key")
        return sources[0] if sources else objects[-1]

    def experts(self) -> int:
        """Routed experts of a layer: `num_experts`, or `num_local_experts` as transformers 5 writes it."""
        key = "num_experts" if self._raw.get("num_local_experts") is None else "num_local_experts"
        count = self.integer(key, most=EXPERTS)
        self.only("num_experts", count, optional=True)
        return count

    def all_attended(self) -> None:
        """Refuse sliding layers. `sliding_window` alone, a size, does not switch them on."""
        self.only("use_sliding_window", False, optional=True)
        layers = self.get("layer_types")
        if layers is not None and not (isinstance(layers, list) and all(kind == FULL for kind in layers)):
            raise self.unfit("layer_types", 'a list of "full_attention"')

    def sliding_layers(self, kinds: Any, layers: int) -> tuple[int, ...]:
        """The sliding layers, by the `kinds` of all `layers` in the form of `layer_types`."""
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
            raise self.unfit("layer_types", f"a list of {layers} times {FULL!r} or {SLIDING!r}")
        return tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)

    def rotary_dim(self, key: str, head_dim: int, default: float = 1.0) -> int | None:
        """The number of channels of a head that RoPE rotates, from the key of their share. Returns None if all are."""
        share = self.get(key)
        share = default if share is None else share
        if not is_real(share, 0) or share > 1 or int(head_dim * share) % 2 or int(head_dim * share) < 2:
            raise self.unfit(key, f"a share up to 1 of the head's {head_dim} channels that leaves an even number")
        rotary_dim = int(head_dim * share)
        return None if rotary_dim == head_dim else rotary_dim

    def kv_heads(self, key: str, heads: int) -> int:
        """The number of key and value heads, a divisor of `heads`; `heads` if the key is absent."""
        value = self.integer(key, heads)
        if heads % value:
            raise self.unfit(key, f"a divisor of the {heads} attention heads")
        return value

    def block(self, key: str, default: int | None = None) -> int | None:
        """The block length that a block-causal model was trained with; `default` if the key is absent."""
        return default if self.get(key) is None else self.integer(key, most=BLOCK)

    def shape(
        self,
        head_dim: int,
        *,
        width_key: str | None = "intermediate_size",
        share: float | None = None,
        windows: bool = False,
        nested_leads: bool = False,
        masked: bool = True,
    ) -> dict[str, Any]:
        """The fields of `ModelConfig` whose keys are the same in most configurations.

        `width_key` is the key of the width of a dense layer's MLP; None: no layer is dense. `share` and `nested_leads`
        are those of `rope`. With `windows`, keys of sliding layers are accepted and ignored. A model that is not
        `masked` has no mask token.
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
            "intermediate": 0 if width_key is None else self.integer(width_key),
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
    def kind_key(self) -> str:
        """The key of the kind of scaling: "rope_type", or "type" in older files."""
        return "type" if self.get("rope_type") is None and self.get("type") is not None else "rope_type"

    def kind(self) -> str:
        """The kind of scaling. Raises `CheckpointError` if the transformer lacks it or a key is another kind's."""
        kind = str(self.get(self.kind_key) or "default")
        if kind not in _SCALINGS:
            raise self.unfit(
                self.kind_key, f"{', '.join(_SCALINGS)} (the transformer has no other scaling of positions)"
            )
        self.only("type", kind, optional=True)
        keys = ("rope_type", "type", "rope_theta", "partial_rotary_factor", *_SCALINGS[kind])
        keys += (GROWTH, "max_position_embeddings") if GROWTH in self._defaults else ()
        for key, value in self._raw.items():
            if key not in keys and value is not None:
                raise self.unfit(key, f"the keys {', '.join(keys)}, where {self.kind_key!r} is {kind!r}")
        return kind

    def scaling_of(self, length: int, max_length: int) -> RopeScaling | None:
        """The scaling, for a model that was first trained on `length` positions. Returns None if there is none."""
        kind = self.kind()
        if kind == "yarn":
            factor = self.number("factor", max_length / length)
            return RopeScaling(
                kind="yarn",
                factor=factor,
                length=length,
                slow=self._turns("beta_slow", 1.0),
                fast=self._turns("beta_fast", 32.0),
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
        # "dynamic" scales only canvases longer than `max_position_embeddings`, and no canvas is longer.
        return RopeScaling(kind="linear", factor=factor) if kind == "linear" else None

    def _turns(self, key: str, default: float) -> float:
        """A number of turns at which YaRN's mixture begins or ends."""
        turns = self.number(key, default)
        if not 1 / _MAX_TURNS <= turns <= _MAX_TURNS:
            raise self.unfit(key, f"a number from {1 / _MAX_TURNS:g} to {_MAX_TURNS:g}")
        return turns

    def _gain(self, factor: float) -> float:
        """YaRN's factor of cosines and sines."""
        scales = [self.get(key) and self.number(key) for key in ("mscale", "mscale_all_dim")]
        log = 0.1 * math.log(max(factor, 1))
        return (1 + scales[0] * log) / (1 + scales[1] * log) if all(scales) else 1 + log
