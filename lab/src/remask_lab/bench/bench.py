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
from remask_lab.bench.reference import Losses, Reference, loss_differences, mean_loss, measure_losses
from remask_lab.bench.workload import Task, Workload, prefix_clusters, steps_of, token_agreement
from remask_lab.observe import CacheMeter, observe_cache
from remask_lab.ops.flops import Executed
from remask_lab.records.interval import clustered_interval, mean_interval, paired_difference, verdict_texts
from remask_lab.records.machine import conditions
from remask_lab.records.record import Record, about, as_json

LEAST_ACCURACY = 0.1
"""The accuracy of a baseline below which the loss of a cache cannot be seen."""

_WRONG_ANSWERS = 2  # that an error quotes

FIRST = 8
"""The number of questions that are asked first: a baseline that answers none of them rightly stops a bench."""


@dataclass(slots=True, kw_only=True)
class BenchRound:
    """One run of one contender over tasks: its time, the outputs in their order, and stats of the engine.

    `peak_memory_bytes` counts K/V pages in use and hidden states.
    """

    seconds: float
    outputs: list[Output]
    prefix_hits: int
    partial_prefix_hits: int
    prefix_row_layers: int
    audit_row_layers: int
    peak_memory_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """Response tokens a second, each response up to its end token."""
        return sum(output.usage.completion_tokens for output in self.outputs) / self.seconds

    @property
    def row_layers(self) -> int:
        """Row-layers computed, those of prefix-only passes included."""
        return sum(output.usage.row_layers for output in self.outputs) + self.prefix_row_layers


@dataclass(slots=True)
class BenchRow:
    """One contender, its tasks, and its rounds over them.

    Attributes:
        shares: the tasks of each round; rounds take turns with them. One share holds all tasks.
        rounds: rounds with full batches.
        alone: rounds with one request at a time.
        meter, executed: cache use and FLOPs of the warm-up turn; empty and None without details.
        losses: of the reference answers; None where they are not measured.
        no_loss: why the policy has no losses.
        audits: results of the audits before the rounds; None without audits.
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

    def round_tasks(self, number: int) -> tuple[Task, ...]:
        """The tasks of round `number`, counted from 0."""
        return self.shares[number % len(self.shares)]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of all shares."""
        return tuple(task for share in self.shares for task in share)

    @property
    def final_rounds(self) -> list[BenchRound]:
        """The last rounds that together ran each task once. Sums and responses are theirs; times are of all rounds."""
        return self.rounds[-len(self.shares) :]

    @property
    def outputs(self) -> list[Output]:
        """The response of the final rounds to each of `tasks`."""
        return [output for turn in self.final_rounds for output in turn.outputs]

    @property
    def peak_memory_bytes(self) -> int:
        """The peak over the final rounds."""
        return max(turn.peak_memory_bytes for turn in self.final_rounds)

    def total(self, name: str) -> int:
        """The sum of the attribute `name` of `BenchRound` over the final rounds."""
        return sum(getattr(turn, name) for turn in self.final_rounds)

    def loss(self, baseline: "BenchRow") -> dict[str, Any]:
        """The fields of a result about the loss of reference answers; empty where losses are not measured."""
        if self.losses is None or baseline.losses is None:
            return {}
        ids = (task.request.id for task in self.tasks)
        clusters = dict(zip(ids, prefix_clusters(self.tasks), strict=True))
        differences = loss_differences(self.losses, baseline.losses, clusters)
        return {**mean_loss(self.losses), "no_loss": self.no_loss, **differences}


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
        detail: the warm-up turn runs all requests and meters their K/V and FLOPs, and every round has another turn with
            one request at a time, of as many requests as there are full batches.
        alone: whether a detailed bench has these other turns.
        answers: whether to raise `ConfigError` after a turn in which a baseline has less than `LEAST_ACCURACY`.
        losses: whether to measure the loss of the reference answers under each policy (`reference`), untimed.
        audits: whether to audit some requests of each policy that approximates, untimed. A policy whose depth audits
            earn is audited in any case.
        responses: whether the record holds a response to each request, of the last round that ran it.
        warm_up: number of requests of each contender's first turn, which is untimed, without `detail`.
        divided: whether a round runs a share of the prefixes, with all their requests, so that each request runs once.
            Raises `ConfigError` if there are fewer prefixes than rounds.
    """
    count = rounds if divided else 1
    rows = [BenchRow(contender, _shares((contender.workload or workload).tasks, count)) for contender in contenders]
    alone_requests = -(-len(workload.tasks) // engine.max_num_seqs)
    one_at_a_time = replace(engine, max_num_seqs=1)
    alone = detail and alone and engine.max_num_seqs > 1
    warm_ups = [row.tasks if detail else row.tasks[:warm_up] for row in rows]
    turns = [*warm_ups, *(row.round_tasks(number) for row in rows for number in range(rounds))]
    turns += [row.tasks[:alone_requests] for row in rows] * rounds if alone else []
    start = read_cpu()
    with tqdm(total=sum(map(len, turns)), desc="bench", unit="req", disable=not progress) as bar:
        for row, tasks in zip(rows, warm_ups, strict=True):
            row.audits = _row_audits(llm, row, engine, audits)
            _run_turn(llm, row, tasks, engine, bar, metered=detail)
        for number in range(rounds):
            for row in rows:
                tasks = row.round_tasks(number)
                row.rounds.append(_run_turn(llm, row, tasks, engine, bar))
                if answers:
                    _check_answers(row, tasks)
            for row in rows if alone else ():
                row.alone.append(_run_turn(llm, row, row.tasks[:alone_requests], one_at_a_time, bar))
    for row in rows if losses else ():
        references = [Reference(task.request, task.reference) for task in row.tasks if task.reference is not None]
        row.losses, row.no_loss = measure_losses(llm, references, row.contender.policy, workload.seed, engine)
    by_name = {row.contender.name: row for row in rows}
    settings = _settings(llm, workload, rounds, engine) | ({"alone_requests": alone_requests} if detail else {})
    settings["metric"] = "agreement" if losses else "accuracy"
    results = [_result(row, by_name[row.contender.baseline], detail, audits) for row in rows]
    data: dict[str, Any] = {"results": results, "conditions": conditions(start)}
    if responses:
        data["answers"] = list(_responses(llm, rows))
    return Record("bench", about(llm, seed=workload.seed, settings=settings), data)


def _row_audits(llm: LLM, row: BenchRow, engine: EngineConfig, approximations: bool) -> Audits | None:
    """Audits of a row whose depth they earn, and with `approximations` of any policy that is not exact; else None."""
    policy = row.contender.policy
    earned = isinstance(policy, BiCache) and isinstance(policy.depth, Earned)
    if not engine.audit_share or not (earned or (approximations and not policy.traits.exact)):
        return None
    return audit(llm, policy, row.tasks, replace(engine, prefix_match=row.contender.prefix_match))


def _shares(tasks: Sequence[Task], count: int) -> tuple[tuple[Task, ...], ...]:
    """The tasks in `count` shares, those of one prefix in one share.

    Raises `ConfigError` if there are fewer prefixes than shares.
    """
    clusters = prefix_clusters(tasks)
    numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters))}
    if len(numbers) < count:
        raise ConfigError(
            f"{count} rounds are to share {len(numbers)} prefixes among them; ask for at most {len(numbers)} rounds, "
            "or for more prefixes"
        )
    shares: list[list[Task]] = [[] for _ in range(count)]
    for task, cluster in zip(tasks, clusters, strict=True):
        shares[numbers[cluster] % count].append(task)
    return tuple(map(tuple, shares))


def _check_answers(row: BenchRow, tasks: Sequence[Task], questions: int | None = None) -> None:
    """Raise `ConfigError` as `check_answers` does if `row` is a baseline whose last round answered `tasks`.

    One that writes in random order passes: that sampler is not the workload's. `questions` is the number of questions
    of the workload, if `tasks` are the first of them alone.
    """
    params = tasks[0].request.params
    if row.contender.name != row.contender.baseline or params.remasking.rule == "random":
        return
    outputs = row.rounds[-1].outputs
    judged = (task.correct(output.text) for task, output in zip(tasks, outputs, strict=True))
    verdicts = [verdict for verdict in judged if verdict is not None]
    if verdicts:
        scope = "" if questions is None else f" (the first {len(tasks)} of {questions} were asked)"
        accuracy = sum(map(bool, verdicts)) / len(verdicts)
        check_answers(row.contender.name, accuracy, params, scope, _wrong_answers(tasks, outputs))


def _wrong_answers(tasks: Sequence[Task], outputs: Sequence[Output]) -> str:
    """A sentence with the first wrong answers, the right ones, and the rule by which answers are right; else empty."""
    pairs = zip(tasks, outputs, strict=True)
    wrong = [(task, output.text) for task, output in pairs if task.correct(output.text) is False][:_WRONG_ANSWERS]
    if not wrong:
        return ""
    answers = "; ".join(f"{shown(text)} where {shown(task.answer)} is right" for task, text in wrong)
    return f". It answers {answers} (right: {wrong[0][0].rule})"


def check_first_answers(llm: LLM, workload: Workload, engine: EngineConfig) -> None:
    """Ask the first `FIRST` questions without a cache; raise `ConfigError` if none is answered rightly.

    A workload of no more questions, or without right answers, passes.
    """
    tasks = workload.tasks[:FIRST]
    if len(workload.tasks) <= FIRST or tasks[0].answer is None:
        return
    row = BenchRow(Contender("none", llm.session.policy("none")), (tasks,))
    with tqdm(disable=True) as bar:
        row.rounds.append(_run_turn(llm, row, tasks, engine, bar))
    if not any(task.correct(output.text) for task, output in zip(tasks, row.rounds[0].outputs, strict=True)):
        _check_answers(row, tasks, len(workload.tasks))


def check_answers(name: str, accuracy: float, params: SamplingParams, scope: str = "", wrong: str = "") -> None:
    """Raise `ConfigError` if `accuracy`, that of the baseline `name`, is below `LEAST_ACCURACY`.

    `scope` and `wrong` are parts of its message: which of the questions were asked, and some wrong answers.
    """
    if accuracy < LEAST_ACCURACY:
        raise ConfigError(
            f"{name!r}, without any cache, answers {100 * accuracy:.1f} % of the questions, less than "
            f"{100 * LEAST_ACCURACY:g} %{scope}, so nothing can be said of what caches cost in accuracy: the sampling "
            f"({params.max_tokens} tokens in {steps_of(params)} steps, blocks of "
            f"{params.block_length or params.max_tokens}) does not fit the task, or the task the model; leave the "
            "sampling out to take the task's own, or compare what can be measured all the same: agreement with 'none', "
            "the loss of the reference answers, work and time (--metric agreement of remask bench and remask eval; "
            f"--metric accuracy runs to the end){wrong}"
        )


def _run_turn(
    llm: LLM, row: BenchRow, tasks: Sequence[Task], config: EngineConfig, bar: "tqdm[Any]", *, metered: bool = False
) -> BenchRound:
    """Run `tasks` under the row's policy on a new engine, at the depths that its audits have earned.

    With `metered` the row's meters observe the engine.
    """
    engine = llm.session.new_engine(replace(config, prefix_match=row.contender.prefix_match))
    if row.audits is not None:
        engine.auditor.depths.records.update(row.audits.depths.records)
    if metered:
        observe_cache(engine, row.meter)
        row.executed = Executed(engine)
    requests = [task.request.with_policy(row.contender.policy) for task in tasks]
    start = time.perf_counter()
    outputs = {}
    for output in llm.session.run(requests, engine=engine, progress=False):
        outputs[output.id] = output
        bar.set_postfix_str(row.contender.name, refresh=False)
        bar.update()
    seconds = time.perf_counter() - start
    return BenchRound(
        seconds=seconds,
        outputs=[outputs[task.request.id] for task in tasks],
        prefix_hits=engine.store.stats.hits,
        partial_prefix_hits=engine.store.stats.partial_hits,
        prefix_row_layers=engine.stats.prefix_row_layers,
        audit_row_layers=engine.stats.audit_row_layers,
        peak_memory_bytes=engine.stats.peak_memory_bytes,
    )


def _responses(llm: LLM, rows: Sequence[BenchRow]) -> Iterator[dict[str, Any]]:
    """Yield for each prompt its text, its right answer, and the responses of all contenders, as records hold them."""
    outputs = {row.contender.name: row.outputs for row in rows}
    for number, task in enumerate(rows[0].tasks):
        answers = []
        for row in rows:
            output = outputs[row.contender.name][number]
            baseline_output = outputs[row.contender.baseline][number]
            answers.append(
                {
                    "cache": row.contender.name,
                    "baseline": row.contender.baseline,
                    "text": output.text,
                    "token_ids": output.token_ids,
                    "correct": task.correct(output.text),
                    "agreement": token_agreement(output.token_ids, baseline_output.token_ids),
                    "forwards": output.usage.forwards,
                    "row_layers": output.usage.row_layers,
                    "seconds": output.elapsed_s,
                    "finish_reason": output.finish_reason,
                }
            )
        tokens = task.request.prompt_token_ids
        prompt = " ".join(map(str, tokens)) if llm.tokenizer is None else llm.tokenizer.decode(tokens)
        yield {"prompt": prompt, "right": task.answer, "answers": answers}


def _settings(llm: LLM, workload: Workload, rounds: int, engine: EngineConfig) -> dict[str, Any]:
    """The settings of a bench as records hold them."""
    sampling = [task.request.params for task in workload.tasks]
    uniform = llm.loaded.config.kind == "uniform"
    return {
        "name": workload.name,
        "requests": len(workload.tasks),
        "prefixes": workload.prefixes,
        "prefix_ratio": round(workload.prefix_ratio, 3),
        "concurrency": engine.max_num_seqs,
        "rounds": rounds,
        "max_tokens": _span([params.max_tokens for params in sampling]),
        "steps": _span([steps_of(params) for params in sampling]),
        "block_length": _span([params.block_length or params.max_tokens for params in sampling]),
        "canvas_length": sampling[0].uniform.canvas_length or (llm.engine.max_model_len if uniform else None),
        "sampling": sampling_of(sampling),
    }


def sampling_of(requests: Sequence[SamplingParams]) -> dict[str, Any]:
    """All sampling parameters of requests but their seeds, by name, as records keep them.

    A parameter in which requests differ is the list of its values, in the order of the requests that first have them.
    """
    sampling: dict[str, Any] = {}
    for name in asdict(requests[0]):
        if name != "seed":
            by_text = {repr(value): as_json(value) for value in (getattr(params, name) for params in requests)}
            values = list(by_text.values())
            sampling[name] = values[0] if len(values) == 1 else values
    return sampling


def _span(numbers: Sequence[int]) -> int | str:
    """The number, if all are equal, else a text of the least and the largest, such as "4 to 8"."""
    least, largest = min(numbers), max(numbers)
    return least if least == largest else f"{least} to {largest}"


def _accuracy(row: BenchRow, baseline: BenchRow) -> dict[str, Any]:
    """The fields of a result about right answers, with intervals over prefixes; None where no task has an answer."""
    clusters = prefix_clusters(row.tasks)
    verdicts, baseline_verdicts = (
        [task.correct(output.text) for task, output in zip(row.tasks, outputs, strict=True)]
        for outputs in (row.outputs, baseline.outputs)
    )
    pairs = [(verdict, cluster) for verdict, cluster in zip(verdicts, clusters, strict=True) if verdict is not None]
    right = [verdict for verdict, _ in pairs]
    right_clusters = [cluster for _, cluster in pairs]
    triples = [triple for triple in zip(verdicts, baseline_verdicts, clusters, strict=True) if None not in triple]
    change = paired_difference(*zip(*triples, strict=True)) if triples else None
    return {
        "accuracy": sum(right) / len(right) if right else None,
        "accuracy_interval": list(clustered_interval(right, right_clusters)) if right else None,
        "accuracy_over_none": None if change is None else change[0],
        "accuracy_over_none_interval": None if change is None else list(change[1:]),
        "verdicts": verdict_texts(right, right_clusters),
    }


def _result(row: BenchRow, baseline: BenchRow, detail: bool, audits: bool) -> dict[str, Any]:
    """The result of a row as records hold it, beside that of its baseline. Fields ending in `_none` compare the two."""
    tasks, outputs = row.tasks, row.outputs
    agreements = [
        token_agreement(output.token_ids, other.token_ids)
        for output, other in zip(outputs, baseline.outputs, strict=True)
    ]
    result = {
        "cache": row.contender.name,
        "settings": dict(row.contender.settings),
        "policy": repr(row.contender.policy),
        "baseline": baseline.contender.name,
        "throughput_tok_s": float(np.median([turn.tokens_per_second for turn in row.rounds])),
        **_speed_and_work(row.rounds, baseline.rounds),
        **_accuracy(row, baseline),
        "parts": part_scores(tasks, outputs),
        "agreement_with_none": float(np.mean(agreements)),
        "agreement_interval": list(mean_interval(agreements, prefix_clusters(tasks))),
        **(row.audits.result if row.audits is not None and audits else {}),
        **row.loss(baseline),
        "forwards": sum(output.usage.forwards for output in outputs),
        **{name: row.total(name) for name in ("row_layers", "audit_row_layers", "prefix_hits", "partial_prefix_hits")},
        "cached_tokens": sum(output.usage.cached_tokens for output in outputs),
        "prefix_note": _prefix_note(outputs),
        "prefix_depth": float(np.mean([output.usage.prefix_depth for output in outputs])),
        "peak_memory_bytes": row.peak_memory_bytes,
        "extra_memory_bytes": row.peak_memory_bytes - baseline.peak_memory_bytes,
    }
    if detail:
        result["alone"] = _speed_and_work(row.alone or row.rounds, baseline.alone or baseline.rounds)
        result["cache_ratio"] = row.meter.cache_ratio
        result["staleness"] = row.meter.staleness
        result["staleness_is_upper_bound"] = row.meter.upper_bound
        result |= _flops(row, baseline, result["ratio_to_none"])
    return result


def _prefix_note(outputs: Sequence[Output]) -> str | None:
    """The most frequent reason why requests read no shared prefix, with its count.

    None if some request read one, or the policy never does.
    """
    notes = Counter(note for output in outputs if (note := output.usage.prefix_note) is not None)
    if not notes or NEVER.note in notes or any(output.usage.prefix_tokens for output in outputs):
        return None
    note, count = notes.most_common(1)[0]
    return f"{note} ({count} of {len(outputs)} requests)"


def part_scores(tasks: Sequence[Task], outputs: Sequence[Output]) -> dict[str, float]:
    """The mean score of each of the tasks' `parts`, by name, over the responses of the tasks that have it."""
    scores: dict[str, list[float]] = {}
    for task, output in zip(tasks, outputs, strict=True):
        for name, score in task.parts.items():
            scores.setdefault(name, []).append(score(output.text or ""))
    return {name: float(np.mean(values)) for name, values in scores.items()}


def _flops(row: BenchRow, baseline: BenchRow, speed: float) -> dict[str, Any]:
    """FLOPs and bytes of all passes of the warm-up turn.

    `flops_saved` is the baseline's FLOPs as a multiple of the row's. `efficiency_kept`, the row's FLOPs a second as a
    share of the baseline's, is `speed`, the ratio of times, divided by it.
    """
    assert row.executed is not None
    assert baseline.executed is not None
    cost = row.executed.meter.total
    saved = baseline.executed.meter.total.total.flops / cost.total.flops
    return {
        "flops": cost.total.flops,
        "flops_by_operation": {name: operation.flops for name, operation in cost.operations.items()},
        "executed_flops": row.executed.flops,
        "bytes": cost.total.bytes,
        "flops_saved": saved,
        "efficiency_kept": speed / saved,
    }


def _speed_and_work(rounds: Sequence[BenchRound], baseline: Sequence[BenchRound]) -> dict[str, Any]:
    """The baseline's time and row-layers as multiples of a policy's: the median and range over rounds, and in all.

    `slower_with_less_work` marks a policy that computes less than its baseline and is slower.
    """
    ratios = [other.seconds / turn.seconds for turn, other in zip(rounds, baseline, strict=True)]
    work = sum(turn.row_layers for turn in baseline) / sum(turn.row_layers for turn in rounds)
    speed = float(np.median(ratios))
    return {
        "ratio_to_none": speed,
        "ratio_range": [min(ratios), max(ratios)],
        "work_ratio_to_none": work,
        "slower_with_less_work": work > 1 and speed < 1,
    }
