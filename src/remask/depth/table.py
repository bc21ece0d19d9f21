"""`DepthTable`: how many leading layers of one model may reuse a shared prefix, per prefix ratio; and its file."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from remask.checkpoint.loaded import LoadedModel
from remask.checks.values import LARGEST, real, whole
from remask.depth.limits import depth_entries, limits_of
from remask.depth.rule import AUTHORS, DepthRule
from remask.errors import ConfigError, TableError
from remask.machine.disk import write_whole
from remask.policies.depth_lookup import DepthLookup

VERSION = 2
FIRST = 1  # had neither rule nor limits: `AUTHORS` made it
DEFINITIONS = ("flat", "joint", "official", "published")


@dataclass(frozen=True, slots=True)
class Growth:
    """One step of the convergence check: after `samples` requests per ratio, how far the table moved.

    `distance` is the L1 distance to the table of the step before, in layers, averaged over the ratios.
    """

    samples: int
    distance: float


@dataclass(frozen=True, slots=True)
class DepthTable:
    """The result of profiling one model (BiCache section 5.1).

    Attributes:
        model: name of the model, for people; `fingerprint` is what identifies it.
        fingerprint: identity of the model; None in a table taken from a publication, which goes by the shape.
        family, layers, hidden, vocab: the model's shape.
        tau: similarity that a layer must exceed.
        definition: "flat", "joint" or "official" as in `similarity`; "published" where a publication does not say.
        samples: requests measured per ratio.
        source: what was measured on, or where the values were published.
        rule: how depths follow from similarities; None where a publication does not say.
        entries: prefix ratio in percent -> depth b in layers, increasing in both.
        limits: prefix ratio in percent -> for each depth from 1 to `layers` the tau below which the rule gives at least
            that depth; empty in a published table. They end before `layers` where only those that `tau` needs were
            computed.
        curves: prefix ratio in percent -> mean similarity per layer; empty in a published table, and where not all
            layers were computed.
        request_depths: prefix ratio in percent -> mean of the depths of single requests, in layers; empty likewise.
        growth: the convergence check.
    """

    model: str
    fingerprint: str | None
    family: str
    layers: int
    hidden: int
    vocab: int
    tau: float
    definition: Literal["flat", "joint", "official", "published"]
    samples: int
    source: str
    rule: DepthRule | None
    entries: Mapping[int, int]
    limits: Mapping[int, tuple[float, ...]]
    curves: Mapping[int, tuple[float, ...]]
    request_depths: Mapping[int, float]
    growth: tuple[Growth, ...]

    @property
    def lookup(self) -> DepthLookup:
        """The table as policies use it."""
        return DepthLookup(self.entries)

    def lookup_at(self, tau: float) -> DepthLookup:
        """The table at another tau, by the same rule. Raises `ConfigError` where it holds no similarities."""
        if not self.limits:
            raise ConfigError(
                f"the depth table of {self.model!r} holds no similarities ({self.source}), so its depths at tau "
                f"{tau:g} are unknown; measure one with 'remask profile --output FILE' and name it with --depth-table"
            )
        if tau < self.tau and any(len(limits) < self.layers for limits in self.limits.values()):
            raise ConfigError(
                f"the depth table of {self.model!r} was measured in the layers that tau {self.tau:g} needs, so its "
                f"depths at tau {tau:g} are unknown; use {self.tau:g} or more, or measure it without --needed-layers"
            )
        return DepthLookup(depth_entries(self.limits, tau))

    @property
    def identity(self) -> str:
        """Equal for tables that give the same depths, at any threshold."""
        content = [sorted(self.entries.items()), sorted(self.limits.items())]
        return xxhash.xxh64(json.dumps(content).encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the table as JSON. Raises `TableError` where the file cannot be written; an earlier one stays then."""
        value = {
            "version": VERSION,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "family": self.family,
            "layers": self.layers,
            "hidden": self.hidden,
            "vocab": self.vocab,
            "tau": self.tau,
            "definition": self.definition,
            "samples": self.samples,
            "source": self.source,
            "rule": None if self.rule is None else asdict(self.rule),
            "entries": {str(r): b for r, b in self.entries.items()},
            "request_depths": {str(r): b for r, b in self.request_depths.items()},
            "growth": [[step.samples, step.distance] for step in self.growth],
            "limits": {str(r): list(limits) for r, limits in self.limits.items()},
            "curves": {str(r): list(curve) for r, curve in self.curves.items()},
        }
        # One line a ratio: readable, and a diff of two tables shows which ratios changed.
        text = json.dumps(value, indent=1).replace("[\n   ", "[").replace("\n  ]", "]").replace(",\n   ", ", ")
        write_whole("the depth table", path, text + "\n", TableError)

    @classmethod
    def load(cls, path: str | Path, model: LoadedModel | None = None) -> "DepthTable":
        """Read a table, and check that it is of `model` where one is given.

        Tables of the first format name no rule. They were made by that of the authors' code, and are read so.

        Raises `TableError` where the file is missing or malformed, or the table is of another model.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TableError(f"The depth table {path} cannot be read: {error}.") from error
        try:
            table = _parse(json.loads(text))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise TableError(
                f"{path} is no depth table: {reason}. Write one with `remask profile --model MODEL --output {path}`."
            ) from error
        if model is not None and not table.fits(model):
            own, other = table.fingerprint or "no fingerprint", model.fingerprint
            raise TableError(
                f"The depth table {path} is of the model {table.model!r} ({own}, {table.layers} layers), but "
                f"{model.name!r} ({other}, {model.config.layers} layers) is loaded. Measure a table of it with "
                f"`remask profile --model {model.name} --output FILE`."
            )
        return table

    def fits(self, model: LoadedModel) -> bool:
        """Whether this is a table of `model`: by fingerprint, or by shape where the table has none."""
        shape = model.config
        if self.layers != shape.layers:
            return False
        if self.fingerprint is not None:
            return self.fingerprint == model.fingerprint
        return (self.family, self.hidden, self.vocab) == (shape.family, shape.hidden, shape.vocab)


def _parse(raw: Any) -> DepthTable:
    """The table that decoded JSON holds. Raises `KeyError`, `TypeError` or `ValueError` where it holds none."""
    if not isinstance(raw, dict):
        raise TypeError("it is not a JSON object")
    if raw["version"] not in (FIRST, VERSION) or isinstance(raw["version"], bool):
        raise ValueError(f"version is {raw['version']!r}, this program reads {FIRST} and {VERSION}")
    if raw["definition"] not in DEFINITIONS:
        raise ValueError(f"definition is {raw['definition']!r}, not one of {', '.join(DEFINITIONS)}")
    layers, tau = _integer(raw, "layers"), _real("tau", raw["tau"], 1)
    entries = {r: _whole(f"entries.{r}", b, layers) for r, b in _by_ratio(raw, "entries")}
    try:
        DepthLookup(entries)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    curves = _curves(raw, "curves", layers)
    if raw["version"] == FIRST:
        rule = None if raw["definition"] == "published" else AUTHORS
        limits = {r: tuple(limits_of(AUTHORS, np.array(curve)).tolist()) for r, curve in curves.items()}
    else:
        rule, limits = _rule(raw["rule"]), _curves(raw, "limits", layers, whole=False)
        if limits and depth_entries(limits, tau) != entries:
            raise ValueError("entries are not those that limits give at tau")
    return DepthTable(
        model=_text(raw, "model"),
        fingerprint=None if raw["fingerprint"] is None else _text(raw, "fingerprint"),
        family=_text(raw, "family"),
        layers=layers,
        hidden=_integer(raw, "hidden"),
        vocab=_integer(raw, "vocab"),
        tau=tau,
        definition=raw["definition"],
        samples=_integer(raw, "samples"),
        source=_text(raw, "source"),
        rule=rule,
        entries=entries,
        limits=limits,
        curves=curves,
        request_depths={r: _real(f"request_depths.{r}", b, layers) for r, b in _by_ratio(raw, "request_depths")},
        growth=tuple(Growth(_whole("growth", n), _real("growth", d, layers)) for n, d in raw["growth"]),
    )


def _text(raw: Mapping[str, Any], key: str) -> str:
    if not isinstance(raw[key], str):
        raise TypeError(f"{key} must be text, got {raw[key]!r}")
    return str(raw[key])


def _integer(raw: Mapping[str, Any], key: str) -> int:
    return _whole(key, raw[key])


def _whole(key: str, value: Any, high: int = LARGEST) -> int:
    whole(key, value, low=0, high=high)
    return int(value)


def _real(key: str, value: Any, high: float, low: float = 0) -> float:
    real(key, value, low=low, high=high)
    return float(value)


def _by_ratio(raw: Mapping[str, Any], key: str) -> Iterable[tuple[int, Any]]:
    if not isinstance(raw[key], dict) or not all(r.isdecimal() for r in raw[key]):
        raise TypeError(f"{key} must be an object with ratios in percent as keys, got {raw[key]!r}")
    return [(int(r), value) for r, value in raw[key].items()]


def _curves(raw: Mapping[str, Any], key: str, layers: int, *, whole: bool = True) -> dict[int, tuple[float, ...]]:
    """Numbers by ratio, one a layer, of all layers or, unless `whole`, of the first ones."""
    return {ratio: _curve(f"{key}.{ratio}", values, layers, whole=whole) for ratio, values in _by_ratio(raw, key)}


def _curve(name: str, values: Any, layers: int, *, whole: bool) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) > layers or (whole and len(values) < layers):
        raise TypeError(f"{name} must be a list of {'' if whole else 'up to '}{layers} similarities, one a layer")
    return tuple(_real(name, value, 1.001, low=-1.001) for value in values)


def _rule(raw: Any) -> DepthRule | None:
    if raw is None:
        return None
    names = [part.name for part in fields(DepthRule)]
    if not isinstance(raw, dict) or sorted(raw) != sorted(names):
        raise TypeError(f"rule must be an object of {', '.join(names)}, got {raw!r}")
    return DepthRule(**raw)
