"""The parts of a run. Each yields what it has found so far, so that one that is ended keeps what it had."""

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
PROCESSES = 8  # of the tests: more have no more to do

Finding: TypeAlias = dict[str, Any]


class PartError(Exception):
    """What a part has found is wrong."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the parts of a run share.

    Attributes:
        device, shape: what is proven and measured, and the model and its requests.
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
        work: yields the part's finding, each time as far as it has come. Raises `PartError` on one that is wrong.
        share: of the time that is left when it begins, what it may take.
        needs: packages that other parts do without, by the names of their imports.
    """

    about: str
    work: Callable[[Setting], Iterator[Finding]]
    share: float
    needs: Mapping[str, str] = field(default_factory=dict)


def run_child(words: Sequence[str], folder: Path, output: Path, seconds: float) -> int | None:
    """Run a process in `folder`. What it prints goes to the file `output`.

    Returns its status; None where it was ended, with its own children, as it had not ended after `seconds`.
    """
    with output.open("wb") as target:
        child = subprocess.Popen(words, cwd=folder, stdout=target, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return child.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _proof(setting: Setting) -> Iterator[Finding]:
    """What the start of an engine proves, on the model that is timed, and how long it takes: twice.

    The first proof compiles kernels, unless an earlier process of this machine did. On a CPU NumPy's attention stands
    in for Triton's, and graphs are not tried, as they need a CUDA device.
    """
    device, kernels = setting.device, setting.device.type == "cuda"
    name: AttentionName = "triton" if kernels else "numpy"
    found: Finding = {"executor": name, "proven": [], "faults": [], "graph_faults": [], "seconds": {}}
    config = presets()[setting.shape.preset]
    model = Transformer(config, dummy_weights(config, getattr(torch, setting.shape.dtype), device))
    for when, graphs in (("first", False), ("graphs", True), ("again", True)) if kernels else (("first", False),):
        if graphs and graphs_obstacle(model) is not None:
            continue
        start = time.perf_counter()
        try:
            faults = prove(model, resolve_executor(name, config, device), graphs=graphs)
        except ConfigError as error:
            faults = [str(error)]
        found["seconds"][when] = time.perf_counter() - start
        found["graph_faults" if graphs else "faults"] += faults
        found["proven"].append(f"{setting.shape.preset} {setting.shape.dtype}{' in graphs' if graphs else ''}")
        yield found
    if found["faults"] or found["graph_faults"]:
        raise PartError("; ".join([*found["faults"], *found["graph_faults"]]))


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


def _tests(setting: Setting) -> Iterator[Finding]:
    """Tests as they are, on the device, in several processes. Where their time is over, those that have ended count."""
    output, places = setting.folder / "tests.txt", max(1, min(PROCESSES, (os.cpu_count() or 1) // 2))
    # Machines with GPUs often have pytest-benchmark, which refuses to run beside pytest-xdist.
    options = ["--tier", "thorough", "-p", "no:cacheprovider", "-p", "no:benchmark", "-n", str(places), "-vv"]
    # Some take a hundred times as long as others.
    options += ["--dist", "worksteal", "--device", str(setting.device)]
    options += ["-k", setting.tests] if setting.tests else []
    run_child([sys.executable, "-u", "-m", "pytest", *options, *TESTS], CHECKOUT, output, setting.left)
    printed = output.read_text(encoding="utf-8", errors="replace")
    ended = {test: word for word, test in _ENDED.findall(printed)}
    failed = sorted(test for test, word in ended.items() if word in ("FAILED", "ERROR"))
    counts = Counter(ended.values())
    yield {"passed": counts["PASSED"], "skipped": counts["SKIPPED"], "failed": failed}
    if failed or not ended:
        raise PartError(f"{len(failed)} of {len(ended)} tests failed; {output.name} says how")
    if not _COUNTED.search(printed):
        raise PartError(f"the tests did not come to their end; {output.name} holds what they printed")


# As pytest-xdist prints a test's end, and pytest that of a session without failures.
_ENDED = re.compile(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|SKIPPED|ERROR) (\S.*?) *$", re.MULTILINE)
_COUNTED = re.compile(r"^(?:=+ )?(?:\d+ \w+, )*\d+ passed.* in [\d.]+s", re.MULTILINE)


Measure: TypeAlias = Callable[[], dict[str, Any]]


class _Bench:
    """The model whose speed is measured, with random weights; its own engine takes next to no memory."""

    def __init__(self, setting: Setting, shape: Shape | None = None, quantization: Quantization | None = None) -> None:
        self.shape = shape = shape or setting.shape
        limits = EngineConfig(max_num_seqs=1, max_model_len=shape.block, store_budget_tokens=0)
        self.llm = LLM(
            shape.preset,
            load_format="dummy",
            dtype=shape.dtype,
            device=str(setting.device),
            quantization=quantization,
            engine=limits,
        )
        # Attention is computed by what was proven, and peaks are those of the part `machine`, where these have run.
        proof, machine = (Result.read(setting.folder, part) for part in ("proof", "machine"))
        right = proof is not None and proof.found.get("executor") == "triton" and not proof.found["faults"]
        self.attention: AttentionName = "triton" if right else "torch"
        known = {} if machine is None else machine.found.get("peaks", {})
        dtype = shape.dtype
        self.peaks = Peaks(**known[dtype]) if dtype in known else measure_peaks(setting.device, getattr(torch, dtype))

    def cell(self, cache: str, requests: int, tokens_per_step: int = 2, **engine: bool) -> Cell:
        """A cell, with the depth of the shape and a refresh every 16 steps where the policy has them."""
        settings = {"depth": self.shape.depth, "refresh_interval": 16} if "bicache" in cache else {}
        return Cell(cache, requests, settings, tokens_per_step, engine)

    def speed(self, cell: Cell, attention: AttentionName | None = None) -> tuple[str, Measure]:
        """How a cell's speed is measured, and what that is called."""
        executor = attention or self.attention
        return f"{executor} {cell.name}", partial(measure_cell, self.llm, self.shape, cell, self.peaks, executor)

    def profile(self, cell: Cell) -> tuple[str, Measure]:
        return cell.name, partial(profile_cell, self.llm, self.shape, cell, self.attention)


def _measured(found: Finding, cells: Iterable[tuple[str, Measure]], rows: str = "rows") -> Iterator[Finding]:
    """`found` with a row more for each cell. One that is refused or fails is told."""
    found |= {rows: [], "refused": found.get("refused", [])}
    for name, measure in cells:
        start = time.perf_counter()
        try:
            row = measure()
            found[rows].append(row | {"took_s": time.perf_counter() - start})
        except RemaskError as error:
            found["refused"].append({"cell": name, "reason": str(error)})
        # Kernels, compilers and allocators raise errors of any kind, and other cells may run all the same.
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            found["refused"].append({"cell": name, "reason": reason})
        yield found


BOTH = "bicache+block-dual"
FAST = {"overlap": True, "graphs": True}


def _speed(setting: Setting) -> Iterator[Finding]:
    bench = _Bench(setting)
    shape = bench.shape
    yield from _measured({"shape": asdict(shape), "quantization": None}, _speed_cells(bench, setting.device))


def _speed_cells(bench: _Bench, device: torch.device) -> Iterator[tuple[str, Measure]]:
    """Every cache at every number of requests, by both kinds of attention, and the plain loop.

    What is most worth knowing comes first, with what it is compared to.
    """
    cell, speed, (alone, several, *many) = bench.cell, bench.speed, bench.shape.batches
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
    """A model of which a step takes the host longer than the device."""
    bench = _Bench(setting, None if setting.device.type == "cpu" else find_shape("llada-100m", setting.device))
    requests, engines = 8 * bench.shape.batches[1], [FAST, {"graphs": True}, dict[str, bool]()]
    cells = [bench.cell(cache, requests, **own) for cache in (BOTH, "block-dual", "bicache", "none") for own in engines]
    found: Finding = {"shape": asdict(bench.shape), "quantization": None}
    yield from _measured(found, map(bench.speed, cells))
    yield from _measured(found, map(bench.profile, cells[:3]), "profiles")


def _quantized(setting: Setting) -> Iterator[Finding]:
    """Quantized weights: fp8 on CUDA devices, and int8 on a CPU.

    Timed are what has the most passes of few rows, and what has the most rows, alone and many at a time.
    """
    shape = setting.shape
    quantization: Quantization = "fp8" if setting.device.type == "cuda" else "int8"
    products = [(str(rows), partial(time_products, quantization, shape, rows, setting.device)) for rows in ROWS]
    found: Finding = {"shape": asdict(shape), "quantization": quantization}
    yield from _measured(found, products, "products")
    bench = _Bench(setting, quantization=quantization)
    cells = [bench.cell(BOTH, requests, **FAST) for requests in shape.batches]
    for requests in shape.batches[:2]:
        cells += [bench.cell("none", requests), bench.cell(BOTH, requests)]
    yield from _measured(found, map(bench.speed, cells))


def _profile(setting: Setting) -> Iterator[Finding]:
    bench = _Bench(setting)
    cell, (alone, several, *_), most = bench.cell, bench.shape.batches, bench.shape.batches[-1]
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
    yield from _measured({"shape": asdict(bench.shape)}, map(bench.profile, cells), "profiles")


TESTED = {"pytest": "pytest", "xdist": "pytest-xdist", "hypothesis": "hypothesis"}

PARTS: Mapping[str, Part] = {
    "proof": Part("What the start of an engine proves", _proof, 0.25),
    "machine": Part("The machine and its peaks", _machine, 0.2),
    "speed": Part("Speed of the caches", _speed, 0.6),
    "profile": Part("Where the time of a step goes", _profile, 0.4),
    "small": Part("Speed of a small model", _small, 0.35),
    "tests": Part("Kernels, and recorded runs of the original codes", _tests, 0.65, TESTED),
    "quantized": Part("Speed with quantized weights", _quantized, 1.0),
}
