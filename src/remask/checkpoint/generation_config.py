"""The sampling parameters that a checkpoint's files give to requests that leave them out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remask.checkpoint.json_files import read_json
from remask.errors import CheckpointError, ConfigError
from remask.request.sampling_params import SamplingParams

OWN, GENERATION = "remask.json", "generation_config.json"
KEY = "sampling"
# Of the Hugging Face file: our names of the fields that mean the same. The second apply where it says that it samples.
_ALWAYS: Mapping[str, str] = {"max_new_tokens": "max_tokens"}
_SAMPLED: Mapping[str, str] = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p"}


def read_sampling(folder: Path) -> dict[str, Any]:
    """The defaults of the checkpoint in `folder`; empty where it gives none.

    `remask.json` holds them as an object `sampling` of declared sampling parameters. Without such a file they are what
    `generation_config.json` says in its own words: `max_new_tokens`, and with `do_sample` also `temperature`, `top_k`
    and `top_p`; the rest of that file is for other libraries. What no file says is the family's choice.

    Raises `CheckpointError` where a file cannot be read or gives a value that is not allowed.
    """
    for name, find in ((OWN, _own), (GENERATION, _generation)):
        if (folder / name).is_file():
            sampling = find(folder / name)
            try:
                SamplingParams.from_mapping(sampling)
            except ConfigError as error:
                raise CheckpointError(
                    f"{folder / name}: {error} Mend the file, or take it away to load the model without its defaults."
                ) from error
            return sampling
    return {}


def _own(path: Path) -> dict[str, Any]:
    content = read_json(path)
    sampling = content.get(KEY)
    if set(content) != {KEY} or not isinstance(sampling, dict):
        raise CheckpointError(f"{path} must hold one key, {KEY!r}: an object of sampling parameters.")
    return sampling


def _generation(path: Path) -> dict[str, Any]:
    content = read_json(path)
    names = {**_ALWAYS, **(_SAMPLED if content.get("do_sample") is True else {})}
    found = {ours: content[theirs] for theirs, ours in names.items() if content.get(theirs) is not None}
    if found.get("top_k") == 0:  # all tokens, in that library's words
        del found["top_k"]
    return found
