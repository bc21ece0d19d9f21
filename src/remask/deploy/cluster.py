"""Starting a fleet on Ray. Whatever Ray raises becomes one sentence that says what to do."""

import logging
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import ray
from ray import serve
from ray.serve.schema import ProxyStatus

from remask.errors import DeployError

log = logging.getLogger(__name__)

STARTS: Final = 4
CONNECT_S: Final = 5.0
POLL_S: Final = 0.5
PATIENCE_S: Final = 60.0
"""Seconds between two lines that say that Ray is still waited for."""

_LOGS: Final = f"Ray's logs are in {tempfile.gettempdir()}/ray/session_latest/logs"
_LABEL: Final = re.compile(r"\x1b\[[0-9;]*m|^(?:[a-z_]+\.)+(?=[A-Z]\w*(?:Error|Exception)\b)")


def join(address: str | None, host: str, port: int) -> None:
    """Connect to the cluster at `address`; None starts one on this machine alone, which listens on `host` and `port`.

    Raises `DeployError` where there is no cluster at `address`, or Ray does not start, or the port is in use.
    """
    # What Ray's processes log, also of a stop that went well, stands in its own files.
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if address is not None:
        with _deploy_errors(
            f"there is no Ray cluster at {address!r}", "Start one with 'ray start --head', or leave --ray-address out"
        ):
            _check_reachable(address)
            ray.init(address=address, log_to_driver=False)
        return
    _check_free(host, port)
    log.info("starting Ray on this machine")
    with _deploy_errors("Ray did not start", f"{_LOGS}; Ray needs some 2 GB of free memory and of /dev/shm"):
        _init_here()


def start(application: Any, name: str, host: str, port: int) -> None:
    """Run `application` on the cluster, and wait until its proxy answers: as long as a slow machine needs.

    Raises `DeployError` where a replica, or the proxy, cannot start.
    """
    with _deploy_errors("Ray Serve did not start", f"Is port {port} free on every machine? {_LOGS}"), _patience():
        serve.start(http_options={"host": host, "port": port})
    log.info("starting the replicas")
    with _deploy_errors("the replicas did not start", f"Mend that and deploy again; {_LOGS}"), _patience():
        try:
            serve.run(application, name=name, route_prefix="/")
        except RuntimeError as error:
            raise RuntimeError(_replica_error(name) or str(error)) from error
    _await_proxy()


def _replica_error(name: str) -> str:
    """What the replicas of an application raised, which Ray keeps apart from the failure of the application."""
    application = serve.status().applications.get(name)
    deployments = {} if application is None else application.deployments
    return next((deployment.message for deployment in deployments.values() if "Error" in deployment.message), "")


def _init_here() -> None:
    """Start Ray on this machine. Ray gives its processes a fixed time, so a slow machine gets `STARTS` of them."""
    for left in reversed(range(STARTS)):
        try:
            # A cluster of this machine alone stays on its loopback address.
            ray.init(address="local", include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
        except Exception as error:  # Ray raises no other class here
            ray.shutdown()
            if not left or "timed out" not in str(error):
                raise
            log.info("Ray did not start in time; trying %d times more", left)
        else:
            return


def _await_proxy() -> None:
    """Wait for a proxy that takes requests. Ray starts one anew as often as it takes."""
    start = reported = time.monotonic()
    while True:
        with _deploy_errors("Ray Serve has stopped", _LOGS):
            proxies = serve.status().proxies
        if not proxies or any(status is ProxyStatus.HEALTHY for status in proxies.values()):
            return
        if time.monotonic() - reported > PATIENCE_S:
            reported = time.monotonic()
            log.info("Ray's proxy is not up after %.0f s; waiting on (Ctrl-C ends it)", reported - start)
        time.sleep(POLL_S)


@contextmanager
def _patience() -> Iterator[None]:
    """Ray gives up waiting for its proxy after a fixed time, which says nothing about a slow machine."""
    try:
        yield
    except TimeoutError as error:
        log.info("Ray is slow to start; waiting on: %s", error)


@contextmanager
def _deploy_errors(what: str, way_out: str) -> Iterator[None]:
    """Raise what Ray raises as a `DeployError` of one sentence, in front of `way_out`."""
    try:
        yield
    # Beside errors of its own Ray raises plain Exception, RuntimeError, ValueError and OSError.
    except Exception as error:
        log.debug("%s", what, exc_info=error)
        raise DeployError(f"{what}: {_reason(error)}. {way_out}.") from error


def _reason(error: BaseException) -> str:
    """The last line of an error's text: the error of a replica stands there, below Ray's account of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return _LABEL.sub("", lines[-1]).rstrip(".") if lines else type(error).__name__


def _check_reachable(address: str) -> None:
    """Raise `OSError` where nobody listens at `address`: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_S).close()


def _check_free(host: str, port: int) -> None:
    """Raise `DeployError` where another process listens on the port."""
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise DeployError(
            f"port {port} of {host} cannot be listened on: {os.strerror(error.errno or 0)}. Give another --port or "
            "--host."
        ) from error
