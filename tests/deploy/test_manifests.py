"""The compose file and the Kubernetes example: what they say is what the command, the server and the image know."""

import re
from pathlib import Path
from typing import Any

import yaml

from remask.cli.main import parse
from remask.server.gate import OPEN_PATHS
from remask.server.limits import ServerLimits

DEPLOY = Path(__file__).parents[2] / "deploy"
IMAGE = (DEPLOY / "Containerfile").read_text(encoding="utf-8")


def entry_point() -> list[str]:
    """The words that stand before a container's own."""
    found: list[str] = yaml.safe_load(re.search(r"^ENTRYPOINT (.*)$", IMAGE, re.MULTILINE).group(1))  # type: ignore[union-attr]
    assert found[0] == "remask"
    return found[1:]


def checked(words: list[str], grace_s: float) -> None:
    """The command takes them, and a container has time to drain."""
    args = parse([*entry_point(), *words])
    assert args.command == "serve"
    assert (args.host, args.port) == ("0.0.0.0", 8000)
    assert args.drain_timeout == ServerLimits().drain_timeout < grace_s - 5


def test_the_compose_file() -> None:
    (service,) = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"].values()
    checked(service["command"], float(service["stop_grace_period"].removesuffix("s")))
    build = (DEPLOY / service["build"]["context"]).resolve()
    assert (build / service["build"]["dockerfile"]).read_text(encoding="utf-8") == IMAGE
    for source in re.findall(r"^COPY (.*) \S+$", IMAGE, re.MULTILINE):
        assert all((build / name).exists() for name in source.split())
    assert all(port.startswith("127.0.0.1:") and port.endswith(":8000") for port in service["ports"])
    assert "REMASK_API_KEY" in service["environment"]
    assert service["volumes"][0].partition(":")[2] in re.findall(r"^VOLUME (.*)$", IMAGE, re.MULTILINE)


def test_the_kubernetes_example() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")))
    workload, service = documents
    assert [each["kind"] for each in documents] == ["Deployment", "Service"]
    pod: dict[str, Any] = workload["spec"]["template"]
    labels = workload["spec"]["selector"]["matchLabels"]
    assert labels == pod["metadata"]["labels"] == service["spec"]["selector"]
    (container,) = pod["spec"]["containers"]
    wait = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    checked(container["args"], pod["spec"]["terminationGracePeriodSeconds"] - wait)
    (port,) = container["ports"]
    assert f"EXPOSE {port['containerPort']}" in IMAGE
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
