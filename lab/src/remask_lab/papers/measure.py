"""Measures a table: every row side by side with its baseline, into a result file that a later run resumes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies import CachePolicy
from remask.request.sampling_params import SamplingParams
from remask_lab.bench.bench import check_answers, run_bench, sampling_of
from remask_lab.bench.contenders import Contender
from remask_lab.bench.workload import (
    Task,
    Workload,
    chat_workload,
    has_own_task,
    own_task,
    random_workload,
    reads_chats,
)
from remask_lab.likelihood.perplexity import Judge, Policy, cut_prompts, read_texts
from remask_lab.likelihood.perplexity import measure as perplexity
from remask_lab.ops.operations import profile_operations
from remask_lab.papers.autoregressive import Autoregressive
from remask_lab.papers.definition import PaperTable, ResolvedRow, Scale, resolve
from remask_lab.records.record import Record, Sweep, about
from remask_lab.similarity.table import SimilarityTable

KEPT = (
    *("policy", "throughput_tok_s", "ratio_to_none", "ratio_range", "work_ratio_to_none", "accuracy"),
    *("accuracy_interval", "verdicts", "agreement_with_none", "forwards", "row_layers", "audit_row_layers"),
    *("prefix_hits", "prefix_depth", "extra_memory_bytes"),
)
DETAILS = ("flops", "executed_flops", "flops_saved", "efficiency_kept", "cache_ratio")
BASELINE, OURS = "baseline", "ours"
SUBJECT = "paper"
# The operations that rows of tables name. All others count as the rest.
NAMED = ("projections", "attention", "mlp", "head", "norms")
OPERATIONS = (*NAMED, "rest", "total")


@dataclass(slots=True)
class Measurer:
    """Measures rows on one model.

    Attributes:
        rounds, seed: turns of each contender, and the seed of the workload.
        prompts: the file of texts, for rows that read texts.
        judge: scores the responses, where perplexities are wanted.
        ar_model: folder or hub id of the autoregressive model. None takes random weights of the same shape.
        divided: whether each turn asks its own share of the requests (`run_bench`).
        similarities: what rows at a tau read their depths from.
    """

    llm: LLM
    rounds: int
    seed: int
    prompts: str | None = None
    judge: Judge | None = None
    ar_model: str | None = None
    divided: bool = False
    similarities: SimilarityTable | None = None

    def measure(self, row: ResolvedRow) -> dict[str, Any]:
        """The result of `row`. Where its policy cannot run, its only key is "left_out", with the reason.

        Raises `ConfigError` where the baseline cannot run.
        """
        baseline = self._contender(row if row.baseline is None else row.baseline, BASELINE)
        if row.measure == "autoregressive":
            return self._autoregressive(baseline)
        try:
            ours = baseline if row.baseline is None else self._contender(row, OURS)
        except ConfigError as error:
            return {"left_out": str(error)}
        if row.measure == "operations":
            return self._operations(baseline, ours)
        contenders = [baseline] if ours is baseline else [baseline, ours]
        detailed = row.measure == "detailed"
        config = replace(self.llm.session.engine_config, max_num_seqs=row.concurrency)
        record = run_bench(
            self.llm,
            _workload(baseline),
            contenders,
            self.rounds,
            config,
            progress=False,
            detail=detailed,
            answers=False,  # poor samples may be a table's subject; `run_table` judges the best row without a cache
            divided=self.divided,
        )
        result = record.data["results"][-1]
        names = (*KEPT, *DETAILS) if detailed else KEPT
        our_workload = _workload(ours)
        figures = {name: result[name] for name in names} | {"prefix_ratio": our_workload.prefix_ratio}
        sampling = {"sampling": sampling_of([task.request.params for task in our_workload.tasks])}
        return figures | sampling | {"busy": record.data["conditions"]["busy"]} | self._perplexity(row, our_workload)

    def _contender(self, row: ResolvedRow, name: str) -> Contender:
        """The policy and the requests of `row`. Raises `ConfigError` where they cannot run."""
        workload = draw(self.llm, row.workload, row.params, self.seed, self.prompts)
        if row.tau is None:
            policy = self.llm.session.policy(row.cache, self._settings(row))
        else:
            assert self.similarities is not None  # as `run_table` has found
            lookup = self.similarities.at(row.tau)
            policy = self.llm.session.policy(row.cache, row.settings, lambda: lookup)
        self.llm.engine.check(workload.tasks[0].request.with_policy(policy))
        return Contender(name, policy, workload=workload, baseline=BASELINE)

    def _settings(self, row: ResolvedRow) -> Mapping[str, Any]:
        """The settings of a row, in which `bicache` without a depth reads that of the model's table, if there is one.

        The paper does so too. A depth that is earned by audits would add their passes to those that are timed.
        """
        reads_table = row.cache.split("+")[0] == "bicache" and "depth" not in row.settings
        return {**row.settings, "depth": "table"} if reads_table and self.llm.depth_table is not None else row.settings

    def _perplexity(self, row: ResolvedRow, workload: Workload) -> dict[str, Any]:
        """The perplexity of the row's responses under the judge, with its 95 % interval; nothing without a judge."""
        if self.judge is None:
            return {}
        prompts = [task.request.prompt_token_ids for task in workload.tasks]
        policies = [Policy(row.cache, row.settings)]
        scored = perplexity(self.llm, self.judge, prompts, policies, row.params, self.seed)[0]
        interval = [scored.low, scored.high]
        return {"perplexity": scored.perplexity, "perplexity_interval": interval, "judge": self.judge.name}

    def _operations(self, baseline: Contender, ours: Contender) -> dict[str, Any]:
        """The `operation_times` of both contenders."""
        return {
            f"{contender.name}_ms": operation_times(self.llm, _workload(contender), contender.policy, self.rounds)
            for contender in (baseline, ours)
        }

    def _autoregressive(self, baseline: Contender) -> dict[str, Any]:
        """Tokens/s of the autoregressive model, which takes turns with `baseline`, and the ratio to its tokens/s."""
        model = Autoregressive(self.llm, self.ar_model)
        config = self.llm.session.engine_config
        workload = _workload(baseline)
        batch = config.max_num_seqs
        lengths = self._answer_lengths(workload, baseline.policy)
        model.seconds(workload, lengths, batch)  # the first run warms up
        speeds, ratios = [], []
        for _ in range(self.rounds):
            speeds.append(sum(lengths) / model.seconds(workload, lengths, batch))
            record = run_bench(self.llm, workload, [baseline], 1, config, progress=False)
            ratios.append(speeds[-1] / record.data["results"][0]["throughput_tok_s"])
        return {
            "throughput_tok_s": float(np.median(speeds)),
            "ratio_to_none": float(np.median(ratios)),
            "ratio_range": [min(ratios), max(ratios)],
            "model": model.name,
            "parameters": model.parameters,
        }

    def _answer_lengths(self, workload: Workload, policy: CachePolicy) -> list[int]:
        """Tokens of each answer up to its end token, which are those that a speed in tokens/s counts."""
        requests = [task.request.with_policy(policy) for task in workload.tasks]
        answers = {
            output.id: output
            for output in self.llm.session.run(requests, engine=self.llm.session.new_engine(), progress=False)
        }
        return [max(1, answers[task.request.id].usage.completion_tokens) for task in workload.tasks]


def _workload(contender: Contender) -> Workload:
    """The requests of a contender of `Measurer`, which always has its own."""
    assert contender.workload is not None
    return contender.workload


def draw(llm: LLM, workload: Mapping[str, Any], sampling: SamplingParams, seed: int, prompts: str | None) -> Workload:
    """Draw the requests that the `workload` of a scale describes. The same seed gives the same requests.

    Every request has its own seed, so that every policy begins with the same noise. Raises `ConfigError` where the
    model has no questions, or texts are wanted and `prompts` is None.
    """
    count, prefixes = workload["requests"], workload.get("prefixes", 0)
    if workload["name"] == "random":
        # Random tokens have no meaning, so an end token among them must not shorten the response.
        return random_workload(
            llm,
            requests=count,
            prefixes=prefixes,
            seed=seed,
            sampling=replace(sampling, ignore_eos=True),
            prefix_tokens=workload["prefix_tokens"],
            prompt_tokens=workload["prompt_tokens"],
        ).seeded
    if workload["name"] == "texts":
        if prompts is None:
            raise ConfigError(
                f"this table reads texts of {workload['prompt_tokens']} tokens: give a file of them with --prompts, or "
                "--workload random for speed on random tokens"
            )
        tokens = cut_prompts(llm, read_texts(prompts), workload["prompt_tokens"], count)
        tasks = tuple(Task(Request(str(number), ids, sampling)) for number, ids in enumerate(tokens))
        return Workload("texts", seed=seed, tasks=tasks, prefixes=0).seeded
    if has_own_task(llm) or reads_chats(llm):
        return chat_workload(llm, own_task(llm), requests=count, prefixes=prefixes, seed=seed, sampling=sampling).seeded
    raise ConfigError(
        f"the model {llm.loaded.name!r} has no chat template, so it cannot be asked questions; "
        "--workload random measures speed on random tokens of the table's lengths"
    )


def operation_times(llm: LLM, workload: Workload, policy: CachePolicy, rounds: int) -> dict[str, float]:
    """Milliseconds of all steps of `workload` by operation, and in "total", measured as `remask profile ops` does.

    "overhead" is the share of time that the instruments add.
    """
    requests = [task.request.with_policy(policy) for task in workload.tasks]
    profile = profile_operations(llm, requests, rounds=rounds)
    milliseconds = {name: 1e3 * operation.seconds for name, operation in profile.operations.items()}
    times = {name: milliseconds.pop(name) for name in NAMED}
    times["rest"] = sum(milliseconds.values())
    return {**times, "total": sum(times.values()), "overhead": profile.overhead}


def check_kind(table: PaperTable, llm: LLM) -> None:
    """Raise `ConfigError` where `table` is for another kind of model."""
    kind = llm.loaded.config.kind
    if kind != table.kind:
        default_model = table.scales["bundled"].model
        raise ConfigError(
            f"table {table.name} is about {table.kind} models, and {llm.loaded.name!r} is {kind.replace('_', '-')}; "
            f"give a {table.kind} one with --model, such as {default_model!r}"
        )


def run_table(
    table: PaperTable,
    scale_name: str,
    scale: Scale,
    measurer: Measurer,
    path: str | Path | None,
    progress: bool = False,
) -> Record:
    """Measure all rows of `table`. With a `path`, each is written to that file at once, and is not measured again.

    The record's data are {"rows": [{"point", "result"}]}, one row for each different measurement. Raises `ConfigError`
    where the model is of another kind, similarities are missing, a baseline cannot run, or no row without a cache
    answers more than hardly anything, and `RecordError` where the file holds another measurement.
    """
    check_kind(table, measurer.llm)
    if measurer.similarities is None and any(row.tau is not None for row in table.rows):
        name = measurer.llm.loaded.name
        raise ConfigError(
            f"table {table.name} has rows by tau, whose depths follow from similarities: measure them with 'python -m "
            f"remask_lab papers profile --model {name} --output FILE', and give --similarities FILE"
        )
    settings = {
        "table": table.name,
        "identity": table.identity,
        "scale": scale_name,
        "workload": scale.workload,
        "sampling": scale.sampling,
        "concurrency": scale.concurrency,
        "rounds": measurer.rounds,
        "divided": measurer.divided,
        "prompts": None if measurer.prompts is None else Path(measurer.prompts).name,
        "judge": None if measurer.judge is None else measurer.judge.name,
        "ar_model": measurer.ar_model,
        "similarities": None if measurer.similarities is None else measurer.similarities.source,
    }
    sweep = Sweep(path, SUBJECT, about(measurer.llm, seed=measurer.seed, settings=settings))
    rows = [row for row in table.rows if row.missing is None]
    uncached = [row for row in rows if row.cache == "none"] or rows[:1]
    accuracies: list[tuple[float, ResolvedRow, str]] = []  # of those without a cache
    for row in tqdm(rows, desc=table.name, unit="row", disable=not progress):
        resolved = resolve(table, row, scale_name, scale)
        result = sweep.row(asdict(resolved), lambda resolved=resolved: measurer.measure(resolved))  # type: ignore[misc]
        if row in uncached and result.get("accuracy") is not None:
            accuracies.append((result["accuracy"], resolved, row.name))
        # Some of them may be poor, as few steps are; where all are, the table says nothing of caches.
        if row is uncached[-1] and accuracies:
            accuracy, best, name = max(accuracies, key=lambda entry: entry[0])
            check_answers(name, accuracy, best.params)
    return sweep.record
