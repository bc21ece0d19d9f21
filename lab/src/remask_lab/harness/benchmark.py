"""Our own benchmarks, read from the config files that lm-eval reads too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from remask.checks.values import check_choice
from remask.depth.requests import read_system_prompt
from remask.errors import ConfigError
from remask.text.prompts import Message
from remask_lab.harness.formats import FORMATS, Doc, Format
from remask_lab.records.jsonl import read_lines

FOLDER = Path(__file__).parent / "tasks"
PREFIX = "remask_"  # the names of our own tasks begin with it; all others are lm-eval's


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One of our own tasks.

    Attributes:
        rules: the second part of the system prompt, which defines the form of the answer.
        max_tokens: length of a response.
        format: the reader of the data set's records.
        data: the name of the data set on the hub.
    """

    task: str
    rules: str
    max_tokens: int
    format: Format
    data: str

    def messages(self, role: str, doc: Doc, shots: Sequence[Doc] = ()) -> list[Message]:
        """The chat of a question: system prompt, which begins with `role`, worked examples `shots`, and `doc`."""
        system: Message = {"role": "system", "content": f"{role}\n\n{self.rules}"}
        return [system, *turns_of(shots), {"role": "user", "content": doc.asked}]


def turns_of(shots: Sequence[Doc]) -> list[Message]:
    """Worked examples as earlier turns of a chat."""
    turns: list[Message] = []
    for shot in shots:
        turns += [{"role": "user", "content": shot.asked}, {"role": "assistant", "content": shot.solution}]
    return turns


def task_names() -> tuple[str, ...]:
    """The names of our own tasks."""
    return tuple(f"{PREFIX}{name}" for name in FORMATS)


def is_own(task: str) -> bool:
    """Whether a name is reserved for our own tasks."""
    return task.startswith(PREFIX)


@cache
def benchmark(task: str) -> Benchmark:
    """Our own task of that name. Raises `UnknownNameError` on another name."""
    check_choice("task", task, task_names())
    config = _read(FOLDER / f"{task}.yaml")
    name = task.removeprefix(PREFIX)
    dataset = config.get("dataset_path", "SaylorTwift/bbh")
    return Benchmark(
        task=task,
        rules=config["description"],
        max_tokens=config["generation_kwargs"]["max_gen_toks"],
        format=FORMATS[name],
        data=f"{dataset}, {config['dataset_name']}" if "dataset_name" in config else dataset,
    )


def list_tasks() -> str:
    """A list of our own tasks for the terminal, and the option by which lm-eval's command line finds them."""
    lines = [f"{'task':<22}data set", *(f"{task:<22}{benchmark(task).data}" for task in task_names())]
    lines.append(f"\nFor lm-eval's own command line: --include_path {FOLDER}")
    return "\n".join(lines)


@cache
def default_role() -> str:
    """The default first part of the system prompt: role and rules."""
    return (Path(__file__).parent / "system.txt").read_text(encoding="utf-8").strip()


def read_role(path: str | None) -> str:
    """The first part of the system prompt, from the file `path` or the default. Raises `ConfigError` on a bad file."""
    return default_role() if path is None else read_system_prompt(path)


def read_docs(
    task: Benchmark, path: str, names: Mapping[str, str] | None = None, limit: int | None = None
) -> Sequence[Doc]:
    """Read at most `limit` questions of a local JSONL file in the data set's shape.

    `names` are the file's names of fields by the data set's. Raises `ConfigError`, which names the first bad line and
    its field.
    """
    return [task.format.read(line) for line in read_lines(path, names, limit)]


def read_shots(task: Benchmark, path: str, names: Mapping[str, str] | None, shots: int) -> Sequence[Doc]:
    """Read the first `shots` records of a local JSONL file as worked examples.

    Raises `ConfigError` as `read_docs` does, and where the file holds fewer.
    """
    docs = read_docs(task, path, names, shots)
    if len(docs) < shots:
        raise ConfigError(f"--shots {shots} needs as many records in {path}, which holds {len(docs)}; lower --shots")
    return docs


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads lm-eval's `!function` as the function's name."""


_Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))  # type: ignore[arg-type]


def _read(path: Path) -> dict[str, Any]:
    """Read a config file, with the fields of the config that it includes and does not override."""
    config: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    base = config.pop("include", None)
    return config if base is None else {**_read(path.parent / base), **config}
