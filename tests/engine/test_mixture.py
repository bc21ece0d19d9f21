"""Mixtures of experts: routing, rows grouped by expert, and what depends on nothing but a row itself."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from remask.families import preset
from remask.model.arithmetic import Arithmetic
from remask.model.config import Mixture, Router
from remask.model.invariant import TiledArithmetic
from remask.model.mixture import Routes, mixture_output, route
from remask.model.weights import MixtureWeights, empty_weights
from tests.engine.support import CPU

ARITHMETICS = pytest.mark.parametrize("arithmetic", [Arithmetic(), TiledArithmetic()], ids=["plain", "tiled"])
EXPERTS, WIDE, INNER = 12, 16, 6
ROUTERS = {
    "llada-moe": Router(),
    "sdar-moe": Router(normalise=True),
    "llada2": Router("sigmoid", bias=True, groups=4, kept_groups=2, normalise=True, scale=2.5, float32=True),
}
EACH_ROUTER = pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)


def weights_of(router: Router, dtype: torch.dtype = torch.float32, seed: int = 0) -> MixtureWeights:
    config = replace(
        preset("llada-moe-tiny"), layers=1, hidden=WIDE, mixture=Mixture(EXPERTS, 3, INNER, router=router), vocab=8
    )
    (layer,) = empty_weights(config, dtype, CPU).layers
    assert layer.mixture is not None
    generator = torch.Generator().manual_seed(seed)
    for tensor in (layer.mixture.router, layer.mixture.bias, layer.mixture.gate_up, layer.mixture.down):
        if tensor is not None:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
    return layer.mixture


def rows_of(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, WIDE, generator=torch.Generator().manual_seed(count)).to(dtype)


def by_hand(x: Tensor, routes: Routes, w: MixtureWeights) -> Tensor:
    out = torch.zeros_like(x, dtype=torch.float64)
    for row, (experts, weights) in enumerate(zip(routes.experts.tolist(), routes.weights.tolist(), strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            gate, up = (w.gate_up[expert].double() @ x[row].double()).chunk(2)
            out[row] += weight * (w.down[expert].double() @ (F.silu(gate) * up))
    return out


@ARITHMETICS
@EACH_ROUTER
@pytest.mark.parametrize("count", [0, 1, 2, 5, 150])
def test_the_weighted_sum_of_the_chosen_experts(arithmetic: Arithmetic, router: Router, count: int) -> None:
    w, x = weights_of(router), rows_of(count)
    routes = route(x, router, 3, w, arithmetic)
    assert routes.experts.shape == routes.weights.shape == (count, 3)
    torch.testing.assert_close(
        mixture_output(x, routes, w, arithmetic).double(), by_hand(x, routes, w), rtol=0, atol=1e-5
    )


@ARITHMETICS
def test_rows_that_all_choose_the_same_expert(arithmetic: Arithmetic) -> None:
    w, x = weights_of(Router()), rows_of(70)
    for expert in (0, 5, EXPERTS - 1):
        routes = Routes(torch.full((70, 1), expert), torch.full((70, 1), 0.25))
        torch.testing.assert_close(
            mixture_output(x, routes, w, arithmetic).double(), by_hand(x, routes, w), rtol=0, atol=1e-5
        )


def test_the_bias_decides_on_the_choice_and_not_on_the_weight() -> None:
    router = Router("sigmoid", bias=True)
    w, x = weights_of(router), rows_of(9)
    assert w.bias is not None
    w.bias.fill_(-50).index_fill_(0, torch.tensor([2, 7]), 50)
    routes = route(x, router, 2, w, Arithmetic())
    assert routes.experts.sort(dim=-1).values.tolist() == [[2, 7]] * 9
    torch.testing.assert_close(routes.weights, F.linear(x, w.router).sigmoid().gather(1, routes.experts))


def test_groups_are_chosen_by_their_two_best() -> None:
    router = Router("sigmoid", bias=True, groups=3, kept_groups=1)
    w, x = weights_of(router), torch.zeros(1, WIDE)  # every score is one half
    assert w.bias is not None
    w.bias.copy_(torch.tensor([9.0, 0, 0, 0, 6, 5, 0, 0, 1, 1, 1, 1]))
    assert route(x, router, 2, w, Arithmetic()).experts.sort().values.tolist() == [[4, 5]], "6 + 5 > 9 + 0"


@EACH_ROUTER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiled_rows_have_the_same_bits_in_any_company(router: Router, dtype: torch.dtype) -> None:
    w, x, arithmetic = weights_of(router, dtype), rows_of(130, dtype), TiledArithmetic()

    def out(rows: Tensor) -> tuple[Tensor, Tensor]:
        routes = route(rows, router, 3, w, arithmetic)
        return routes.weights, mixture_output(rows, routes, w, arithmetic)

    weights, fed = out(x)
    for rows in ([3], [0, 129], [*range(7, 90)], [*range(129, -1, -1)]):
        for whole, part in zip((weights, fed), out(x[rows]), strict=True):
            assert torch.equal(whole[rows], part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_grouped_kernel_is_asked_for_the_same_product(dtype: torch.dtype) -> None:
    """PyTorch's grouped product on CPU, where it takes the same arguments as on GPUs."""
    x, weights = rows_of(40, dtype), torch.randn(5, 24, WIDE).to(dtype)
    ends = torch.tensor([0, 11, 11, 39, 40], dtype=torch.int32)
    expected = Arithmetic().grouped_linear_loop(x, weights, ends)
    torch.testing.assert_close(F.grouped_mm(x, weights.transpose(1, 2), offs=ends), expected, rtol=1e-2, atol=1e-2)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not out._is_view():
            self.numbers = max(self.numbers, out.numel())
        return out


def test_no_tensor_has_rows_and_experts_and_channels() -> None:
    router, x = Router(), rows_of(500)
    w = weights_of(router)
    with Largest() as seen:  # type: ignore[no-untyped-call]
        mixture_output(x, route(x, router, 3, w, Arithmetic()), w, Arithmetic())
    assert 500 * 3 * WIDE <= seen.numbers < 500 * EXPERTS * INNER


def test_half_precision_follows_the_router() -> None:
    """LLaDA2 sums experts in float32, the others in the model's type."""
    for router in (ROUTERS["llada2"], ROUTERS["sdar-moe"]):
        w, x = weights_of(router, torch.bfloat16), rows_of(6, torch.bfloat16)
        routes = route(x, router, 3, w, Arithmetic())
        assert routes.weights.dtype == (torch.float32 if router.float32 else torch.bfloat16)
        assert mixture_output(x, routes, w, Arithmetic()).dtype == torch.bfloat16
