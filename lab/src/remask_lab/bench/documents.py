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
    """The prose of the HTML files in `folders`, a file a document.

    Paragraphs of at least eight words that are mostly letters are kept, each once. A file is a document where it has
    150 words of them.
    """
    seen: set[str] = set()
    for file in sorted(path for folder in folders for path in folder.rglob("*.html") if path.is_file()):
        kept = []
        for found in re.finditer(r"<p[^>]*>(.*?)</p>", file.read_text(encoding="utf-8", errors="ignore"), re.DOTALL):
            text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", found[1])).split())
            letters = sum(letter.isalpha() or letter == " " for letter in text)
            if len(text.split()) >= 8 and text.isascii() and letters > 0.85 * len(text) and text not in seen:
                seen.add(text)
                kept.append(text)
        if sum(len(text.split()) for text in kept) >= 150:
            yield " ".join(kept)


def document_workload(
    llm: LLM, documents: Sequence[str], count: int, canvas: int, ratio: int, seed: int, sampling: SamplingParams
) -> Workload:
    """Windows of `canvas` tokens, each of another document: the first `ratio` percent of it are the shared prefix.

    The last `max_tokens` are the reference answer. Raises `ConfigError` where there are not so many documents of that
    length, or no room for a prefix.
    """
    if llm.tokenizer is None:
        raise ConfigError("documents are read in words, and this model folder has no tokenizer")
    rng, answer = random.Random(seed), sampling.max_tokens
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
