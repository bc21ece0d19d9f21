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


def read_documents(folders: Sequence[Path]) -> Iterator[str]:
    """The prose of the HTML files in `folders`, one document from a file.

    It consists of the ASCII paragraphs of at least eight words, more than 85 % letters and spaces, without repetitions.
    Files with fewer than 150 words of them are left out.
    """
    seen: set[str] = set()
    for file in sorted(path for folder in folders for path in folder.rglob("*.html") if path.is_file()):
        paragraphs = []
        for match in re.finditer(r"<p[^>]*>(.*?)</p>", file.read_text(encoding="utf-8", errors="ignore"), re.DOTALL):
            text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", match[1])).split())
            letters = sum(letter.isalpha() or letter == " " for letter in text)
            if len(text.split()) >= 8 and text.isascii() and letters > 0.85 * len(text) and text not in seen:
                seen.add(text)
                paragraphs.append(text)
        document = " ".join(paragraphs)
        if len(document.split()) >= 150:
            yield document


def document_workload(
    llm: LLM, documents: Sequence[str], count: int, canvas: int, ratio: int, seed: int, sampling: SamplingParams
) -> Workload:
    """`count` windows of `canvas` tokens, each from another document, drawn at random.

    The first `ratio` percent of a window are the shared prefix, and its last `max_tokens` the reference answer. Raises
    `ConfigError` if too few documents have `canvas` tokens, if the prefix or the text between it and the answer would
    be empty, and if the model has no tokenizer.
    """
    if llm.tokenizer is None:
        raise ConfigError("documents are read in words, and this model folder has no tokenizer")
    rng = random.Random(seed)
    answer = sampling.max_tokens
    prefix = canvas * ratio // 100
    if not 0 < prefix < canvas - answer:
        raise ConfigError(f"a prefix of {ratio} % and an answer of {answer} leave no room on a canvas of {canvas}")
    tasks: list[Task] = []
    for text in rng.sample(documents, len(documents)):
        tokens = llm.tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) >= canvas:
            start = rng.randint(0, len(tokens) - canvas)
            window = tokens[start : start + canvas]
            request = Request(str(len(tasks)), window[: canvas - answer], sampling, prefix)
            tasks.append(Task(request, reference=llm.tokenizer.decode(window[canvas - answer :])))
        if len(tasks) == count:
            return Workload(f"documents, prefix {ratio} %", seed, tuple(tasks), count)
    raise ConfigError(f"of {len(documents)} documents {len(tasks)} have {canvas} tokens, and {count} are asked for")
