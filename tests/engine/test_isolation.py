"""What fails on account of one request ends that request, and changes nothing for the others."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from remask.engine.canvas_state import CanvasState
from remask.engine.engine import Engine
from remask.engine.pack import Items
from remask.engine.request import Request
from remask.engine.running import RunningRequest
from remask.errors import IntegrityError
from remask.plan.canvas import Canvas
from remask.policies import BiCache, BlockDual, CachePolicy, Dense, Reuse
from remask.policies.dllm import DllmCache
from remask.request.result import Event, Result
from remask.sampling.masked import MaskedDecoder, MaskedDecoding
from tests.engine.own_policies import Reviving
from tests.engine.support import LAYERS, Work, alone, make_engine, outcome, request, run

BAD = 33  # the first prompt token of the request that is to blame
SEED = 77


Breaks: TypeAlias = Callable[[Engine, pytest.MonkeyPatch], None]


def bad_request(**fields: Any) -> Request:
    return request("bad", [BAD, 7, 9, 11, 20, 21, 22, 23], seed=SEED, **fields)


def neighbours() -> list[Work]:
    policies: list[CachePolicy] = [Dense(), Reuse(), BiCache(depth=2), BlockDual(), BiCache(BlockDual(), depth=3)]
    return [
        Work(request(f"r{i}", list(range(10 + i, 18 + i)), prefix, block_length=2, steps=8), policy)
        for i, policy in enumerate(policies)
        for prefix in [6 if i % 2 else 0]
    ]


def comparing() -> list[Work]:
    """Requests whose passes compare their values with those of the pass before."""
    policies: dict[str, CachePolicy] = {
        "value": DllmCache(100, 4, 0.5),
        "key": DllmCache(3, 4, 0.25, select="key"),
        "prefix": BiCache(DllmCache(100, 8, 0.5), depth=2),
        "reviving": Reviving(),
        "always": Reviving(at=1, every=100),
    }
    prompts = (list(range(20 + i, 28 + i)) for i in range(0, 10, 2))
    work = [
        Work(request(name, prompt, 6 if name == "prefix" else 0), policy)
        for prompt, (name, policy) in zip(prompts, policies.items(), strict=True)
    ]
    guided = request("guided", list(range(40, 48)), cfg_scale=1.0)
    return [*work, Work(guided, DllmCache(100, 4, 0.5, 2))]


def blamed(branch: CanvasState) -> bool:
    return len(branch.canvas) > 0 and int(branch.canvas.tokens[0]) == BAD


def defect(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a defect that nobody foresaw")


def breaking(name: str, owner: Callable[[Engine], Any], when: Callable[..., bool]) -> Breaks:
    """What breaks the method `name` of the owner where `when`, which gets the arguments, says so."""

    def breaks(engine: Engine, patch: pytest.MonkeyPatch) -> None:
        whole = getattr(owner(engine), name)

        def broken(*args: Any, **more: Any) -> Any:
            return defect() if when(*args) else whole(*args, **more)

        patch.setattr(owner(engine), name, broken)

    return breaks


def breaks_begin(engine: Engine, patch: pytest.MonkeyPatch, name: str) -> None:
    """Not while the request is checked, where canvases and decoders are made too."""
    breaking(name, lambda _: MaskedDecoding, lambda own, *_: own.seed == SEED and bool(engine.active_ids))(
        engine, patch
    )


def breaks_forward(engine: Engine, patch: pytest.MonkeyPatch, operation: str = "head_input", layer: int = 0) -> None:
    """The pass writes K and V of everybody up to `layer`, in which `operation` fails: by default, all of them."""
    model, run_pass = engine.runner.model, engine.runner.run
    act = getattr(model, operation)
    layers = {id(weights): number for number, weights in enumerate(model.weights.layers)}
    among = False

    def ran(items: Items) -> tuple[Tensor, Items]:
        nonlocal among
        among = late(items)
        return run_pass(items)

    def acted(*inputs: Any) -> Tensor:
        result: Tensor = act(*inputs)
        return defect() if among and all(layers.get(id(given), layer) == layer for given in inputs) else result

    patch.setattr(engine.runner, "run", ran)
    patch.setitem(vars(model), operation, acted)


def breaks_choice(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    breaking("choose", lambda _: MaskedDecoder, third_step)(engine, patch)
    known = vars(MaskedDecoder)["transfers"].fget
    patch.setattr(MaskedDecoder, "transfers", property(lambda own: defect() if third_step(own) else known(own)))


def third_step(decoder: MaskedDecoder, *_: Any) -> bool:
    return decoder._seed == SEED and decoder.step == 3


def late(items: Items, *_: Any) -> bool:
    return any(blamed(branch) and branch.ledger.step >= 2 for branch, _ in items)


BREAKS: dict[str, Breaks] = {
    "start": partial(breaks_begin, name="canvas"),
    "decoder": partial(breaks_begin, name="decoder"),
    "pack": breaking("pack", lambda engine: engine.runner, late),
    "forward": breaks_forward,
    "read": breaking(
        "launch_scores", lambda engine: engine.runner, lambda _, turns: any(turn.member.id == "bad" for turn in turns)
    ),
    "group": breaking("group", lambda _: MaskedDecoder, third_step),
    "choice": breaks_choice,
    "advance": breaking("advance", lambda _: MaskedDecoder, third_step),
    "cost": breaking("tally", lambda _: RunningRequest, lambda _, items: blamed(items[0][0])),
}


@pytest.mark.few(23)
@pytest.mark.parametrize("breaks", BREAKS.values(), ids=BREAKS)
@pytest.mark.parametrize("limits", [{}, {"max_row_layers": 90}], ids=["whole", "budget"])
@pytest.mark.parametrize("prefix", [0, 6])
def test_a_failure_ends_its_own_request(
    breaks: Breaks, limits: dict[str, Any], prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = neighbours() + comparing()
    expected = {item.request.id: outcome(alone(item)) for item in good}
    engine = make_engine(max_num_seqs=16, **limits)
    bad = Work(bad_request(prefix=prefix, block_length=2, steps=8), BiCache(depth=2))
    with monkeypatch.context() as patch:
        breaks(engine, patch)
        results = run(engine, [*good[:2], bad, *good[2:]], limit=400, each_step=lambda _: engine.check_integrity())
    assert results["bad"].finish_reason == "error"
    assert "a defect that nobody foresaw" in str(results["bad"].error)
    assert {name: outcome(results[name]) for name in expected} == expected
    # What has failed leaves nothing behind, and the next one is answered.
    assert run(engine, [bad])["bad"].finish_reason == "length"
    engine.store.drop()
    assert engine.allocator.used == 0
    assert engine.memory.extra_bytes == 0


@pytest.mark.parametrize("broken", ["pack", "run"])
def test_a_prefix_pass_that_fails_ends_those_that_wait_for_it(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good = neighbours()
    expected = {item.request.id: outcome(alone(item)) for item in good}
    engine = make_engine(max_num_seqs=8)
    whole = getattr(engine.runner, broken)

    def act(items: Items, *rest: Any) -> Any:
        return (
            defect()
            if any(blamed(state) and not state.canvas.noisy.any() for state, _ in items)
            else whole(items, *rest)
        )

    bad = [Work(request(f"bad {i}", [BAD, *range(1, 8)], prefix=6), Reuse()) for i in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, broken, act)
        results = run(engine, [bad[0], *good, bad[1]], each_step=lambda _: engine.check_integrity())
    assert [results[item.request.id].finish_reason for item in bad] == ["error", "error"]
    assert {name: outcome(results[name]) for name in expected} == expected
    assert run(engine, bad)["bad 0"].finish_reason == "length", "the prefix is computed anew"


@pytest.mark.few(23)
@pytest.mark.parametrize("joins", [0, 1, 4])
@pytest.mark.parametrize(
    ("operation", "layer"),
    # The first layer computes all of its rows, so nothing is chosen there.
    [(name, i) for name in ("_pick_rows", "attend", "_feed_forward") for i in range(name == "_pick_rows", LAYERS)]
    + [("head_input", 0)],
)
def test_a_pass_that_failed_halfway_is_repeated_as_it_was(
    operation: str, layer: int, joins: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where new values are compared with those of the last pass, a repeat would find its own."""
    good = comparing()
    expected = {item.request.id: outcome(alone(item)) for item in good}
    engine = make_engine(max_num_seqs=16)
    with monkeypatch.context() as patch:
        breaks_forward(engine, patch, operation, layer)
        bad = Work(bad_request(), DllmCache(100, 100, 0.5), joins)
        results = run(engine, [*good[:3], bad, *good[3:]], each_step=lambda _: engine.check_integrity())
    assert "is run in parts" in caplog.text
    # A choice that was made is not made again, so it need not fail again.
    assert results["bad"].finish_reason == "error" or operation == "_pick_rows"
    assert {name: outcome(results[name]) for name in expected} == expected


FATAL = [
    RuntimeError("CUDA error: device-side assert triggered"),
    torch.OutOfMemoryError("out of memory"),
    IntegrityError("pages are off"),
    MemoryError("no more"),
]


def drive(engine: Engine, work: Sequence[Work]) -> tuple[dict[str, Result], list[Event]]:
    """Run to the end, beginning again where a step fails."""
    events: list[Event] = []
    for item in work:
        engine.add(item.asked)
    for _ in range(1000):
        if not engine.busy:
            break
        try:
            events += engine.step()
        except Exception as error:
            engine.recover(error)
        engine.check_integrity()
    assert not engine.busy
    return {event.id: event.result for event in events if event.result is not None}, events


@pytest.mark.few(7)
@pytest.mark.parametrize("error", FATAL, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("stage", ["run", "launch_scores"])
@pytest.mark.parametrize("after", [1, 4])
def test_an_error_of_the_device_restarts_the_engine_with_its_queue(
    error: Exception, stage: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had reported nothing is answered as if nothing had happened; what had ends with the error."""
    work = neighbours()
    expected = {item.request.id: outcome(alone(item)) for item in work}
    engine = make_engine(max_num_seqs=3)
    whole, calls = getattr(engine.runner, stage), 0

    def act(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after:
            raise error
        return whole(*args)

    monkeypatch.setattr(engine.runner, stage, act)
    results, events = drive(engine, work)
    assert len(results) == len(work)
    assert engine.stats.recoveries == 1
    assert Counter(event.id for event in events if event.queued_s is not None) == dict.fromkeys(expected, 1)
    failed = {name for name, result in results.items() if result.finish_reason == "error"}
    assert len(failed) == (0 if after == 1 else 3)
    for name, result in results.items():
        if name in failed:
            assert "the engine failed while it ran" in str(result.error)
            assert any(event.id == name and event.transfer is not None for event in events)
        else:
            assert outcome(result) == expected[name]
    engine.store.drop()
    assert engine.allocator.used == 0


def test_a_request_that_always_brings_the_engine_down_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    work = neighbours()
    expected = {item.request.id: outcome(alone(item)) for item in work}
    engine = make_engine(max_num_seqs=8)
    run_pass = engine.runner.run

    def ran(items: Items) -> tuple[Tensor, Items]:
        if any(blamed(branch) for branch, _ in items):
            raise torch.OutOfMemoryError("out of memory")
        return run_pass(items)

    monkeypatch.setattr(engine.runner, "run", ran)
    results, _ = drive(engine, [*work, Work(bad_request(), Dense())])
    assert results["bad"].finish_reason == "error"
    assert {name: outcome(results[name]) for name in expected} == expected
    assert engine.stats.recoveries == 2


@pytest.mark.parametrize("error", [IntegrityError("off"), RuntimeError("CUDA error: x"), ValueError("one request's")])
def test_an_error_while_a_request_is_placed_leaves_nothing_claimed(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    state = engine.memory._new_state

    def made(canvas: Canvas, *args: Any, **more: Any) -> CanvasState:
        if canvas.tokens[0] == BAD:
            raise error
        return state(canvas, *args, **more)

    monkeypatch.setattr(engine.memory, "_new_state", made)
    good = Work(request("good", prefix=5), Reuse())
    results, events = drive(engine, [Work(bad_request(prefix=6), Reuse()), good])
    assert results["bad"].finish_reason == "error"
    assert [event.id for event in events if event.queued_s is not None] == ["good"]
    assert str(error) in str(results["bad"].error)
    assert outcome(results["good"]) == outcome(alone(good))
    assert [entry.tokens[0] for entry in engine.store.entries] == [good.request.prompt_token_ids[0]]


def test_no_memory_for_a_new_entry_leaves_nothing_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    whole, calls = engine.store.new_states, 0

    def states(tokens: int) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("out of memory")
        return whole(tokens)

    monkeypatch.setattr(engine.store, "new_states", states)
    good = Work(request("good", prefix=5), Reuse())
    results, _ = drive(engine, [Work(bad_request(prefix=6), Reuse()), good])
    assert "out of memory" in str(results["bad"].error)
    assert outcome(results["good"]) == outcome(alone(good))
    assert engine.stats.recoveries == 0


def test_an_error_of_the_last_check_loses_no_result() -> None:
    engine = make_engine()
    engine.add(request("r"))
    engine.step()
    assert engine.allocator.allocate(1, range(1, 2)) is not None, "a page that nobody owns"
    events: list[Event] = []
    while engine.busy:
        try:
            events += engine.step()
        except IntegrityError as error:
            engine.recover(error)
    (result,) = [event.result for event in events if event.result is not None]
    assert outcome(result) == outcome(alone(Work(request("r"), Dense())))
    assert engine.stats.recoveries == 1
    engine.check_integrity()


def test_a_pass_that_nobody_waits_for_does_not_bring_the_engine_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests that leased a prefix are gone, and its pass goes on alone."""
    engine = make_engine(max_row_layers=1)
    engine.add(request("gone", prefix=6).with_policy(Reuse()))
    engine._admission.admit(engine.clock())
    engine.cancel("gone")
    whole = engine.runner.run

    def ran(items: Items) -> tuple[Tensor, Items]:
        if any(not state.canvas.noisy.any() for state, _ in items):
            raise torch.OutOfMemoryError("out of memory")
        return whole(items)

    monkeypatch.setattr(engine.runner, "run", ran)
    results, _ = drive(engine, [])
    assert (results["gone"].finish_reason, engine.stats.recoveries) == ("cancelled", 1)
    assert not engine.store.entries
    later = Work(request("later"), Dense())
    assert outcome(drive(engine, [later])[0]["later"]) == outcome(alone(later))


def test_what_nobody_is_to_blame_for_is_raised() -> None:
    with pytest.raises(ValueError, match="of nobody"):
        make_engine().recover(ValueError("of nobody"))
