"""Questions of the bundled model's task as requests, and how many of each kind were answered right."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remask import Output
from remask.engine.request import Request
from remask.tasks.tariff import KINDS, is_correct
from remask_lab.records.interval import wilson


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, the kind of its question, its right answer, and which of the requests like it this is, from 1."""

    request: Request
    kind: str
    answer: str
    number: int


def accuracy_by_kind(work: Sequence[Asked], found: Mapping[str, Output]) -> dict[str, dict[str, Any]]:
    """Share of right answers of each kind with its 95 % interval. `found` has the answers by the requests' names."""
    told = {}
    for kind in KINDS:
        own = [each for each in work if each.kind == kind]
        right = sum(is_correct(found[each.request.id].text or "", each.answer) for each in own)
        bounds = [round(bound, 3) for bound in wilson(right, len(own))]
        told[kind] = {"accuracy": round(right / len(own), 3), "interval": bounds}
    return told
