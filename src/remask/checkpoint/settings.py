"""What to load: the settings that `LLM`, commands and deployments hand on to the loader."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from remask.checks import QuantizationChoice
from remask.checks.values import one_of, whole

Reads: TypeAlias = Literal["tokens", "text", "chat"]


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A model, and how it is loaded: the arguments of `LLM` of these names, which says what they mean.

    Plain data, as it is sent to the processes of other ranks. With `reads=None` no tokenizer is read. Raises
    `ConfigError` on a value that is not allowed.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    quantization: QuantizationChoice = None
    load_format: str = "auto"
    hf_overrides: Mapping[str, Any] | None = None
    check_weights: bool = True
    adapter: str | None = None
    adapters: Mapping[str, str] | None = None
    max_lora_rank: int | None = None
    skip_bad_adapters: bool = False
    tokenizer: str | None = None
    chat_template: str | None = None
    reads: Reads | None = "tokens"
    threads: int | None = None
    spare_cores: int = 0
    tensor_parallel: int = 1
    progress: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        one_of("load_format", self.load_format, ("auto", "dummy"))
        if self.reads is not None:
            one_of("reads", self.reads, get_args(Reads))
        whole("threads", self.threads, low=1, optional=True)
        whole("spare_cores", self.spare_cores, low=0)
        whole("tensor_parallel", self.tensor_parallel, low=1)
        whole("max_lora_rank", self.max_lora_rank, low=1, optional=True)
