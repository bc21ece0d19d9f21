"""Files of the Hugging Face hub: those on this disk, downloads, and errors that say why one failed."""

import errno
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from tqdm import tqdm

from remask.checkpoint.files import weight_files
from remask.checkpoint.shelf import suggest_models
from remask.errors import CheckpointError
from remask.machine.progress import Progress

# What a model needs, and nothing that could be executed: no Python files, no pickles.
_WEIGHTS = ["*.safetensors"]
_TEXTS = ["*.json", "merges.txt", "tokenizer.model", "*.jinja"]
_THREADS = 8  # files that are downloaded at a time, as many as by the client
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The client's transfer library, in Rust, raises a `RuntimeError` with the text of the system's error.
_FULL_TEXTS = tuple(f"(os error {number})" for number in _FULL)
_REFUSALS = (401, 403, 410, 451)  # HTTP statuses


def on_disk(repo: str, revision: str | None = None) -> Path | None:
    """The folder of the model `repo` in the hub's cache, without network. Returns None if files of it are missing."""
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=_TEXTS, local_files_only=True))
        weight_files(folder)
    except (OSError, CheckpointError, HFValidationError):
        return None
    return folder


def fetch(
    repo: str, revision: str | None = None, *, weights: bool = True, progress: bool = False, noun: str = "model"
) -> Path:
    """Download the files of `repo` that the cache lacks, and return its folder. `progress` is shown on stderr.

    Weights come last, so that a folder that has them is complete. Whole files of an interrupted download stay in the
    cache. Raises `CheckpointError` if the hub does not answer, does not know the id or the revision, or needs a login,
    and if the disk is full; `noun` is the kind of the repository in the message, "model" or "adapter".
    """
    with _no_client_bars(), _checkpoint_errors(noun, repo, revision=revision):
        for patterns in (_TEXTS, _WEIGHTS) if weights else (_TEXTS,):
            _download(repo, revision, patterns, progress)
            folder = snapshot_download(repo, revision=revision, allow_patterns=patterns)
    return Path(folder)


def _download(repo: str, revision: str | None, patterns: Sequence[str], progress: bool) -> None:
    """Download files of `repo` that match `patterns` to the cache, `_THREADS` at a time.

    Daemon threads do it, as an interrupt would wait for the client's own. Raises the client's error for the first file
    that fails. Does nothing if the hub does not list the files: the caller's `snapshot_download` then raises the
    reason, or finds all files on the disk.
    """
    try:
        info = HfApi().model_info(repo, revision=revision or constants.DEFAULT_REVISION, files_metadata=True)
    except Exception:
        return
    matching = [file for file in info.siblings or () if any(fnmatch(file.rfilename, pattern) for pattern in patterns)]
    files = [file for file in matching if try_to_load_from_cache(repo, file.rfilename, revision=info.sha) is None]
    pending = SimpleQueue[str]()
    for file in files:
        pending.put(file.rfilename)
    results = SimpleQueue[Exception | None]()
    stop = Event()
    bar = Progress(f"downloading {repo}", sum(file.size or 0 for file in files), "B", enabled=progress, scale=True)
    bar_class = _progress_bar_class(bar)

    def download_pending() -> None:
        """Download files until none is pending or `stop` is set; put an error or None into `results` for each."""
        while not stop.is_set():
            try:
                name = pending.get_nowait()
            except Empty:
                return
            try:
                hf_hub_download(repo, name, revision=info.sha, tqdm_class=bar_class)
                results.put(None)
            except Exception as error:
                results.put(error)

    for _ in range(min(_THREADS, len(files))):
        Thread(target=download_pending, name=f"download of {repo}", daemon=True).start()
    with bar:
        try:
            for _ in files:
                error = results.get()
                if error is not None:
                    raise error
        finally:
            stop.set()


def _progress_bar_class(progress: Progress) -> type[tqdm]:
    """A class for the client's bars, one for each file, which draw nothing and add their bytes to `progress`."""
    lock = Lock()

    class ByteCounter(tqdm):  # type: ignore[misc]
        def __init__(self, *_: object, initial: float = 0, **__: object) -> None:
            super().__init__(disable=True)
            self.update(initial)  # bytes that an interrupted download has left

        def update(self, n: float | None = 1) -> None:
            """Add `n` bytes."""
            with lock:
                progress.update(int(n or 0))

    return ByteCounter


def fetch_file(repo: str, file: str, *, progress: bool = False) -> Path:
    """The path of one file of `repo`, downloaded if the cache lacks it. Raises `CheckpointError` like `fetch`."""
    with _no_client_bars(), _checkpoint_errors("model", repo, file):
        path = try_to_load_from_cache(repo, file)
        if isinstance(path, str):
            return Path(path)
        _download(repo, None, [file], progress)
        return Path(hf_hub_download(repo, file))


def cache_disk() -> tuple[Path, int]:
    """The folder of the hub's cache, and the free bytes on its disk."""
    folder = Path(constants.HF_HUB_CACHE).expanduser()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    return folder, shutil.disk_usage(parent).free


@contextmanager
def _no_client_bars() -> Iterator[None]:
    """Disable the client's own progress bars."""
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _checkpoint_errors(noun: str, repo: str, file: str | None = None, *, revision: str | None = None) -> Iterator[None]:
    """Turn any error of a download, of `file` or of all files of `repo`, into a `CheckpointError` with the reason.

    Errors about the id of the repository suggest similar ids. `noun` is the kind of the repository, as for `fetch`.
    The client raises its own errors, the operating system's, and those of an HTTP library that differs between its
    versions.
    """
    try:
        yield
    except Exception as error:
        may_be_misspelt = isinstance(error, RepositoryNotFoundError | LocalEntryNotFoundError)
        suggestion = suggest_models(repo) if may_be_misspelt and not isinstance(error, GatedRepoError) else ""
        subject = f"the {noun} {repo if file is None else f'{repo}:{file}'!r}"
        raise CheckpointError(_explain(error, subject, revision) + suggestion) from error


def _explain(error: Exception, subject: str, revision: str | None) -> str:
    """Why a download of `subject` failed, in a sentence with the way out.

    The client's classes are subclasses of each other and of `OSError`, so the order of the branches matters.
    """
    log_in = "log in with `hf auth login`"
    if isinstance(error, HFValidationError):
        return f"There is no folder of {subject}, and the hub allows no such id: check the name."
    if isinstance(error, GatedRepoError):
        return f"The hub does not give {subject} to everybody: accept the terms on its page, and {log_in}."
    if isinstance(error, RevisionNotFoundError):
        return f"The hub has no revision {revision!r} of {subject}: give its hub id, which loads the newest."
    if isinstance(error, RepositoryNotFoundError):
        return f"The hub does not have {subject}, or not for everybody: check the name, or {log_in}."
    is_full = error.errno in _FULL if isinstance(error, OSError) else str(error).endswith(_FULL_TEXTS)
    if is_full:
        system_error = error.strerror if isinstance(error, OSError) else str(error)
        return (
            f"The disk of {constants.HF_HUB_CACHE} has no room for {subject} ({system_error}): free some, or "
            "set HF_HOME to a folder on another disk; whole files are kept, and the same command goes on."
        )
    cause = error.__cause__ or error
    if isinstance(cause, HfHubHTTPError) and cause.response.status_code in _REFUSALS:
        return f"The hub refuses {subject} (status {cause.response.status_code}): see its page there, and {log_in}."
    reason = type(cause).__name__
    if isinstance(error, LocalEntryNotFoundError):
        return (
            f"Not all files of {subject} are on this disk, and the hub cannot be reached ({reason}): check the name "
            "and the network, or download it elsewhere and give its folder."
        )
    if isinstance(error, EntryNotFoundError):
        return f"The hub does not have the file of {subject}: check its name on the page of the repository."
    return f"The download of {subject} stopped ({reason}): whole files are kept, and the same command goes on."
