"""Proves and measures the engine on a GPU, part by part, in a few minutes and without a network.

    scripts/gpu OUTPUT [--parts proof,machine,speed] [--minutes 8] [--device cuda] [--shape auto] [--again]

Each part runs in a process of its own, the ones that tell most first, and leaves OUTPUT/PART.json. A part whose time is
over keeps what it had. One that this commit has done is not run again, so that an interrupted run goes on where it
stopped; `--again` runs it nevertheless. OUTPUT/report.md is a page on all parts, and OUTPUT/kept.json what
benchmarks/results/gpu keeps of them.

Ends with 1 where a part failed. Needs the checkout and PyTorch, and pytest with xdist and hypothesis for the tests.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from remask.checks.values import check_choice, check_real
from remask.machine.device import resolve_device
from remask.machine.disk import write_whole
from remask_lab.gpu.page import page
from remask_lab.gpu.parts import CHECKOUT, PARTS, PartError, Setting, run_child
from remask_lab.gpu.results import Result, summarize
from remask_lab.gpu.steady import find_shape
from remask_lab.records.machine import commit
from remask_lab.speed.command import command_parser, run_command

SPARE_S = 3.0  # what a process may take to end beside its part
LEAST_S = 10.0  # less is not enough for any part


def run(start: float) -> int:
    """Run the command, whose time began at `start` (`time.monotonic`, seconds). Returns its exit status."""
    return run_command(partial(main, start))


def main(start: float) -> None:
    """Run the parts that `--parts` names, each in a process of its own; with `--here` one part in this process.

    Writes the report. Exits with a message if a part has failed.
    """
    parser = command_parser(__doc__)
    parser.add_argument("output", type=Path, help="folder of the results")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", default="auto", help="of the model whose speed is measured")
    parser.add_argument("--tests", default="", help="run only the tests that match this pytest expression")
    parser.add_argument("--again", action="store_true", help="run parts that are done too")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # this process is the part's own
    args = parser.parse_args()
    check_real("minutes", args.minutes, low=0)
    names = args.parts.split(",")
    for name in names:
        check_choice("parts", name, tuple(PARTS))
    device = resolve_device(args.device)
    args.output.mkdir(parents=True, exist_ok=True)
    shape = find_shape(args.shape, device)
    setting = Setting(
        device=device, shape=shape, folder=args.output.resolve(), deadline=start + 60 * args.minutes, tests=args.tests
    )
    if args.here:
        run_part(names[0], setting)
        return
    pending = [name for name in PARTS if name in names and (args.again or not _done(setting.folder, name))]
    for name in pending:
        if missing := _missing(name):
            print(f"{name}: cannot run without {', '.join(missing)}: pip install {' '.join(missing)}", flush=True)
    for name in pending:
        _start(name, setting)
    results = {name: Result.read(setting.folder, name) for name in PARTS}
    report = page(results)
    summary = summarize(results)
    write_whole("the page", setting.folder / "report.md", report)
    if summary is not None:
        write_whole("what is kept", setting.folder / "kept.json", json.dumps(summary, indent=1) + "\n")
    print(report)
    failed = [name for name in names if not _done(setting.folder, name)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def run_part(name: str, setting: Setting) -> None:
    """Run a part in this process, and save its result whenever its finding grows. Errors are saved and raised."""
    result = Result(name, {})
    try:
        for finding in PARTS[name].work(setting):
            result = replace(result, found=finding)
            result.save(setting.folder)
            if setting.seconds_left <= 0:
                raise PartError("out of time")
        result = replace(result, done=True)
    # Whatever a kernel or a library raises is the part's result.
    except Exception as error:
        result = replace(result, error=f"{type(error).__name__}: {error}")
        raise
    finally:
        result.save(setting.folder)


def _done(folder: Path, name: str) -> bool:
    """Whether this commit has run the part to its end."""
    result = Result.read(folder, name)
    return result is not None and result.done and result.commit == commit()


def _missing(name: str) -> list[str]:
    """Packages that the part needs and that are not installed."""
    return [package for module, package in PARTS[name].needs.items() if find_spec(module) is None]


def _start(name: str, setting: Setting) -> None:
    """Run a part in a process of its own. Where the process leaves no error, the way it ended becomes one."""
    part, start = PARTS[name], time.monotonic()
    seconds = setting.seconds_left * part.share
    if missing := _missing(name):
        Result(name, {}, error=f"not run: it needs {', '.join(missing)}").save(setting.folder)
        return
    if seconds < LEAST_S:
        Result(name, {}, error=f"not run: {max(0.0, seconds):.0f} s were left").save(setting.folder)
        return
    Result(name, {}).save(setting.folder)
    command = [sys.executable, "-u", "-m", "remask_lab.gpu", str(setting.folder), "--here", "--parts", name]
    command += ["--device", str(setting.device), "--shape", setting.shape.name, "--tests", setting.tests]
    print(f"{name}: {part.title} (at most {seconds:.0f} s)", flush=True)
    log = setting.folder / f"{name}.log"
    status = run_child([*command, "--minutes", str((seconds - SPARE_S) / 60)], CHECKOUT, log, seconds)
    result = Result.read(setting.folder, name)
    if result is not None and not result.done and result.error is None:
        reason = "was ended, as its time was over" if status is None else f"ended with status {status}"
        result = replace(result, error=f"its process {reason}; {log.name} holds what it printed")
        result.save(setting.folder)
    outcome = "no result" if result is None else "done" if result.done else result.error
    print(f"{name}: {outcome} after {time.monotonic() - start:.0f} s", flush=True)
