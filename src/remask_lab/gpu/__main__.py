"""Proves and measures the engine on a GPU, part by part, in a few minutes and without a network.

    scripts/gpu OUTPUT [--parts machine,kernels,policies] [--minutes 25] [--device cuda] [--shape auto] [--again]

Each part runs in a process of its own and leaves OUTPUT/PART.json. A part that this commit has done is not run again,
so an interrupted run goes on where it stopped; `--again` runs it nevertheless. OUTPUT/report.md is a page on all parts.
What is proven and faster becomes the default of `--attention auto`, `--overlap` and `--graphs` on this device: it is
written to `~/.cache/remask/devices.json`, which every start with this code reads.
Ends with 1 where a part failed. Needs the checkout, PyTorch and pytest.
"""

import argparse
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from remask.checks.values import one_of, real
from remask.engine.device_defaults import defaults_file, write_defaults
from remask.machine.device import resolve_device
from remask.machine.disk import write_whole
from remask_lab.gpu.children import run_child
from remask_lab.gpu.decide import decide
from remask_lab.gpu.page import page
from remask_lab.gpu.parts import CHECKOUT, PARTS, PartError, Setting
from remask_lab.gpu.results import Result
from remask_lab.gpu.shapes import find_shape
from remask_lab.records.machine import commit
from remask_lab.speed.command import command_parser, run_command

SPARE_S = 5.0  # what a process may take to start and to end beside its part


def main() -> None:
    """Run the parts that are asked for, or the one of a process of `_start`."""
    parser = command_parser(__doc__)
    parser.add_argument("output", type=Path, help="folder of the results")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--minutes", type=float, default=25.0, help="time for all parts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", default="auto", help="of the model whose speed is measured")
    parser.add_argument("--tests", default="", help="run only the tests that match this pytest expression")
    parser.add_argument("--again", action="store_true", help="run parts that are done too")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # this process is the part's own
    args = parser.parse_args()
    real("minutes", args.minutes, low=0)
    names = args.parts.split(",")
    for name in names:
        one_of("parts", name, tuple(PARTS))
    device = resolve_device(args.device)
    args.output.mkdir(parents=True, exist_ok=True)
    shape = find_shape(args.shape, device)
    setting = Setting(device, shape, args.output.resolve(), time.monotonic() + 60 * args.minutes, args.tests)
    if args.here:
        run_part(names[0], setting)
        return
    for name in (name for name in PARTS if name in names):
        if args.again or not _done(setting.folder, name):
            _start(name, setting)
    results = {name: Result.read(setting.folder, name) for name in PARTS}
    decision = decide({name: found for name, found in results.items() if found is None or found.commit == commit()})
    file = None
    if decision is not None:
        # A rehearsal decides nothing for the engine.
        place = defaults_file() if device.type == "cuda" else setting.folder / "devices.json"
        file = write_defaults(device, asdict(decision), place)
    report = page(results, decision, file)
    write_whole("the page", setting.folder / "report.md", report)
    print(report)
    failed = [name for name in names if not _done(setting.folder, name)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def run_part(name: str, setting: Setting) -> None:
    """Run a part in this process. Its result is saved each time that it has found more."""
    result = Result(name, {})
    try:
        for found in PARTS[name].work(setting):
            result = replace(result, found=found)
            result.save(setting.folder)
            if setting.left <= 0:
                raise PartError("out of time")
        result = replace(result, done=True)
    # Whatever a kernel or a library raises is the part's result.
    except Exception as error:
        result = replace(result, error=f"{type(error).__name__}: {error}")
        raise
    finally:
        result.save(setting.folder)


def _done(folder: Path, name: str) -> bool:
    result = Result.read(folder, name)
    return result is not None and result.done and result.commit == commit()


def _start(name: str, setting: Setting) -> None:
    """Run a part in a process of its own. Where it ends without a word, that is its result."""
    seconds = setting.left * PARTS[name].share
    Result(name, {}).save(setting.folder)
    words = [sys.executable, "-m", "remask_lab.gpu", str(setting.folder), "--here", "--parts", name]
    words += ["--device", str(setting.device), "--shape", setting.shape.name, "--tests", setting.tests]
    print(f"{name}: {PARTS[name].about} (at most {seconds:.0f} s)", flush=True)
    output = setting.folder / f"{name}.log"
    status = run_child([*words, "--minutes", str((seconds - SPARE_S) / 60)], CHECKOUT, output, seconds)
    result = Result.read(setting.folder, name)
    if result is not None and not result.done and result.error is None:
        why = "was ended, as its time was over" if status is None else f"ended with status {status}"
        replace(result, error=f"its process {why}; {output.name} holds what it printed").save(setting.folder)


if __name__ == "__main__":
    sys.exit(run_command(main))
