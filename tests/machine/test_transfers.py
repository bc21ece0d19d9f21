"""What is on its way to the host is read once it has arrived, and not before."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from remask.machine.transfers import Arrival, fetch


class Stream:
    """A device that runs ahead of nobody: what is queued on it is done when somebody waits for it."""

    def __init__(self) -> None:
        self.queued: list[Any] = []

    def event(self) -> "Event":
        return Event(self)


class Event:
    """A point among what is queued."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.place = stream, 0

    def record(self, stream: Stream) -> None:
        """After all that is queued now."""
        assert stream is self.stream
        self.place = len(stream.queued)

    def synchronize(self) -> None:
        """Do what was queued before."""
        while self.stream.queued and self.place:
            self.place -= 1
            self.stream.queued.pop(0)()


class OnDevice:
    """A tensor that the device has yet to compute."""

    is_cuda, device, shape, dtype = True, "cuda:0", (2,), torch.float32

    def __init__(self, *numbers: float) -> None:
        self.numbers = torch.tensor(numbers)


class Pinned:
    """Host memory that the device writes to."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.numbers = stream, torch.full((2,), torch.nan)

    def copy_(self, source: OnDevice, *, non_blocking: bool) -> None:
        """Queue the copy."""
        assert non_blocking
        self.stream.queued.append(lambda: self.numbers.copy_(source.numbers))

    def cpu(self) -> torch.Tensor:
        """It is there already."""
        return self.numbers


def test_what_is_queued_later_does_not_delay_it() -> None:
    stream, made = Stream(), list[dict[str, Any]]()

    def empty(*shape: Any, **settings: Any) -> Pinned:
        made.append(settings)
        return Pinned(stream)

    with (
        patch.object(torch, "empty", empty),
        patch.object(torch.cuda, "Event", stream.event),
        patch.object(torch.cuda, "current_stream", lambda device: stream),  # noqa: ARG005
    ):
        first, second = Arrival(OnDevice(1, 2)), Arrival(OnDevice(3, 4))  # type: ignore[arg-type]
        assert len(stream.queued) == 2
        assert first.wait().tolist() == [1, 2]
        assert len(stream.queued) == 1, "nothing waited for the second"
        assert second.wait().tolist() == [3, 4]
    assert made == [{"dtype": torch.float32, "pin_memory": True}] * 2


@pytest.mark.parametrize("numbers", [[1.0, 2.0], []])
def test_on_a_cpu_there_is_no_way(numbers: list[float]) -> None:
    assert fetch(torch.tensor(numbers)).tolist() == numbers
