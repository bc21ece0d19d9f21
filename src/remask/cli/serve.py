"""`remask serve`: an OpenAI-compatible server. `remask deploy`: replicas of it behind Ray Serve."""

import argparse
import gc
import json
import logging
import signal
import threading
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from remask.checks.fields import declared
from remask.checks.values import check_whole
from remask.cli.logs import tell_people
from remask.cli.options import engine_config, model_settings, object_option, open_llm, server_settings, show_banner
from remask.errors import ConfigError
from remask.llm import LLM
from remask.machine.log_format import FIELDS
from remask.policies.registry import file_and_class
from remask.server.config import ServerLimits

if TYPE_CHECKING:
    from remask.deploy.settings import FleetSettings

log = logging.getLogger(__name__)

WARM_UP = 3  # steps before the trace: they allocate memory and choose kernels


def run(args: argparse.Namespace) -> int:
    """Serve until a signal stops the server."""
    from remask.server.app import create_app
    from remask.server.config import ServerConfig, bind, url_of
    from remask.server.run import Server

    args.model = args.served or args.model
    config = ServerConfig(**server_settings(args))
    trace = None if args.profile_dir is None else StepTrace(Path(args.profile_dir), args.profile_steps)
    cache_config, limits = object_option("--cache-config", args.cache_config), engine_config(args)
    # Loading a model may take minutes. If the port is taken, the error comes before that.
    with (
        bind(args.host, args.port) as listener,
        open_llm(args, args.cache, cache_config, limits, "text", spare_cores=1, skip_bad_adapters=True) as llm,
    ):
        app = create_app(llm, config, trace)
        url = url_of(listener)
        _announce(args, url, llm, config)
        where = f"API {url}/v1, playground {url}/ (Ctrl-C stops the server)"
        show_banner(args, llm, where, f"remask chat --base-url {url}/v1, or open the playground in a browser")
        # What is loaded stays. Without this every large body makes the collector look at all of it again, and the event
        # loop stands still meanwhile.
        gc.collect()
        gc.freeze()
        try:
            Server(app, listener).run()
        finally:
            gc.unfreeze()  # what stays for ever is reported as leaked when the process ends, by Triton among others
    return 0


class StepTrace:
    """Records `steps` engine steps after the warm-up, once, and writes a Chrome trace into `folder`.

    Raises `ConfigError` if the folder cannot be made.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        check_whole("profile_steps", steps, low=1)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--profile-dir: cannot make {str(folder)!r}: {error.strerror}") from error
        self.file = folder / "steps.trace.json"
        self.steps = steps
        self._seen = 0
        self._profile: profile | None = None

    def before_step(self) -> None:
        """Start the profiler after the warm-up."""
        if self._seen == WARM_UP:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()

    def after_step(self) -> None:
        """Count the step. After the last one, write the trace."""
        self._seen += 1
        if self._seen == WARM_UP + self.steps:
            self.close()

    def close(self) -> None:
        """Write the recorded steps, unless they are written already."""
        if self._profile is None:
            return
        self._profile.stop()
        self._profile.export_chrome_trace(str(self.file))
        log.info("the trace of %d steps is in %s", self._seen - WARM_UP, self.file)
        self._profile = None


def _announce(args: argparse.Namespace, url: str, llm: LLM, config: Any) -> None:
    """Log every setting at debug, after `auto` was resolved."""
    settings = {
        "url": url,
        "model": args.model,
        "names": list(config.model_names),
        "adapters": {name: each.name for name, each in llm.loaded.adapters.items()},
        "refused_adapters": llm.refused_adapters,
        "device": str(llm.model.device),
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "cache": llm.session.cache_name,
        "cache_config": llm.session.cache_config,
        "sampling": llm.session.overlaid(config.sampling),
        "max_model_len": llm.engine.max_model_len,
        "engine": asdict(llm.session.engine_config),
        "seed": config.seed,
        **{name: getattr(config, name) for name in declared(ServerLimits)},
        "api_keys": len(config.api_keys),
        "priority_keys": len(config.priority_keys),
        "open_metrics": config.open_metrics,
        "allowed_origins": list(config.allowed_origins),
        "allowed_hosts": list(config.allowed_hosts),
        "root_path": config.root_path,
        "tools_by_form": config.tools_by_form,
        "kv_events": None if config.kv_events is None else asdict(config.kv_events),
        "chat_template": args.chat_template
        or ("the model's" if llm.tokenizer and llm.tokenizer.has_chat_template else None),
        "profile_dir": args.profile_dir,
        "profile_steps": None if args.profile_dir is None else args.profile_steps,
    }
    log.debug("remask serve: %s", json.dumps(settings), extra={FIELDS: settings})


APPLICATION = "remask"


def deploy(args: argparse.Namespace) -> int:
    """Serve until a signal stops the fleet."""
    from remask.deploy.settings import FleetSettings

    args.model = args.served or args.model
    if file_and_class(args.cache) is not None:
        raise ConfigError("--cache: replicas run in processes of their own, so a policy has to be in a package there")
    loading = model_settings(args)
    settings = FleetSettings(
        model=args.model,
        cache=args.cache,
        llm={
            "cache_config": object_option("--cache-config", args.cache_config),
            **{name: value for name, value in loading.items() if name != "chat_template"},
        },
        engine=asdict(engine_config(args)),
        server=server_settings(args),
        chat_template=loading["chat_template"],
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
    _run_fleet(settings, args)
    return 0


def _run_fleet(settings: "FleetSettings", args: argparse.Namespace) -> None:
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
        cluster.start(build(settings), APPLICATION, args.host, args.port)
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
        serve.delete(APPLICATION)
    finally:
        # A cluster that was started here ends with it, Ray Serve included.
        ray.shutdown()
