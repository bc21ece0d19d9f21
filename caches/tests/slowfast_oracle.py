"""SlowFast sampling, as docs/lab/methods.md describes it."""

from dataclasses import dataclass

from tests.oracles.sampling import Choosing, Cut, Stateful, take_threshold


@dataclass(frozen=True)
class SlowFast(Stateful):
    """Its parameters."""

    slow_tokens: int = 1
    slow_steps: int = 8
    min_confidence: float = 0.1
    window: int = 2
    variance: float = 1.0
    threshold: float = 0.85
    slow_threshold: float | None = None
    leave_early: bool = True
    cut_tail: bool = False

    def choosing(self) -> Choosing:
        return slow_fast(self)


def slow_fast(knobs: SlowFast) -> Choosing:
    """Cycles of exploring and filling."""

    def by_confidence(positions: list[int]) -> list[int]:
        return sorted(positions, key=lambda p: (-float(confidence[p]), p))

    confidence, noisy = yield []
    while True:
        ends: list[int] = []
        found: int | None = None
        while len(ends) < knobs.slow_steps and (found is None or not knobs.leave_early):
            ends.append(max([p for p in noisy if confidence[p] >= knobs.min_confidence], default=min(noisy)))
            recent = ends[-knobs.window :]
            mean = sum(recent) / len(recent)
            spread = sum((end - mean) ** 2 for end in recent) / len(recent)
            if found is None and len(recent) == knobs.window and spread < knobs.variance:
                found = ends[-1]
            best = by_confidence(noisy)
            taken = best[: knobs.slow_tokens]
            sure = [p for p in best if knobs.slow_threshold is not None and confidence[p] >= knobs.slow_threshold]
            confidence, noisy = yield sorted({*taken, *sure}) if len(sure) >= 2 else taken
        end = int(mean) if found is None else found
        while any(p <= end for p in noisy):
            taken = take_threshold(confidence, by_confidence([p for p in noisy if p <= end]), knobs.threshold)
            # Where some of the span is left, the next pass ends with it.
            whole = not knobs.cut_tail or len(taken) == sum(p <= end for p in noisy)
            confidence, noisy = yield Cut(taken, None if whole else end + 1)
