"""Compares a checkpoint as the engine computes it with a reference in another process: every pass, and the answer."""

import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from remask.checkpoint.source import Source
from remask.errors import CheckpointError, ConfigError
from remask.llm import LLM
from remask.outputs import Output
from remask.text.prompts import Prompt
from remask_lab.observe import ScoredPass, replace_logits
from remask_lab.verify.reference import Canvas, Spec, serve

LISTED = 3  # at most how many differing tokens are listed


@dataclass
class Comparison:
    """The passes of the engine and of the reference, compared so far. Distances and differences are of logits.

    Attributes:
        reference, versions: the code of the reference, and its versions.
        passes, rows: how many were compared.
        vocab: logits a row.
        worst, mean: the largest and the mean distance of two rows, as a share of the norm of the reference's.
        logit: the largest difference of two logits.
        log_prob: the largest difference of the log-probabilities of the reference's most probable token.
        same: rows with the same most probable token.
        differing: the first `LISTED` other rows, in words.
        answers: the engine's answer by its own logits, and by those of the reference.
    """

    reference: str
    versions: str
    passes: int = 0
    rows: int = 0
    vocab: int = 0
    worst: float = 0.0
    mean: float = 0.0
    logit: float = 0.0
    log_prob: float = 0.0
    same: int = 0
    differing: list[str] = field(default_factory=list)
    answers: tuple[Output, ...] = ()

    def note(self, scored: ScoredPass, theirs: Tensor) -> None:
        """Compare one pass with the reference's logits [P, V]. Raises `CheckpointError` where shapes differ."""
        ours = scored.logits.cpu()
        if ours.shape != theirs.shape:
            raise CheckpointError(f"the reference returns logits {list(theirs.shape)}, and remask {list(ours.shape)}")
        distance = (ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp_min(1e-6)
        their_best, our_best = theirs.argmax(dim=1), ours.argmax(dim=1)
        log_probs = [logits.log_softmax(dim=1).gather(1, their_best[:, None]) for logits in (ours, theirs)]
        self.worst = max(self.worst, float(distance.max()))
        self.mean = (self.mean * self.rows + float(distance.sum())) / (self.rows + len(distance))
        self.logit = max(self.logit, float((ours - theirs).abs().max()))
        self.log_prob = max(self.log_prob, float((log_probs[0] - log_probs[1]).abs().max()))
        self.passes, self.rows, self.vocab = self.passes + 1, self.rows + len(distance), ours.shape[1]
        self.same += int((their_best == our_best).sum())
        for row in (their_best != our_best).nonzero()[:, 0].tolist()[: LISTED - len(self.differing)]:
            margin = float(theirs[row, their_best[row]] - theirs[row, our_best[row]])
            self.differing.append(
                f"pass {self.passes}, position {scored.positions[row]}: token {int(our_best[row])}, and the reference "
                f"{int(their_best[row])} by {margin:.2g}"
            )


def compare(llm: LLM, source: Source, prompt: Prompt, params: Mapping[str, Any], *, trusted: bool) -> Comparison:
    """Answer `prompt` by `llm` twice, the second time by the logits that the reference computes for each canvas.

    `llm`, opened from the files `source`, must run one request at a time, without overlap, under an exact policy.
    Raises `ConfigError` where there is no reference, and `CheckpointError` where its process fails.
    """
    config = llm.loaded.config
    spec = Spec(
        folder=str(source.weights),
        family=config.family,
        overrides=source.overrides,
        dtype=str(llm.model.dtype).removeprefix("torch."),
        device=str(llm.model.device),
        trusted=trusted,
        windowed=config.sliding is not None,
    )
    (answer,) = llm.generate([prompt], params)
    with _process(spec) as connection:
        comparison = Comparison(*_receive(connection))
        failures: list[Exception] = []

        def judge(scored: ScoredPass) -> Tensor:
            """Compare a pass, and return the reference's logits; after a failure the engine's own."""
            if not failures:
                try:
                    canvas = Canvas(
                        tokens=scored.tokens,
                        rows=scored.rows,
                        sees=scored.sees,
                        start=scored.block.start,
                        temperature=scored.temperature,
                    )
                    their_logits = torch.from_numpy(_receive(connection, canvas))
                    comparison.note(scored, their_logits)
                    return their_logits
                # The engine would end the request by it and report nothing.
                except Exception as error:
                    failures.append(error)
            return scored.logits

        observer = replace_logits(llm.engine, judge)
        try:
            (reference_answer,) = llm.generate([prompt], params)
        finally:
            llm.engine.detach(observer)
    if failures:
        raise failures[0]
    comparison.answers = answer, reference_answer
    return comparison


@contextmanager
def _process(spec: Spec) -> Iterator[Connection]:
    """A process of `serve`, which ends with the context."""
    context = multiprocessing.get_context("spawn")
    connection, child_connection = context.Pipe()
    process = context.Process(target=serve, args=(child_connection, spec), daemon=True)
    process.start()
    child_connection.close()
    try:
        yield connection
    finally:
        connection.close()
        process.join()


def _receive(connection: Connection, canvas: Canvas | None = None) -> Any:
    """The process' next message, the logits of `canvas` if one is given.

    Raises `ConfigError` on an error of the process, and `CheckpointError` where it has ended.
    """
    try:
        if canvas is not None:
            connection.send(canvas)
        message = connection.recv()
    except (EOFError, OSError):
        raise CheckpointError(
            "The reference's process ended without a word; both models are in memory, so it may have had too little. "
            "Try --dtype bfloat16."
        ) from None
    if isinstance(message, str):
        raise ConfigError(f"reference: {message}")
    return message
