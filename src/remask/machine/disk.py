"""Files that commands write, and where they are kept. A disk may fill up: what a file held before stays whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from remask.errors import ConfigError, OutputError, RemaskError


def cache_folder() -> Path:
    """Where this package keeps what it may find out again: `$XDG_CACHE_HOME/remask`, or `~/.cache/remask`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "remask"


@contextmanager
def whole_file(what: str, path: str | Path, error: type[RemaskError] = OutputError) -> Iterator[Path]:
    """Give a draft to write to, which takes the place of the file `path` at the end.

    An interrupted or failed write leaves the earlier file as it was. A link stays one: the file that it names is
    replaced. What is no regular file, such as a device or a pipe, is written directly. `what` names the file in errors,
    as "the result". Raises an `error` where the file cannot be written.
    """
    target = Path(path)
    direct = target.exists() and not target.is_file()
    target = target if direct else Path(os.path.realpath(target))
    # The end of the name stays: libraries that draw choose the format by it.
    draft = target if direct else target.with_name(f".{os.getpid()}.{target.name}")
    try:
        yield draft
        if not direct:
            draft.replace(target)
    except OSError as cause:
        raise error(f"{what} {str(path)!r} cannot be written: {cause.strerror or cause}") from cause
    finally:
        if not direct:
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def write_whole(what: str, path: str | Path, text: str, error: type[RemaskError] = OutputError) -> None:
    """Write `text` in UTF-8, as `whole_file` does."""
    with whole_file(what, path, error) as draft:
        draft.write_text(text, encoding="utf-8")


class LineFile:
    """Lines, which reach the file one by one and as a whole. Raises `ConfigError` where it cannot be opened."""

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115 - closed by `__exit__`
        except OSError as error:
            raise ConfigError(f"cannot open {path!r}: {error.strerror}") from error
        self._path, self._size, self._lines = path, 0, 0

    def __enter__(self) -> "LineFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def write(self, line: str) -> None:
        """Add a line, given without its end. Raises `OutputError` where it cannot be written as a whole."""
        rest = line.encode() + b"\n"
        whole = len(rest)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BrokenPipeError:
            raise  # no full disk: whoever read has gone
        except OSError as error:
            with suppress(OSError):  # a device takes back nothing
                self._file.truncate(self._file.seek(self._size))
            raise OutputError(
                f"{self._path!r} cannot be written: {error.strerror}; it holds the {self._lines} lines written before"
            ) from error
        self._size += whole
        self._lines += 1
