"""What is measured of a pretrained model: similarities, losses, answers, and what every cache costs there.

`measure` measures one part, a `Record`, at one of `SIZES`. `remask_lab.pages.real_weights` keeps the parts as files and
writes the page.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

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
    documents,
    is_bench,
    solved,
    town,
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
"""Depths of the part `outputs`, by model, on its own task; the last are all layers."""
ROWS: Final = 0.05  # of a prefix's rows may be less like than the cosine of the rule by rows
RATIOS: Final = (10, 30, 50, 70, 90)
TURNS: Final = 3  # of each way to run a pass

PROMPTS: Final = tuple(Path(__file__).with_name("prompts.txt").read_text(encoding="utf-8").splitlines())
"""What the model is asked to answer; none was drawn from what it was trained on."""


def parts(size: Size) -> tuple[str, ...]:
    return (
        *HELD_OUT,
        PUBLISHED,
        *("profile", *TOWNS, *LOOKUPS, SIMILARITY, "outputs"),
        *(f"{DOCUMENTS}{share}" for share in SHARES),
        *(f"{SHOTS}{shots}" for shots in size.solved),
        *("passes", "answers"),
    )


def possible(part: str, source: Source) -> bool:
    if part == PUBLISHED:
        return source.published is not None
    return not part.startswith(DOCUMENTS) or bool(source.documents)


def measure(part: str, size: Size, source: Source) -> Record:
    """Measure one of `parts`.

    Parts that compare caches are records of `remask bench`. Raises `UnknownNameError` on another part, and
    `ConfigError` where the model or the files that it reads cannot be used.
    """
    check_choice("part", part, parts(size))
    if not possible(part, source):
        what = "GSM8K's test.jsonl as it is published" if part == PUBLISHED else "folders of documents in HTML"
        raise ConfigError(f"the part {part} reads {what}: give its path")
    if is_bench(part):
        return bench(part, size, source)
    if part == PUBLISHED:
        lines = read_lines(source.published or "", limit=size.published)
        data, llm = held_out(source, [(each.text("question"), each.text("answer")) for each in lines])
    elif part in HELD_OUT:  # as they come with the package, without annotations of the calculator
        packaged = gsm8k.conversations()[: size.held_out]
        asked = [(question["content"], worked["content"]) for question, worked in packaged]
        data, llm = held_out(source, asked, HELD_OUT[part])
    else:
        data, llm = _PARTS[part](source, size)
    return Record(SUBJECT, about(llm, seed=SEED, settings={"part": part}), data)


def _profile(source: Source, size: Size) -> tuple[dict[str, Any], LLM]:
    """Depth by ratio and similarity by layer, of the model and of the bundled one, on prompts of their own."""
    samples, canvas = size.profiled
    settings = ProfileSettings(ratios=RATIOS, samples=samples, canvas=canvas, response=canvas // 8, seed=SEED)
    toy = open_model(source, model=BUNDLED)
    own = replace(settings, canvas=None, response=None)
    tables = {BUNDLED: profile(toy.session, default_prompts(toy.loaded), own)}
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


def _town_similarity(source: Source, size: Size) -> tuple[dict[str, Any], LLM]:
    """How far the pages' K and V move before a question, in the first step of answers under `none`."""
    llm = open_model(source)
    workload = town(size, size.town_caches, {"steps": 1, "block_length": 32})(llm, source)
    found = measure_prefix(llm, [task.request for task in workload.tasks])
    return asdict(found) | {"layers": llm.loaded.config.layers}, llm


def _outputs(source: Source, size: Size) -> tuple[dict[str, Any], LLM]:
    """How far first predictions move by depth, and the depth of the rule of `profile`, of three models on their tasks.

    The rule is also read by rows: at the cosine below which `ROWS` of a prefix's rows are.
    """
    cases = []
    for name, depths in TOYS.items():
        toy = open_model(source, model=name)
        workload = usual_workload(toy, size.outputs, SEED, {}, prefixes=size.outputs)
        cases.append(_first_steps(toy, workload, depths))
    llm, asked = open_model(source), (size.outputs, size.outputs)  # int8 rounds activations, which moves predictions
    draws = [town(size, asked, {}, shops) for shops in (DEPTHS.values() if size.shops >= 8 else (size.shops,))]
    few = replace(size, solved=dict.fromkeys(size.solved, size.outputs), documents=(size.outputs, *size.documents[1:]))
    draws += [solved(few, shots) for shots in size.solved]
    draws += [documents(few, share) for share in SHARES if source.documents]
    depths = tuple(depth for depth in size.first_depths if depth <= llm.loaded.config.layers)
    cases += [_first_steps(llm, draw(llm, source), depths) for draw in draws]
    return {"questions": size.outputs, "cases": cases}, llm


def _first_steps(llm: LLM, workload: Workload, depths: Sequence[int]) -> dict[str, Any]:
    curves: dict[str, list[Any]] = {"rule": [], "rule_by_rows": []}

    def compare(alone: KV, within: KV) -> None:
        curves["rule"].append(layer_cosines(alone, within).mean(axis=0))
        curves["rule_by_rows"].append(row_cosines(alone, within, ROWS).mean(axis=0))

    requests = [each.request for each in workload.tasks]
    shifts = measure_predictions(llm, requests, workload.clusters, depths, on_states=compare)
    tau = ProfileSettings().tau
    return {
        "model": llm.loaded.name,
        "task": workload.name,
        "layers": llm.loaded.config.layers,
        "prefix_ratio": workload.prefix_ratio,
        **{
            name: [depth_at(limits, tau) for limits in limits_of(DepthRule(), np.array(own)).tolist()]
            for name, own in curves.items()
        },
        "depths": {str(shift.depth): asdict(shift) for shift in shifts},
    }


def _passes(source: Source, size: Size) -> tuple[dict[str, Any], LLM]:
    """Time of one pass over whole canvases: the engine's, and of its products and attention alone by PyTorch."""
    found: list[dict[str, Any]] = []
    llm = open_model(source)
    few = open_model(source, "int8")
    began = read_cpu()
    for prompt in size.passes:
        noisy, layers = 64, llm.loaded.config.layers
        rows = prompt + noisy
        bare = bare_pass(llm, [rows] * layers, noisy, rows)
        ways = {"engine": _one_pass(llm, prompt, noisy), "PyTorch": bare, "engine, int8": _one_pass(few, prompt, noisy)}
        times = in_turns(ways, TURNS, on_device(llm))
        seconds = {name: statistics.median(own) for name, own in times.items()}
        found.append({"rows": rows, "read": noisy, "seconds": seconds})
    return {"passes": found, "conditions": conditions(began)}, llm


def _one_pass(llm: LLM, prompt: int, noisy: int) -> Callable[[], object]:
    """An answer in one step, which is one pass over the whole canvas."""
    tokens = np.random.default_rng(SEED).integers(0, llm.loaded.config.vocab, prompt).tolist()
    params = SamplingParams(max_tokens=noisy, steps=1, ignore_eos=True)
    return lambda: list(
        llm.session.run([Request("0", tokens, params, policy=llm.session.policy("none"))], progress=False)
    )


def _answers(source: Source, size: Size) -> tuple[dict[str, Any], LLM]:
    """Answers to `PROMPTS` at the model's own decoding, under no cache, cut at so many tokens."""
    llm = open_model(source, "int8")
    count, tokens = size.answers
    start, found = time.perf_counter(), []
    for prompt in PROMPTS[:count]:
        (output,) = llm.chat([{"role": "user", "content": prompt}], {"max_tokens": tokens}, cache="none")
        found.append({"prompt": prompt, "answer": output.text, "tokens": output.usage.completion_tokens})
    return {"answers": found, "max_tokens": tokens, "seconds": time.perf_counter() - start}, llm


_PARTS: Final[Mapping[str, Callable[[Source, Size], tuple[dict[str, Any], LLM]]]] = {
    "profile": _profile,
    SIMILARITY: _town_similarity,
    "outputs": _outputs,
    "passes": _passes,
    "answers": _answers,
}
