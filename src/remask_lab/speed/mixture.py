"""What a mixture of experts takes beside a dense MLP of equal active size, by the number of rows.

    python -m remask_lab.speed.mixture [--hidden 1024] [--experts 32] [--active 4] [--intermediate 512] [--rows 1,8,64]

One layer of random weights. The mixture chooses experts, groups the rows and computes them; the MLP is as wide as the
experts that compute a row are together, so both take the same FLOPs for the rows. Both take turns in one run, with
the choice of experts alone. Few rows go to as many experts as they are rows, so more weights are read than the MLP has.
"""

import json
import math
import statistics
import sys
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from remask.errors import ConfigError
from remask.machine.device import resolve_device, resolve_dtype
from remask.model.arithmetic import Arithmetic
from remask.model.config import Mixture
from remask.model.mixture import feed, route
from remask.model.weights import MixtureWeights
from remask_lab.ops.clock import time_call
from remask_lab.records.machine import commit, host
from remask_lab.speed.command import add_model_options, command_parser, run_command


@dataclass(frozen=True, slots=True)
class Layer:
    """A mixture, and the dense MLP [2 I, D] and [D, I] of equal active size."""

    mixture: Mixture
    weights: MixtureWeights
    gate_up: Tensor
    down: Tensor
    arithmetic: Arithmetic

    def routed(self, x: Tensor) -> Tensor:
        """The experts' output of rows `x` [N, D]."""
        routes = route(x, self.mixture.router, self.mixture.active, self.weights, self.arithmetic)
        return feed(x, routes, self.weights, self.arithmetic)

    def chosen(self, x: Tensor) -> Tensor:
        """The experts of rows `x` [N, D], int64 [N, k]."""
        return route(x, self.mixture.router, self.mixture.active, self.weights, self.arithmetic).experts

    def dense(self, x: Tensor) -> Tensor:
        """The MLP's output of rows `x` [N, D]."""
        gate, up = self.arithmetic.linear(x, self.gate_up).chunk(2, dim=-1)
        inner = self.arithmetic.silu_(gate).mul_(up)
        return self.arithmetic.linear(inner, self.down)


def random_layer(hidden: int, mixture: Mixture, dtype: torch.dtype, device: torch.device) -> Layer:
    """A layer of random weights. Raises `ConfigError` where more experts are active than there are."""
    if mixture.active > mixture.experts:
        raise ConfigError(
            f"--active {mixture.active} is more than --experts {mixture.experts}; a row goes to different experts"
        )

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device) / math.sqrt(shape[-1])

    inner, wide = mixture.intermediate, mixture.active * mixture.intermediate
    weights = MixtureWeights(
        router=drawn(mixture.experts, hidden),
        bias=None,
        gate_up=drawn(mixture.experts, 2 * inner, hidden),
        down=drawn(mixture.experts, hidden, inner),
    )
    return Layer(mixture, weights, drawn(2 * wide, hidden), drawn(hidden, wide), Arithmetic())


def main() -> None:
    """Measure and print one JSON object."""
    parser = command_parser(__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--active", type=int, default=4, help="experts that compute a row")
    parser.add_argument("--intermediate", type=int, default=512, help="width of an expert")
    parser.add_argument("--rows", default="1,8,64,256,1024", help="numbers of rows, joined by commas")
    parser.add_argument("--turns", type=int, default=15)
    add_model_options(parser)
    args = parser.parse_args()
    for name in ("hidden", "experts", "active", "intermediate", "turns"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be 1 or more, got {getattr(args, name)}")
    if not all(count.isdecimal() and int(count) > 0 for count in args.rows.split(",")):
        raise ConfigError(f"--rows are whole numbers of 1 or more, joined by commas; got {args.rows!r}")
    device = resolve_device(args.device)
    dtype, _ = resolve_dtype(args.dtype, device, 0)
    layer = random_layer(args.hidden, Mixture(args.experts, args.active, args.intermediate), dtype, device)
    with torch.inference_mode():
        results = [measured(layer, int(count), args.turns) for count in args.rows.split(",")]
    about = {"machine": host(), "threads": torch.get_num_threads(), "commit": commit()}
    print(json.dumps({**about, **vars(args), "results": results}, indent=2))


def measured(layer: Layer, count: int, turns: int) -> dict[str, float | list[float] | int]:
    """The mixture's time over the MLP's, and how much of it the choice of experts is, for `count` rows."""
    x = torch.randn(count, layer.gate_up.shape[1], dtype=layer.gate_up.dtype, device=layer.gate_up.device)
    ratios, choice = [], []
    for turn in range(turns + 2):
        routed, dense, chosen = (
            time_call(partial(call, x), x.device) for call in (layer.routed, layer.dense, layer.chosen)
        )
        if turn >= 2:
            ratios.append(routed / dense)
            choice.append(chosen / routed)
    return {
        "rows": count,
        "experts_used": len(set(layer.chosen(x).flatten().tolist())),
        "ratio_to_dense": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "choice_share": statistics.median(choice),
    }


if __name__ == "__main__":
    sys.exit(run_command(main))
