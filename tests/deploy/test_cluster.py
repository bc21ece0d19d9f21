"""What Ray cannot do ends in one sentence with the way out. Needs Ray to be installed; no cluster is started."""

import importlib.util
import logging
import re
import socket
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from remask.errors import DeployError

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray: make test EXTRAS=dev,ray", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own use of pydantic
    from ray.exceptions import ActorDiedError
    from ray.serve.schema import ProxyStatus

    from remask.deploy import cluster

TRACEBACK = """The deployment failed to start 3 times in a row. Error:
\x1b[36mray::ServeReplica:remask:Replica.initialize()\x1b[39m (pid=1, ip=127.0.0.1)
  File "app.py", line 33, in __init__
remask.errors.CheckpointError: There is no model 'x': no such folder."""


class Serve:
    """Ray Serve, as far as a fleet asks for it."""

    def __init__(self, *proxies: ProxyStatus, start: Exception | None = None, run: Exception | None = None) -> None:
        self.proxies, self.failures, self.asked = list(proxies), {"start": start, "run": run}, 0

    def start(self, **_options: Any) -> None:
        self._act("start")

    def run(self, _application: Any, **_options: Any) -> None:
        self._act("run")

    def status(self) -> Any:
        self.asked += 1
        status = self.proxies.pop(0) if len(self.proxies) > 1 else self.proxies[0]
        replica = SimpleNamespace(message=TRACEBACK if self.failures["run"] is not None else "")
        application = SimpleNamespace(deployments={"Front": SimpleNamespace(message=""), "Replica": replica})
        return SimpleNamespace(proxies={"node": status}, applications={"remask": application})

    def _act(self, what: str) -> None:
        failure = self.failures[what]
        if failure is not None:
            raise failure


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a fleet on a stand-in of Ray Serve, which it returns."""

    def start(serve: Serve) -> Serve:
        monkeypatch.setattr(cluster, "serve", serve)
        cluster.start("application", "remask", "127.0.0.1", 8000)
        return serve

    monkeypatch.setattr(cluster, "POLL_INTERVAL_S", 0.001)
    return start


def test_a_port_in_use_is_refused_before_ray_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(DeployError, match=rf"port {port} of 127.0.0.1 cannot be listened on: .*--port"):
            cluster.join(None, "127.0.0.1", port)


@pytest.mark.parametrize(("failures", "ends"), [(0, True), (2, True), (cluster.START_ATTEMPTS, False)])
def test_ray_may_start_more_than_once(failures: int, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises a plain `Exception` where its processes take longer than it gives them."""
    left, stopped = [Exception("The current node timed out during startup. This could be ...")] * failures, []

    def init(**options: Any) -> None:
        assert options["address"] == "local"
        if left:
            raise left.pop()

    monkeypatch.setattr(cluster, "ray", SimpleNamespace(init=init, shutdown=lambda: stopped.append(1)))
    if ends:
        cluster.join(None, "127.0.0.1", 0)
    else:
        with pytest.raises(DeployError, match=r"^Ray did not start: The current node timed out [^\n]+ /dev/shm\.$"):
            cluster.join(None, "127.0.0.1", 0)
    assert len(stopped) == failures


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_without_a_cluster_is_refused(scheme: str) -> None:
    with pytest.raises(DeployError, match=r"there is no Ray cluster at .*refused\. Start one with 'ray start --head'"):
        cluster.join(f"{scheme}127.0.0.1:1", "127.0.0.1", 8000)


def test_the_error_of_a_replica_is_told_without_rays_account_of_it(started: Any) -> None:
    with pytest.raises(DeployError) as caught:
        started(Serve(ProxyStatus.HEALTHY, run=RuntimeError("Deploying application remask failed: ['Replica'].")))
    assert str(caught.value).startswith(
        "the replicas did not start: CheckpointError: There is no model 'x': no such folder. "
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [ActorDiedError(), RuntimeError("a\nFailed to bind\n"), Exception("bad"), OSError()])
def test_whatever_ray_raises_is_one_sentence(started: Any, error: Exception) -> None:
    with pytest.raises(DeployError, match=r"^Ray Serve did not start: [^\n]+\. Is port 8000 free [^\n]+\.$"):
        started(Serve(ProxyStatus.HEALTHY, start=error))


@pytest.mark.parametrize("slow", ["start", "run"])
def test_a_proxy_that_takes_longer_than_ray_waits_is_waited_for(
    started: Any, slow: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "REPORT_INTERVAL_S", 0.0)
    late = [ProxyStatus.STARTING, ProxyStatus.UNHEALTHY, ProxyStatus.STARTING, ProxyStatus.HEALTHY]
    failure = {slow: TimeoutError("Proxies not available after 60s.")}
    with caplog.at_level(logging.INFO):
        assert started(Serve(*late, **failure)).asked == len(late)
    assert "Ray is slow to start; waiting on" in caplog.text
    assert re.search(r"Ray's proxy is not up after \d+ s; waiting on", caplog.text)
