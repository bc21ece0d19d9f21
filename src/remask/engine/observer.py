"""Observers of an engine, which watch its passes or replace its runner."""

from typing import ClassVar

from remask.engine.member import Turn
from remask.engine.runner import PassResult, Runner
from remask.model.pool import Pool
from remask.model.transformer import Transformer


class EngineObserver:
    """The calls that an attached observer gets (`Engine.attach`). Methods that are not overridden do nothing."""

    waits: ClassVar[bool] = False  # whether each pass must be read before the next one is queued

    def runner(self, model: Transformer, pool: Pool) -> Runner | None:  # noqa: ARG002
        """The runner of passes of `model` over `pool` from now on; None keeps the present one."""
        return None

    def on_launch(self, result: PassResult) -> None:
        """A pass was launched. Its plans are the last ones in the ledgers."""

    def on_complete(self, result: PassResult) -> None:
        """A pass that was not queued ahead has run. Its tokens are not written yet."""

    def on_write(self, turn: Turn) -> None:
        """The predictions of a request's pass are about to be written."""


class Observers:
    """The observers of one engine, in the order in which they were attached."""

    def __init__(self, runner: Runner, model: Transformer) -> None:
        """`runner` is that of the engine, and `model` what it runs, without graphs."""
        self.attached: list[EngineObserver] = []
        self.runner = runner  # that of the last observer that has one, or else the engine's
        self.waits = False  # whether any observer waits
        self._engine_runner = runner
        self._model = model
        self._runners: dict[EngineObserver, Runner] = {}

    def attach(self, observer: EngineObserver) -> None:
        """See `Engine.attach`."""
        self.attached.append(observer)
        self._use_runner(observer)
        self.waits = any(other.waits for other in self.attached)

    def detach(self, observer: EngineObserver) -> None:
        """See `Engine.detach`."""
        self.attached.remove(observer)
        if observer in self._runners:  # runners of later observers may wrap it
            self._runners.clear()
            self.runner = self._engine_runner
            for other in self.attached:
                self._use_runner(other)
        self.waits = any(other.waits for other in self.attached)

    def _use_runner(self, observer: EngineObserver) -> None:
        """Run passes by the runner of `observer`, if it has one, over the model of the last one."""
        model = self.runner.model if self._runners else self._model
        runner = observer.runner(model, self._engine_runner.pool)
        if runner is not None:
            self._runners[observer] = self.runner = runner
