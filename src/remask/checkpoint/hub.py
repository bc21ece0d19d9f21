"""Files of the Hugging Face hub: whether they are on this disk, how they come there, and why they do not."""

import errno
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from tqdm import tqdm

from remask.checkpoint.files import weight_files
from remask.checkpoint.shelf import meant
from remask.errors import CheckpointError
from remask.machine.progress import Progress

# What a model needs, and nothing that could be executed: no Python files, no pickles.
_WEIGHTS = ["*.safetensors"]
_TEXTS = ["*.json", "merges.txt", "tokenizer.model", "*.jinja"]
_AT_A_TIME = 8  # files that are downloaded, as of the client
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def on_disk(repo: str, revision: str | None = None) -> Path | None:
    """The folder of the model `repo` in the hub's cache; None where files of it are missing. Asks no network."""
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=_TEXTS, local_files_only=True))
        weight_files(folder)
    except (OSError, CheckpointError):
        return None
    return folder


def fetch(
    repo: str, revision: str | None = None, *, weights: bool = True, progress: bool = False, what: str = "model"
) -> Path:
    """The folder of `repo`, whose files are downloaded where the cache lacks them; on stderr how far with `progress`.

    Weights come last, so that a folder that has them has everything. Whole files of a download that was interrupted are
    kept. Raises `CheckpointError` where the hub does not answer, does not know the id or the revision, or does not give
    it to everybody, and where the disk is full.
    """
    with _without_bars(), _in_words(repo, revision, what):
        for patterns in (_TEXTS, _WEIGHTS) if weights else (_TEXTS,):
            _download(repo, revision, patterns, progress)
            folder = snapshot_download(repo, revision=revision, allow_patterns=patterns)
    return Path(folder)


def _download(repo: str, revision: str | None, patterns: Sequence[str], progress: bool) -> None:
    """Download files of `repo`, some at a time, in threads that an interrupt does not wait for.

    The client's own threads are waited for where a process ends, and a file that stands still is given up after 50
    seconds. Raises what the client raises of a file. Where the list of files cannot be had nothing is done: the client
    says why, or finds all files on the disk.
    """
    try:
        info = HfApi().model_info(repo, revision=revision or constants.DEFAULT_REVISION, files_metadata=True)
    except Exception:
        return
    files = [file for file in info.siblings or () if any(fnmatch(file.rfilename, pattern) for pattern in patterns)]
    files = [file for file in files if try_to_load_from_cache(repo, file.rfilename, revision=info.sha) is None]
    waiting, results, stopped = iter(files), SimpleQueue[Exception | None](), Event()
    bar = Progress(f"downloading {repo}", sum(file.size or 0 for file in files), "B", shown=progress, scale=True)
    counting = _counting(bar)

    def work() -> None:
        for file in waiting:
            if stopped.is_set():
                return
            try:
                hf_hub_download(repo, file.rfilename, revision=revision, tqdm_class=counting)
                results.put(None)
            except Exception as error:
                results.put(error)

    for _ in range(min(_AT_A_TIME, len(files))):
        Thread(target=work, daemon=True).start()
    with bar:
        try:
            for _ in files:
                error = results.get()
                if error is not None:
                    raise error
        finally:
            stopped.set()


def _counting(progress: Progress) -> type[tqdm]:
    """A class for bars of the client, a file each, which add to `progress` what has come and draw nothing."""
    lock = Lock()

    class Counting(tqdm):  # type: ignore[misc]
        def __init__(self, *_: object, initial: float = 0, **__: object) -> None:
            super().__init__(disable=True)
            self.update(initial)  # of a download that was interrupted

        def update(self, n: float | None = 1) -> None:
            """Add `n` bytes."""
            with lock:
                progress.update(int(n or 0))

    return Counting


def fetch_file(repo: str, file: str, *, progress: bool = False) -> Path:
    """One file of `repo`, which is asked for where the cache lacks it. Raises `CheckpointError` as `fetch`."""
    path = try_to_load_from_cache(repo, file)
    if isinstance(path, str):
        return Path(path)
    with _without_bars(), _in_words(f"{repo}:{file}", None, "model"):
        _download(repo, None, [file], progress)
        return Path(hf_hub_download(repo, file))


def cache_disk() -> tuple[Path, int]:
    """The folder that downloads go to, and the bytes that are free there."""
    folder = Path(constants.HF_HUB_CACHE).expanduser()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    return folder, shutil.disk_usage(parent).free


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep the client from drawing bars of its own, a file each."""
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _in_words(repo: str, revision: str | None, what: str) -> Iterator[None]:
    """Tell in a sentence why a download failed.

    The client raises its own errors, the operating system's, and those of an HTTP library that differs between its
    versions. All of them mean that there are no files.
    """
    try:
        yield
    except Exception as error:
        doubtful = isinstance(error, RepositoryNotFoundError | LocalEntryNotFoundError)
        names = meant(repo) if doubtful and not isinstance(error, GatedRepoError) else ""
        raise CheckpointError(_why(error, f"the {what} {repo!r}", revision) + names) from error


def _why(error: Exception, it: str, revision: str | None) -> str:
    log_in = "log in with `hf auth login`"
    if isinstance(error, GatedRepoError):
        return f"The hub does not give {it} to everybody: accept the terms on its page, and {log_in}."
    if isinstance(error, RevisionNotFoundError):
        return f"The hub has no revision {revision!r} of {it}: give its hub id, which loads the newest."
    if isinstance(error, RepositoryNotFoundError):
        return f"The hub does not have {it}, or not for everybody: check the name, or {log_in}."
    if isinstance(error, OSError) and error.errno in _FULL:
        return (
            f"The disk of {constants.HF_HUB_CACHE} has no room for {it} ({error.strerror}): free some, or set HF_HOME "
            "to a folder on another disk; whole files are kept, and the same command goes on."
        )
    cause = error.__cause__ or error
    reason = type(cause).__name__
    if isinstance(error, LocalEntryNotFoundError):
        return (
            f"Not all files of {it} are on this disk, and the hub cannot be reached ({reason}): check the name and the "
            "network, or download it elsewhere and give its folder."
        )
    if isinstance(error, EntryNotFoundError):
        return f"The hub does not have the file of {it}: check its name on the page of the repository."
    return f"The download of {it} stopped ({reason}): whole files are kept, and the same command goes on."
