"""`adapter_config.json`: which modules an adapter changes, by PEFT's rules, and the ranks and scales."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remask.checkpoint.source import ADAPTER_CONFIG as CONFIG
from remask.checks.values import is_real, is_whole
from remask.errors import CheckpointError
from remask.families.fields import Fields

_MAX_R = 2**12  # rank
_MAX_NAMES = 3  # that an error lists
ALL = "all-linear"
# Keys that only training reads. PEFT sets `fan_in_fan_out` to false on linear layers, which all of ours are.
_TRAINING_KEYS = (
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out",
    "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
)  # fmt: skip
_KEYS = (
    "peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights",
)  # fmt: skip
_INITS = (True, False, "gaussian", "eva", "orthogonal")  # values of `init_lora_weights` that do not change the base


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The configuration of an adapter's matrices. The rules of matching are those of PEFT."""

    alpha: float
    default_rank: int
    rank_stabilised: bool
    targets: str | Sequence[str]
    exclusions: str | Sequence[str]
    layers: Sequence[int]
    layer_patterns: Sequence[str]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> "PeftConfig":
        """Read `adapter_config.json`. Raises `CheckpointError`, naming the key, if a value is not supported."""
        fields = Fields(CONFIG, raw)
        if raw.get("peft_type") != "LORA":
            raise fields.unfit("peft_type", '"LORA"')
        for key, value in raw.items():
            if key not in (*_KEYS, *_TRAINING_KEYS) and value not in (None, False, [], {}):
                raise fields.unfit(key, "null or false, as no other value of it is known here")
        fields.only("bias", "none", optional=True)
        if raw.get("init_lora_weights") not in (None, *_INITS):
            raise fields.unfit(
                "init_lora_weights",
                "true, false, gaussian, eva or orthogonal: others change the base too, so save the adapter with "
                "path_initial_model_for_weight_conversion",
            )
        targets = _names_or_pattern(fields, "target_modules")
        if not targets:
            raise fields.unfit("target_modules", 'a list of names, a regular expression or "all-linear"')
        layers = _layers(fields)
        if layers and isinstance(targets, str):
            raise fields.unfit("layers_to_transform", "null beside a 'target_modules' that is one text")
        names = _names_or_pattern(fields, "layers_pattern")
        layer_patterns = [names] if isinstance(names, str) else names
        for pattern in layer_patterns:
            _check_pattern(fields, "layers_pattern", _layer_pattern(pattern))
        return cls(
            alpha=fields.real("lora_alpha"),
            default_rank=fields.integer("r", most=_MAX_R),
            rank_stabilised=fields.flag("use_rslora", False),
            targets=targets,
            exclusions=_names_or_pattern(fields, "exclude_modules"),
            layers=layers,
            layer_patterns=layer_patterns,
            ranks=_pattern_values(fields, "rank_pattern", f"names and ranks from 1 to {_MAX_R}"),
            alphas=_pattern_values(fields, "alpha_pattern", "names and finite numbers"),
        )

    @property
    def all_linear(self) -> bool:
        """Whether the targets are all linear layers except the output matrix."""
        return isinstance(self.targets, str) and self.targets.lower() == ALL

    def matches(self, module: str) -> bool:
        """Whether the adapter has factors for `module`."""
        if self.exclusions and _matches_names(self.exclusions, module):
            return False
        if self.all_linear:
            return True
        if not _matches_names(self.targets, module):
            return False
        if isinstance(self.targets, str) or not self.layers:
            return True
        patterns = [_layer_pattern(name) for name in self.layer_patterns] or [r".*?\.[^.]*\.(?P<layer>\d+)\."]
        match = next(filter(None, (re.match(pattern, module) for pattern in patterns)), None)
        return match is not None and int(match["layer"]) in self.layers

    def rank(self, module: str) -> int:
        """The rank of the factors of `module`."""
        return int(_value_for(self.ranks, module, self.default_rank))

    def scale(self, module: str) -> float:
        """The scale of the factors' product: alpha / r, or alpha / sqrt(r) if rank-stabilised (arXiv 2312.03732)."""
        rank = self.rank(module)
        return _value_for(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rank_stabilised else rank)

    def check(self, modules: Iterable[str]) -> None:
        """Raise `CheckpointError` if a name in `target_modules` fits none of the model's `modules`."""
        modules = list(modules)
        names = [self.targets] if isinstance(self.targets, str) else self.targets
        unknown = list[str]()
        if not isinstance(self.targets, str):
            unknown = [name for name in names if not any(_matches_names([name], module) for module in modules)]
        if unknown or not any(map(self.matches, modules)):
            model_names = sorted({module.rpartition(".")[2] for module in modules})
            raise CheckpointError(
                f"{CONFIG}: 'target_modules' names {list_few(unknown or names)}, which fits no matrix of the model; it "
                f"has {', '.join(model_names)}."
            )


def list_few(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = len(names) - _MAX_NAMES
    return ", ".join(map(repr, names[:_MAX_NAMES])) + (f" and {more} more" if more > 0 else "")


def _names_or_pattern(fields: Fields, key: str) -> str | list[str]:
    """The value of `key`: a list of names, or a regular expression; an empty list if it is absent."""
    value: str | list[str] | None = fields.get(key)
    if value is None or value == "":
        return []
    if isinstance(value, str):
        _check_pattern(fields, key, value)
    elif not (isinstance(value, list) and all(isinstance(name, str) and name for name in value)):
        raise fields.unfit(key, "a list of names, or a regular expression")
    return value


def _layers(fields: Fields) -> list[int]:
    """The numbers of the layers that the adapter changes; an empty list for all of them."""
    value = fields.get("layers_to_transform")
    if value is None:
        return []
    layers = value if isinstance(value, list) else [value]
    if not all(is_whole(layer, 0) for layer in layers):
        raise fields.unfit("layers_to_transform", "a layer's number >= 0, or a list of them")
    return layers


def _check_pattern(fields: Fields, key: str, pattern: str) -> None:
    """Raise `CheckpointError` if the `pattern` of a key is not a regular expression."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise fields.unfit(key, f"a regular expression ({error})") from None


def _pattern_values(fields: Fields, key: str, supported: str) -> dict[str, Any]:
    """The value of `key`: an object of patterns with numbers, which are whole for ranks."""
    value = fields.get(key) or {}

    def fits(number: object) -> bool:
        return is_whole(number, 1, _MAX_R) if key == "rank_pattern" else is_real(number, -math.inf)

    if not isinstance(value, dict) or not all(map(fits, value.values())):
        raise fields.unfit(key, f"an object of {supported}")
    for pattern in value:
        _check_pattern(fields, key, _suffix_pattern(pattern))
    return value


def _layer_pattern(pattern: str) -> str:
    return rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\."


def _suffix_pattern(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _matches_names(names: str | Sequence[str], module: str) -> bool:
    """Whether `names`, a regular expression or a list of last parts of names, select `module`."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _value_for(values: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern in `values` that fits `module`, or `default`."""
    return next((value for key, value in values.items() if re.match(_suffix_pattern(key), module)), default)
