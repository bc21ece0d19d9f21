"""What the parts of a run leave in its folder: one JSON file each, which a later run of the same commit keeps."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from remask.checks.values import json_object
from remask.errors import RecordError
from remask.machine.disk import write_whole
from remask_lab.records.machine import commit


@dataclass(frozen=True, slots=True)
class Result:
    """What a part has come to.

    Attributes:
        part: its name.
        found: its figures, as far as it has come.
        done: it ran to its end.
        error: why it did not. None while it runs, too.
        commit: of the checkout that ran it.
    """

    part: str
    found: Mapping[str, Any]
    done: bool = False
    error: str | None = None
    commit: str | None = field(default_factory=commit)

    def save(self, folder: Path) -> None:
        """Write the part's file. Raises `OutputError`."""
        write_whole("the part's result", _file(folder, self.part), json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path, part: str) -> "Result | None":
        """What stands in the part's file; None where there is none. Raises `RecordError` on another file."""
        file = _file(folder, part)
        if not file.exists():
            return None
        try:
            return cls(**json_object(str(file), file.read_text(encoding="utf-8")))
        except (TypeError, OSError) as error:
            raise RecordError(f"{file} is no result of this command ({error}); remove it") from error


def _file(folder: Path, part: str) -> Path:
    return folder / f"{part}.json"
