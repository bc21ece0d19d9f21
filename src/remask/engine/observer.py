"""Observers of an engine: one registration for whatever watches its passes, or replaces its runner."""

from typing import ClassVar

from remask.engine.member import Turn
from remask.engine.runner import Ran, Runner
from remask.model.pool import Pool
from remask.model.transformer import Transformer


class EngineObserver:
    """The calls that an attached observer gets (`Engine.attach`). Methods that are not overridden do nothing."""

    waits: ClassVar[bool] = False  # each pass is read before the next is queued, so it is seen before its tokens change

    def runner(self, model: Transformer, pool: Pool) -> Runner | None:  # noqa: ARG002
        """The runner of passes of `model` over `pool` from now on; None keeps the present one."""
        return None

    def launched(self, ran: Ran) -> None:
        """A pass was launched. Its ledgers have entered it last."""

    def computed(self, ran: Ran) -> None:
        """A pass has run that was not queued ahead; its tokens are not written yet."""

    def writing(self, turn: Turn) -> None:
        """What the pass of a request predicted is about to be written."""


class Observers:
    """The observers of one engine, in the order in which they came."""

    def __init__(self, runner: Runner, model: Transformer) -> None:
        """`runner` is the engine's own, and `model` what it runs, without graphs."""
        self._own, self._model = runner, model
        self._runners: dict[EngineObserver, Runner] = {}
        self.attached: list[EngineObserver] = []
        self.runner = runner  # what runs passes: that of the last observer that has one, else the engine's own
        self.wait = False  # whether any of them waits

    def attach(self, observer: EngineObserver) -> None:
        """See `Engine.attach`."""
        self.attached.append(observer)
        self._take(observer)
        self.wait = any(other.waits for other in self.attached)

    def detach(self, observer: EngineObserver) -> None:
        """See `Engine.detach`."""
        self.attached.remove(observer)
        if observer in self._runners:  # runners of later observers may wrap it
            self._runners.clear()
            self.runner = self._own
            for other in self.attached:
                self._take(other)
        self.wait = any(other.waits for other in self.attached)

    def _take(self, observer: EngineObserver) -> None:
        """Run passes by the runner of `observer`, if it has one, over the model that the last one ran."""
        model = self.runner.model if self._runners else self._model
        runner = observer.runner(model, self._own.pool)
        if runner is not None:
            self._runners[observer] = self.runner = runner
