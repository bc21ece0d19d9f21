"""Files that commands write, and the cache folder. If a disk is full, the earlier content of a file is unchanged."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from remask.errors import ConfigError, OutputError, RemaskError


def cache_folder() -> Path:
    """The folder for files that can be made again: `$XDG_CACHE_HOME/remask`, or `~/.cache/remask`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "remask"


@contextmanager
def whole_file(noun: str, path: str | Path, error: type[RemaskError] = OutputError) -> Iterator[Path]:
    """The path of a draft, which replaces the file `path` at the end of the block.

    If the block fails, the earlier file is unchanged. If `path` is a link, the file that it points to is replaced.
    Devices and pipes are written directly. Raises an `error` if the file cannot be written; its message begins with
    `noun`, such as "the result".
    """
    target = Path(path)
    is_direct = target.exists() and not target.is_file()
    target = target if is_direct else Path(os.path.realpath(target))
    # The suffix stays, as plotting libraries choose the format by it.
    draft = target if is_direct else target.with_name(f".{os.getpid()}.{target.name}")
    try:
        yield draft
        if not is_direct:
            draft.replace(target)
    except OSError as cause:
        raise error(f"{noun} {str(path)!r} cannot be written: {cause.strerror or cause}") from cause
    finally:
        if not is_direct:
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def write_whole(noun: str, path: str | Path, text: str, error: type[RemaskError] = OutputError) -> None:
    """Write `text` in UTF-8, as `whole_file` does."""
    with whole_file(noun, path, error) as draft:
        draft.write_text(text, encoding="utf-8")


class LineFile:
    """A file of lines. A line is written whole or not at all. Raises `ConfigError` if it cannot be opened."""

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115 - closed by `__exit__`
        except OSError as error:
            raise ConfigError(f"cannot open {path!r}: {error.strerror}") from error
        self._path = path
        self._size = self._lines = 0

    def __enter__(self) -> "LineFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, line: str) -> None:
        """Append `line` and a line end. If it cannot be written whole, truncates the file and raises `OutputError`."""
        content = line.encode() + b"\n"
        count = 0
        try:
            while count < len(content):
                count += self._file.write(content[count:])
        except BrokenPipeError:
            raise  # the reader has ended; the disk is not full
        except OSError as error:
            with suppress(OSError):  # a device cannot be truncated
                self._file.truncate(self._file.seek(self._size))
            raise OutputError(
                f"{self._path!r} cannot be written: {error.strerror}; it holds the {self._lines} lines written before"
            ) from error
        self._size += len(content)
        self._lines += 1
