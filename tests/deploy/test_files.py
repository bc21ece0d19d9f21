"""The container file and the systemd unit, as far as they can be checked without running either."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from remask.cli.arguments import serve

ROOT = Path(__file__).parents[2]
CONTAINER = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")
UNIT = (ROOT / "deploy" / "remask.service").read_text(encoding="utf-8")


def parsed(words: list[str]) -> argparse.Namespace:
    """What `remask` makes of a command."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser.add_subparsers(dest="command").add_parser("serve"))
    return parser.parse_args(words)


def test_the_container_serves_the_bundled_model_on_the_port_that_it_names() -> None:
    entry, command = (
        json.loads(re.findall(rf"^{name} (\[.*\])$", CONTAINER, re.MULTILINE)[0]) for name in ("ENTRYPOINT", "CMD")
    )
    assert entry[0] == "remask"
    args = parsed([*entry[1:], *command])
    assert (args.served, args.host) == ("bundled", "0.0.0.0")
    assert f"EXPOSE {args.port}\n" in CONTAINER
    assert f"http://127.0.0.1:{args.port}/health" in CONTAINER


def test_the_container_is_built_of_files_that_are_there() -> None:
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", CONTAINER, re.MULTILINE) for word in line.split()]
    assert {"pyproject.toml", "constraints.txt", "src"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)


def test_the_units_command_and_times() -> None:
    (command,) = re.findall(r"^ExecStart=/opt/remask/bin/remask (.*)$", UNIT, re.MULTILINE)
    args = parsed(command.split())
    assert args.config == "/etc/remask/serve.yaml"
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert float(stop) > args.drain_timeout, "accepted requests are not cut off"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze: apt-get install systemd")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "remask.service"
    # It looks for the command, which is not installed there.
    unit.write_text(UNIT.replace("/opt/remask/bin/remask", sys.executable), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
