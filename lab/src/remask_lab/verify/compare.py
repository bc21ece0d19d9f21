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

LISTED = 3  # most places that are told of where tokens differ


@dataclass
class Comparison:
    """What passes have come to, in the engine and in the reference.

    Attributes:
        reference, versions: what computed beside the engine.
        passes, rows: how many were compared.
        vocab: logits a row.
        worst: the largest distance of a row, as a share of its size.
        mean: the mean of these.
        logit: the largest difference of two logits.
        log_prob: the largest difference of the log-probabilities of the reference's most probable token.
        same: rows with the same most probable token.
        differing: of other rows, the first few in words.
        answers: the engine's own answer, and that which the reference's logits come to.
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
        """Take in a pass. Raises `CheckpointError` where the reference has another vocabulary."""
        ours = scored.logits.cpu()
        if ours.shape != theirs.shape:
            raise CheckpointError(f"the reference returns logits {list(theirs.shape)}, and remask {list(ours.shape)}")
        distance = (ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp_min(1e-6)
        best, rival = theirs.argmax(dim=1), ours.argmax(dim=1)
        probs = [each.log_softmax(dim=1).gather(1, best[:, None]) for each in (ours, theirs)]
        self.worst = max(self.worst, float(distance.max()))
        self.mean = (self.mean * self.rows + float(distance.sum())) / (self.rows + len(distance))
        self.logit = max(self.logit, float((ours - theirs).abs().max()))
        self.log_prob = max(self.log_prob, float((probs[0] - probs[1]).abs().max()))
        self.passes, self.rows, self.vocab = self.passes + 1, self.rows + len(distance), ours.shape[1]
        self.same += int((best == rival).sum())
        for row in (best != rival).nonzero()[:, 0].tolist()[: LISTED - len(self.differing)]:
            theirs_by = float(theirs[row, best[row]] - theirs[row, rival[row]])
            self.differing.append(
                f"pass {self.passes}, position {scored.positions[row]}: token {int(rival[row])}, and the reference "
                f"{int(best[row])} by {theirs_by:.2g}"
            )


def compare(llm: LLM, source: Source, prompt: Prompt, params: Mapping[str, Any], *, trusted: bool) -> Comparison:
    """Answer `prompt` by `llm` twice: as ever, and by the logits of the reference on the canvases that these make.

    `llm`, of the files `source`, must run one request at a time, without overlap, and with exact policies alone.
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
    (own,) = llm.generate([prompt], params)
    with _process(spec) as connection:
        comparison = Comparison(*_received(connection))

        failed = list[Exception]()

        def judge(scored: ScoredPass) -> Tensor:
            if not failed:
                try:
                    canvas = Canvas(scored.tokens, scored.rows, scored.sees, scored.block.start, scored.temperature)
                    theirs = torch.from_numpy(_received(connection, canvas))
                    comparison.note(scored, theirs)
                    return theirs
                # The engine would take it for an error of this request, which ends that and tells nobody.
                except Exception as error:
                    failed.append(error)
            return scored.logits

        observer = replace_logits(llm.engine, judge)
        try:
            (theirs,) = llm.generate([prompt], params)
        finally:
            llm.engine.detach(observer)
    if failed:
        raise failed[0]
    comparison.answers = own, theirs
    return comparison


@contextmanager
def _process(spec: Spec) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, spec), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join()


def _received(connection: Connection, canvas: Canvas | None = None) -> Any:
    """What the process sends, of a canvas where one is sent.

    Raises `ConfigError` on its errors, and `CheckpointError` where it has ended.
    """
    try:
        if canvas is not None:
            connection.send(canvas)
        found = connection.recv()
    except (EOFError, OSError):
        raise CheckpointError(
            "The reference's process ended without a word; both models are in memory, so it may have had too little. "
            "Try --dtype bfloat16."
        ) from None
    if isinstance(found, str):
        raise ConfigError(f"reference: {found}")
    return found
