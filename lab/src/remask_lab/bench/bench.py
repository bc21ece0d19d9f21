"""Compares cache policies on one workload. Their turns are interleaved in one run."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from remask.checks.values import shown
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM, Output
from remask.machine.cpu import read_cpu
from remask.policies.base import NEVER
from remask.policies.bicache import BiCache, Earned
from remask.request.sampling_params import SamplingParams
from remask_lab.bench.audited import Audits, audit
from remask_lab.bench.contenders import Contender
from remask_lab.bench.reference import Losses, Reference, beside, mean_loss, measured_loss
from remask_lab.bench.workload import Task, Workload, prefix_clusters, steps_of, token_agreement
from remask_lab.observe import CacheMeter, observe_cache
from remask_lab.ops.flops import Executed
from remask_lab.records.interval import clustered_interval, mean_interval, paired_difference, verdict_texts
from remask_lab.records.machine import conditions
from remask_lab.records.record import Record, about, as_json

LEAST_ACCURACY = 0.1
"""Share of right answers below which a baseline says nothing: what a cache loses cannot be seen beside it."""

_SHOWN = 2  # wrong answers in an error

FIRST = 8
"""Questions after which a baseline that has answered none of them is told from one that answers some."""


@dataclass(slots=True)
class BenchRound:
    """One run of one contender over its tasks."""

    seconds: float
    outputs: list[Output]
    prefix_hits: int
    partial_prefix_hits: int
    prefix_row_layers: int
    audit_row_layers: int
    peak_memory_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """Response tokens, each response up to its end token."""
        return sum(output.usage.completion_tokens for output in self.outputs) / self.seconds

    @property
    def row_layers(self) -> int:
        """Row-layers computed, prefix-only passes included."""
        return sum(output.usage.row_layers for output in self.outputs) + self.prefix_row_layers


@dataclass(slots=True)
class BenchRow:
    """One contender, its tasks, and its rounds over them.

    Attributes:
        shares: the tasks of each round in turn: one share of all tasks, or one for each round.
        rounds: rounds with full batches.
        alone: rounds with one request at a time.
        meter, executed: cache use and FLOPs of the warm-up turn, where details are wanted.
        losses, no_loss: of the reference answers, and why there are none; None where losses are not wanted.
        audits: what audits before the rounds have shown, where that is wanted or a depth is to be earned.
    """

    contender: Contender
    shares: tuple[tuple[Task, ...], ...]
    rounds: list[BenchRound] = field(default_factory=list)
    alone: list[BenchRound] = field(default_factory=list)
    meter: CacheMeter = field(default_factory=CacheMeter)
    executed: Executed | None = None
    losses: Losses | None = None
    no_loss: str | None = None
    audits: Audits | None = None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks."""
        return tuple(task for share in self.shares for task in share)

    @property
    def counted(self) -> list[BenchRound]:
        """The last rounds that together ran each task once."""
        return self.rounds[-len(self.shares) :]

    @property
    def outputs(self) -> list[Output]:
        """The response to each of `tasks` that was counted."""
        return [output for turn in self.counted for output in turn.outputs]

    @property
    def peak_memory_bytes(self) -> int:
        """The most that a counted round held."""
        return max(turn.peak_memory_bytes for turn in self.counted)

    def total(self, name: str) -> int:
        """The sum of a number over the counted rounds."""
        return sum(getattr(turn, name) for turn in self.counted)

    def loss(self, baseline: "BenchRow") -> dict[str, Any]:
        """What a result says of the reference answers, alone and beside the baseline's; empty where not wanted."""
        if self.losses is None or baseline.losses is None:
            return {}
        names = (task.request.id for task in self.tasks)
        clusters = dict(zip(names, prefix_clusters(self.tasks), strict=True))
        compared = beside(self.losses, baseline.losses, clusters)
        return {**mean_loss(self.losses), "no_loss": self.no_loss, **compared}


def run_bench(
    llm: LLM,
    workload: Workload,
    contenders: Sequence[Contender],
    rounds: int,
    engine: EngineConfig,
    progress: bool,
    *,
    detail: bool = False,
    alone: bool = True,
    answers: bool = True,
    losses: bool = False,
    audits: bool = False,
    responses: bool = False,
    warm_up: int = 2,
    divided: bool = False,
) -> Record:
    """Run every contender over the workload `rounds` times, and return the record that `remask bench` writes.

    The contenders take turns. Each turn has its own engine and store, so that the first request of every prefix is a
    miss. The record holds medians against each contender's baseline, which must be among the contenders.

    Args:
        detail: the warm-up turn runs all requests and meters their K/V and FLOPs, and every round has a further turn of
            one request at a time, of as many requests as make the passes of full batches.
        alone: whether a detailed bench has these further turns.
        answers: whether to raise `ConfigError` after a baseline's first turn where it answers hardly anything.
        losses: whether to measure the loss of the reference answers under each policy (`reference`), untimed.
        audits: whether to audit some requests of each policy that approximates, untimed. Where audits earn a policy's
            depth they do so before the rounds in any case.
        responses: whether the record holds a response to each request, of the last round that ran it.
        warm_up: requests of each contender's first turn, which is not timed, unless all of them are.
        divided: whether a round runs a share of the prefixes, with all their requests, so that each request runs once.
            Raises `ConfigError` where there are fewer prefixes than rounds.
    """
    shares = [_shares((each.workload or workload).tasks, rounds if divided else 1) for each in contenders]
    rows = [BenchRow(contender, own) for contender, own in zip(contenders, shares, strict=True)]
    single = replace(engine, max_num_seqs=1)
    few = -(-len(workload.tasks) // engine.max_num_seqs)
    began = read_cpu()
    singly = detail and alone and engine.max_num_seqs > 1
    first = [row.tasks if detail else row.tasks[:warm_up] for row in rows]
    turns = [row.shares[turn % len(row.shares)] for turn in range(rounds) for row in rows]
    turns += [row.tasks[:few] for row in rows] * rounds if singly else []
    requests = sum(map(len, [*first, *turns]))
    with tqdm(total=requests, desc="bench", unit="req", disable=not progress) as bar:
        for row, tasks in zip(rows, first, strict=True):
            policy = row.contender.policy
            earns = isinstance(policy, BiCache) and isinstance(policy.depth, Earned)
            if engine.audit_share and (earns or (audits and not policy.traits.exact)):
                config = replace(engine, prefix_match=row.contender.prefix_match)
                row.audits = audit(llm, policy, row.tasks, config)
            _turn(llm, row, tasks, engine, bar, metered=detail)
        for turn in range(rounds):
            for row in rows:
                tasks = row.shares[turn % len(row.shares)]
                row.rounds.append(_turn(llm, row, tasks, engine, bar))
                if answers:
                    _check_answers(row, tasks)
            for row in rows if singly else ():
                row.alone.append(_turn(llm, row, row.tasks[:few], single, bar))
    for row in rows if losses else ():
        known = [Reference(task.request, task.reference) for task in row.tasks if task.reference is not None]
        row.losses, row.no_loss = measured_loss(llm, known, row.contender.policy, workload.seed, engine)
    by_name = {row.contender.name: row for row in rows}
    settings = _describe(llm, workload, rounds, engine) | ({"alone_requests": few} if detail else {})
    settings["metric"] = "agreement" if losses else "accuracy"
    results = [_result(row, by_name[row.contender.baseline], detail, audits) for row in rows]
    data: dict[str, Any] = {"results": results, "conditions": conditions(began)}
    if responses:
        data["answers"] = list(_responses(llm, rows))
    return Record("bench", about(llm, seed=workload.seed, settings=settings), data)


def _shares(tasks: Sequence[Task], count: int) -> tuple[tuple[Task, ...], ...]:
    """The tasks in `count` shares, those of one prefix in the same. Raises `ConfigError` with fewer prefixes."""
    clusters = prefix_clusters(tasks)
    order = {cluster: place for place, cluster in enumerate(dict.fromkeys(clusters))}
    if len(order) < count:
        raise ConfigError(
            f"{count} rounds are to share {len(order)} prefixes among them; ask for at most {len(order)} rounds, "
            "or for more prefixes"
        )
    shares: list[list[Task]] = [[] for _ in range(count)]
    for task, cluster in zip(tasks, clusters, strict=True):
        shares[order[cluster] % count].append(task)
    return tuple(map(tuple, shares))


def _check_answers(row: BenchRow, tasks: Sequence[Task], questions: int | None = None) -> None:
    """Raise what `check_answers` raises on a baseline's turn. One in random order is another sampler's, and may."""
    params = tasks[0].request.params
    if row.contender.name != row.contender.baseline or params.remasking.rule == "random":
        return
    verdicts = [task.correct(output.text) for task, output in zip(tasks, row.rounds[-1].outputs, strict=True)]
    right = [verdict for verdict in verdicts if verdict is not None]
    if right:
        asked = "" if questions is None else f" (the first {len(tasks)} of {questions} were asked)"
        check_answers(row.contender.name, sum(right) / len(right), params, asked, _wrong(tasks, row.rounds[-1].outputs))


def _wrong(tasks: Sequence[Task], outputs: Sequence[Output]) -> str:
    """The first wrong answers beside the right ones, and when an answer is right, in words."""
    both = zip(tasks, outputs, strict=True)
    wrong = [(output.text, task) for task, output in both if task.correct(output.text) is False][:_SHOWN]
    if not wrong:
        return ""
    answers = "; ".join(f"{shown(text)} where {shown(task.answer)} is right" for text, task in wrong)
    return f". It answers {answers} (right: {wrong[0][1].rule})"


def check_first_answers(llm: LLM, workload: Workload, engine: EngineConfig) -> None:
    """Ask the first questions without a cache, before anything long begins. Raises what `check_answers` raises.

    It does where none of `FIRST` answers is right. A workload of no more questions, or without right answers, passes.
    """
    tasks = workload.tasks[:FIRST]
    if len(workload.tasks) <= FIRST or tasks[0].answer is None:
        return
    row = BenchRow(Contender("none", llm.session.policy("none")), (tasks,))
    with tqdm(disable=True) as bar:
        row.rounds.append(_turn(llm, row, tasks, engine, bar))
    if not any(task.correct(output.text) for task, output in zip(tasks, row.rounds[0].outputs, strict=True)):
        _check_answers(row, tasks, len(workload.tasks))


def check_answers(name: str, accuracy: float, params: SamplingParams, asked: str = "", wrong: str = "") -> None:
    """Raise `ConfigError` where the baseline `name` answers less than `LEAST_ACCURACY` of its questions.

    `asked` says how many of them were asked, where that was not all, and `wrong` shows some wrong answers.
    """
    if accuracy < LEAST_ACCURACY:
        raise ConfigError(
            f"{name!r}, without any cache, answers {100 * accuracy:.1f} % of the questions, less than "
            f"{100 * LEAST_ACCURACY:g} %{asked}, so nothing can be said of what caches cost in accuracy: the sampling "
            f"({params.max_tokens} tokens in {steps_of(params)} steps, blocks of "
            f"{params.block_length or params.max_tokens}) does not fit the task, or the task the model; leave the "
            "sampling out to take the task's own, or compare what can be measured all the same: agreement with 'none', "
            "the loss of the reference answers, work and time (--metric agreement of remask bench and remask eval; "
            f"--metric accuracy runs to the end){wrong}"
        )


def _turn(
    llm: LLM, row: BenchRow, tasks: Sequence[Task], config: EngineConfig, bar: "tqdm[Any]", *, metered: bool = False
) -> BenchRound:
    engine = llm.session.new_engine(replace(config, prefix_match=row.contender.prefix_match))
    if row.audits is not None:
        engine.auditor.depths.records.update(row.audits.depths.records)
    if metered:
        observe_cache(engine, row.meter)
        row.executed = Executed(engine)
    work = [task.request.with_policy(row.contender.policy) for task in tasks]
    start = time.perf_counter()
    outputs = {}
    for output in llm.session.run(work, engine=engine, progress=False):
        outputs[output.id] = output
        bar.set_postfix_str(row.contender.name, refresh=False)
        bar.update()
    seconds = time.perf_counter() - start
    return BenchRound(
        seconds,
        [outputs[task.request.id] for task in tasks],
        engine.store.stats.hits,
        engine.store.stats.partial_hits,
        engine.stats.prefix_row_layers,
        engine.stats.audit_row_layers,
        engine.stats.peak_memory_bytes,
    )


def _responses(llm: LLM, rows: Sequence[BenchRow]) -> Iterator[dict[str, Any]]:
    """Each prompt, what is right, and what each contender made of it."""
    answered = {row.contender.name: row.outputs for row in rows}
    for place, task in enumerate(rows[0].tasks):
        answers = []
        for row in rows:
            baseline = row.contender.baseline
            output, other = answered[row.contender.name][place], answered[baseline][place]
            answers.append(
                {
                    "cache": row.contender.name,
                    "baseline": baseline,
                    "text": output.text,
                    "token_ids": output.token_ids,
                    "correct": task.correct(output.text),
                    "agreement": token_agreement(output.token_ids, other.token_ids),
                    "forwards": output.usage.forwards,
                    "row_layers": output.usage.row_layers,
                    "seconds": output.elapsed_s,
                    "finish_reason": output.finish_reason,
                }
            )
        tokens = task.request.prompt_token_ids
        prompt = " ".join(map(str, tokens)) if llm.tokenizer is None else llm.tokenizer.decode(tokens)
        yield {"prompt": prompt, "right": task.answer, "answers": answers}


def _describe(llm: LLM, workload: Workload, rounds: int, engine: EngineConfig) -> dict[str, Any]:
    sampling = [task.request.params for task in workload.tasks]
    params = sampling[0]
    uniform = llm.loaded.config.kind == "uniform"
    return {
        "name": workload.name,
        "requests": len(workload.tasks),
        "prefixes": workload.prefixes,
        "prefix_ratio": round(workload.prefix_ratio, 3),
        "concurrency": engine.max_num_seqs,
        "rounds": rounds,
        "max_tokens": _span([each.max_tokens for each in sampling]),
        "steps": _span([steps_of(each) for each in sampling]),
        "block_length": _span([each.block_length or each.max_tokens for each in sampling]),
        "canvas_length": params.uniform.canvas_length or (llm.engine.max_model_len if uniform else None),
        "sampling": sampling_of(sampling),
    }


def sampling_of(requests: Sequence[SamplingParams]) -> dict[str, Any]:
    """All sampling parameters of requests as records keep them, whether given or not, but for their seeds.

    Where requests differ in one it is the list of its values, in the order of the requests that first have them.
    """
    found: dict[str, Any] = {}
    for name in asdict(requests[0]):
        if name != "seed":
            by_text = {repr(value): as_json(value) for value in (getattr(params, name) for params in requests)}
            values = list(by_text.values())
            found[name] = values[0] if len(values) == 1 else values
    return found


def _span(numbers: Sequence[int]) -> int | str:
    """A number that all share, or the least and the largest in words."""
    least, largest = min(numbers), max(numbers)
    return least if least == largest else f"{least} to {largest}"


def _result(row: BenchRow, baseline: BenchRow, detail: bool, audits: bool) -> dict[str, Any]:
    tasks, outputs, others = row.tasks, row.outputs, baseline.outputs
    own = prefix_clusters(tasks)
    verdicts = [task.correct(output.text) for task, output in zip(tasks, outputs, strict=True)]
    judged = [(verdict, cluster) for verdict, cluster in zip(verdicts, own, strict=True) if verdict is not None]
    right, clusters = [verdict for verdict, _ in judged], [cluster for _, cluster in judged]
    theirs = [task.correct(output.text) for task, output in zip(tasks, others, strict=True)]
    compared = [each for each in zip(verdicts, theirs, own, strict=True) if None not in each]
    over = paired_difference(*zip(*compared, strict=True)) if compared else None
    agreement = [
        token_agreement(output.token_ids, other.token_ids) for output, other in zip(outputs, others, strict=True)
    ]
    result = {
        "cache": row.contender.name,
        "settings": dict(row.contender.settings),
        "policy": repr(row.contender.policy),
        "baseline": baseline.contender.name,
        "throughput_tok_s": float(np.median([turn.tokens_per_second for turn in row.rounds])),
        **_compared(row.rounds, baseline.rounds),
        "accuracy": sum(right) / len(right) if right else None,
        "accuracy_interval": list(clustered_interval(right, clusters)) if right else None,
        "accuracy_over_none": None if over is None else over[0],
        "accuracy_over_none_interval": None if over is None else list(over[1:]),
        "verdicts": verdict_texts(right, clusters),
        "parts": part_scores(tasks, outputs),
        "agreement_with_none": float(np.mean(agreement)),
        "agreement_interval": list(mean_interval(agreement, own)),
        **(row.audits.result if row.audits is not None and audits else {}),
        **row.loss(baseline),
        "forwards": sum(output.usage.forwards for output in outputs),
        **{name: row.total(name) for name in ("row_layers", "audit_row_layers", "prefix_hits", "partial_prefix_hits")},
        "cached_tokens": sum(output.usage.cached_tokens for output in outputs),
        "prefix_note": _unread(outputs),
        "prefix_depth": float(np.mean([output.usage.prefix_depth for output in outputs])),
        "peak_memory_bytes": row.peak_memory_bytes,
        "extra_memory_bytes": row.peak_memory_bytes - baseline.peak_memory_bytes,
    }
    if detail:
        result["alone"] = _compared(row.alone or row.rounds, baseline.alone or baseline.rounds)
        result["cache_ratio"] = row.meter.cache_ratio
        result["staleness"] = row.meter.staleness
        result["staleness_is_upper_bound"] = row.meter.upper_bound
        result |= _flops(row, baseline, result["ratio_to_none"])
    return result


def _unread(outputs: Sequence[Output]) -> str | None:
    """Why most requests that read no shared prefix did not, where none of them read any.

    None: some did, or the policy never does.
    """
    notes = Counter(note for output in outputs if (note := output.usage.prefix_note) is not None)
    if not notes or NEVER.note in notes or any(output.usage.prefix_tokens for output in outputs):
        return None
    note, count = notes.most_common(1)[0]
    return f"{note} ({count} of {len(outputs)} requests)"


def part_scores(tasks: Sequence[Task], outputs: Sequence[Output]) -> dict[str, float]:
    """For each of the tasks' `parts` its mean over the responses of the tasks that have it."""
    scores: dict[str, list[float]] = {}
    for task, output in zip(tasks, outputs, strict=True):
        for name, score in task.parts.items():
            scores.setdefault(name, []).append(score(output.text or ""))
    return {name: float(np.mean(found)) for name, found in scores.items()}


def _flops(row: BenchRow, baseline: BenchRow, speed: float) -> dict[str, Any]:
    """FLOPs and bytes of all passes. `speed` = `flops_saved` x `efficiency_kept`, the ratio of FLOPs a second."""
    assert row.executed is not None
    assert baseline.executed is not None
    cost, reference = row.executed.meter.total, baseline.executed.meter.total
    saved = reference.total.flops / cost.total.flops
    return {
        "flops": cost.total.flops,
        "flops_by_operation": {name: each.flops for name, each in cost.operations.items()},
        "executed_flops": row.executed.flops,
        "bytes": cost.total.bytes,
        "flops_saved": saved,
        "efficiency_kept": speed / saved,
    }


def _compared(rounds: Sequence[BenchRound], baseline: Sequence[BenchRound]) -> dict[str, Any]:
    """Time and work against the baseline's. `slower_with_less_work` marks a policy that computes less and is slower."""
    ratios = [theirs.seconds / ours.seconds for ours, theirs in zip(rounds, baseline, strict=True)]
    work = sum(each.row_layers for each in baseline) / sum(each.row_layers for each in rounds)
    speed = float(np.median(ratios))
    return {
        "ratio_to_none": speed,
        "ratio_range": [min(ratios), max(ratios)],
        "work_ratio_to_none": work,
        "slower_with_less_work": work > 1 and speed < 1,
    }
