"""English prose as a workload: the beginning of a document is the shared prefix, and its end the reference answer."""

import html
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from remask_lab.bench.workload import Task, Workload

MIN_WORDS, MIN_LETTERS = 8, 0.85  # of a paragraph: headings, tables and code have fewer
MIN_DOCUMENT_WORDS = 150


def read_documents(folders: Sequence[Path]) -> Iterator[str]:
    """The prose of the HTML files in `folders`, one document from a file.

    A document consists of the ASCII paragraphs of at least `MIN_WORDS` words whose share of letters and spaces is above
    `MIN_LETTERS`, without repetitions. Files with fewer than `MIN_DOCUMENT_WORDS` words of them are left out.
    """
    seen: set[str] = set()
    for file in sorted(path for folder in folders for path in folder.rglob("*.html") if path.is_file()):
        paragraphs = []
        for match in re.finditer(r"<p[^>]*>(.*?)</p>", file.read_text(encoding="utf-8", errors="ignore"), re.DOTALL):
            text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", match[1])).split())
            letters = sum(character.isalpha() or character == " " for character in text)
            is_prose = len(text.split()) >= MIN_WORDS and text.isascii() and letters > MIN_LETTERS * len(text)
            if is_prose and text not in seen:
                seen.add(text)
                paragraphs.append(text)
        document = " ".join(paragraphs)
        if len(document.split()) >= MIN_DOCUMENT_WORDS:
            yield document


def document_workload(
    llm: LLM, documents: Sequence[str], *, count: int, canvas: int, ratio: int, seed: int, sampling: SamplingParams
) -> Workload:
    """`count` windows of `canvas` tokens, each from another document, drawn at random.

    The first `ratio` percent of a window are the shared prefix, and its last `max_tokens` the reference answer. Raises
    `ConfigError` if too few documents have `canvas` tokens, if the prefix or the text between it and the answer would
    be empty, and if the model has no tokenizer.
    """
    if llm.tokenizer is None:
        raise ConfigError("documents are read in words, and this model folder has no tokenizer")
    rng = random.Random(seed)
    prompt_length = canvas - sampling.max_tokens
    prefix_length = canvas * ratio // 100
    if not 0 < prefix_length < prompt_length:
        raise ConfigError(
            f"a prefix of {ratio} % and an answer of {sampling.max_tokens} leave no room on a canvas of {canvas}"
        )
    tasks: list[Task] = []
    for text in rng.sample(documents, len(documents)):
        tokens = llm.tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) >= canvas:
            start = rng.randint(0, len(tokens) - canvas)
            window = tokens[start : start + canvas]
            request = Request(str(len(tasks)), window[:prompt_length], sampling, prefix_length)
            tasks.append(Task(request, reference=llm.tokenizer.decode(window[prompt_length:])))
        if len(tasks) == count:
            return Workload(f"documents, prefix {ratio} %", seed=seed, tasks=tuple(tasks), prefixes=count)
    raise ConfigError(f"of {len(documents)} documents {len(tasks)} have {canvas} tokens, and {count} are asked for")
