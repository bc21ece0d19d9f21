"""Compares uniform models under the caches: `python training/uniform_evaluate.py FOLDER...`.

Every model answers the same held-out timetables, well and poorly: poor blocks get half of the steps at a token each, so
that about half of their tokens stay noise. On models without structured attention completed blocks are revised at
borders, too. A table shows right lists, right departures, row-layers, and what revisions made of tokens.

`--prompts` shows instead how far a prompt's K/V move from those of the first step, at the first step of each block.
Under structured attention those of the first step are the K/V of the prompt alone, so this is what sharing would cost.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch.nn.functional as F
from torch import Tensor

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from remask.llm import LLM, Output  # noqa: E402
from remask.observe import ObservedPass  # noqa: E402
from remask.request.sampling_params import SamplingParams  # noqa: E402  (the path above makes a plain script call work)
from remask_lab.bench.workload import timetable_workload  # noqa: E402
from remask_lab.instruments.watch import Watcher  # noqa: E402
from remask_lab.records.interval import wilson  # noqa: E402
from remask_lab.records.markdown import markdown_table  # noqa: E402

CACHES: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("none", {}),
    ("block-prefix", {}),
    ("uniform-cache", {}),
    ("uniform-cache", {"border": "neighbours"}),
)
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "well": {"steps_per_block": 8, "tokens_per_step": 3},
    "poorly": {"steps_per_block": 4, "tokens_per_step": 1},
}
REVISIONS: Final = (0, 2, 8)
HEAD: Final = (
    "model",
    "blocks",
    "cache",
    "revision",
    "lists right",
    "departures right",
    "row-layers",
    "revised",
    "mended",
    "spoiled",
)


def compare(name: str, questions: int, seed: int) -> Iterator[list[str]]:
    """Yields the rows of one model as they are measured."""
    llm = LLM(name, dtype="float32", progress=False)
    for blocks, own in SETTINGS.items():
        for revision in REVISIONS[:1] if llm.model.config.structured_attention else REVISIONS:
            sampling = {"max_tokens": 32, "block_length": 8, "canvas_length": 64, "ignore_eos": True, **own}
            sampling |= {"revision_tokens": revision} if revision else {}
            workload = timetable_workload(llm, questions, seed, SamplingParams.from_mapping(sampling))
            for cache, settings in CACHES:
                policy = llm.policy(cache, settings)
                asked = [task.request.with_policy(policy) for task in workload.tasks]
                outputs = {output.id: output for output in llm.run(asked, trace=True)}
                answers = [
                    (outputs[task.request.id], len(task.request.prompt_token_ids), str(task.answer).split())
                    for task in workload.tasks
                ]
                yield [Path(name).name, blocks, _words(cache, settings), str(revision), *_cells(llm, answers)]


def prompts(name: str, questions: int, seed: int) -> list[list[str]]:
    """Returns the similarity of a prompt's K/V to those of the first step: a row for each block, the layers beside.

    It is the mean over requests of one cosine over the flattened K, and one over the flattened V.
    """
    llm = LLM(name, dtype="float32", progress=False)
    sampling = {"max_tokens": 32, "block_length": 8, "canvas_length": 64, "ignore_eos": True, **SETTINGS["well"]}
    workload = timetable_workload(llm, questions, seed, SamplingParams.from_mapping(sampling))
    watcher, found = Watcher(llm), np.zeros((4, llm.model.config.layers, 2))
    for task in workload.tasks:
        first: list[tuple[Tensor, Tensor]] = []

        def observe(seen: ObservedPass, first: list[tuple[Tensor, Tensor]] = first) -> None:
            if seen.block_step:
                return
            layers = [(k.flatten().clone(), v.flatten().clone()) for k, v in seen.kv(slice(0, seen.prompt))]
            if not first:
                first.extend(layers)
            cosines = [
                [float(F.cosine_similarity(a, b, dim=0)) for a, b in zip(*both, strict=True)]
                for both in zip(first, layers, strict=True)
            ]
            found[seen.step // SETTINGS["well"]["steps_per_block"]] += np.array(cosines) / questions

        watcher.run(task.request.with_policy(llm.policy("none")), observe)
    shown = [[f"{k:.3f} / {v:.3f}" for k, v in block] for block in found]
    return [[Path(name).name, str(number + 1), *row] for number, row in enumerate(shown)]


def _words(cache: str, settings: Mapping[str, Any]) -> str:
    return " ".join([cache, *[f"{name}={value}" for name, value in settings.items()]])


def _cells(llm: LLM, answers: list[tuple[Output, int, list[str]]]) -> list[str]:
    assert llm.tokenizer is not None
    right, places, counts = 0, 0, {"revised": 0, "mended": 0, "spoiled": 0}
    for output, first, words in answers:
        wanted = [llm.tokenizer.encode(word, add_special_tokens=False)[0] for word in words]
        hits = sum(a == b for a, b in zip(output.token_ids, wanted, strict=True))
        right, places = right + (hits == len(wanted)), places + hits
        standing: dict[int, int] = {}
        for transfer in output.trace or ():
            for position, token in zip(transfer.positions, transfer.token_ids, strict=True):
                place = position - first
                if position in transfer.edits and place < len(wanted):
                    counts["revised"] += 1
                    counts["mended"] += token == wanted[place]
                    counts["spoiled"] += standing.get(place) == wanted[place]
                standing[place] = token
    low, high = wilson(right, len(answers))
    total = sum(len(words) for *_, words in answers)
    return [
        f"{right / len(answers):.1%} ({low:.1%} to {high:.1%})",
        f"{places / total:.1%}",
        f"{sum(output.usage.row_layers for output, *_ in answers):,}",
        *map(str, counts.values()),
    ]


def main() -> None:
    """Compares the models that the command line names, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="FOLDER")
    parser.add_argument("--questions", type=int, default=48)
    parser.add_argument("--seed", type=int, default=20_000)
    parser.add_argument("--prompts", action="store_true", help="show how far prompts move")
    options = parser.parse_args()
    if options.prompts:
        rows = [row for model in options.models for row in prompts(model, options.questions, options.seed)]
        print(markdown_table(["model", "block", *[f"layer {n}" for n in range(1, len(rows[0]) - 1)]], rows))
        return
    print(markdown_table(list(HEAD), []), flush=True)
    for model in options.models:
        for row in compare(model, options.questions, options.seed):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
