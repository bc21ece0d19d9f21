"""What to load: the settings that `LLM`, commands and deployments hand on to the loader, each declared once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypedDict, get_args

from remask.checks import QUANTIZATIONS, QuantizationChoice
from remask.checks.fields import check, declare, documented
from remask.checks.values import Choice, Flag, OrNull, Settings, Text, TextsByName, Whole

Reads: TypeAlias = Literal["tokens", "text", "chat"]
LoadFormat: TypeAlias = Literal["auto", "dummy"]
MAX_PATH: Final = 4096
MAX_TEMPLATE: Final = 1 << 24
MAX_KEYS: Final = 1024


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """How a model is loaded. Plain data, as it is sent to the processes of other ranks.

    Raises `ConfigError` on a value that is not allowed.
    """

    load_format: LoadFormat = declare(
        "auto",
        Choice(get_args(LoadFormat)),
        "Where weights come from: auto reads a checkpoint, dummy makes random ones of a preset's shape, which read "
        "texts as bytes.",
    )
    tokenizer: str | None = declare(
        None,
        Text(MAX_PATH),
        "Folder, GGUF file or hub id of the tokenizer, where it is not with the model.",
        metavar="PATH_OR_ID",
    )
    chat_template: str | None = declare(
        None, Text(MAX_TEMPLATE, empty=True), "Jinja template in place of the tokenizer's own.", metavar="FILE"
    )
    check_weights: bool = declare(
        True,
        Flag(),
        "Refuse a checkpoint that holds NaN or infinities, by the name of the tensor.",
        flags=("--skip-weight-check",),
    )
    adapter: str | None = declare(
        None,
        Text(MAX_PATH),
        "Low-rank adapter in PEFT's layout, a folder or hub id, that is merged into the weights.",
        metavar="PATH",
    )
    adapters: Mapping[str, str] | None = declare(
        None,
        TextsByName("adapters and where each is"),
        "More adapters by name, which stand beside the weights, each a folder or hub id, or an object of name and "
        "path; a request names one as its model, or as its adapter.",
        flags=("--lora-modules",),
        metavar="NAME=PATH",
    )
    max_lora_rank: int | None = declare(None, Whole(1), "Largest rank of these. By default any.")
    skip_bad_adapters: bool = declare(
        False, Flag(), "Leave out those of these that cannot be used, and log why.", flags=()
    )
    force: bool = declare(
        False,
        Flag(),
        "Download and load a model that has no room in memory or on the disk, and pass over keys of its config.json "
        "that nobody here knows.",
    )
    hf_overrides: Mapping[str, Any] | None = declare(
        None, Settings("keys", MAX_KEYS), "Keys laid over those of the model's config.json."
    )
    dtype: str = declare("auto", Text(64), "auto, float32, bfloat16 or float16.", metavar="DTYPE")
    quantization: QuantizationChoice = declare(
        None,
        Choice(("auto", "none", *QUANTIZATIONS)),
        "Quantize the weights as they are read: int8 or int4 on CPUs, fp8 on CUDA devices that have it, or none; auto: "
        "the fastest that fits on a CPU, the dtype included. Hidden states stay of the dtype, and K/V too unless it is "
        "float32 on a CPU: then they are bfloat16. By default as the model's files advise for CPUs, else the widest "
        "that fits where no dtype is named.",
    )
    device: str = declare(
        "auto",
        Text(64),
        "Device of PyTorch, such as cpu, cuda or cuda:1; auto: CUDA where there is one, else the CPU.",
        metavar="DEVICE",
    )
    threads: int | None = declare(
        None,
        Whole(1),
        "CPU threads to compute on, for the whole process. By default by the model's size and the cores that are free, "
        "unless OMP_NUM_THREADS or torch.set_num_threads has set a number.",
    )
    tensor_parallel: int = declare(
        1,
        Whole(1),
        "Processes that compute the model together, each a part of every layer: on CUDA with a device each, from "
        "device on. They end with LLM.close, with the LLM, or with this process.",
        flags=("--tensor-parallel", "--tensor-parallel-size"),
    )
    reads: Reads | None = declare(
        "tokens",
        OrNull(Choice(get_args(Reads))),
        "What will be asked of the model; one that cannot read it is refused before its weights are read, and a chat "
        "without a template gets a plain one, with a warning. With null no tokenizer is read.",
        flags=(),
    )
    spare_cores: int = declare(0, Whole(0), "Cores that a chosen number of threads leaves to others.", flags=())
    progress: bool = declare(
        True,
        Flag(),
        "Tell on stderr what is loaded, where that takes a while, and how far loading and answers have come: a bar on "
        "a terminal, and else a line every few seconds.",
        flags=(),
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class ModelSettings(LoadSettings):
    """A model, and how it is loaded."""

    model: str


class Loading(TypedDict, total=False):
    """The types of `LoadSettings`, for those who give them as keywords."""

    load_format: LoadFormat
    tokenizer: str | None
    chat_template: str | None
    check_weights: bool
    adapter: str | None
    adapters: Mapping[str, str] | None
    max_lora_rank: int | None
    skip_bad_adapters: bool
    force: bool
    hf_overrides: Mapping[str, Any] | None
    dtype: str
    quantization: QuantizationChoice
    device: str
    threads: int | None
    tensor_parallel: int
    reads: Reads | None
    spare_cores: int
    progress: bool
