"""The parts of a run. Each yields what it has found so far, so that one that is ended keeps what it had."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias
from xml.etree import ElementTree

import torch

from remask import LLM
from remask.checkpoint.dummy import dummy_weights
from remask.checkpoint.presets import presets
from remask.engine.proof import prove
from remask.errors import ConfigError, RemaskError
from remask.model.attention_names import AttentionName
from remask.model.executors import check_graphs, resolve_executor
from remask.model.quantization_names import Quantization
from remask.model.transformer import Transformer
from remask_lab.gpu.children import run_child
from remask_lab.gpu.results import Result
from remask_lab.gpu.shapes import Shape
from remask_lab.gpu.steady import Cell, measure_cell
from remask_lab.ops.peaks import Peaks, measure_peaks
from remask_lab.records.machine import host, versions

CHECKOUT = Path(__file__).parents[3]
COMPILER = CHECKOUT / "scripts" / "kernels"
KERNELS = ("tests/model/test_layer_triton.py", "tests/model/test_capture.py", "tests/engine/test_attention.py")
GOLDENS = tuple(f"tests/cli/test_goldens{kind}.py" for kind in ("", "_block_causal", "_uniform", "_moe"))

Finding: TypeAlias = dict[str, Any]


class PartError(Exception):
    """What a part has found is wrong."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the parts of a run share.

    Attributes:
        device: the device that is proven and measured.
        shape: the model and its requests.
        folder: where results go.
        ends: when the part must be over, on the clock of `time.monotonic`, which all processes of a machine share.
        tests: a pytest expression (`-k`) that the names of tests must match; empty: all run.
    """

    device: torch.device
    shape: Shape
    folder: Path
    ends: float
    tests: str = ""

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.ends - time.monotonic()


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a run.

    Attributes:
        about: what it shows, as a heading says it.
        work: yields the part's finding, each time as far as it has come. Raises `PartError` on a finding that is wrong.
        share: of the time that is left when it begins, what it may take.
    """

    about: str
    work: Callable[[Setting], Iterator[Finding]]
    share: float


def _compile(setting: Setting) -> Iterator[Finding]:
    """Compiling needs no device: what fails here fails on every one."""
    output = setting.folder / "compile.txt"
    words = [str(COMPILER)]
    if setting.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(setting.device)
        words += ["--targets", f"{10 * major + minor}", "--all"]
    else:  # a rehearsal
        words += ["--targets", "90", "--match", "_gate"]
    status = run_child(words, CHECKOUT, output, setting.left)
    lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    yield {"status": status, "last": lines[-1] if lines else ""}
    if status != 0:
        raise PartError(f"{COMPILER.name} {'was out of time' if status is None else 'failed'}; {output.name} says how")


def _proof(setting: Setting) -> Iterator[Finding]:
    """What the start of an engine proves, on a small model of every family and on the one that is timed.

    On a CPU NumPy's attention stands in for Triton's, and graphs are not tried, as they need a CUDA device.
    """
    device, kernels = setting.device, setting.device.type == "cuda"
    name: AttentionName = "triton" if kernels else "numpy"
    found: Finding = {"executor": name, "proven": [], "faults": [], "graph_faults": []}
    shapes = presets()
    tiny = [(preset, dtype) for preset in shapes if preset.endswith("-tiny") for dtype in _proof_dtypes(kernels)]
    for preset, dtype in [*tiny, *([(setting.shape.preset, setting.shape.dtype)] if kernels else [])]:
        config = shapes[preset]
        model = Transformer(config, dummy_weights(config, getattr(torch, dtype), device))
        for graphs in (False, True) if kernels else (False,):
            if graphs and check_graphs(model) is not None:
                continue
            try:
                executor = resolve_executor(name, config, device)
                faults = prove(model, executor, graphs=graphs)
            except ConfigError as error:
                faults = [str(error)]
            found["graph_faults" if graphs else "faults"] += [f"{preset} {dtype}: {fault}" for fault in faults]
        found["proven"].append(f"{preset} {dtype}")
        yield found
    if found["faults"] or found["graph_faults"]:
        raise PartError("; ".join([*found["faults"], *found["graph_faults"]]))


def _proof_dtypes(kernels: bool) -> tuple[str, ...]:
    return ("bfloat16", "float32") if kernels else ("float32",)


def _machine(setting: Setting) -> Iterator[Finding]:
    device = setting.device
    found: Finding = {"host": host(), "versions": {**versions(), "triton": _triton()}, "device": str(device)}
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        found["gpu"] = {"name": facts.name, "memory": facts.total_memory, "capability": [facts.major, facts.minor]}
    found["peaks"] = {}
    for name in dict.fromkeys((setting.shape.dtype, "float32")):
        found["peaks"][name] = asdict(measure_peaks(device, getattr(torch, name)))
        yield found


def _triton() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def _tests(name: str, *words: str) -> Callable[[Setting], Iterator[Finding]]:
    """The work of the part `name`, which runs tests as they are, on the device: pytest with these files and options."""

    def work(setting: Setting) -> Iterator[Finding]:
        report, output = setting.folder / f"{name}.xml", setting.folder / f"{name}.txt"
        report.unlink(missing_ok=True)
        options = ["--tier", "thorough", "-p", "no:cacheprovider", "--device", str(setting.device)]
        options.append(f"--junitxml={report}")
        chosen = ["-k", setting.tests] if setting.tests else []
        run_child([sys.executable, "-m", "pytest", *options, *chosen, *words], CHECKOUT, output, setting.left)
        if not report.exists():
            raise PartError(f"the tests did not come to their end; {output.name} holds what they printed")
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
        failed = [str(case.get("name")) for case in cases if _has(case, "failure") or _has(case, "error")]
        skipped = sum(_has(case, "skipped") for case in cases)
        yield {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}
        if failed or not cases:
            raise PartError(f"{len(failed)} of {len(cases)} tests failed; {output.name} says how")

    return work


def _has(case: ElementTree.Element, child: str) -> bool:
    return case.find(child) is not None


def read_peaks(folder: Path, dtype: str) -> Peaks:
    """The peaks that the part `machine` measured. Raises `ConfigError` where it has not."""
    machine = Result.read(folder, "machine")
    peaks = {} if machine is None else machine.found.get("peaks", {})
    if dtype not in peaks:
        raise ConfigError(f"{folder} holds no peaks of {dtype}; run the part 'machine' first")
    return Peaks(**peaks[dtype])


def _attention(setting: Setting) -> AttentionName:
    """What computes attention where speed is measured: what was proven, whatever an earlier run has decided."""
    proof = Result.read(setting.folder, "proof")
    right = proof is not None and proof.found.get("executor") == "triton" and not proof.found["faults"]
    return "triton" if right else "torch"


def _speed(
    cells: Callable[[Shape], Iterable[Cell]], *, quantised: bool = False
) -> Callable[[Setting], Iterator[Finding]]:
    """The work of a part that measures `cells`. A cell that is refused, or for which memory is short, is told.

    With `quantised` the model's weights are quantized: fp8 on CUDA devices, and int8 on a CPU.
    """

    def work(setting: Setting) -> Iterator[Finding]:
        shape = setting.shape
        few: Quantization = "fp8" if setting.device.type == "cuda" else "int8"
        quantization = few if quantised else None
        peaks = read_peaks(setting.folder, shape.dtype)
        llm = LLM(
            shape.preset,
            load_format="dummy",
            dtype=shape.dtype,
            device=str(setting.device),
            quantization=quantization,
        )
        attention = _attention(setting)
        found: Finding = {"shape": asdict(shape), "quantization": quantization, "rows": [], "refused": []}
        for cell in cells(shape):
            try:
                found["rows"].append(measure_cell(llm, shape, cell, peaks, attention))
            except (RemaskError, torch.OutOfMemoryError) as error:
                found["refused"].append({"cell": cell.name, "reason": str(error).splitlines()[0]})
            yield found

    return work


R16, NO_REFRESH = {"refresh_interval": 16}, {"refresh_interval": None}
OVERLAP, GRAPHS = {"overlap": True}, {"graphs": True}
BOTH = "bicache+block-dual"


def _policies(shape: Shape) -> Iterator[Cell]:
    """Every policy at every number of requests, the slowest last."""
    depth = {"depth": shape.depth}
    for cache, settings, tokens, engine in (
        (BOTH, depth | R16, 2, {}),
        (BOTH, depth | R16, 2, OVERLAP),
        (BOTH, depth | R16, 2, GRAPHS),
        (BOTH, depth | R16, 2, OVERLAP | GRAPHS),
        ("block-dual", {}, 2, {}),
        ("block-dual", {}, 2, OVERLAP),
        ("block-dual", {}, 2, GRAPHS),
        ("block-dual", {}, 2, OVERLAP | GRAPHS),
        (BOTH, depth | NO_REFRESH, 2, {}),
        (BOTH, depth | R16, 4, {}),
        (BOTH, depth | NO_REFRESH, 4, {}),
        ("bicache", depth | R16, 2, {}),
        ("none", {}, 2, {}),
    ):
        for requests in shape.batches:
            yield Cell(cache, requests, settings, tokens, engine)


def _quantised(shape: Shape) -> Iterator[Cell]:
    """What has the most passes of few rows, and what has the most rows, alone and many at a time."""
    for requests in shape.batches:
        yield Cell(BOTH, requests, {"depth": shape.depth} | R16)
        yield Cell(BOTH, requests, {"depth": shape.depth} | R16, engine=OVERLAP | GRAPHS)
        yield Cell("none", requests)


PARTS: Mapping[str, Part] = {
    "compile": Part("Every kernel compiled for every kind of GPU", _compile, 0.2),
    "proof": Part("What the start of an engine proves", _proof, 0.2),
    "machine": Part("The machine and its peaks", _machine, 0.2),
    "kernels": Part("Kernels against PyTorch's own operations", _tests("kernels", *KERNELS), 0.2),
    "goldens": Part("Recorded runs of the original codes, in float32", _tests("goldens", *GOLDENS), 0.4),
    "policies": Part("Speed of the policies", _speed(_policies), 0.6),
    "quantised": Part("Speed with quantized weights", _speed(_quantised, quantised=True), 0.4),
    "overlap": Part("Recorded runs where passes overlap", _tests("overlap", "--overlap", *GOLDENS), 0.5),
    "graphs": Part("The same where graphs repeat layers too", _tests("graphs", "--overlap", "--graphs", *GOLDENS), 1.0),
}
