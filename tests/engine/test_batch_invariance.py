"""Under `batch_invariant` a request computes the same bits in any company: tokens, confidences and hidden states.

One thread computes the answers that are compared: the option holds for one number of threads.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from remask.checkpoint.loaded import find_model
from remask.checkpoint.settings import ModelSettings
from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.observer import EngineObserver
from remask.engine.request import Request
from remask.engine.runner import PassResult
from remask.errors import ConfigError
from remask.model.invariant import TILE, TiledArithmetic, batch_invariant
from remask.model.transformer import Transformer
from remask.plan.cost import NOTHING, Widths
from remask.plan.pass_cost import pass_cost
from remask.policies import BiCache, Dense, Reuse
from remask.policies.dllm import DllmCache
from remask.policies.exact import Exact
from remask.readers.drafts import Drafts
from remask.request.result import Draft, Result
from remask.request.sampling_params import SamplingParams
from remask.sampling import score
from remask.sampling.rows import RowGroup
from remask.sampling.vocabulary import Vocabulary
from tests.engine import kinds, support, test_block_causal_against_oracles, test_uniform_drawn_against_oracles
from tests.engine.own_policies import Reviving
from tests.engine.support import CPU, CheckedTransformer, Work, lively_weights, poisoned_engine, prompt_of, small_config

MASKED = ("llada", "dream", "llada-moe")
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@cache
def model_of(name: str, dtype: torch.dtype) -> Transformer:
    if name in MASKED:
        config = small_config(name)
        return CheckedTransformer(config, lively_weights(config, dtype))
    loaded = find_model(ModelSettings(str(kinds.checkpoint(name).folder))).load(dtype, CPU)
    return CheckedTransformer(loaded.config, loaded.weights)


@dataclass
class Bits:
    """All that was computed for one request: what its predicted rows were in each pass, and what was read from them."""

    hidden: list[Tensor] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    result: Result | None = None


def answers(engine: Engine, work: Sequence[Work]) -> dict[str, Bits]:
    found = {item.request.id: Bits() for item in work}

    class Keep(EngineObserver):
        waits = True

        def on_complete(self, ran: PassResult) -> None:
            at = 0
            for turn in ran.batch:
                rows = len(turn.predicted) * len(turn.items)
                if rows:
                    found[turn.member.id].hidden.append(ran.hidden[at : at + rows].clone())
                at += rows

    keep = Keep()
    engine.attach(keep)
    todo = sorted(work, key=lambda item: item.joins)
    for step in range(2000):
        while todo and todo[0].joins <= step:
            engine.add(todo.pop(0).asked.with_readers(Drafts()))
        for event in engine.step():
            if event.draft is not None:
                found[event.id].drafts.append(event.draft)
            if event.result is not None:
                found[event.id].result = event.result
        if not todo and not engine.busy:
            engine.detach(keep)
            return found
    raise AssertionError("stuck")


def compare(one: Bits, other: Bits, item: Work) -> None:
    assert one.result is not None
    assert other.result is not None
    assert one.result.error is None
    read = [[(each.positions, each.token_ids, each.confidences) for each in bits.drafts] for bits in (one, other)]
    assert read[0] == read[1], item
    assert [len(rows) for rows in one.hidden] == [len(rows) for rows in other.hidden]
    for first, second in zip(one.hidden, other.hidden, strict=True):
        assert torch.equal(first, second), item
    assert (one.result.token_ids, one.result.trace) == (other.result.token_ids, other.result.trace)


def check(model: Transformer, work: Sequence[Work], **limits: Any) -> None:
    """Many at once are as each alone, in an engine whose memory is cut in other ways."""
    together = answers(poisoned_engine(model, batch_invariant=True, **limits), work)
    apart = {**limits, "page_size": limits["page_size"] * 2, "max_row_layers": None, "max_num_seqs": 2}
    for item in work:
        engine = poisoned_engine(model, batch_invariant=True, **apart)
        compare(together[item.request.id], answers(engine, [replace(item, joins=0)])[item.request.id], item)


def limits(rng: random.Random, page: int = 1) -> dict[str, Any]:
    return {
        "max_num_seqs": rng.choice([3, 6, 12]),
        "max_row_layers": rng.choice([None, None, 150]),
        "max_refreshes": rng.choice([None, 1]),
        "page_size": page * rng.choice([1, 3, 4]),
        "store_budget_tokens": rng.choice([25, 64]),
        "max_model_len": 64,
    }


@pytest.mark.few(13)
@BOTH
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", MASKED)
def test_masked_models(family: str, seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(f"{family} {seed} invariant")
    work = [support.random_work(rng, family, str(number)) for number in range(10)]
    check(model_of(family, dtype), work, **limits(rng))


@pytest.mark.few(7)
@BOTH
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("model", kinds.UNIFORM)
def test_uniform_models(model: str, seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(f"{model} {seed} invariant")
    lines = [test_uniform_drawn_against_oracles.draw(rng, model, corrected=False) for _ in range(8)]
    work = [
        test_block_causal_against_oracles.work_of(line, str(number), rng.randrange(6))
        for number, line in enumerate(lines)
    ]
    check(model_of(model, dtype), work, **limits(rng))


@pytest.mark.few(5)
@BOTH
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("model", kinds.BLOCKS)
def test_block_causal_models(model: str, seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(f"{model} {seed} invariant")
    work = []
    for number in range(8):
        line = test_block_causal_against_oracles.draw_line(rng, model)
        line["sampling"] |= {"temperature": rng.choice([0.0, 0.7]), "seed": number}
        work.append(test_block_causal_against_oracles.work_of(line, str(number), rng.randrange(8)))
    check(model_of(model, dtype), work, **limits(rng, kinds.checkpoint(model).block))


@pytest.mark.parametrize("model", ["llada", kinds.UNIFORM[0], kinds.BLOCKS[0]])
def test_attention_by_numpy(model: str) -> None:
    """The option holds whatever computes attention. What it does not hold under is refused at the start."""
    rng = random.Random(f"{model} numpy")
    if model in MASKED:
        work = [support.random_work(rng, model, str(number)) for number in range(6)]
    else:
        draw = test_block_causal_against_oracles.draw_line
        if model in kinds.UNIFORM:
            draw = partial(test_uniform_drawn_against_oracles.draw, corrected=False)
        lines = [draw(rng, model) for _ in range(6)]
        work = [test_block_causal_against_oracles.work_of(line, str(n), n) for n, line in enumerate(lines)]
    page = kinds.checkpoint(model).block if model in kinds.BLOCKS else 1
    check(model_of(model, torch.float32), work, attention="numpy", **limits(rng, page))


@BOTH
def test_pages_that_another_request_computed(dtype: torch.dtype) -> None:
    """A page's bits are the same whichever prompt it was computed with, and so is what is answered from it."""
    model = model_of("sdar, any block", dtype)
    prompt = [token % kinds.MASK for token in prompt_of(44)]
    params = SamplingParams(max_tokens=8, block_length=4, ignore_eos=True)
    lengths = {"long": 44, "cut within a block": 30, "short": 17}
    work = {name: Work(Request(name, prompt[:length], params), Exact()) for name, length in lengths.items()}
    first, *others = work.values()
    store: dict[str, Any] = {"page_size": 8, "store_budget_tokens": 64, "batch_invariant": True}
    engine = poisoned_engine(model, **store)
    shared = answers(engine, [first])
    shared |= answers(engine, others)
    for name, item in work.items():
        result = shared[name].result
        assert result is not None
        assert (result.usage.cached_tokens > 0) == (name != "long")
        alone = answers(poisoned_engine(model, **store), [item])[name]
        assert torch.equal(shared[name].hidden[-1], alone.hidden[-1])
        compare(replace(shared[name], hidden=[]), replace(alone, hidden=[]), item)


@BOTH
def test_a_shared_prefix_in_pieces_and_company(dtype: torch.dtype) -> None:
    """A request that finds its prefix, one that computes it, and one whose prefix pass is cut read the same bits."""
    model, prompt = model_of("llada", dtype), prompt_of(20)
    policy = BiCache(Dense(), 2, 2)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    work = [Work(Request(str(n), [*prompt, n], params, 20), policy, joins=n) for n in range(4)]
    check(model, work, page_size=3, max_num_seqs=4, store_budget_tokens=32, max_row_layers=60)


def rows_of(count: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, width, dtype=dtype)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@BOTH
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("_threads")
def test_products_of_any_number_of_rows(bias: bool, dtype: torch.dtype) -> None:
    arithmetic = TiledArithmetic()
    x, weight = rows_of(3 * TILE + 5, 33, dtype), rows_of(45, 33, dtype)
    plus = rows_of(1, 45, dtype)[0] if bias else None
    whole = arithmetic.linear(x, weight, plus)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, plus))
    for start, stop in ((0, 0), (0, 1), (1, 3), (3, TILE), (5, TILE + 6), (TILE - 1, 3 * TILE)):
        assert torch.equal(arithmetic.linear(x[start:stop], weight, plus), whole[start:stop])


@BOTH
@pytest.mark.usefixtures("_threads")
def test_activations_of_any_number_of_rows(dtype: torch.dtype) -> None:
    arithmetic, x = TiledArithmetic(), rows_of(1501, 2 * 50, dtype)  # so many that threads would share them
    gates = arithmetic.activate_(x.clone().chunk(2, dim=-1)[0])
    torch.testing.assert_close(gates, torch.nn.functional.silu(x[:, :50]))
    for start, stop in ((0, 0), (0, 1), (1, 8), (17, 800), (1, 1501)):
        assert torch.equal(arithmetic.activate_(x[start:stop].clone().chunk(2, dim=-1)[0]), gates[start:stop])


def test_each_request_is_read_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine it need not change a bit, so the calls are counted."""
    read, real = [], Vocabulary.greedy

    def greedy(self: Vocabulary, logits: Tensor, mask_id: int) -> Tensor:
        read.append(len(logits))
        return real(self, logits, mask_id)

    monkeypatch.setattr(Vocabulary, "greedy", greedy)
    groups = [RowGroup(rows, None, "logits", 0.0, None, None, 0) for rows in (slice(0, 2), slice(2, 5))]
    logits = rows_of(5, 9, torch.float32)
    apart = score.score(logits.clone(), groups, mask_id=8, per_group=True)
    assert read == [2, 3]
    together = score.score(logits.clone(), groups, mask_id=8)
    assert read == [2, 3, 5]
    torch.testing.assert_close(apart, together)


class PlaceDependent(TiledArithmetic):
    """As a matrix library that rounds the last row of a tile in another way."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = super().linear(x, weight, bias)
        out[-1] *= 1 + 1e-6
        return out


def test_a_library_whose_bits_depend_on_the_place_is_refused() -> None:
    weights = [rows_of(8, 16, torch.float32), rows_of(16, 8, torch.float32)]
    TiledArithmetic().check(weights)
    with pytest.raises(ConfigError, match=r"batch_invariant=True cannot be kept here: on cpu .* 16 x 8 depends"):
        PlaceDependent().check(iter(weights[::-1]))


def test_every_shape_that_is_multiplied_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, used = set[torch.Size](), set[torch.Size]()
    multiply = TiledArithmetic.linear

    def tries(self: TiledArithmetic, weights: Iterable[Tensor]) -> None:
        tried.update(weight.shape for weight in weights)

    def linear(self: TiledArithmetic, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        used.add(weight.shape)
        return multiply(self, x, weight, bias)

    monkeypatch.setattr(TiledArithmetic, "check", tries)
    monkeypatch.setattr(TiledArithmetic, "linear", linear)
    policies = [Dense(), Reviving(), *(DllmCache(100, 4, 0.5, select=by) for by in ("value", "key"))]
    work = [Work(support.request(str(number)), policy) for number, policy in enumerate(policies)]
    found = answers(poisoned_engine(model_of("dream", torch.float32), batch_invariant=True), work)
    assert all(bits.result is not None and bits.result.error is None for bits in found.values())
    assert used == tried


def test_the_option() -> None:
    model = model_of("llada", torch.float32)
    plain, tiled = (Engine(model, EngineConfig(max_model_len=32, batch_invariant=on), "test") for on in (False, True))
    assert plain.model is model
    assert not plain.model.arithmetic.invariant
    assert tiled.model.arithmetic.invariant
    assert tiled.model.weights is model.weights
    assert tiled.runner.model is tiled.model
    assert isinstance(batch_invariant(model), CheckedTransformer), "whatever a subclass adds stays"
    with pytest.raises(ConfigError, match="needs prefix_match='exact', got 'longest'"):
        EngineConfig(batch_invariant=True, prefix_match="longest")
    with pytest.raises(ConfigError, match="batch_invariant must be true or false"):
        EngineConfig(batch_invariant="yes")  # type: ignore[arg-type]


class Costs(EngineObserver):
    def __init__(self, widths: Widths, apart: bool) -> None:
        self.widths, self.apart, self.last = widths, apart, NOTHING

    def on_launch(self, ran: PassResult) -> None:
        self.last = pass_cost(self.widths, [state.executed_plan(plan, self.apart) for state, plan in ran.items])


@pytest.mark.parametrize("apart", [False, True])
def test_the_cost_of_a_pass_counts_a_shared_prefix_as_often_as_it_is_read(apart: bool) -> None:
    model = model_of("llada", torch.float32)
    widths = model.config.widths(4)
    work = [Work(support.request(name, 9, prefix=6), Reuse()) for name in "abc"]

    def read(*some: Work) -> int:
        engine = poisoned_engine(model, batch_invariant=apart)
        costs = Costs(widths, apart)
        engine.attach(costs)
        for item in some:
            engine.add(item.asked)
        engine.step()  # the pass over the prefix
        engine.step()
        return costs.last.operations["attention"].kv_read

    saved = (
        2 * (6 * model.config.layers) * 2 * widths.keys * widths.itemsize
    )  # what two of three requests need not read
    assert read(*work) == 3 * read(work[0]) - (0 if apart else saved)
