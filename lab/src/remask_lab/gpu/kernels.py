"""Compiles the Triton kernels for GPUs that need not be there, and says what they take of them.

    scripts/kernels [--targets 80,86,89,90,100] [--all] [--match TEXT ...]

Every kernel is compiled with the constants and options of its launch, at the shapes of all presets, with and without
what it can do. Number of heads and rows of a model only scale addresses, so shapes that differ in them alone are
compiled once. Attention is compiled in bfloat16 for every target, and in float16 and float32 for sm_90; what stands
between products in bfloat16 for sm_80 and sm_90, and in float32 for sm_90. `--all` compiles all kernels in all three
dtypes for every target.

Ends with 1 where a kernel does not compile, takes more shared memory than the device has for a block, or keeps numbers
in local memory instead of registers. Needs Triton, and no GPU.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
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
# Bytes a thread. Compilers keep a few on the stack that are no spilled registers.
SPILLS: Final = 64


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel as it is launched: `kernel` names its module and function.

    Attributes:
        pointers: the dtypes that its pointers and numbers have, by parameter.
        constants: its constants, and options of the compiler by their names there.
        aligned: numbers that are divisible by 16.
    """

    kernel: str
    dtype: torch.dtype
    pointers: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: frozenset[str] = frozenset()

    @property
    def products(self) -> bool:
        """Whether it multiplies matrices."""
        return self.kernel.endswith("_attend")

    @property
    def label(self) -> str:
        """Its name, dtype and constants."""
        constants = " ".join(f"{name}={int(value)}" for name, value in self.constants.items() if name != "EMULATED")
        return f"{self.kernel.partition(':')[2]} {NAMES[self.dtype]} {constants}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compiled kernel takes: bytes of shared memory a block; registers and bytes of local memory a thread.

    `loop` counts the instructions of its longest loop, 0 without one; `matrix` tells those of the matrix units.
    """

    shared: int
    registers: int
    local: int
    matrix: str
    loop: int = 0

    def problem(self, target: int) -> str | None:
        """Why it cannot serve on devices of compute capability `target`."""
        if self.shared > SHARED_BYTES[target]:
            return f"{self.shared} bytes of shared memory, and the device has {SHARED_BYTES[target]}"
        return f"{self.local} bytes of registers a thread are spilled" if self.local > SPILLS else None


def main() -> None:
    """Compile, print a line for each kernel, and end with 1 where one cannot serve."""
    parser = command_parser(__doc__)
    parser.add_argument("--targets", default=",".join(map(str, SHARED_BYTES)), help="compute capabilities, x 10")
    parser.add_argument("--all", action="store_true", help="all kernels in all dtypes for every target")
    parser.add_argument("--match", action="append", help="only kernels whose line begins with this, behind the target")
    args = parser.parse_args()
    known = [str(each) for each in SHARED_BYTES]
    targets = args.targets.split(",")
    for each in targets:
        if each not in known:
            raise ConfigError(f"--targets names {each!r}; known: {', '.join(known)}")
    if _interpreted():
        raise ConfigError("TRITON_INTERPRET=1 leaves nothing to compile; unset it")
    work = [
        (variant, int(target))
        for target in targets
        for variant in variants(presets().values())
        if (args.all or usual(variant, int(target))) and variant.label.startswith(tuple(args.match or [""]))
    ]
    failed = 0
    with ProcessPoolExecutor() as pool:
        for (variant, target), found in zip(work, pool.map(partial(_compiled), work, chunksize=4), strict=True):
            problem = found if isinstance(found, str) else found.problem(target)
            failed += problem is not None
            line = f"sm_{target} {variant.label}"
            if not isinstance(found, str):
                line += f": {found.registers} registers, {found.shared} B shared, {found.local} B local, {found.matrix}"
                line += f", loop of {found.loop} instructions" if found.loop else ""
            print(line if problem is None else f"FAILED {line}: {problem}", flush=True)
    print(f"{len(work)} kernels compiled by {_version()}, {failed} failed")
    sys.exit(1 if failed or not work else 0)


def usual(variant: Variant, target: int) -> bool:
    """Whether a run without `--all` compiles `variant` for `target`."""
    if variant.products:
        return variant.dtype == torch.bfloat16 or target == 90
    return (variant.dtype, target) in {(torch.bfloat16, 80), (torch.bfloat16, 90), (torch.float32, 90)}


def variants(shapes: Iterable[ModelConfig]) -> Iterator[Variant]:
    """All kernels at all `shapes` that Triton's attention serves, in all dtypes, each once."""
    seen: set[str] = set()
    for shape in shapes:
        if max(each.head_dim for each in shape.shapes) > LARGEST_HEAD:
            continue  # PyTorch computes such models
        for dtype in NAMES:
            for each in _of(shape, dtype):
                key = re.sub(r" (HEADS)=\d+", "", each.label) if "_heads" not in each.kernel else each.label
                if key not in seen:
                    seen.add(key)
                    yield each


def _of(shape: ModelConfig, dtype: torch.dtype) -> Iterator[Variant]:
    from remask.model import attention_triton, layer_triton
    from remask.sampling import kernels_triton

    heads, groups, dim, capped = shape.heads, shape.kv_heads, shape.head_dim, shape.score_cap is not None
    own = f"*{NAMES[dtype]}"
    numbers = {"scale": "fp32", "cap": "fp32"}
    strides = ("q_row", "q_head", "k_slot", "k_head", "v_slot", "v_head")
    plain = {"EMULATED": False}
    for merged in (False, True):
        _, options = attention_triton.attend_options(heads, groups, dim, dtype, capped=capped, merges=merged)
        pointers = {"q": own, "k": own, "v": own, "units": "*i32", "slots": "*i32", "reach": "*i32"}
        pointers |= {"skip": "*i32", "sums": "*fp32", "outputs": "*fp32" if merged else own}
        pointers |= numbers | dict.fromkeys(strides, "i32")
        yield Variant("remask.model.attention_triton:_attend", dtype, pointers, options | plain, frozenset(strides))
    for sink in {False, shape.sink is not None}:
        _, options = attention_triton.merge_options(heads, groups, dim, capped=capped, sink=sink)
        pointers = {"q": own, "partial": "*fp32", "sums": "*fp32", "order": "*i32", "starts": "*i32", "sink_k": own}
        pointers |= {"sink_v": own, "out": own, **numbers, **dict.fromkeys(strides[:2], "i32")}
        yield Variant("remask.model.attention_triton:_merge", dtype, pointers, options | plain, frozenset(strides[:2]))
    layer = "remask.model.layer_triton"
    for add, norm, store in ((False, True, False), (True, True, True), (True, False, True)):
        options = layer_triton.sum_options(shape.hidden, add=add, norm=norm, store=store, centred=shape.norm == "layer")
        pointers = {"h": own, "addend": own, "weight": own, "out": own, "outputs": own, "slots": "*i64", "eps": "fp32"}
        yield Variant(f"{layer}:_sum_and_norm", dtype, pointers, options | plain)
    pointers = dict.fromkeys(("qkv", "q_norm", "k_norm", "cos", "sin", "q", "k", "v"), own)
    pointers |= {"slots": "*i64", "eps": "fp32"}
    if shape.rope_float32:
        pointers |= dict.fromkeys(("cos", "sin"), "*fp32")
    yield Variant(f"{layer}:_heads", dtype, pointers, layer_triton.heads_options(shape) | plain)
    pointers = {"x": own, "out": own, "total": "i32", "SIZE": "i32"}
    options = {"BLOCK": layer_triton.BLOCK, "GELU": shape.mlp == "geglu"}
    yield Variant(f"{layer}:_gate", dtype, pointers, options | plain, frozenset(("total", "SIZE")))
    pointers = {"logits": own, "out": "*fp32", **dict.fromkeys(("rows", "size", "barred", "stride"), "i32")}
    options = {"BLOCK": kernels_triton.BLOCK}
    aligned = frozenset(("size", "stride"))
    yield Variant("remask.sampling.kernels_triton:_greedy", dtype, pointers, options, aligned)
    pointers = {"answer": "*fp32", **dict.fromkeys(("values", "rules", "kinds", "targets"), "*i64")}
    pointers |= dict.fromkeys(("requests", "total", "last"), "i32")
    for rows in (32, kernels_triton.MAX_ROWS):
        options = kernels_triton.transfer_options(rows) | {"CANVASES": 1}
        yield Variant("remask.sampling.kernels_triton:_transfer", dtype, pointers, options)


def compiled(variant: Variant, target: int) -> Compiled:
    """Compile for a CUDA device of compute capability `target` / 10. Raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from remask.model.layer_triton import OPTIONS

    module, _, name = variant.kernel.partition(":")
    kernel = getattr(__import__(module, fromlist=[name]), name)
    signature, constants, hints = {}, {}, {}
    for place, parameter in enumerate(kernel.arg_names):
        if parameter in variant.constants:
            signature[parameter], constants[(place,)] = "constexpr", variant.constants[parameter]
            continue
        signature[parameter] = variant.pointers[parameter]
        if signature[parameter].startswith("*") or parameter in variant.aligned:
            hints[(place,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in variant.constants.items() if name not in kernel.arg_names}
    options |= OPTIONS
    source = ASTSource(kernel, signature, constants, hints)
    binary = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    registers, local = _usage(binary.asm["cubin"])
    found = re.findall(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", binary.asm["ptx"])
    matrix = f"{len(found)} {found[0]}" if found else "no matrix units"
    return Compiled(binary.metadata.shared, registers, local, matrix, _longest_loop(binary.asm["cubin"]))


def _compiled(work: tuple[Variant, int]) -> Compiled | str:
    try:
        return compiled(*work)
    except Exception as error:  # of a compiler, whose errors are of many types
        return f"{type(error).__name__}: {' '.join(str(error).split())[-400:]}"


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of local memory a thread."""
    told = _told("cuobjdump", "--dump-resource-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told)
    if found is None:
        raise ValueError(f"cuobjdump told nothing of registers: {told[:200]}")
    return int(found[1]), int(found[2]) + int(found[3])


def _longest_loop(cubin: bytes) -> int:
    """Instructions from a label to the jump back to it, in the longest such stretch."""
    labels: dict[str, int] = {}
    count = longest = 0
    for line in _told("nvdisasm", "--print-code", cubin).splitlines():
        label, jump = re.match(r"\s*(\.L_\w+):", line), re.search(r"BRA.*`\((\.L_\w+)\)", line)
        if label is not None:
            labels[label[1]] = count
        if re.search(r"/\*[0-9a-f]{4,}\*/", line):
            count += 1
            if jump is not None and jump[1] in labels and labels[jump[1]] < count - 1:  # the last jump is to itself
                longest = max(longest, count - labels[jump[1]])
    return longest


def _told(tool: str, option: str, cubin: bytes) -> str:
    """What a tool that comes with Triton prints of a compiled kernel."""
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
