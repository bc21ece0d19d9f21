"""The parts of a run. Each yields its finding as it grows, so that a part which is stopped leaves what it had."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

import torch

from remask import LLM, EngineConfig
from remask.checkpoint.loaded import dummy_weights
from remask.checks import AttentionName, Quantization
from remask.engine.proof import prove
from remask.errors import ConfigError, RemaskError
from remask.families import presets
from remask.model.executors import graphs_obstacle, resolve_executor
from remask.model.transformer import Transformer
from remask_lab.gpu.plain import ROWS, plain_row, time_products
from remask_lab.gpu.profile import profile_cell, warm_up
from remask_lab.gpu.results import Result
from remask_lab.gpu.steady import Cell, Shape, find_shape, measure_cell
from remask_lab.ops.roofline import Peaks, measure_peaks
from remask_lab.records.machine import host, versions

CHECKOUT = Path(__file__).parents[4]
TESTS = (
    *(f"tests/cli/test_goldens{kind}.py" for kind in ("", "_block_causal", "_uniform", "_a2d")),
    "tests/engine/test_proof.py",
    "tests/engine/test_attention.py",
    "tests/model/test_layer_triton.py",
    "tests/model/test_capture.py",
)
PROCESSES = 8  # of the tests, of which there are too few for more

Finding: TypeAlias = dict[str, Any]


class PartError(Exception):
    """A part has found a fault, or could not come to its end."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the parts of a run share.

    Attributes:
        device: the device that is proven and measured.
        shape: the model, and the requests for it.
        folder: the folder of results.
        deadline: seconds on the clock of `time.monotonic`, which all processes of a machine share.
        tests: a pytest expression (`-k`) that selects tests; empty selects all.
    """

    device: torch.device
    shape: Shape
    folder: Path
    deadline: float
    tests: str = ""

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a run.

    Attributes:
        title: its heading in the report.
        work: yields the part's finding each time that it has grown. Raises `PartError` on a fault.
        share: the share of the run's remaining time that it may take.
        needs: packages that only this part needs, by the names of their imports.
    """

    title: str
    work: Callable[[Setting], Iterator[Finding]]
    share: float
    needs: Mapping[str, str] = field(default_factory=dict)


def run_child(command: Sequence[str], folder: Path, output: Path, seconds: float) -> int | None:
    """Run `command` in `folder`, with its output in the file `output`.

    Returns its status. After `seconds` the process and its children are killed, and the result is None.
    """
    with output.open("wb") as target:
        child = subprocess.Popen(command, cwd=folder, stdout=target, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return child.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _proof(setting: Setting) -> Iterator[Finding]:
    """Run the proof of an engine's start on the model that is timed, and take its seconds.

    On CUDA it runs three times: without graphs, which compiles kernels, and twice with graphs, if the model can be
    captured. On a CPU it runs once, with NumPy's attention in place of Triton's.
    """
    device = setting.device
    cuda = device.type == "cuda"
    name: AttentionName = "triton" if cuda else "numpy"
    finding: Finding = {"executor": name, "proven": [], "faults": [], "graph_faults": [], "seconds": {}}
    config = presets()[setting.shape.preset]
    model = Transformer(config, dummy_weights(config, getattr(torch, setting.shape.dtype), device))
    for turn, graphs in (("first", False), ("graphs", True), ("again", True)) if cuda else (("first", False),):
        if graphs and graphs_obstacle(model) is not None:
            continue
        start = time.perf_counter()
        try:
            faults = prove(model, resolve_executor(name, config, device), graphs=graphs)
        except ConfigError as error:
            faults = [str(error)]
        finding["seconds"][turn] = time.perf_counter() - start
        finding["graph_faults" if graphs else "faults"] += faults
        finding["proven"].append(f"{setting.shape.preset} {setting.shape.dtype}{' in graphs' if graphs else ''}")
        yield finding
    if finding["faults"] or finding["graph_faults"]:
        raise PartError("; ".join([*finding["faults"], *finding["graph_faults"]]))


def _machine(setting: Setting) -> Iterator[Finding]:
    """The machine, versions, and measured peaks of the shape's dtype and of float32."""
    device = setting.device
    finding: Finding = {"host": host(), "versions": {**versions(), "triton": _triton()}, "device": str(device)}
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        finding["gpu"] = {"name": gpu.name, "memory": gpu.total_memory, "capability": [gpu.major, gpu.minor]}
    finding["peaks"] = {}
    for name in dict.fromkeys((setting.shape.dtype, "float32")):
        finding["peaks"][name] = asdict(measure_peaks(device, getattr(torch, name)))
        yield finding


def _triton() -> str | None:
    """The version of Triton; None if it is not installed."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def _tests(setting: Setting) -> Iterator[Finding]:
    """Run `TESTS` on the device in several processes. When their time is over, those that have ended count."""
    log = setting.folder / "tests.txt"
    processes = max(1, min(PROCESSES, (os.cpu_count() or 1) // 2))
    # Machines with GPUs often have pytest-benchmark, which refuses to run beside pytest-xdist.
    options = ["--tier", "thorough", "-p", "no:cacheprovider", "-p", "no:benchmark", "-n", str(processes), "-vv"]
    # Some take a hundred times as long as others.
    options += ["--dist", "worksteal", "--device", str(setting.device)]
    options += ["-k", setting.tests] if setting.tests else []
    run_child([sys.executable, "-u", "-m", "pytest", *options, *TESTS], CHECKOUT, log, setting.seconds_left)
    log_text = log.read_text(encoding="utf-8", errors="replace")
    outcomes = {test: outcome for outcome, test in _OUTCOME.findall(log_text)}
    failed = sorted(test for test, outcome in outcomes.items() if outcome in ("FAILED", "ERROR"))
    counts = Counter(outcomes.values())
    yield {"passed": counts["PASSED"], "skipped": counts["SKIPPED"], "failed": failed}
    if failed or not outcomes:
        raise PartError(f"{len(failed)} of {len(outcomes)} tests failed; {log.name} says how")
    if not _SUMMARY.search(log_text):
        raise PartError(f"the tests did not come to their end; {log.name} holds what they printed")


# The line of pytest-xdist for a finished test, and the last one of pytest for a session without failures.
_OUTCOME = re.compile(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|SKIPPED|ERROR) (\S.*?) *$", re.MULTILINE)
_SUMMARY = re.compile(r"^(?:=+ )?(?:\d+ \w+, )*\d+ passed.* in [\d.]+s", re.MULTILINE)


Measure: TypeAlias = Callable[[], dict[str, Any]]


class _Bench:
    """A model with random weights whose speed is measured. The engine that it opens takes next to no memory."""

    def __init__(self, setting: Setting, shape: Shape | None = None, quantization: Quantization | None = None) -> None:
        """`shape` is by default that of `setting`. Peaks are measured if the part `machine` has not run."""
        self.shape = shape or setting.shape
        self.llm = LLM(
            self.shape.preset,
            load_format="dummy",
            dtype=self.shape.dtype,
            device=str(setting.device),
            quantization=quantization,
            engine=EngineConfig(max_num_seqs=1, max_model_len=self.shape.block, store_budget_tokens=0),
        )
        proof, machine = (Result.read(setting.folder, part) for part in ("proof", "machine"))
        triton_proven = proof is not None and proof.found.get("executor") == "triton" and not proof.found["faults"]
        self.attention: AttentionName = "triton" if triton_proven else "torch"
        peaks = {} if machine is None else machine.found.get("peaks", {})
        dtype = self.shape.dtype
        self.peaks = Peaks(**peaks[dtype]) if dtype in peaks else measure_peaks(setting.device, getattr(torch, dtype))

    def cell(self, cache: str, requests: int, tokens_per_step: int = 2, **engine: bool) -> Cell:
        """A cell; `bicache` gets the shape's depth and a refresh every 16 steps, and `engine` are engine settings."""
        settings = {"depth": self.shape.depth, "refresh_interval": 16} if "bicache" in cache else {}
        return Cell(cache, requests, settings=settings, tokens_per_step=tokens_per_step, engine=engine)

    def speed(self, cell: Cell, attention: AttentionName | None = None) -> tuple[str, Measure]:
        """The name of the measurement of a cell's speed, and the function that makes it."""
        executor = attention or self.attention
        return f"{executor} {cell.name}", partial(measure_cell, self.llm, self.shape, cell, self.peaks, executor)

    def profile(self, cell: Cell) -> tuple[str, Measure]:
        """The name of the profile of a cell, and the function that makes it."""
        return cell.name, partial(profile_cell, self.llm, self.shape, cell, self.attention)


def _measure_each(
    finding: Finding, measurements: Iterable[tuple[str, Measure]], key: str = "rows"
) -> Iterator[Finding]:
    """Yield `finding` after each measurement, whose result goes to the list `key`, or whose error to "refused"."""
    finding |= {key: [], "refused": finding.get("refused", [])}
    for name, measure in measurements:
        start = time.perf_counter()
        try:
            row = measure()
            finding[key].append(row | {"took_s": time.perf_counter() - start})
        except RemaskError as error:
            finding["refused"].append({"cell": name, "reason": str(error)})
        # Kernels, compilers and allocators raise errors of any kind, and other cells may run all the same.
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            finding["refused"].append({"cell": name, "reason": reason})
        yield finding


BOTH = "bicache+block-dual"
FAST = {"overlap": True, "graphs": True}


def _speed(setting: Setting) -> Iterator[Finding]:
    """Measure `_speed_cells` on the shape of `setting`."""
    bench = _Bench(setting)
    yield from _measure_each({"shape": asdict(bench.shape), "quantization": None}, _speed_cells(bench, setting.device))


def _speed_cells(bench: _Bench, device: torch.device) -> Iterator[tuple[str, Measure]]:
    """Yield a measurement of every cache at every number of requests, and of the plain loop.

    A few are repeated with PyTorch's attention. The most important cells come first, each beside those that it is
    compared with, as time may end the part.
    """
    cell, speed = bench.cell, bench.speed
    alone, several, *many = bench.shape.batches
    for requests in (alone, several):
        yield speed(cell(BOTH, requests, **FAST))
        yield speed(cell("none", requests))
        yield f"plain {requests}", partial(plain_row, bench.llm.model.config, bench.shape, requests, device)
        yield speed(cell("bicache", requests))
        yield speed(cell(BOTH, requests))
        yield speed(cell("block-dual", requests, **FAST))
    for requests in many:
        yield speed(cell(BOTH, requests, **FAST))
        yield speed(cell(BOTH, requests))
        yield speed(cell("block-dual", requests, **FAST))
    for requests in (alone, several):
        yield speed(cell("bicache", requests, **FAST))
        yield speed(cell("block-dual", requests))
    if bench.attention != "torch":
        yield speed(cell(BOTH, several), "torch")
    yield speed(cell("none", alone, **FAST))
    for requests in (alone, several):
        yield speed(cell(BOTH, requests, graphs=True))
    yield speed(cell(BOTH, several, overlap=True))
    yield speed(cell(BOTH, several, 4, **FAST))
    for requests in many:
        yield speed(cell("block-dual", requests))
    if bench.attention != "torch":
        yield speed(cell("none", several), "torch")


def _small(setting: Setting) -> Iterator[Finding]:
    """Speed and profiles of a model so small that a step takes the host longer than the device."""
    bench = _Bench(setting, None if setting.device.type == "cpu" else find_shape("llada-100m", setting.device))
    requests = 8 * bench.shape.batches[1]
    engines = [FAST, {"graphs": True}, dict[str, bool]()]
    caches = (BOTH, "block-dual", "bicache", "none")
    cells = [bench.cell(cache, requests, **engine) for cache in caches for engine in engines]
    finding: Finding = {"shape": asdict(bench.shape), "quantization": None}
    yield from _measure_each(finding, map(bench.speed, cells))
    yield from _measure_each(finding, map(bench.profile, cells[:3]), "profiles")


def _quantized(setting: Setting) -> Iterator[Finding]:
    """Products and speed with quantized weights, fp8 on CUDA devices and int8 on a CPU.

    The cells are `bicache+block-dual`, most of whose passes have few rows, and `none`, whose passes have the most.
    """
    shape = setting.shape
    quantization: Quantization = "fp8" if setting.device.type == "cuda" else "int8"
    products = [(str(rows), partial(time_products, quantization, shape, rows, setting.device)) for rows in ROWS]
    finding: Finding = {"shape": asdict(shape), "quantization": quantization}
    yield from _measure_each(finding, products, "products")
    bench = _Bench(setting, quantization=quantization)
    cells = [bench.cell(BOTH, requests, **FAST) for requests in shape.batches]
    for requests in shape.batches[:2]:
        cells += [bench.cell("none", requests), bench.cell(BOTH, requests)]
    yield from _measure_each(finding, map(bench.speed, cells))


def _profile(setting: Setting) -> Iterator[Finding]:
    """Profile steps of several caches, the most important first, alone and in batches, with graphs and without."""
    bench = _Bench(setting)
    cell = bench.cell
    alone, several, most = (bench.shape.batches[index] for index in (0, 1, -1))
    warm_up(setting.device)
    cells = (
        cell(BOTH, alone, **FAST),
        cell(BOTH, several, **FAST),
        cell("bicache", alone),
        cell("none", several),
        cell(BOTH, most, **FAST),
        cell(BOTH, alone),
        cell("bicache", alone, **FAST),
        cell("block-dual", several, **FAST),
        cell("none", alone, **FAST),
        cell("bicache", several, **FAST),
    )
    yield from _measure_each({"shape": asdict(bench.shape)}, map(bench.profile, cells), "profiles")


TESTED = {"pytest": "pytest", "xdist": "pytest-xdist", "hypothesis": "hypothesis"}

PARTS: Mapping[str, Part] = {
    "proof": Part("What the start of an engine proves", _proof, share=0.25),
    "machine": Part("The machine and its peaks", _machine, share=0.2),
    "speed": Part("Speed of the caches", _speed, share=0.6),
    "profile": Part("Where the time of a step goes", _profile, share=0.4),
    "small": Part("Speed of a small model", _small, share=0.35),
    "tests": Part("Kernels, and recorded runs of the original codes", _tests, share=0.65, needs=TESTED),
    "quantized": Part("Speed with quantized weights", _quantized, share=1.0),
}
