"""Compiles the Triton kernels for GPUs that need not be there, and prints the resources that each takes.

    scripts/kernels [--targets 80,86,89,90,100] [--all] [--match TEXT ...]

Every kernel is compiled with the constants and options of its launches, at the shapes of all presets. The numbers of
heads and rows only scale addresses, so shapes that differ in them alone are compiled once. Attention is compiled in
bfloat16 for every target, and in float16 and float32 for sm_90; the other kernels in bfloat16 for sm_80 and sm_90, and
in float32 for sm_90. `--all` compiles all kernels in all three dtypes for every target.

Ends with 1 where a kernel does not compile, takes more shared memory than the device has for a block, or keeps numbers
in local memory instead of registers. Needs Triton, and no GPU.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, Final

import torch

from remask.errors import ConfigError
from remask.families import presets
from remask.model.config import ModelConfig
from remask.model.executors import LARGEST_HEAD
from remask_lab.speed.command import command_parser, run_command

SHARED_BYTES: Final = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}
"""Most shared memory of a block, by compute capability (CUDA C++ Programming Guide, technical specifications)."""
NAMES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
MAX_LOCAL_BYTES: Final = 64  # a thread: compilers keep a few bytes on the stack that are no spilled registers


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel as it is launched.

    Attributes:
        kernel: its module and function, "module:function".
        dtype: the element type of its pointers.
        types: Triton's types of those parameters that are no pointers to `dtype`.
        constants: its constants, and options of the compiler by their names there.
        aligned: parameters whose integers are divisible by 16.
    """

    kernel: str
    dtype: torch.dtype
    _: KW_ONLY
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: frozenset[str] = frozenset()

    @property
    def products(self) -> bool:
        """Whether it multiplies matrices, which only attention does."""
        return self.kernel.endswith("_attend")

    @property
    def label(self) -> str:
        """Its name, dtype and constants."""
        constants = " ".join(f"{name}={int(value)}" for name, value in self.constants.items())
        return f"{self.kernel.partition(':')[2]} {NAMES[self.dtype]} {constants}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """The resources of a compiled kernel.

    Attributes:
        shared: bytes of shared memory a block.
        registers, local: registers, and bytes of local memory, a thread.
        matrix: number and name of its instructions for matrix units, in words.
        loop: instructions of its longest loop, 0 without one.
    """

    shared: int
    registers: int
    local: int
    matrix: str
    loop: int = 0

    def problem(self, target: int) -> str | None:
        """Why it cannot run well on devices of compute capability `target` / 10, in words; None where it can."""
        if self.shared > SHARED_BYTES[target]:
            return f"{self.shared} bytes of shared memory, and the device has {SHARED_BYTES[target]}"
        return f"{self.local} bytes of registers a thread are spilled" if self.local > MAX_LOCAL_BYTES else None


def main() -> None:
    """Compile, print a line for each kernel, and exit with 1 where one has a problem or none was compiled."""
    parser = command_parser(__doc__)
    parser.add_argument("--targets", default=",".join(map(str, SHARED_BYTES)), help="compute capabilities, x 10")
    parser.add_argument("--all", action="store_true", help="all kernels in all dtypes for every target")
    parser.add_argument("--match", action="append", help="only kernels whose line begins with this, behind the target")
    args = parser.parse_args()
    known = [str(target) for target in SHARED_BYTES]
    targets = args.targets.split(",")
    for name in targets:
        if name not in known:
            raise ConfigError(f"--targets names {name!r}; known: {', '.join(known)}")
    if _interpreted():
        raise ConfigError("TRITON_INTERPRET=1 leaves nothing to compile; unset it")
    prefixes = tuple(args.match or [""])
    matching = [variant for variant in variants(presets().values()) if variant.label.startswith(prefixes)]
    jobs = [
        (variant, target)
        for target, variant in product(map(int, targets), matching)
        if args.all or usual(variant, target)
    ]
    failed = 0
    with ProcessPoolExecutor() as pool:
        for (variant, target), result in zip(jobs, pool.map(partial(_try_compile), jobs, chunksize=4), strict=True):
            problem = result if isinstance(result, str) else result.problem(target)
            failed += problem is not None
            line = f"sm_{target} {variant.label}"
            if not isinstance(result, str):
                line += f": {result.registers} registers, {result.shared} B shared, {result.local} B local, "
                line += result.matrix + (f", loop of {result.loop} instructions" if result.loop else "")
            print(line if problem is None else f"FAILED {line}: {problem}", flush=True)
    print(f"{len(jobs)} kernels compiled by {_version()}, {failed} failed")
    sys.exit(1 if failed or not jobs else 0)


def usual(variant: Variant, target: int) -> bool:
    """Whether a run without `--all` compiles `variant` for `target`."""
    if variant.products:
        return variant.dtype == torch.bfloat16 or target == 90
    return (variant.dtype, target) in {(torch.bfloat16, 80), (torch.bfloat16, 90), (torch.float32, 90)}


def variants(shapes: Iterable[ModelConfig]) -> Iterator[Variant]:
    """Yield all kernels at those `shapes` that Triton's attention serves, in all dtypes, without repetitions."""
    keys: set[str] = set()
    served_shapes = (  # PyTorch computes models with larger heads
        shape for shape in shapes if max(layer_shape.head_dim for layer_shape in shape.shapes) <= LARGEST_HEAD
    )
    for shape, dtype in product(served_shapes, NAMES):
        for variant in chain(_attention(shape, dtype), _layer(shape, dtype), _sampling(dtype)):
            key = re.sub(r" HEADS=\d+", "", variant.label) if "_heads" not in variant.kernel else variant.label
            if key not in keys:
                keys.add(key)
                yield variant


def _attention(shape: ModelConfig, dtype: torch.dtype) -> Iterator[Variant]:
    """Yield both kernels of `remask.model.attention_triton`, with and without merging and attention sinks."""
    from remask.model import attention_triton

    module = attention_triton.__name__
    heads, groups, dim, capped = shape.heads, shape.kv_heads, shape.head_dim, shape.score_cap is not None
    numbers = {"scale": "fp32", "cap": "fp32", "sums": "*fp32"}
    strides = dict.fromkeys(("q_row", "q_head", "k_slot", "k_head", "v_slot", "v_head"), "i32")
    indices = dict.fromkeys(("units", "slots", "reach", "skip"), "*i32")
    for merged in (False, True):
        _, options = attention_triton.attend_options(heads, groups, dim, dtype, capped=capped, merges=merged)
        types = numbers | indices | strides | ({"outputs": "*fp32"} if merged else {})
        yield Variant(f"{module}:_attend", dtype, types=types, constants=options, aligned=frozenset(strides))
    strides = dict.fromkeys(("q_row", "q_head"), "i32")
    types = numbers | strides | {"partial": "*fp32", "order": "*i32", "starts": "*i32"}
    for sink in {False, shape.sink is not None}:
        _, options = attention_triton.merge_options(heads, groups, dim, capped=capped, sink=sink)
        yield Variant(f"{module}:_merge", dtype, types=types, constants=options, aligned=frozenset(strides))


def _layer(shape: ModelConfig, dtype: torch.dtype) -> Iterator[Variant]:
    """Yield the kernels of `remask.model.layer_triton`."""
    from remask.model import layer_triton

    module = layer_triton.__name__
    types = {"slots": "*i64", "eps": "fp32"}
    for add, norm, store in ((False, True, False), (True, True, True), (True, False, True)):
        options = layer_triton.sum_options(shape.hidden, add=add, norm=norm, store=store, centred=shape.norm == "layer")
        yield Variant(f"{module}:_sum_and_norm", dtype, types=types, constants=options)
    types = types | (dict.fromkeys(("cos", "sin"), "*fp32") if shape.rope_float32 else {})
    yield Variant(f"{module}:_heads", dtype, types=types, constants=layer_triton.heads_options(shape))
    sizes = {"total": "i32", "SIZE": "i32"}
    options = {"BLOCK": layer_triton.BLOCK, "GELU": shape.mlp == "geglu"}
    yield Variant(f"{module}:_gate", dtype, types=sizes, constants=options, aligned=frozenset(sizes))


def _sampling(dtype: torch.dtype) -> Iterator[Variant]:
    """Yield the kernels of `remask.sampling.kernels_triton`."""
    from remask.sampling import kernels_triton

    module = kernels_triton.__name__
    types = {"out": "*fp32", **dict.fromkeys(("rows", "size", "barred", "stride"), "i32")}
    aligned = frozenset(("size", "stride"))
    yield Variant(f"{module}:_greedy", dtype, types=types, constants={"BLOCK": kernels_triton.BLOCK}, aligned=aligned)
    types = {"answer": "*fp32", **dict.fromkeys(("values", "rules", "kinds", "targets"), "*i64")}
    types |= dict.fromkeys(("requests", "total", "last"), "i32")
    for rows in (32, kernels_triton.MAX_ROWS):
        options = kernels_triton.transfer_options(rows) | {"CANVASES": 1}
        yield Variant(f"{module}:_transfer", dtype, types=types, constants=options)


def compile_variant(variant: Variant, target: int) -> Compiled:
    """Compile `variant` for CUDA devices of compute capability `target` / 10. Raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from remask.model.layer_triton import OPTIONS

    module, _, name = variant.kernel.partition(":")
    kernel = getattr(__import__(module, fromlist=[name]), name)
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    hints: dict[tuple[int], list[list[Any]]] = {}
    constant_values = {**variant.constants, "EMULATED": False}  # it is True in Triton's interpreter alone
    for index, parameter in enumerate(kernel.arg_names):
        if parameter in constant_values:
            signature[parameter] = "constexpr"
            constants[(index,)] = constant_values[parameter]
            continue
        signature[parameter] = variant.types.get(parameter, f"*{NAMES[variant.dtype]}")
        if signature[parameter].startswith("*") or parameter in variant.aligned:
            hints[(index,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in variant.constants.items() if name not in kernel.arg_names}
    options |= OPTIONS
    source = ASTSource(kernel, signature, constants, hints)
    binary = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    registers, local = _usage(binary.asm["cubin"])
    instructions = re.findall(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", binary.asm["ptx"])
    matrix = f"{len(instructions)} {instructions[0]}" if instructions else "no matrix units"
    return Compiled(
        shared=binary.metadata.shared,
        registers=registers,
        local=local,
        matrix=matrix,
        loop=_longest_loop(binary.asm["cubin"]),
    )


def _try_compile(job: tuple[Variant, int]) -> Compiled | str:
    """`compile_variant` of a variant and a target, or the error of the compiler as text."""
    try:
        return compile_variant(*job)
    except Exception as error:  # of a compiler, whose errors are of many types
        return f"{type(error).__name__}: {' '.join(str(error).split())[-400:]}"


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory a thread, the stack included. Raises `ValueError` on other output."""
    report = _tool_output("cuobjdump", "--dump-resource-usage", cubin)
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    if usage is None:
        raise ValueError(f"cuobjdump printed no registers: {report[:200]}")
    return int(usage[1]), int(usage[2]) + int(usage[3])


def _longest_loop(cubin: bytes) -> int:
    """Instructions of the longest loop: from a label to the last jump back to it; 0 without a loop."""
    labels: dict[str, int] = {}
    count = longest = 0
    for line in _tool_output("nvdisasm", "--print-code", cubin).splitlines():
        label = re.match(r"\s*(\.L_\w+):", line)
        jump = re.search(r"BRA.*`\((\.L_\w+)\)", line)
        if label is not None:
            labels[label[1]] = count
        if re.search(r"/\*[0-9a-f]{4,}\*/", line):
            count += 1
            if jump is not None and jump[1] in labels and labels[jump[1]] < count - 1:  # the last jump is to itself
                longest = max(longest, count - labels[jump[1]])
    return longest


def _tool_output(tool: str, option: str, cubin: bytes) -> str:
    """The output for a compiled kernel of one of the CUDA tools that Triton brings."""
    import triton

    path = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(path), option, file.name], capture_output=True, text=True, check=True).stdout


def _interpreted() -> bool:
    from remask.model.layer_triton import INTERPRETED

    return INTERPRETED


def _version() -> str:
    import triton

    return f"Triton {triton.__version__}"


if __name__ == "__main__":
    sys.exit(run_command(main))
