"""The processes that compute one model together: which part each of them has, and how results are combined."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from remask.errors import ConfigError, RankLostError
from remask.model.config import Mixture, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that rank `rank` of `size` holds.

    Attention is cut by heads, a dense feed-forward and the MLP of self-conditioning by columns (Megatron-LM, arXiv
    1909.08053, section 3), a mixture by whole experts, and the output matrix by tokens of the vocabulary. Everything
    else, such as the embedding and the router, is on every rank. Ranges of columns and tokens may differ by one.
    """

    rank: int = 0
    size: int = 1

    def check(self, config: ModelConfig) -> None:
        """Raise a `ConfigError` that names every size of `config` that cannot be cut for `size` ranks."""
        faults = _faults(config, self.size)
        if faults:
            sizes = [str(size) for size in range(1, config.heads + 1) if Shard(0, size).fits(config)]
            raise ConfigError(
                f"tensor_parallel={self.size} cannot cut this {config.family} model: {'; '.join(faults)}. "
                f"Use {' or '.join(sizes)}"
            )

    def fits(self, config: ModelConfig) -> bool:
        """Whether `config` can be cut for `size` ranks."""
        return not _faults(config, self.size)

    def part(self, config: ModelConfig) -> ModelConfig:
        """`config` with the sizes of this rank's matrices. The number of experts is that of all ranks."""
        if self.size == 1:
            return config
        mixture, sliding = config.mixture, config.sliding
        if mixture is not None and mixture.shared:
            mixture = replace(mixture, shared=len(self.share(mixture.shared)))
        if sliding is not None and sliding.kv_heads is not None:
            sliding = replace(sliding, kv_heads=len(self.kv_heads(config.shapes[-1])))
        return replace(
            config,
            heads=len(self.heads(config)),
            kv_heads=len(self.kv_heads(config)),
            intermediate=len(self.share(config.intermediate)),
            mixture=mixture,
            sliding=sliding,
        )

    def share(self, count: int) -> range:
        """This rank's share of `count` columns, rows or tokens."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def heads(self, config: ModelConfig) -> range:
        """The query heads of this rank."""
        return self.share(config.heads)

    def kv_heads(self, config: ModelConfig) -> range:
        """The K/V heads of this rank. If there are fewer heads than ranks, each head is replicated on several ranks."""
        if config.kv_heads >= self.size:
            return self.share(config.kv_heads)
        head = self.rank * config.kv_heads // self.size
        return range(head, head + 1)

    def experts(self, mixture: Mixture) -> range:
        """The routed experts of this rank."""
        return self.share(mixture.experts)


class RankLocal:
    """An object that exists on every rank with contents of its own. Its class takes no arguments.

    When `Ranks.run_on_all` first gets it, the other ranks construct theirs, and keep it as long as rank 0 does.
    """


class Ranks:
    """The ranks of one model, as seen by one of them. This class is for a single rank: it returns its arguments."""

    shard = Shard()
    lost: RankLostError | None = None  # the reason why nothing more can be computed; None: no rank has ended

    @property
    def several(self) -> bool:
        """Whether there are other ranks."""
        return self.shard.size > 1

    def sum(self, x: "Tensor") -> "Tensor":
        """The sum of every rank's `x`, with the same bits on all ranks. `x` may be overwritten."""
        return x

    def gather(self, x: "Tensor") -> "Tensor":
        """Every rank's `x`, stacked in the order of the ranks: [ranks, *x.shape]. `x` is not changed."""
        return x[None]

    def run_on_all(self, act: Callable[..., T], *args: Any) -> T:
        """Call `act(*args)` on every rank, and return this rank's result.

        A model in `args` becomes the rank's own model. A tensor or pool that an earlier call has returned, or a view of
        one, becomes the rank's own result of that call. Other tensors are sent with their contents.
        """
        return act(*args)

    def check(self) -> None:
        """Raise `RankLostError` if a rank has ended or is out of step."""

    def close(self) -> None:
        """End the other ranks."""


def _faults(config: ModelConfig, size: int) -> list[str]:
    """The sizes of `config` that cannot be cut for `size` ranks, in words."""
    heads, mixture = config.heads, config.mixture
    faults = []
    if heads % size:
        faults.append(f"its {heads} attention heads are not a multiple of {size}")
    faults += [
        f"its {groups} heads of K/V are neither a multiple nor a divisor of {size}"
        for groups in dict.fromkeys(shape.kv_heads for shape in config.shapes)
        if groups % size and size % groups
    ]
    if mixture is not None and mixture.experts % size:
        faults.append(f"its {mixture.experts} experts are not a multiple of {size}")
    widths = {config.feed_forward(layer).intermediate for layer in range(config.layers)} - {0}
    width = min(widths, default=size)
    if width < size:
        faults.append(f"its feed-forward is {width} wide")
    return faults
