"""Sweeps that resume after an interruption: each row is written to the result file as soon as it is measured."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from remask.errors import RecordError
from remask_lab.records.record import Record, as_json, differing, read_record, write_record


class Sweep:
    """The rows of one measurement, each identified by its `point`. Rows that the file holds are not measured again.

    Raises `RecordError` where the file has another subject, model, machine or setting. Rows of different measurements
    must not stand in one table.
    """

    def __init__(self, path: str | Path | None, subject: str, about: Mapping[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        self._subject, self._about = subject, as_json(about)
        self._rows: list[dict[str, Any]] = []
        self.resumed = 0  # rows read from the file
        if self._path is None or not self._path.exists():
            return
        record = read_record(self._path, subject)
        others = differing(record.about, self._about)
        if others:
            raise RecordError(
                f"{str(self._path)!r} holds rows of another measurement ({'; '.join(others)}); "
                "name another file, or remove this one to begin anew"
            )
        self._rows = list(record.data["rows"])
        self.resumed = len(self._rows)

    @property
    def record(self) -> Record:
        """All rows so far. The record's data are {"rows": [{"point": ..., "result": ...}]}."""
        return Record(self._subject, self._about, {"rows": list(self._rows)})

    def row(self, point: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the result at `point`. Where the file has none, call `measure` and save its result first.

        `point` must differ from every other row's. An exception of `measure` leaves the rows as they were.
        """
        key = as_json(point)
        for row in self._rows:
            if row["point"] == key:
                known: dict[str, Any] = row["result"]
                return known
        result: dict[str, Any] = as_json(measure())
        self._rows.append({"point": key, "result": result})
        if self._path is not None:
            write_record(self._path, self.record)
        return result
