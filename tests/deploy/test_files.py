"""The container file, the systemd unit, the compose file and the Kubernetes example, without running any.

What they say is what the command, the server and the image know.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from remask.cli.arguments import serve
from remask.server.config import ServerLimits
from remask.server.gate import OPEN_PATHS

FOLDER = Path(__file__).parents[2] / "deploy"
CONTAINER = (FOLDER / "Containerfile").read_text(encoding="utf-8")
ENTRY: list[str] = json.loads(re.findall(r"^ENTRYPOINT (\[.*\])$", CONTAINER, re.MULTILINE)[0])
UNIT = (FOLDER / "remask.service").read_text(encoding="utf-8")


def parsed(words: list[str]) -> argparse.Namespace:
    """What `remask` makes of a command."""
    parser = argparse.ArgumentParser()
    serve(parser.add_subparsers(dest="command").add_parser("serve"))
    return parser.parse_args(words)


def test_the_container_serves_the_bundled_model_on_the_port_that_it_names() -> None:
    assert ENTRY[0] == "remask"
    args = parsed([*ENTRY[1:], *json.loads(re.findall(r"^CMD (\[.*\])$", CONTAINER, re.MULTILINE)[0])])
    assert (args.served, args.host) == ("bundled", "0.0.0.0")
    assert f"EXPOSE {args.port}\n" in CONTAINER
    assert f"http://127.0.0.1:{args.port}/health" in CONTAINER


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


def checked(words: list[str], grace_s: float) -> None:
    """The command takes them, and a container has time to drain."""
    args = parsed([*ENTRY[1:], *words])
    assert args.command == "serve"
    assert (args.host, args.port) == ("0.0.0.0", 8000)
    assert args.drain_timeout == ServerLimits().drain_timeout < grace_s - 5


def test_the_compose_file() -> None:
    (service,) = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"].values()
    checked(service["command"], float(service["stop_grace_period"].removesuffix("s")))
    build = (FOLDER / service["build"]["context"]).resolve()
    assert (build / service["build"]["dockerfile"]).read_text(encoding="utf-8") == CONTAINER
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", CONTAINER, re.MULTILINE) for name in line.split()]
    assert {"pyproject.toml", "constraints.txt", "src"} <= set(copied)
    assert all((build / name).exists() for name in copied)
    assert all(port.startswith("127.0.0.1:") and port.endswith(":8000") for port in service["ports"])
    assert "REMASK_API_KEY" in service["environment"]
    assert service["volumes"][0].partition(":")[2] in re.findall(r"^VOLUME (.*)$", CONTAINER, re.MULTILINE)


def test_the_kubernetes_example() -> None:
    documents = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8")))
    workload, service = documents
    assert [each["kind"] for each in documents] == ["Deployment", "Service"]
    pod: dict[str, Any] = workload["spec"]["template"]
    labels = workload["spec"]["selector"]["matchLabels"]
    assert labels == pod["metadata"]["labels"] == service["spec"]["selector"]
    (container,) = pod["spec"]["containers"]
    wait = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    checked(container["args"], pod["spec"]["terminationGracePeriodSeconds"] - wait)
    (port,) = container["ports"]
    assert f"EXPOSE {port['containerPort']}" in CONTAINER
    assert [each["targetPort"] for each in service["spec"]["ports"]] == [port["name"]]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["path"] in OPEN_PATHS, "probes send no key"
        assert asked["port"] == port["name"]
    live = container["livenessProbe"]
    slowest = max(ServerLimits().step_limit, ServerLimits().drain_timeout)
    assert live["periodSeconds"] * live["failureThreshold"] > slowest, "neither ends a server that drains"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert container["env"][0]["name"] == "REMASK_API_KEY"
