"""Measurements of a pretrained model: similarities, losses, answers, and the costs of every cache.

`measure` measures one part, a `Record`, at one of `SIZES`. `remask_lab.pages.real_weights` keeps the parts as files and
writes the page.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from remask.checks import BUNDLED, BUNDLED_TARIFF
from remask.checks.values import check_choice
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.machine.cpu import read_cpu
from remask.request.sampling_params import SamplingParams
from remask_lab import gsm8k
from remask_lab.bench.workload import Workload, usual_workload
from remask_lab.instruments.depths import measure_predictions, row_cosines
from remask_lab.pages.real_weights_benches import (
    DEPTHS,
    DOCUMENTS,
    LOOKUPS,
    SHARES,
    SHOTS,
    TOWNS,
    bench,
    document_draw,
    gsm8k_draw,
    is_bench,
    town_draw,
)
from remask_lab.pages.real_weights_losses import held_out
from remask_lab.pages.real_weights_sizes import SEED, NumberFormat, Size, Source, open_model
from remask_lab.records.jsonl import read_lines
from remask_lab.records.machine import conditions
from remask_lab.records.record import Record, about
from remask_lab.similarity.probe import KV, layer_cosines, limits_of
from remask_lab.similarity.profile import profile
from remask_lab.similarity.prompts import default_prompts
from remask_lab.similarity.rule import DepthRule, ProfileSettings, depth_at
from remask_lab.speed.command import in_turns
from remask_lab.speed.runs import bare_pass, on_device
from remask_lab.subjects.prefix_similarity import measure_prefix

SUBJECT: Final = "real weights"
SIMILARITY: Final = "town-similarity"
PUBLISHED: Final = "held-out-published"
HELD_OUT: Final[Mapping[str, NumberFormat]] = {"held-out": "none", "held-out-int8": "int8", "held-out-int4": "int4"}
TOYS: Final[Mapping[str, tuple[int, ...]]] = {BUNDLED: (1, 2, 3, 4, 9), BUNDLED_TARIFF: (1, 2, 3, 4, 8)}
"""Depths of the part `outputs` on the models of our own tasks, by model; the last are all layers."""
ROWS: Final = 0.05  # share of a prefix's rows that may have a smaller cosine than the one of the rule by rows
RATIOS: Final = (10, 30, 50, 70, 90)
TURNS: Final = 3  # timed turns of each way to compute a pass

PROMPTS: Final = tuple(Path(__file__).with_name("prompts.txt").read_text(encoding="utf-8").splitlines())
"""Prompts that the model answers; none is from its training data."""

Data: TypeAlias = tuple[dict[str, Any], LLM]
"""The data of a part's record, and the model that the record is about."""


def parts(size: Size) -> tuple[str, ...]:
    """The names of all parts at a size."""
    return (
        *HELD_OUT,
        PUBLISHED,
        *("profile", *TOWNS, *LOOKUPS, SIMILARITY, "outputs"),
        *(f"{DOCUMENTS}{share}" for share in SHARES),
        *(f"{SHOTS}{shots}" for shots in size.gsm8k),
        *("passes", "answers"),
    )


def is_possible(part: str, source: Source) -> bool:
    """Whether `source` names the files that a part reads."""
    if part == PUBLISHED:
        return source.published is not None
    return not part.startswith(DOCUMENTS) or bool(source.documents)


def measure(part: str, size: Size, source: Source) -> Record:
    """Measure one of `parts`.

    Parts that compare caches are records of `remask bench`. Raises `UnknownNameError` on another part, and
    `ConfigError` if the model or a file cannot be used.
    """
    check_choice("part", part, parts(size))
    if not is_possible(part, source):
        files = "GSM8K's test.jsonl as it is published" if part == PUBLISHED else "folders of documents in HTML"
        raise ConfigError(f"the part {part} reads {files}: give its path")
    if is_bench(part):
        return bench(part, size, source)
    if part == PUBLISHED:
        lines = read_lines(source.published or "", limit=size.published)
        data, llm = held_out(source, [(line.text("question"), line.text("answer")) for line in lines])
    elif part in HELD_OUT:  # as they come with the package, without annotations of the calculator
        conversations = gsm8k.conversations()[: size.held_out]
        pairs = [(question["content"], answer["content"]) for question, answer in conversations]
        data, llm = held_out(source, pairs, HELD_OUT[part])
    else:
        data, llm = _PARTS[part](source, size)
    return Record(SUBJECT, about(llm, seed=SEED, settings={"part": part}), data)


def _profile(source: Source, size: Size) -> Data:
    """Depths by prefix ratio and similarities by layer, of the bundled model and of the pretrained one.

    Each is measured on its own default prompts, and the bundled model on its own canvas.
    """
    samples, canvas = size.profile
    settings = ProfileSettings(ratios=RATIOS, samples=samples, canvas=canvas, response=canvas // 8, seed=SEED)
    bundled = open_model(source, model=BUNDLED)
    bundled_settings = replace(settings, canvas=None, response=None)
    tables = {BUNDLED: profile(bundled.session, default_prompts(bundled.loaded), bundled_settings)}
    llm = open_model(source)
    tables[source.model] = profile(llm.session, default_prompts(llm.loaded), settings)
    rows = {
        name: {
            "layers": table.layers,
            "samples": table.samples,
            "source": table.source,
            "tau": table.tau,
            "depths": {str(ratio): table.lookup.depth(ratio, 100) for ratio in RATIOS},
            "request_depths": dict(table.request_depths),
            "curves": {str(ratio): list(curve) for ratio, curve in table.curves.items()},
        }
        for name, table in tables.items()
    }
    return {"tables": rows}, llm


def _town_similarity(source: Source, size: Size) -> Data:
    """Similarities of the pages' K and V, alone and before a question, in the first step under `none`."""
    llm = open_model(source)
    workload = town_draw(size, size.town_caches, {"steps": 1, "block_length": 32})(llm, source)
    similarities = measure_prefix(llm, [task.request for task in workload.tasks])
    return asdict(similarities) | {"layers": llm.loaded.config.layers}, llm


def _outputs(source: Source, size: Size) -> Data:
    """The `_first_steps` of three models on their tasks."""
    count = size.first_steps
    cases = []
    for name, depths in TOYS.items():
        toy = open_model(source, model=name)
        workload = usual_workload(toy, count, SEED, {}, prefixes=count)
        cases.append(_first_steps(toy, workload, depths))
    llm = open_model(source)  # not in int8, which rounds activations and so changes predictions
    page_shops = DEPTHS.values() if size.shops >= 8 else (size.shops,)
    draws = [town_draw(size, (count, count), {}, shops) for shops in page_shops]
    size = replace(size, gsm8k=dict.fromkeys(size.gsm8k, count), documents=(count, *size.documents[1:]))
    draws += [gsm8k_draw(size, shots) for shots in size.gsm8k]
    draws += [document_draw(size, share) for share in SHARES if source.documents]
    depths = tuple(depth for depth in size.first_step_depths if depth <= llm.loaded.config.layers)
    cases += [_first_steps(llm, draw(llm, source), depths) for draw in draws]
    return {"questions": count, "cases": cases}, llm


def _first_steps(llm: LLM, workload: Workload, depths: Sequence[int]) -> dict[str, Any]:
    """The divergence of first predictions by depth, and the depths of the paper's rule for the same requests.

    `rule_by_rows` replaces the mean cosine of a prefix by the one below which the share `ROWS` of its rows lies.
    """
    curves: dict[str, list[Any]] = {"rule": [], "rule_by_rows": []}

    def compare(alone: KV, within: KV) -> None:
        curves["rule"].append(layer_cosines(alone, within).mean(axis=0))
        curves["rule_by_rows"].append(row_cosines(alone, within, ROWS).mean(axis=0))

    requests = [task.request for task in workload.tasks]
    shifts = measure_predictions(llm, requests, workload.clusters, depths, on_states=compare)
    tau = ProfileSettings().tau
    return {
        "model": llm.loaded.name,
        "task": workload.name,
        "layers": llm.loaded.config.layers,
        "prefix_ratio": workload.prefix_ratio,
        **{
            name: [depth_at(limits, tau) for limits in limits_of(DepthRule(), np.array(values)).tolist()]
            for name, values in curves.items()
        },
        "depths": {str(shift.depth): asdict(shift) for shift in shifts},
    }


def _passes(source: Source, size: Size) -> Data:
    """Seconds of one pass over a whole canvas: by the engine, and by PyTorch's products and attention alone."""
    passes: list[dict[str, Any]] = []
    llm = open_model(source)
    int8_llm = open_model(source, "int8")
    start = read_cpu()
    masks = 64
    for prompt in size.passes:
        rows = prompt + masks
        calls = {
            "engine": _one_pass(llm, prompt, masks),
            "PyTorch": bare_pass(llm, [rows] * llm.loaded.config.layers, masks, rows),
            "engine, int8": _one_pass(int8_llm, prompt, masks),
        }
        times = in_turns(calls, TURNS, on_device(llm))
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        passes.append({"rows": rows, "read": masks, "seconds": medians})
    return {"passes": passes, "conditions": conditions(start)}, llm


def _one_pass(llm: LLM, prompt_tokens: int, masks: int) -> Callable[[], object]:
    """A call that answers a random prompt in one step, which is one pass over the whole canvas."""
    tokens = np.random.default_rng(SEED).integers(0, llm.loaded.config.vocab, prompt_tokens).tolist()
    params = SamplingParams(max_tokens=masks, steps=1, ignore_eos=True)
    request = Request("0", tokens, params, policy=llm.session.policy("none"))
    return lambda: list(llm.session.run([request], progress=False))


def _answers(source: Source, size: Size) -> Data:
    """Answers to the first `PROMPTS` by the model's default sampling, under no cache, and their seconds in all."""
    llm = open_model(source, "int8")
    count, max_tokens = size.answers
    answers = []
    start = time.perf_counter()
    for prompt in PROMPTS[:count]:
        (output,) = llm.chat([{"role": "user", "content": prompt}], {"max_tokens": max_tokens}, cache="none")
        answers.append({"prompt": prompt, "answer": output.text, "tokens": output.usage.completion_tokens})
    return {"answers": answers, "max_tokens": max_tokens, "seconds": time.perf_counter() - start}, llm


_PARTS: Final[Mapping[str, Callable[[Source, Size], Data]]] = {
    "profile": _profile,
    SIMILARITY: _town_similarity,
    "outputs": _outputs,
    "passes": _passes,
    "answers": _answers,
}
