"""Finds the end of a response while its tokens settle."""

import numpy as np

from remask.plan.canvas import Canvas, Hole, Template
from remask.request.result import FinishReason, Transfer
from remask.sampling.decoder import Decoder, Decoding
from remask.text.incremental import StopRule


class ResponseEnd:
    """Looks for the end of one response while its tokens settle. It reads the canvas and never writes to it.

    Settled tokens never change, so a settled stop can end a response.

    Attributes:
        stop: canvas position of the first stop token that has settled, with or without noise before it; None without.
        reason: why the response is complete; None while it is not.
        lead: leading response tokens that `settle` has returned.
    """

    def __init__(self, canvas: Canvas, template: Template, rule: StopRule, *, formed: bool) -> None:
        """`formed`: the response has a given form, so it is whole wherever it ends."""
        self.stop: int | None = None
        self.reason: FinishReason | None = None
        self.lead = 0
        self._canvas, self._template, self._rule, self._formed = canvas, template, rule, formed
        self._scan = rule.scan()
        self._scanned = template.tail  # leading response tokens that the scan has passed
        # Whether the canvas may hold a stop: a stop text, or a stop token that was given or written.
        given = canvas.tokens[canvas.prompt :].tolist()
        self._stoppable = rule.decode is not None or not rule.token_ids.isdisjoint(given)

    def settle(self, transfer: Transfer | None, decoding: Decoding, decoder: Decoder) -> tuple[int, ...]:
        """Response tokens that became final since the last call, up to the first gap. Sets `reason` if it is complete.

        `transfer` is that of the pass; its tokens are on the canvas, and `decoder` has gone on to the next step.
        """
        stops = self._rule.token_ids
        stop_written = bool(stops) and transfer is not None and not stops.isdisjoint(transfer.token_ids)
        if stop_written:
            self._stoppable = True
            self.stop = self._settled_stop()
        canvas, begin = self._canvas, self.lead
        self.lead = lead = canvas.settled_lead
        settled = tuple(canvas.response[begin:lead].tolist()) if lead > begin else ()
        finished = decoder.finished
        complete = finished and not decoding.grows
        if self._stoppable:
            inside = decoder.block_step > 0 and not finished
            may_stop = not inside or decoding.ends_within(stop_written=stop_written)
            if may_stop and self.length(lead) is not None:
                self.reason = "stop"
                return settled
            complete = complete or (inside and may_stop and self._stop_behind())
        if complete:
            self.reason = "stop" if self._whole() else "length"
        return settled

    def length(self, lead: int) -> int | None:
        """Length of the response up to its first stop; None where the settled `lead` has no stop.

        Only a stop in a hole at the end counts: other holes have fixed tokens behind them.
        """
        begin = self._scanned
        if lead > begin and self._stoppable:
            self._scanned = lead
            self._scan.push(self._canvas.response[begin:lead].tolist())
        return None if self._scan.end is None else self._template.tail + self._scan.end

    def _settled_stop(self) -> int | None:
        """The first position of the hole at the end where a stop token has settled."""
        canvas, tail = self._canvas, self._canvas.prompt + self._template.tail
        stops = np.fromiter(self._rule.token_ids, dtype=np.int64)
        found = np.isin(canvas.tokens[tail : canvas.end], stops) & ~canvas.noisy[tail : canvas.end]
        return tail + int(found.argmax()) if found.any() else None

    def _stop_behind(self) -> bool:
        """Whether a stop token follows the complete response in the rest of its block, with no noise before it."""
        canvas = self._canvas
        if self.lead < canvas.end - canvas.prompt:
            return False
        rest = canvas.noisy[canvas.end :]
        lead = int(rest.argmax()) if rest.any() else len(rest)
        return not self._rule.token_ids.isdisjoint(canvas.tokens[canvas.end : canvas.end + lead].tolist())

    def _whole(self) -> bool:
        """Whether the response ended by itself, and not because its places were used up."""
        return self._formed or not any(hole.variable and self._full(hole) for hole in self._template.holes)

    def _full(self, hole: Hole) -> bool:
        """Whether a hole holds neither padding nor a stop."""
        tokens = self._canvas.response[hole.start : hole.stop].tolist()
        stops = self._rule.scan()
        stops.push(tokens)
        return stops.end is None and not any(token in self._template.padding for token in tokens)
