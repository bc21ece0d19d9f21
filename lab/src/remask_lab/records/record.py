"""Result files, and sweeps that resume from them. All have one JSON shape, which says what was measured and on what."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from remask.errors import RecordError
from remask.llm import LLM
from remask.machine.disk import write_whole
from remask.model.cpu_kernels import int4_kernel, int8_kernel
from remask_lab.records.machine import commit, machine, versions

FORMAT = "remask-record-1"
# Only measurements in which these facts are equal may stand in one table.
IDENTITY = ("model", "fingerprint", "depth_table", "settings", "seed", "commit", "machine", "versions")


@dataclass(frozen=True, slots=True)
class Record:
    """A measured result.

    Attributes:
        subject: what was measured, in the words of the command, such as "analyze depth".
        about: the facts of `about`.
        data: the numbers. NaN and infinities become None in the file.
    """

    subject: str
    about: Mapping[str, Any]
    data: Any


def about(llm: LLM, *, seed: int | None = None, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The facts that a record of a measurement on `llm` holds. `settings` are the measurement's own."""
    config, table = llm.loaded.config, llm.depth_table
    facts = {
        "model": llm.loaded.name,
        "fingerprint": llm.loaded.fingerprint,
        "product": _product(llm),
        "depth_table": None if table is None else table.identity,
        "family": config.family,
        "kind": config.kind,
        "layers": config.layers,
        "parameters": config.parameters,
        "settings": settings or {},
        "seed": seed,
        "commit": commit(),
        "machine": machine(llm),
        "versions": versions(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    plain: dict[str, Any] = as_json(facts)
    return plain


def _product(llm: LLM) -> str | None:
    """The kernel that multiplies int8 or int4 weights on a CPU; None for other weights and devices."""
    kernels = {"int8": int8_kernel, "int4": int4_kernel}
    kernel = kernels.get(llm.loaded.fingerprint.partition("-")[2])
    return None if kernel is None or llm.model.device.type != "cpu" else kernel().name


def number_format(about: Mapping[str, Any]) -> str:
    """The dtype of a record's model, and how its weights were quantized, such as "float32, weights in int8"."""
    _, _, quantization = about["fingerprint"].partition("-")
    return str(about["machine"]["dtype"]) + (f", weights in {quantization}" if quantization else "")


def write_record(path: str | Path, record: Record) -> None:
    """Write `record` as JSON. An interrupted write leaves the earlier file as it was.

    Raises `RecordError` where the file cannot be written.
    """
    content = {"format": FORMAT, "subject": record.subject, "about": record.about, "data": record.data}
    text = json.dumps(as_json(content), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole("the result", path, text + "\n", RecordError)


def read_record(path: str | Path, subject: str | None = None) -> Record:
    """Read a file that `write_record` wrote.

    Raises `RecordError` where the file cannot be read, has another format, or has another subject than `subject`.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"the result {str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RecordError(f"{str(path)!r} is no result file: it does not hold JSON ({error})") from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise RecordError(
            f"{str(path)!r} is no result file of this version: its format is {version!r}, not {FORMAT!r}; measure again"
        )
    missing = [name for name in ("subject", "about", "data") if name not in content]
    if missing:
        raise RecordError(f"{str(path)!r} is incomplete: it has no {', '.join(missing)}; measure again")
    if subject is not None and content["subject"] != subject:
        raise RecordError(f"{str(path)!r} holds {content['subject']!r}, not {subject!r}; name another file")
    return Record(content["subject"], content["about"], content["data"])


def differences(about: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The facts of `IDENTITY` in which the `about`s of two records differ, each as "name: value, other value"."""
    return [
        f"{name}: {about.get(name)!r}, {other.get(name)!r}" for name in IDENTITY if about.get(name) != other.get(name)
    ]


def as_json(value: Any) -> Any:
    """`value` in the types of JSON: dataclasses become objects, NaN and infinities None, and keys strings."""
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Sweep:
    """The rows of one measurement, each identified by its `point` and written to the file `path` once it is measured.

    Rows that the file holds are not measured again. Raises `RecordError` if the file has another subject, or differs in
    a fact of `IDENTITY`: rows of different measurements must not stand in one table. Without `path` none is written.
    """

    def __init__(self, path: str | Path | None, subject: str, about: Mapping[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        self._subject, self._about = subject, as_json(about)
        self._rows: list[dict[str, Any]] = []
        self.resumed = 0  # rows read from the file
        if self._path is None or not self._path.exists():
            return
        record = read_record(self._path, subject)
        changes = differences(record.about, self._about)
        if changes:
            raise RecordError(
                f"{str(self._path)!r} holds rows of another measurement ({'; '.join(changes)}); "
                "name another file, or remove this one to begin anew"
            )
        self._rows = list(record.data["rows"])
        self.resumed = len(self._rows)

    @property
    def record(self) -> Record:
        """All rows so far. The record's data are {"rows": [{"point": ..., "result": ...}]}."""
        return Record(self._subject, self._about, {"rows": list(self._rows)})

    def row(self, point: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the result at `point`. If there is none yet, call `measure` and save its result first.

        An exception of `measure` leaves the rows as they were.
        """
        key = as_json(point)
        result: dict[str, Any]
        for row in self._rows:
            if row["point"] == key:
                result = row["result"]
                return result
        result = as_json(measure())
        self._rows.append({"point": key, "result": result})
        if self._path is not None:
            write_record(self._path, self.record)
        return result
