"""`scripts/host`: the CPU time of the host in a step, of this commit and of another one in turns."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from remask.checks.plugins import install_line
from remask.checks.values import one_of
from remask.errors import ConfigError
from remask_lab.records.machine import commit
from remask_lab.records.machine import host as processor
from remask_lab.records.markdown import markdown_table
from remask_lab.speed.command import Shown
from remask_lab.speed.host_decode import POLICIES

ROOT = Path(__file__).parents[4]
DECODE = Path("remask_lab/speed/host_decode.py")


class Decodes:
    """A process that decodes with the engine of one tree."""

    def __init__(self, tree: Path) -> None:
        sources = [tree / "lab" / "src", tree / "src"]  # of older commits, the laboratory is in the second one
        path = os.pathsep.join(map(str, sources))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        # -P, or modules beside the file would hide those of the standard library.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(next(source / DECODE for source in sources if (source / DECODE).is_file()))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def measure(self, case: dict[str, Any]) -> float:
        """Milliseconds a step. Raises `ConfigError` where the tree's engine cannot be driven so."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(case), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise ConfigError("the decode failed, as its errors say above; an older commit may have another interface")
        return float(json.loads(line)["ms_per_step"])

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@contextmanager
def checkout(name: str) -> Iterator[Path]:
    """A worktree of a commit, for as long as it is needed. Raises `ConfigError` for a commit that there is not."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        added = _git("worktree", "add", "--detach", str(tree), name)
        if added.returncode:
            raise ConfigError(f"--against {name}: {added.stderr.strip()}")
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def measure(rounds: int, against: str | None, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each case."""
    with ExitStack() as stack:
        trees = [ROOT] if against is None else [ROOT, stack.enter_context(checkout(against))]
        decodes = [Decodes(tree) for tree in trees]
        for each in decodes:
            stack.callback(each.close)
        rows = []
        for case in cases:
            turns = [[each.measure(case) for each in decodes] for _ in range(rounds)]
            own, *other = (min(figures) for figures in zip(*turns, strict=True))
            row = {**case, "ms_per_step": own}
            if other:
                row |= {"against_ms_per_step": other[0], "ratio": other[0] / own}
            rows.append(row)
        return rows


def host(args: argparse.Namespace) -> Shown:
    """The CPU time that the host takes for a step, beside the model: planning, packing, reading, choosing, bookkeeping.

    A real engine decodes under `none`, `block-dual` and `bicache+block-dual`. Its model has 32 layers and answers at
    once; what that takes is left out. A canvas of 1,024 or 4,096 positions is a prompt and a response of 256, which is
    denoised in blocks of 32 and 128 steps. 0.9 of the prompt is a prefix that all requests share, at depth 18 with
    R = 16: of a canvas of 1,024 the response leaves less than that to share. A figure is CPU time of the engine's
    thread, the mean over all steps of a decode, refreshes included. It begins when the requests have been placed and
    their prefix has been computed. Of `--rounds` decodes the least is taken, as other work on the machine only adds.

    Cutting the lists of attention as its Triton kernels need them is the host's work too, and is counted. It needs
    Triton; `--no-lists` leaves it out.

    With `--overlap` passes are queued before those before them are read; what the device would do is counted too.
    `--against` measures another commit in turns with this one, out of a worktree in a temporary folder.
    """
    for policy in args.policies:
        one_of("--policies", policy, POLICIES)
    cases = [
        {"policy": policy, "canvas": canvas, "requests": requests}
        for policy, canvas, requests in product(args.policies, args.canvases, args.requests)
    ]
    if args.overlap:
        cases = [{**case, "overlap": True} for case in cases]
    if not args.no_lists:
        if find_spec("triton") is None:
            raise ConfigError(f"cutting the lists of attention needs triton: {install_line('gpu')}, or --no-lists")
        cases = [{**case, "lists": True} for case in cases]
    rows = measure(args.rounds, args.against, cases)
    found = {"machine": processor(), "commit": commit(), "against": args.against, "rounds": args.rounds, "rows": rows}
    return Shown(found, table(found))


def table(found: Mapping[str, Any]) -> str:
    """The rows as text."""
    figures = ("ms_per_step", "against_ms_per_step", "ratio")
    header = ["policy", "canvas", "requests", "ms a step"]
    if found["against"] is not None:
        header += [f"at {found['against']}", "ratio"]
    cells = [
        [*(str(row[name]) for name in header[:3]), *(f"{row[name]:.2f}" for name in figures if name in row)]
        for row in found["rows"]
    ]
    return markdown_table(header, cells, aligned=True)


def _git(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
