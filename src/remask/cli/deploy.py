"""`remask deploy`: replicas of a server behind Ray Serve."""

import argparse
import json
import logging
import signal
import threading
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING

from remask.cli.early import policy_file
from remask.cli.logs import tell_people
from remask.cli.options import (
    engine_config,
    model_settings,
    object_option,
)
from remask.cli.serve import check_extra, read_template, server_settings
from remask.errors import ConfigError

if TYPE_CHECKING:
    from remask.deploy.settings import FleetSettings

log = logging.getLogger(__name__)

NAME = "remask"
_NEEDED = ("fastapi", "uvicorn", "pydantic", "prometheus_client")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal stops the fleet."""
    check_extra(*_NEEDED)
    check_extra("ray")
    from remask.deploy.settings import FleetSettings

    args.model = args.served or args.model
    if args.port == 0:
        raise ConfigError("--port 0 is not possible here, because Ray Serve does not choose a free port; give a port")
    settings = FleetSettings(
        model=args.model,
        cache=_named(args.cache),
        llm={
            "cache_config": object_option("--cache-config", args.cache_config),
            **model_settings(args),
        },
        engine=asdict(engine_config(args)),
        server=server_settings(args),
        chat_template=read_template(args.chat_template),
        min_replicas=args.min_replicas,
        max_replicas=args.min_replicas if args.max_replicas is None else args.max_replicas,
        target_ongoing_requests=args.target_ongoing_requests,
        upscale_delay_s=args.upscale_delay,
        downscale_delay_s=args.downscale_delay,
        routing=args.routing,
        balance=args.balance,
        num_cpus=args.num_cpus,
        num_gpus=args.num_gpus,
    )
    public = {name: value for name, value in asdict(settings).items() if name != "server"}
    log.info("remask deploy: %s", json.dumps({"url": f"http://{args.host}:{args.port}", **public}))
    _serve(settings, args)
    return 0


def _serve(settings: "FleetSettings", args: argparse.Namespace) -> None:
    """Run the application until a SIGTERM or SIGINT."""
    import ray
    from ray import serve

    from remask.deploy import cluster
    from remask.deploy.app import build

    stop = threading.Event()

    def stop_on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signal handlers' signature
        stop.set()

    cluster.join(args.ray_address, args.host, args.port)
    try:
        cluster.start(build(settings), NAME, args.host, args.port)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop_on_signal)
        url = f"http://{args.host}:{args.port}"
        log.info("running on %s", url)
        tell_people(
            args,
            f"remask deploy: {settings.model}, {settings.min_replicas} to {settings.max_replicas} replicas\n"
            f"  API {url}/v1 (Ctrl-C stops the replicas)\n"
            f"  next: remask chat --base-url {url}/v1",
        )
        stop.wait()
        log.info("stopping: accepted requests have %g s to end", settings.server_config.drain_timeout)
        serve.delete(NAME)
    finally:
        # A cluster that was started here ends with it, Ray Serve included.
        ray.shutdown()


def _named(cache: str) -> str:
    """The policy. Raises `ConfigError` where it is one of a file, which other machines do not have."""
    if policy_file(cache) is not None:
        raise ConfigError("--cache: replicas run in processes of their own, so a policy has to be in a package there")
    return cache
