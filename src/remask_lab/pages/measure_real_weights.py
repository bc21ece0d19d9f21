"""What is measured of a pretrained model: similarities, losses, answers, and what every cache costs there.

`measure` measures one part, a `Record`, at one of `SIZES`. `remask_lab.pages.real_weights` keeps the parts as files and
writes the page.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from remask.checks import BUNDLED, BUNDLED_TARIFF, SMOLLM2
from remask.checks.values import one_of
from remask.depth.profile import profile
from remask.depth.prompts import default_prompts
from remask.depth.rule import DepthRule, ProfileSettings, depth_at
from remask.depth.similarity import PrefixProbe, limits_of
from remask.engine.config import DEFAULT_STORE_TOKENS, EngineConfig
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.machine.cpu import read_cpu
from remask.plan.canvas import OPEN, Hole, Template
from remask.readers.logprobs import Logprobs
from remask.readers.replay import Replay
from remask.request.result import Transfer
from remask.request.sampling_params import SamplingParams
from remask.tasks import gsm8k
from remask.tasks.town import TownSettings
from remask_lab.bench.bench import run_bench
from remask_lab.bench.by_depth import at_depths
from remask_lab.bench.contenders import COMPOSITIONS, every_contender
from remask_lab.bench.documents import document_workload, read_documents
from remask_lab.bench.workload import TOWN_SAMPLING, Task, TaskChoice, Workload, usual_workload
from remask_lab.instruments.depths import row_cosines, states
from remask_lab.records.interval import mean_interval
from remask_lab.records.jsonl import read_lines
from remask_lab.records.machine import conditions
from remask_lab.records.record import Record, about
from remask_lab.speed.runs import bare_pass
from remask_lab.subjects.first_predictions import measure_predictions
from remask_lab.subjects.prefix_similarity import measure_prefix

NumberFormat: TypeAlias = Literal["none", "int8", "int4"]

SUBJECT: Final = "real weights"
SHOTS: Final = "shots-"
DOCUMENTS: Final = "documents-"
DEPTHS: Final[Mapping[str, int]] = {"town-depths": 8, "town-depths-16": 16, "town-depths-24": 24}
"""Parts that compare depths, and the shops of their pages."""
REFRESHED, REFRESHES = (5, 15), (1, 4, None)
"""Depths of the part `town-refresh`, and steps between refreshes of the prefix; None: one at first alone."""
TOYS: Final[Mapping[str, tuple[int, ...]]] = {BUNDLED: (1, 2, 3, 4, 9), BUNDLED_TARIFF: (1, 2, 3, 4, 8)}
"""Depths of the part `outputs`, by model, on its own task; the last are all layers."""
OUTPUTS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30)
"""Those of the pretrained model."""
ROWS: Final = 0.05  # of a prefix's rows may be less like than the cosine of the rule by rows
SEED: Final = 31337
RATIOS: Final = (10, 30, 50, 70, 90)
SHARES: Final = (20, 50, 80, 91)
"""Percent of a document that are its prefix; the paper's canvases have 91."""
CANVAS, QUESTION, ANSWER = 360, 160, 200
"""Tokens of a canvas whose answer is half masked: at most so many of the question's end, and of the answer."""
PUBLISHED: Final = "held-out-published"
HELD_OUT: Final[Mapping[str, NumberFormat]] = {"held-out": "none", "held-out-int8": "int8", "held-out-int4": "int4"}
TURNS: Final = 3  # of each way to run a pass

PROMPTS: Final = tuple(Path(__file__).with_name("prompts.txt").read_text(encoding="utf-8").splitlines())
"""What the model is asked to answer; none was drawn from what it was trained on."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        profiled: requests at each prefix ratio.
        held_out, published: answers of GSM8K whose loss is read, those of the package and of the file `published`.
        solved: questions of GSM8K under every cache, by worked examples of their system prompt; two share a prompt.
        solved_tokens, solved_steps: of their responses, and of as much of a reference answer.
        town: questions and pages under `none`, `reuse` and `bicache`.
        town_depths: questions and pages under `none`, `reuse` and `bicache` at `depths`, or at `REFRESHED`.
        town_caches: questions and pages under every cache.
        shops: of a page.
        outputs: questions whose first predictions are compared by depth, each about a page of its own.
        documents: how many are continued at each of `SHARES`, tokens of each, and how many of them are written.
        answers: of `PROMPTS`, and the tokens of a response.
        depths: of `bicache`, in layers, where answers are compared; every other one where losses are.
        passes: tokens before the 64 masks of a pass.
        at_once: requests at a time.
    """

    profiled: int
    held_out: int
    published: int
    solved: Mapping[int, int]
    solved_tokens: int
    solved_steps: int
    town: tuple[int, int]
    town_depths: tuple[int, int]
    town_caches: tuple[int, int]
    shops: int
    outputs: int
    documents: tuple[int, int, int]
    answers: tuple[int, int]
    depths: tuple[int, ...] = (1, 5, 10, 20)
    passes: tuple[int, ...] = (128, 512, 1024)
    at_once: int = 1


SIZES: Final[Mapping[str, Size]] = {
    "tiny": Size(1, 2, 2, {0: 2}, 8, 2, (4, 2), (2, 1), (4, 2), 4, 2, (2, 60, 4), (2, 8), (2,), (16,)),
    "small": Size(
        4, 150, 512, {0: 12, 4: 3, 8: 2}, 32, 4, (160, 40), (40, 40), (10, 10), 8, 12, (12, 320, 24), (30, 48)
    ),
    "usual": Size(
        8, 200, 1000, {0: 24, 4: 12, 8: 6}, 64, 8, (200, 40), (200, 40), (30, 30), 16, 40, (30, 640, 48), (30, 128)
    ),
    "large": Size(
        8,
        200,
        1000,
        {0: 64, 4: 64, 8: 32},
        64,
        32,
        (400, 200),
        (400, 200),
        (400, 200),
        8,
        24,
        (96, 640, 48),
        (30, 128),
        (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25),
        at_once=64,
    ),
}
"""By name. `small` takes some twenty minutes of two idle cores, `usual` about an hour; `tiny` shows that all runs.

`large` is for a GPU, on which a part takes a minute or two.
"""


@dataclass(frozen=True, slots=True)
class Source:
    """What is measured, and on what.

    Attributes:
        model: its name.
        device: on a CPU numbers are float32, and what takes long has weights in int8; elsewhere all is bfloat16.
        published: GSM8K's test split as it is published.
        documents: folders of HTML in English that the model was not trained on.
    """

    model: str = SMOLLM2
    device: str = "cpu"
    published: Path | None = None
    documents: tuple[Path, ...] = ()


def parts(size: Size) -> tuple[str, ...]:
    """The names of all that is measured."""
    return (
        *HELD_OUT,
        PUBLISHED,
        "profile",
        "town",
        *DEPTHS,
        "town-refresh",
        "town-similarity",
        "town-caches",
        "outputs",
        *(f"{DOCUMENTS}{share}" for share in SHARES),
        *(f"{SHOTS}{shots}" for shots in size.solved),
        "passes",
        "answers",
    )


def possible(part: str, source: Source) -> bool:
    """Whether what a part reads is given."""
    if part == PUBLISHED:
        return source.published is not None
    return not part.startswith(DOCUMENTS) or bool(source.documents)


def measure(part: str, size: Size, source: Source = Source()) -> Record:
    """Measure one of `parts`.

    Parts that compare caches are records of `remask bench`. Raises `UnknownNameError` on another part, and
    `ConfigError` where the model or the files that it reads cannot be used.
    """
    one_of("part", part, parts(size))
    if not possible(part, source):
        what = "GSM8K's test.jsonl as it is published" if part == PUBLISHED else "folders of documents in HTML"
        raise ConfigError(f"the part {part} reads {what}: give its path")
    if compared := _comparison(part, size):
        return compared(source)
    if part == PUBLISHED:
        lines = read_lines(source.published or "", limit=size.published)
        data, llm = _held_out(source, [(each.text("question"), each.text("answer")) for each in lines])
    elif part in HELD_OUT:  # as they come with the package, without annotations of the calculator
        packaged = gsm8k.conversations()[: size.held_out]
        solved = [(asked["content"], worked["content"]) for asked, worked in packaged]
        data, llm = _held_out(source, solved, HELD_OUT[part])
    else:
        data, llm = _PARTS[part](source, size)
    return Record(SUBJECT, about(llm, seed=SEED, settings={"part": part}), data)


def _comparison(part: str, size: Size) -> Callable[[Source], Record] | None:
    """How a part that compares caches is measured; None of another part."""
    sure = {"threshold": 0.9}  # as many tokens a step as are sure, so that many questions are asked in little time
    if part == "town":
        return _Comparison(size, _town(size, size.town, sure), only=("none", "reuse", "bicache")).run
    if part in DEPTHS:
        draw = _town(size, size.town_depths, sure, DEPTHS[part] if size.shops >= 8 else size.shops)
        return _Comparison(size, draw, only=("none", "reuse"), depths=size.depths).run
    if part == "town-refresh":
        # A token a step, so that the prefix is refreshed while an answer is written.
        draw = _town(size, size.town_depths, {"steps": TOWN_SAMPLING["max_tokens"]})
        depths = tuple(depth for depth in REFRESHED if size.shops >= 8 or depth < 8)
        return _Comparison(size, draw, only=("none", "reuse"), depths=depths, refreshes=REFRESHES).run
    if part == "town-caches":
        # Two tokens a step, so that caches within a request have steps to save.
        return _Comparison(size, _town(size, size.town_caches, {"steps": 16})).run
    if part.startswith(SHOTS):
        draw = _solved(size, int(part.removeprefix(SHOTS)))
        return _Comparison(size, draw, depths=size.depths[::2], by_answers=False).run
    if part.startswith(DOCUMENTS):
        draw = _documents(size, int(part.removeprefix(DOCUMENTS)))
        return _Comparison(size, draw, depths=size.depths[::2], by_answers=False).run
    return None


def _open(source: Source, quantization: NumberFormat = "none", model: str | None = None) -> LLM:
    """The model. Losses are read in float32 on a CPU, and what takes long with weights in int8."""
    cpu, engine = source.device == "cpu", EngineConfig(max_num_seqs=1)
    return LLM(
        model or source.model,
        dtype="float32" if cpu else "bfloat16",
        quantization=quantization if cpu else "none",
        device=source.device,
        engine=engine,
        progress=False,
    )


def _profile(source: Source, size: Size) -> tuple[dict[str, Any], LLM]:
    """Depth by ratio and similarity by layer, of the model and of the bundled one, on prompts of their own."""
    settings = ProfileSettings(ratios=RATIOS, samples=size.profiled, canvas=512, response=64, seed=SEED)
    toy = _open(source, model=BUNDLED)
    own = replace(settings, canvas=None, response=None)
    tables = {BUNDLED: profile(toy.session, default_prompts(toy.loaded), own)}
    llm = _open(source)
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


def _held_out(
    source: Source, solved: Sequence[tuple[str, str]], quantization: NumberFormat = "none"
) -> tuple[dict[str, Any], LLM]:
    """Loss of answers to questions, of which half is masked, through the engine: one pass of it an answer."""
    llm = _open(source, quantization)
    rng = np.random.default_rng(SEED)
    requests, answered = [], []
    for number, (question, worked) in enumerate(solved):
        request, own = _half_masked(llm, str(number), question, worked, rng)
        requests.append(request)
        answered.append(own)
    losses: list[list[float]] = []
    right: list[list[float]] = []
    for output, own in zip(llm.session.run(requests, progress=False), answered, strict=True):
        if output.error is not None:
            raise ConfigError(f"the answer {output.id} could not be read: {output.error}")
        read = [each for each, counts in zip(output.logprobs or (), own, strict=True) if counts]
        losses.append([-each.logprob for each in read])
        right.append([float(each.top[0][0] == each.token_id) for each in read])
    return {
        "answers": len(losses),
        "tokens": sum(map(len, losses)),
        **_over_tokens("loss", losses),
        **_over_tokens("right", right),
    }, llm


def _over_tokens(name: str, answers: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The mean over the tokens of all answers, and its interval, as answers and not their tokens are independent.

    That of a ratio: an answer counts as much as it has tokens.
    """
    sums, counts = (np.array([each(own) for own in answers], dtype=np.float64) for each in (sum, len))
    mean = float(sums.sum() / counts.sum())
    low, high = mean_interval(((sums - mean * counts) / counts.mean()).tolist(), range(len(answers)))
    return {name: mean, f"{name}_interval": [mean + low, mean + high]}


def _half_masked(
    llm: LLM, name: str, question: str, worked: str, rng: np.random.Generator
) -> tuple[Request, list[bool]]:
    """A request that writes the masked half of a canvas in one step, and which of the tokens it writes are answer's.

    The canvas is as the adapter's training reads it: the question and its answer as plain text, then end tokens.
    """
    assert llm.tokenizer is not None
    end = min(llm.loaded.config.stop_ids)
    prompt = llm.tokenizer.encode(f"Question: {question}\nAnswer:", add_special_tokens=False)[-QUESTION:]
    answer = llm.tokenizer.encode(f" {worked}", add_special_tokens=False)[:ANSWER]
    response = np.array([*answer, *([end] * (CANVAS - len(prompt) - len(answer)))])
    masked = np.flatnonzero(rng.random(len(response)) < 0.5)
    fixed = response.copy()
    fixed[masked] = OPEN
    runs = np.split(masked, np.flatnonzero(np.diff(masked) > 1) + 1)
    template = Template(tuple(fixed.tolist()), tuple(Hole(int(run[0]), int(run[-1]) + 1) for run in runs))
    params = SamplingParams(max_tokens=len(response), steps=1, ignore_eos=True, blocks={"growing_canvas": False})
    written = Transfer(0, tuple((len(prompt) + masked).tolist()), tuple(response[masked].tolist()))
    request = Request(name, prompt, params, policy=llm.session.policy("none"), template=template)
    return request.with_readers(Replay([written]), Logprobs(1)), (masked < len(answer)).tolist()


Draw: TypeAlias = Callable[[LLM, Source], Workload]


def _town(size: Size, asked: tuple[int, int], sampling: Mapping[str, Any], shops: int | None = None) -> Draw:
    """Questions about pages of so many shops."""
    requests, pages = asked
    task = TaskChoice("town", TownSettings(shops=shops or size.shops))
    return lambda llm, _: usual_workload(llm, requests, SEED, sampling, prefixes=pages, task=task)


def _solved(size: Size, shots: int) -> Draw:
    """Questions of GSM8K behind worked examples: agreement and loss, as the model solves few. Two share a prompt."""
    count = size.solved[shots]
    sampling = {
        "max_tokens": size.solved_tokens,
        "steps": size.solved_steps,
        "block_length": size.solved_tokens // 2,
        "ignore_eos": True,
    }
    task = TaskChoice("gsm8k", gsm8k.Gsm8kSettings(shots=shots))

    def draw(llm: LLM, _: Source) -> Workload:
        workload = usual_workload(llm, count, SEED, sampling, prefixes=-(-count // 2), task=task)
        # Of a reference as much as of a response: what follows would take as long again.
        return replace(workload, tasks=tuple(_cut(llm, each) for each in workload.tasks))

    return draw


def _documents(size: Size, share: int) -> Draw:
    """Documents whose last tokens are written, two a step: agreement and loss."""
    count, canvas, written = size.documents
    params = SamplingParams(max_tokens=written, steps=written // 2, block_length=written // 2, ignore_eos=True)
    return lambda llm, source: document_workload(
        llm, list(read_documents(source.documents)), count, canvas, share, SEED, params
    )


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A bench of every cache, or of `only` these and `bicache` at `depths`, in one turn without a warm-up.

    BiCache's depth is half the layers where none is named. With `refreshes` each depth is run at each of them.
    """

    size: Size
    draw: Draw
    only: Sequence[str] | None = None
    depths: Sequence[int] = ()
    refreshes: Sequence[int | None] = ()
    by_answers: bool = True

    def run(self, source: Source) -> Record:
        """The record of the bench, with what was left out."""
        llm, at_once = _open(source, "int8"), self.size.at_once
        workload = self.draw(llm, source)
        depth = {"depth": llm.loaded.config.layers // 2}
        rows, left_out = every_contender(llm, workload, dict.fromkeys(("bicache", *COMPOSITIONS), depth))
        if self.only is not None:
            rows, left_out = [row for row in rows if row.name in self.only], []
        for steps in self.refreshes:
            named = at_depths(llm, workload, self.depths, {"refresh_interval": steps})
            rows += [replace(row, name=f"{row.name} refresh={steps or 'never'}") for row in named]
        if not self.refreshes:
            rows += at_depths(llm, workload, self.depths)
        asked = (task.request for task in workload.tasks)
        longest = max(len(each.prompt_token_ids) + each.params.max_tokens for each in asked)
        engine = EngineConfig(at_once, longest, store_budget_tokens=max(DEFAULT_STORE_TOKENS, at_once * longest))
        record = run_bench(
            llm,
            workload,
            rows,
            1,
            engine,
            progress=False,
            warm_up=0,
            answers=False,
            losses=not self.by_answers,
        )
        record.data["left_out"] = [asdict(left) for left in left_out]
        return record


def _cut(llm: LLM, task: Task) -> Task:
    assert llm.tokenizer is not None
    tokens = llm.tokenizer.encode(task.reference or "", add_special_tokens=False)[: task.request.params.max_tokens]
    return replace(task, reference=llm.tokenizer.decode(tokens))


def _town_similarity(source: Source, size: Size) -> tuple[dict[str, Any], LLM]:
    """How far the pages' K and V move before a question, in the first step of answers under `none`."""
    llm = _open(source)
    workload = _town(size, size.town_caches, {"steps": 1, "block_length": 32})(llm, source)
    found = measure_prefix(llm, [task.request for task in workload.tasks])
    return asdict(found) | {"layers": llm.loaded.config.layers}, llm


def _outputs(source: Source, size: Size) -> tuple[dict[str, Any], LLM]:
    """How far first predictions move by depth, and the depth of the rule of `profile`, of three models on their tasks.

    The rule is also read by rows: at the cosine below which `ROWS` of a prefix's rows are.
    """
    cases = []
    for name, depths in TOYS.items():
        toy = _open(source, model=name)
        workload = usual_workload(toy, size.outputs, SEED, {}, prefixes=size.outputs)
        cases.append(_first_steps(toy, workload, depths))
    llm, asked = _open(source), (size.outputs, size.outputs)  # int8 rounds activations, which moves predictions
    draws = [_town(size, asked, {}, shops) for shops in (DEPTHS.values() if size.shops >= 8 else (size.shops,))]
    few = replace(size, solved=dict.fromkeys(size.solved, size.outputs), documents=(size.outputs, *size.documents[1:]))
    draws += [_solved(few, shots) for shots in size.solved]
    draws += [_documents(few, share) for share in SHARES if source.documents]
    depths = tuple(depth for depth in OUTPUTS if depth <= llm.loaded.config.layers)
    cases += [_first_steps(llm, draw(llm, source), depths) for draw in draws]
    return {"questions": size.outputs, "cases": cases}, llm


def _first_steps(llm: LLM, workload: Workload, depths: Sequence[int]) -> dict[str, Any]:
    """What first steps of a workload tell of depths."""
    requests = [each.request for each in workload.tasks]
    found = measure_predictions(llm, requests, workload.clusters, depths)
    probe = PrefixProbe(llm.model, max(len(each.prompt_token_ids) + each.params.max_tokens for each in requests))
    curves: list[Any] = []
    for request in requests:
        prompt, masks = request.prompt_token_ids, [llm.loaded.config.mask_id] * request.params.max_tokens
        count = request.prefix_length
        alone, within = states(probe, prompt[:count]), states(probe, [*prompt, *masks], count)
        curves.append(row_cosines(alone, within, ROWS).mean(axis=0))
    limits = limits_of(DepthRule(), np.array(curves)).tolist()
    shifts = {str(shift.depth): asdict(shift) for shift in found.shifts}
    return {
        "model": llm.loaded.name,
        "task": workload.name,
        "layers": llm.loaded.config.layers,
        "prefix_ratio": workload.prefix_ratio,
        "rule": list(found.rule),
        "rule_by_rows": [depth_at(rows, ProfileSettings().tau) for rows in limits],
        "depths": shifts,
    }


def _passes(source: Source, size: Size) -> tuple[dict[str, Any], LLM]:
    """Time of one pass over whole canvases: the engine's, and of its products and attention alone by PyTorch."""
    found: list[dict[str, Any]] = []
    llm = _open(source)
    few = _open(source, "int8")
    began = read_cpu()
    for prompt in size.passes:
        noisy, layers = 64, llm.loaded.config.layers
        rows = prompt + noisy
        bare = bare_pass(llm, [rows] * layers, noisy, rows)
        ways = {"engine": _one_pass(llm, prompt, noisy), "PyTorch": bare, "engine, int8": _one_pass(few, prompt, noisy)}
        for run in ways.values():
            run()
        seconds = {name: [_seconds(run) for _ in range(TURNS)] for name, run in ways.items()}
        found.append(
            {"rows": rows, "read": noisy, "seconds": {n: statistics.median(own) for n, own in seconds.items()}}
        )
    return {"passes": found, "conditions": conditions(began)}, llm


def _one_pass(llm: LLM, prompt: int, noisy: int) -> Callable[[], object]:
    """An answer in one step, which is one pass over the whole canvas."""
    tokens = np.random.default_rng(SEED).integers(0, llm.loaded.config.vocab, prompt).tolist()
    params = SamplingParams(max_tokens=noisy, steps=1, ignore_eos=True)
    return lambda: list(
        llm.session.run([Request("0", tokens, params, policy=llm.session.policy("none"))], progress=False)
    )


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _answers(source: Source, size: Size) -> tuple[dict[str, Any], LLM]:
    """Answers to `PROMPTS` at the model's own decoding, under no cache, cut at so many tokens."""
    llm = _open(source, "int8")
    count, tokens = size.answers
    start, found = time.perf_counter(), []
    for prompt in PROMPTS[:count]:
        (output,) = llm.chat([{"role": "user", "content": prompt}], {"max_tokens": tokens}, cache="none")
        found.append({"prompt": prompt, "answer": output.text, "tokens": output.usage.completion_tokens})
    return {"answers": found, "max_tokens": tokens, "seconds": time.perf_counter() - start}, llm


_PARTS: Final[Mapping[str, Callable[[Source, Size], tuple[dict[str, Any], LLM]]]] = {
    "profile": _profile,
    "town-similarity": _town_similarity,
    "outputs": _outputs,
    "passes": _passes,
    "answers": _answers,
}
