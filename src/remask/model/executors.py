"""How a model computes on a device: attention, the operations between matrix products, and device graphs."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from remask.checks import AttentionName
from remask.errors import ConfigError
from remask.model.attention import Attention, NumpyAttention
from remask.model.attention_torch import TorchAttention
from remask.model.config import ModelConfig
from remask.model.graphs import Graphs, capture_on, max_rows
from remask.model.pool import Pool
from remask.model.transformer import Transformer

if TYPE_CHECKING:
    from remask.model.layer_triton import TritonLayer

LARGEST_HEAD = 256  # channels of a head that the Triton kernels compute


@dataclass(frozen=True, slots=True)
class Executor:
    """A way of computing, and the reason for its choice in words."""

    name: AttentionName  # never "auto"
    why: str

    def attention(self, config: ModelConfig) -> Attention:
        """The attention of a model of the shape `config`."""
        if self.name == "triton":
            from remask.model.attention_triton import TritonAttention

            return TritonAttention(config.score_cap)
        return NumpyAttention(config.score_cap) if self.name == "numpy" else TorchAttention(config.score_cap)

    def kernels(self, model: Transformer) -> "TritonLayer | None":
        """The kernels between the products of `model`. Returns None if PyTorch's own operations compute there."""
        # A norm of all ranks' heads together is a sum over ranks.
        if self.name != "triton" or (model.config.qk_norm == "whole" and model.ranks.several):
            return None
        # The kernel for heads neither ties nor norms values, and has one shape for all layers.
        if model.config.value_norm or model.config.tied_values or not _has_one_head_shape(model):
            return None
        from remask.model.layer_triton import TritonLayer

        return TritonLayer(model.rank_config)


def set_executor(model: Transformer, executor: Executor) -> None:
    """Make `model` compute by `executor`, in place."""
    model.attention = executor.attention(model.config)
    model.kernels = executor.kernels(model)


def _has_one_head_shape(model: Transformer) -> bool:
    """Whether K/V heads are equally many and equally wide in all layers."""
    return len({(config.kv_heads, config.head_dim) for config in model.rank_configs}) == 1


def graphs_obstacle(model: Transformer) -> str | None:
    """The reason why graphs cannot run the layers of `model`, in words. Returns None if they can."""
    if model.ranks.several:
        return (
            f"graphs=True needs a model on one device, and this one is on {model.ranks.shard.size}: sums over ranks "
            "were never captured; leave one of graphs and tensor_parallel out"
        )
    if model.config.mixture is not None:
        return (
            "graphs=True needs a dense model: how many rows each expert computes is known on the device alone; leave "
            "graphs out"
        )
    if model.config.self_conditioning or not _has_one_head_shape(model):
        return "graphs=True needs rows and layers that are all computed alike; leave graphs out"
    return None


def make_graphs(model: Transformer, pool: Pool) -> Graphs:
    """Graphs that run the layers of `model` over `pool`. Raises `ConfigError` if model or device do not allow it."""
    obstacle = graphs_obstacle(model)
    if obstacle is not None:
        raise ConfigError(obstacle)
    return Graphs(pool, capture_on(model.device), model.attention, max_rows(model.config))


def resolve_executor(
    name: AttentionName, config: ModelConfig, device: torch.device, *, batch_invariant: bool = False
) -> Executor:
    """The executor called `name` for a model of the shape `config` on `device`.

    "auto" is "triton" on CUDA devices if it can run there, and "torch" otherwise. Raises `ConfigError` if `name` is
    "triton" and it cannot run, or not `batch_invariant`.
    """
    if name not in ("auto", "triton"):
        return Executor(name, "as asked")
    if name == "auto" and device.type != "cuda":
        return Executor("torch", f"auto: device {device.type}")
    obstacle = _triton_obstacle(config, device, batch_invariant)
    if name == "triton":
        if obstacle is not None:
            raise ConfigError(f"attention='triton' cannot run: {obstacle}. Use 'auto' or 'torch'")
        return Executor("triton", "as asked")
    return Executor("triton", "auto: device cuda") if obstacle is None else Executor("torch", f"auto: {obstacle}")


def _triton_obstacle(config: ModelConfig, device: torch.device, batch_invariant: bool) -> str | None:
    """The reason why the Triton kernels cannot compute a model's attention. Returns None if they can."""
    if batch_invariant:
        return "batch_invariant=True, and it is not shown that its kernels give a row the same bits at every place"
    widest = max(shape.head_dim for shape in config.shapes)
    if widest > LARGEST_HEAD:
        return f"it computes heads of at most {LARGEST_HEAD} channels, and this model's have {widest}"
    if find_spec("triton") is None:
        return "it needs triton: pip install triton"
    from remask.model.layer_triton import INTERPRETED

    if device.type != "cuda" and not INTERPRETED:
        return (
            f"it needs a CUDA device, and the device is {device} (with TRITON_INTERPRET=1 its kernels run on a CPU, "
            "thousands of times slower, for tests)"
        )
    return None
