"""Which errors concern the whole engine, and the message of a request that ends with an error."""

import logging

import torch

from remask.engine.request import Request
from remask.errors import IntegrityError, RankLostError

log = logging.getLogger(__name__)

# How PyTorch's errors begin or what they contain where the device itself failed, and not one kernel's arguments.
_DEVICE = ("CUDA error", "HIP error", "CUBLAS_STATUS", "CUDNN_STATUS", "NCCL error", "device-side assert")
_NO_MEMORY = "DefaultCPUAllocator"


def poisons(error: Exception) -> bool:
    """Whether the device or the engine's memory cannot be trusted after `error`."""
    if isinstance(error, IntegrityError | RankLostError | torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _DEVICE)


def exhausts(error: Exception) -> bool:
    """Whether `error` means that memory ran out."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY in str(error)


def failure(request: Request, error: Exception, what: str) -> str:
    """Log that `what` failed with `error` for `request`. Returns the message of the request's result."""
    log.error("request %s: %s: %s", request.id, what, error, exc_info=error)
    return f"{what}: {error}"
