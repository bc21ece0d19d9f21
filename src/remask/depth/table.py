"""`DepthTable`: how many leading layers of a model may read a shared prefix, by prefix ratio; and its file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeAlias

import xxhash

from remask.checkpoint.loaded import LoadedModel
from remask.checks.values import LARGEST, ListOf, Real, Text, Values, Whole
from remask.errors import TableError
from remask.machine.disk import write_whole
from remask.policies.bicache import DepthLookup

VERSION: Final = 3
Nats: TypeAlias = tuple[float, float, float]  # a mean with the two ends of its 95 % interval


@dataclass(frozen=True, slots=True)
class DepthTable:
    """The depths of one model that audits of requests have proven."""

    model: str  # name of the model, for people; `fingerprint` is what identifies it
    fingerprint: str  # identity of the model
    family: str  # of the model, for people
    layers: int  # of the model
    bound: float  # nats up to which first predictions count as unmoved
    samples: int  # requests that were audited
    source: str  # a description of these requests, for people
    entries: Mapping[int, int]  # prefix ratio in percent -> depth in layers, increasing in both
    # Prefix ratio in percent -> depth -> divergence of first predictions at the position that moved most
    nats: Mapping[int, Mapping[int, Nats]]

    @property
    def lookup(self) -> DepthLookup:
        """The depths by prefix ratio, for policies."""
        return DepthLookup(self.entries)

    @property
    def identity(self) -> str:
        """A hash of the depths: equal for tables with the same `entries`."""
        return xxhash.xxh64(json.dumps(sorted(self.entries.items())).encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the table as JSON. Raises `TableError` if the file cannot be written, and leaves an existing one."""
        value = {"version": VERSION} | {field.name: getattr(self, field.name) for field in fields(self)}
        text = json.dumps(value, indent=1, default=dict)
        # One line a depth: readable, and a diff of two tables shows which depths changed.
        text = text.replace("[\n    ", "[").replace(",\n    ", ", ").replace("\n   ]", "]")
        write_whole("the depth table", path, text + "\n", TableError)

    @classmethod
    def load(cls, path: str | Path, model: LoadedModel | None = None) -> "DepthTable":
        """Read a table. Raises `TableError` if the file is missing or malformed, or if it is not of the `model`."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TableError(f"The depth table {path} cannot be read: {error}.") from error
        try:
            table = _parse(json.loads(text))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise TableError(
                f"{path} is not a depth table: {reason}. Write one with `remask profile --model MODEL --output {path}`."
            ) from error
        if model is not None and table.fingerprint != model.fingerprint:
            raise TableError(
                f"The depth table {path} is of the model {table.model!r} ({table.fingerprint}, {table.layers} layers), "
                f"but {model.name!r} ({model.fingerprint}, {model.config.layers} layers) is loaded. Measure a table of "
                f"it with `remask profile --model {model.name} --output FILE`."
            )
        return table


_TEXT = Text(LARGEST)
_NATS = Real(0, LARGEST)
_SCALARS: Mapping[str, Values] = {
    "model": _TEXT,
    "fingerprint": _TEXT,
    "family": _TEXT,
    "layers": Whole(1),
    "bound": _NATS,
    "samples": Whole(0),
    "source": _TEXT,
}


def _parse(raw: Any) -> DepthTable:
    """The table of decoded JSON. Raises `KeyError`, `TypeError` or `ValueError` if it is malformed."""
    if not isinstance(raw, dict):
        raise TypeError("it is not a JSON object")
    if raw["version"] == 2:
        raise ValueError(
            "it is of version 2, whose depths follow from how similar K and V are, which says too little of "
            "predictions; measure anew"
        )
    if raw["version"] != VERSION or isinstance(raw["version"], bool):
        raise ValueError(f"version is {raw['version']!r}, this program reads {VERSION}")
    for name, values in _SCALARS.items():
        values.check(name, raw[name])
    layers = raw["layers"]
    entries = _parse_items("entries", raw["entries"], "ratios in percent", Whole(0, layers))
    DepthLookup(entries)  # raises `ConfigError` on ratios above 100 and on depths that decrease
    nats = {}
    for ratio, depths in _integer_keys("nats", raw["nats"], "ratios in percent").items():
        name = f"nats.{ratio}"
        nats[ratio] = _parse_items(name, depths, "depths", ListOf(_NATS, "numbers", 3))
        for depth, (mean, low, high) in nats[ratio].items():
            Whole(1, layers).check(f"a depth of {name}", depth)
            if not low <= mean <= high:
                raise ValueError(f"{name}.{depth} must be a mean and its interval, got {[mean, low, high]}")
    return DepthTable(**{name: raw[name] for name in _SCALARS}, entries=entries, nats=nats)


def _integer_keys(name: str, raw: Any, key_noun: str) -> dict[int, Any]:
    """The object `raw` with its keys as integers. Raises `TypeError` if it is not an object or has other keys."""
    if not isinstance(raw, dict) or not all(key.isdecimal() and str(int(key)) == key for key in raw):
        raise TypeError(f"{name} must be an object with {key_noun} as keys, got {raw!r}")
    return {int(key): value for key, value in raw.items()}


def _parse_items(name: str, raw: Any, key_noun: str, values: Values) -> dict[int, Any]:
    """The items of an object by integer key, lists as tuples.

    Raises `TypeError` as `_integer_keys` does, and `ValueError` on an item that `values` does not allow.
    """
    items = _integer_keys(name, raw, key_noun)
    for key, item in items.items():
        values.check(f"{name}.{key}", item)
    return {key: tuple(item) if isinstance(item, list) else item for key, item in items.items()}
