"""Runs what the laboratory measures beside `remask bench`, `eval` and `analyze`, and what is made of it.

    python -m remask_lab speed NAME           one measurement of speed
    python -m remask_lab audits NAME          what the depths that audits earn come to
    python -m remask_lab decisions            how often one-pass decisions are right, and how sure they are
    python -m remask_lab thresholds TASK      how sure a model must be of a token to write it
    python -m remask_lab page                 which questions about the demo's page are answered right
    python -m remask_lab papers TABLE ...     papers' tables beside the published numbers
    python -m remask_lab pages NAME           a page of the notebook, of the results that are kept
    python -m remask_lab gpu                  what a GPU is measured by

Each has a `--help` of its own.
"""

import argparse
import runpy
import sys
from collections.abc import Mapping

from remask.errors import REPLACEMENTS, UnknownNameError
from remask.machine.cpu import wait_passively

COMMANDS: Mapping[str, str] = {
    "speed": "remask_lab.speed",
    "audits": "remask_lab.audits",
    "decisions": "remask_lab.decisions.__main__",
    "thresholds": "remask_lab.thresholds.__main__",
    "page": "remask_lab.page",
    "papers": "remask_lab.papers",
    "pages": "remask_lab.pages",
    "gpu": "remask_lab.gpu",
}


def main() -> None:
    """Run the command that the first argument names, and exit with its status."""
    for words in (" ".join(sys.argv[1:2]), " ".join(sys.argv[1:3])):
        if words in REPLACEMENTS:
            sys.exit(f"error: {UnknownNameError('command', words, COMMANDS)}")
    parser = argparse.ArgumentParser(
        prog="python -m remask_lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=sorted(COMMANDS))
    module = COMMANDS[parser.parse_args(sys.argv[1:2]).command]
    sys.argv[:2] = [module]
    wait_passively()  # as `remask` does; the commands import PyTorch after this
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
