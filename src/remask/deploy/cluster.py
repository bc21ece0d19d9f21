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

START_ATTEMPTS: Final = 4
CONNECT_TIMEOUT_S: Final = 5.0
POLL_INTERVAL_S: Final = 0.5
REPORT_INTERVAL_S: Final = 60.0
"""Seconds between two log lines that say that Ray is still starting."""

_LOG_HINT: Final = f"Ray's logs are in {tempfile.gettempdir()}/ray/session_latest/logs"
_ANSI_OR_MODULE: Final = re.compile(r"\x1b\[[0-9;]*m|^(?:[a-z_]+\.)+(?=[A-Z]\w*(?:Error|Exception)\b)")


def join(address: str | None, host: str, port: int) -> None:
    """Connect to the cluster at `address`; None starts one on this machine alone, which listens on `host` and `port`.

    Raises `DeployError` if there is no cluster at `address`, Ray does not start or the port is in use.
    """
    # Ray's processes log to files of their own, and report errors even when they stop as they should.
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
    with _deploy_errors("Ray did not start", f"{_LOG_HINT}; Ray needs some 2 GB of free memory and of /dev/shm"):
        _start_local_cluster()


def start(application: Any, name: str, host: str, port: int) -> None:
    """Run `application` on the cluster, and wait without a limit until a proxy answers.

    Raises `DeployError` if a replica or the proxy cannot start.
    """
    way_out = f"Is port {port} free on every machine? {_LOG_HINT}"
    with _deploy_errors("Ray Serve did not start", way_out), _ignore_timeout():
        serve.start(http_options={"host": host, "port": port})
    log.info("starting the replicas")
    with _deploy_errors("the replicas did not start", f"Mend that and deploy again; {_LOG_HINT}"), _ignore_timeout():
        try:
            serve.run(application, name=name, route_prefix="/")
        except RuntimeError as error:
            raise RuntimeError(_replica_error(name) or str(error)) from error
    _await_proxy()


def _replica_error(name: str) -> str:
    """Return the error of the application's first failed replica, or "". Ray's error of the application lacks it."""
    application = serve.status().applications.get(name)
    deployments = {} if application is None else application.deployments
    return next((deployment.message for deployment in deployments.values() if "Error" in deployment.message), "")


def _start_local_cluster() -> None:
    """Start Ray on this machine, in `START_ATTEMPTS` attempts: Ray's own time limit is too short for slow machines."""
    for attempts_left in reversed(range(START_ATTEMPTS)):
        try:
            # A cluster of this machine alone stays on its loopback address.
            ray.init(address="local", include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
        except Exception as error:  # Ray raises no other class here
            ray.shutdown()
            if not attempts_left or "timed out" not in str(error):
                raise
            log.info("Ray did not start in time; trying %d times more", attempts_left)
        else:
            return


def _await_proxy() -> None:
    """Wait until one of Ray's proxies takes requests. Ray restarts proxies that fail."""
    start = last_report = time.monotonic()
    while True:
        with _deploy_errors("Ray Serve has stopped", _LOG_HINT):
            proxies = serve.status().proxies
        if not proxies or any(status is ProxyStatus.HEALTHY for status in proxies.values()):
            return
        if time.monotonic() - last_report > REPORT_INTERVAL_S:
            last_report = time.monotonic()
            log.info("Ray's proxy is not up after %.0f s; waiting on (Ctrl-C ends it)", last_report - start)
        time.sleep(POLL_INTERVAL_S)


@contextmanager
def _ignore_timeout() -> Iterator[None]:
    """Log a `TimeoutError` and go on: Ray's limit on the start of its proxy is too short for slow machines."""
    try:
        yield
    except TimeoutError as error:
        log.info("Ray is slow to start; waiting on: %s", error)


@contextmanager
def _deploy_errors(failure: str, way_out: str) -> Iterator[None]:
    """Turn any exception into a `DeployError` of three parts: what failed, `failure`; the reason; and the `way_out`."""
    try:
        yield
    # Beside errors of its own Ray raises plain Exception, RuntimeError, ValueError and OSError.
    except Exception as error:
        log.debug("%s", failure, exc_info=error)
        raise DeployError(f"{failure}: {_reason(error)}. {way_out}.") from error


def _reason(error: BaseException) -> str:
    """Return the last line of an error's text: the replica's own error, below Ray's description of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return _ANSI_OR_MODULE.sub("", lines[-1]).rstrip(".") if lines else type(error).__name__


def _check_reachable(address: str) -> None:
    """Raise `OSError` if nothing listens at `address`. Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()


def _check_free(host: str, port: int) -> None:
    """Raise `DeployError` if the port cannot be listened on."""
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise DeployError(
            f"port {port} of {host} cannot be listened on: {os.strerror(error.errno or 0)}. Give another --port or "
            "--host."
        ) from error
