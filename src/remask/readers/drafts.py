"""Drafts: the predictions of every pass, transferred or not."""

from collections.abc import Sequence

from remask.plan.pass_cost import LayerWork
from remask.readers.base import Reader, ReadPass, Start
from remask.request.result import Draft, Event
from remask.sampling.decoder import Predictions


class Drafts(Reader):
    """Reports a `Draft` of every step, before its transfer."""

    name = "drafts"
    foreseeable = False

    def __init__(self) -> None:
        self._passes: list[tuple[LayerWork, ...]] = []  # work of the passes of the step that runs
        self._draft: Draft | None = None  # of the last step, until it is reported

    def start(self, start: Start) -> Reader:  # noqa: ARG002
        return type(self)()

    def end_pass(self, read_pass: ReadPass, predictions: Predictions | None) -> None:
        """Record the work of the pass. A pass that predicts also completes the step's draft, which `events` reports."""
        self._passes.append(read_pass.work())
        if predictions is not None:
            self._draft = Draft(
                step=read_pass.decoder.step,
                positions=tuple(predictions.positions.tolist()),
                token_ids=tuple(predictions.tokens.tolist()),
                confidences=tuple(predictions.confidence.tolist()),
                passes=tuple(self._passes),
            )
            self._passes.clear()

    def events(self, request_id: str) -> Sequence[Event]:
        draft, self._draft = self._draft, None
        return () if draft is None else (Event(request_id, draft=draft),)
