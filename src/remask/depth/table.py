"""`DepthTable`: how many leading layers of one model may reuse a shared prefix, per prefix ratio; and its file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import xxhash

from remask.checkpoint.loaded import LoadedModel
from remask.checks.values import LARGEST, Choice, ListOf, OrNull, Real, Text, Values, Whole
from remask.depth.rule import DepthRule, depth_entries
from remask.errors import TableError
from remask.machine.disk import write_whole
from remask.policies.bicache import DepthLookup

VERSION = 2
Definition: TypeAlias = Literal["flat", "joint", "official", "published"]
_COSINE = Real(-1.001, 1.001)


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
        fingerprint: identity of the model; None in a table taken from a publication, which fits no model.
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
    definition: Definition
    samples: int
    source: str
    rule: DepthRule | None
    entries: Mapping[int, int]
    request_depths: Mapping[int, float]
    growth: tuple[Growth, ...]
    limits: Mapping[int, tuple[float, ...]]
    curves: Mapping[int, tuple[float, ...]]

    @property
    def lookup(self) -> DepthLookup:
        """The table as policies use it."""
        return DepthLookup(self.entries)

    @property
    def identity(self) -> str:
        """Equal for tables that give the same depths, at any threshold."""
        content = [sorted(self.entries.items()), sorted(self.limits.items())]
        return xxhash.xxh64(json.dumps(content).encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the table as JSON. Raises `TableError` where the file cannot be written; an earlier one stays then."""
        value = {"version": VERSION} | {each.name: getattr(self, each.name) for each in fields(self)}
        value["rule"] = None if self.rule is None else asdict(self.rule)
        value["growth"] = [[step.samples, step.distance] for step in self.growth]
        # One line a ratio: readable, and a diff of two tables shows which ratios changed.
        text = (
            json.dumps(value, indent=1, default=dict)
            .replace("[\n   ", "[")
            .replace("\n  ]", "]")
            .replace(",\n   ", ", ")
        )
        write_whole("the depth table", path, text + "\n", TableError)

    @classmethod
    def load(cls, path: str | Path, model: LoadedModel | None = None) -> "DepthTable":
        """Read a table, and check that it is of `model` where one is given.

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
        """Whether this is a table of `model`, by fingerprint alone: models of one shape may differ in every depth."""
        return self.layers == model.config.layers and self.fingerprint == model.fingerprint


_TEXT, _COUNT = Text(LARGEST), Whole(0)
_PLAIN: Mapping[str, Values] = {
    "model": _TEXT,
    "fingerprint": OrNull(_TEXT),
    "family": _TEXT,
    "layers": _COUNT,
    "hidden": _COUNT,
    "vocab": _COUNT,
    "tau": Real(0, 1),
    "definition": Choice(get_args(Definition)),
    "samples": _COUNT,
    "source": _TEXT,
}


def _parse(raw: Any) -> DepthTable:
    """The table that decoded JSON holds. Raises `KeyError`, `TypeError` or `ValueError` where it holds none."""
    if not isinstance(raw, dict):
        raise TypeError("it is not a JSON object")
    if raw["version"] != VERSION or isinstance(raw["version"], bool):
        raise ValueError(f"version is {raw['version']!r}, this program reads {VERSION}")
    for name, values in _PLAIN.items():
        values.check(name, raw[name])
    layers = raw["layers"]
    entries = _by_ratio(raw, "entries", Whole(0, layers))
    DepthLookup(entries)
    rule, limits = _rule(raw["rule"]), _by_ratio(raw, "limits", ListOf(_COSINE, "similarities", layers))
    if limits and depth_entries(limits, raw["tau"]) != entries:
        raise ValueError("entries are not those that limits give at tau")
    curves = _by_ratio(raw, "curves", ListOf(_COSINE, "similarities", layers))
    if any(len(curve) < layers for curve in curves.values()):
        raise ValueError(f"curves must hold {layers} similarities each, one a layer")
    growth = [(_checked("growth", n, _COUNT), _checked("growth", d, Real(0, layers))) for n, d in raw["growth"]]
    return DepthTable(
        **{name: raw[name] for name in _PLAIN},
        rule=rule,
        entries=entries,
        request_depths=_by_ratio(raw, "request_depths", Real(0, layers)),
        growth=tuple(Growth(*step) for step in growth),
        limits={ratio: tuple(values) for ratio, values in limits.items()},
        curves={ratio: tuple(curve) for ratio, curve in curves.items()},
    )


def _checked(name: str, value: Any, values: Values) -> Any:
    values.check(name, value)
    return value


def _by_ratio(raw: Mapping[str, Any], key: str, values: Values) -> dict[int, Any]:
    """What stands under `key` by ratio, each in `values`."""
    if not isinstance(raw[key], dict) or not all(r.isdecimal() for r in raw[key]):
        raise TypeError(f"{key} must be an object with ratios in percent as keys, got {raw[key]!r}")
    return {int(r): _checked(f"{key}.{r}", value, values) for r, value in raw[key].items()}


def _rule(raw: Any) -> DepthRule | None:
    if raw is None:
        return None
    names = [part.name for part in fields(DepthRule)]
    if not isinstance(raw, dict) or sorted(raw) != sorted(names):
        raise TypeError(f"rule must be an object of {', '.join(names)}, got {raw!r}")
    return DepthRule(**raw)
