"""Where the time of whole generations goes, operation by operation (the thesis's table 6.2)."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.uniform import Exclusive
from remask.engine.config import EngineConfig
from remask.evals.workload import Workload
from remask.llm import LLM, Work
from remask.policies import CachePolicy

OPERATIONS = ("attention", "mlp", "qkv", "head", "norms", "out", "rest")


def operation_times(llm: LLM, workload: Workload, policy: CachePolicy, config: EngineConfig) -> dict[str, float]:
    """Milliseconds that answering `workload` takes in each operation, without what it calls in others; and "total".

    "rest" is all else: RoPE, packing, sampling, reading and writing caches. On a GPU every timed call waits for the
    device at both ends, which costs small operations most.
    """
    clock = Exclusive()
    model, engine = llm.model, llm.new_engine(config)
    weights = {id(layer.qkv): "qkv" for layer in model.weights.layers}
    weights |= {id(layer.out): "out" for layer in model.weights.layers}
    plain = F.linear

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            _wait(model.device)
            with clock.running(name):
                done = call(*args, **kwargs)
                _wait(model.device)
            return done

        return run

    projections = {name: timed(name, plain) for name in ("qkv", "out")}

    def linear(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor | None) -> torch.Tensor:
        name = weights.get(id(weight))
        done: torch.Tensor = (plain if name is None else projections[name])(x, weight, *bias)
        return done

    with (
        mock.patch.object(model, "attention", timed("attention", model.attention)),
        mock.patch.object(model, "_feed", timed("mlp", model._feed)),
        mock.patch.object(model, "head", timed("head", model.head)),
        mock.patch.object(F, "rms_norm", timed("norms", F.rms_norm)),
        mock.patch.object(F, "linear", linear),
        clock.running("rest"),
    ):
        for output in llm.run([Work(task.request, policy) for task in workload.tasks], engine=engine, progress=False):
            assert output.error is None
    spent = {name: 1e3 * clock.seconds[name] for name in OPERATIONS}
    return spent | {"total": sum(spent.values())}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
