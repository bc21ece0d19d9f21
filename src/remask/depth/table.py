"""`DepthTable`: how many leading layers of one model may read a shared prefix, per prefix ratio; and its file."""

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
    """What audits of requests have shown of one model."""

    model: str  # name of the model, for people; `fingerprint` is what identifies it
    fingerprint: str  # identity of the model
    family: str  # of the model, for people
    layers: int  # of the model
    bound: float  # nats up to which first predictions count as unmoved
    samples: int  # requests that were audited
    source: str  # what they were
    entries: Mapping[int, int]  # prefix ratio in percent -> depth in layers, increasing in both
    # Prefix ratio in percent -> depth -> how far first predictions moved where they moved most
    nats: Mapping[int, Mapping[int, Nats]]

    @property
    def lookup(self) -> DepthLookup:
        """The table as policies use it."""
        return DepthLookup(self.entries)

    @property
    def identity(self) -> str:
        """Equal for tables that give the same depths."""
        return xxhash.xxh64(json.dumps(sorted(self.entries.items())).encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the table as JSON. Raises `TableError` where the file cannot be written; an earlier one stays then."""
        value = {"version": VERSION} | {field.name: getattr(self, field.name) for field in fields(self)}
        text = json.dumps(value, indent=1, default=dict)
        # One line a depth: readable, and a diff of two tables shows which depths changed.
        text = text.replace("[\n    ", "[").replace(",\n    ", ", ").replace("\n   ]", "]")
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
        if model is not None and table.fingerprint != model.fingerprint:
            raise TableError(
                f"The depth table {path} is of the model {table.model!r} ({table.fingerprint}, {table.layers} layers), "
                f"but {model.name!r} ({model.fingerprint}, {model.config.layers} layers) is loaded. Measure a table of "
                f"it with `remask profile --model {model.name} --output FILE`."
            )
        return table


_TEXT, _COUNT, _NATS = Text(LARGEST), Whole(0), Real(0, LARGEST)
_PLAIN: Mapping[str, Values] = {
    "model": _TEXT,
    "fingerprint": _TEXT,
    "family": _TEXT,
    "layers": Whole(1),
    "bound": _NATS,
    "samples": _COUNT,
    "source": _TEXT,
}


def _parse(raw: Any) -> DepthTable:
    """The table that decoded JSON holds. Raises `KeyError`, `TypeError` or `ValueError` where it holds none."""
    if not isinstance(raw, dict):
        raise TypeError("it is not a JSON object")
    if raw["version"] == 2:
        raise ValueError(
            "it is of version 2, whose depths follow from how similar K and V are, which says too little of "
            "predictions; measure anew"
        )
    if raw["version"] != VERSION or isinstance(raw["version"], bool):
        raise ValueError(f"version is {raw['version']!r}, this program reads {VERSION}")
    for name, values in _PLAIN.items():
        values.check(name, raw[name])
    layers = raw["layers"]
    entries = _by_number("entries", raw["entries"], "ratios in percent", Whole(0, layers))
    DepthLookup(entries)
    nats = {}
    for ratio, depths in _integer_keys("nats", raw["nats"], "ratios in percent").items():
        name = f"nats.{ratio}"
        nats[ratio] = _by_number(name, depths, "depths", ListOf(_NATS, "numbers", 3))
        for depth, (mean, low, high) in nats[ratio].items():
            Whole(1, layers).check(f"a depth of {name}", depth)
            if not low <= mean <= high:
                raise ValueError(f"{name}.{depth} must be a mean and its interval, got {[mean, low, high]}")
    return DepthTable(**{name: raw[name] for name in _PLAIN}, entries=entries, nats=nats)


def _integer_keys(name: str, raw: Any, what: str) -> dict[int, Any]:
    """An object whose keys are whole numbers."""
    if not isinstance(raw, dict) or not all(key.isdecimal() for key in raw):
        raise TypeError(f"{name} must be an object with {what} as keys, got {raw!r}")
    return {int(key): value for key, value in raw.items()}


def _by_number(name: str, raw: Any, what: str, values: Values) -> dict[int, Any]:
    """What stands in an object by number, each in `values`; lists become tuples."""
    values_by_number = _integer_keys(name, raw, what)
    for key, value in values_by_number.items():
        values.check(f"{name}.{key}", value)
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values_by_number.items()}
