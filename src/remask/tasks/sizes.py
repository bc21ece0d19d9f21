"""What the sizes of a workload may be."""

from remask.errors import ConfigError


def check_sizes(requests: int, prompts: int) -> None:
    """Raise `ConfigError` where a workload would have no request, or fewer than it has system prompts."""
    if requests < 1:
        raise ConfigError(f"requests is {requests}; a workload has at least 1.")
    if not 1 <= prompts <= requests:
        raise ConfigError(f"prompts is {prompts}; it lies between 1 and the number of requests, {requests}.")
