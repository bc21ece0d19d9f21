"""Files of the Hugging Face hub: whether they are on this disk, how they come there, and why they do not."""

import errno
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from remask.checkpoint.files import weight_files
from remask.checkpoint.shelf import meant
from remask.errors import CheckpointError

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
    """The folder of `repo`, whose files are downloaded where the cache lacks them; bars on a terminal with `progress`.

    Weights come last, so that a folder that has them has everything. Whole files of a download that was interrupted are
    kept. Raises `CheckpointError` where the hub does not answer, does not know the id or the revision, or does not give
    it to everybody, and where the disk is full.
    """
    with _bars(progress), _in_words(repo, revision, what):
        for patterns in (_TEXTS, _WEIGHTS) if weights else (_TEXTS,):
            _download(repo, revision, patterns)
            folder = snapshot_download(repo, revision=revision, allow_patterns=patterns)
    return Path(folder)


def _download(repo: str, revision: str | None, patterns: Sequence[str]) -> None:
    """Download files of `repo`, some at a time, in threads that an interrupt does not wait for.

    The client's own threads are waited for where a process ends, and a file that stands still is given up after 50
    seconds. Raises what the client raises of a file. Where the list of files cannot be had nothing is done: the client
    says why, or finds all files on the disk.
    """
    try:
        files = HfApi().model_info(repo, revision=revision or constants.DEFAULT_REVISION).siblings or ()
    except Exception:
        return
    names = [file.rfilename for file in files if any(fnmatch(file.rfilename, pattern) for pattern in patterns)]
    waiting, results, stopped = iter(names), SimpleQueue[Exception | None](), Event()

    def work() -> None:
        for name in waiting:
            if stopped.is_set():
                return
            try:
                hf_hub_download(repo, name, revision=revision)
                results.put(None)
            except Exception as error:
                results.put(error)

    for _ in range(min(_AT_A_TIME, len(names))):
        Thread(target=work, daemon=True).start()
    try:
        for _ in names:
            error = results.get()
            if error is not None:
                raise error
    finally:
        stopped.set()


def fetch_file(repo: str, file: str, *, progress: bool = False) -> Path:
    """One file of `repo`, which is asked for where the cache lacks it. Raises `CheckpointError` as `fetch`."""
    path = try_to_load_from_cache(repo, file)
    if isinstance(path, str):
        return Path(path)
    with _bars(progress), _in_words(f"{repo}:{file}", None, "model"):
        return Path(hf_hub_download(repo, file))


def cache_disk() -> tuple[Path, int]:
    """The folder that downloads go to, and the bytes that are free there."""
    folder = Path(constants.HF_HUB_CACHE).expanduser()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    return folder, shutil.disk_usage(parent).free


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Let the client draw its bars if they shall be `shown`, and on a terminal alone: not all of them look for one."""
    if (shown and sys.stderr.isatty()) or are_progress_bars_disabled():
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
