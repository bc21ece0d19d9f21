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
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from remask.checks.fields import declared
from remask.checks.values import check_whole
from remask.cli.logs import print_notice
from remask.cli.options import engine_config, model_settings, object_option, open_llm, print_banner, server_settings
from remask.errors import ConfigError
from remask.llm import LLM
from remask.machine.device import dtype_name
from remask.machine.log_format import FIELDS
from remask.policies.registry import file_and_class
from remask.server.config import ServerConfig, ServerLimits, bind, url_of

if TYPE_CHECKING:
    from remask.deploy.settings import FleetSettings

log = logging.getLogger(__name__)

WARM_UP_STEPS = 3  # before the trace: they allocate memory and choose kernels


def run(args: argparse.Namespace) -> int:
    """Serve until a signal stops the server. Returns 0. Raises `ConfigError` on options, and as `open_llm` does."""
    from remask.server.app import create_app
    from remask.server.run import Server

    args.model = args.positional_model or args.model
    config = ServerConfig(**server_settings(args))
    trace = None if args.profile_dir is None else StepTrace(Path(args.profile_dir), args.profile_steps)
    cache_config = object_option("--cache-config", args.cache_config)
    limits = engine_config(args)
    # The socket is bound first, as loading a model may take minutes and the port may be in use.
    with (
        bind(args.host, args.port) as listener,
        open_llm(args, args.cache, cache_config, limits, "text", spare_cores=1, skip_bad_adapters=True) as llm,
    ):
        app = create_app(llm, config, trace)
        url = url_of(listener)
        _log_settings(args, url, llm, config)
        addresses = f"API {url}/v1, playground {url}/ (Ctrl-C stops the server)"
        print_banner(args, llm, addresses, f"remask chat --base-url {url}/v1, or open the playground in a browser")
        # The model is never garbage. Without this, the collector scans it again whenever a large body is read, which
        # blocks the event loop.
        gc.collect()
        gc.freeze()
        try:
            Server(app, listener).run()
        finally:
            gc.unfreeze()  # frozen objects are reported as leaked at the end of the process, by Triton among others
    return 0


class StepTrace:
    """Records a Chrome trace of `steps` engine steps after the warm-up, once, and writes it into `folder`.

    Raises `ConfigError` if `steps` is less than 1 or the folder cannot be made.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        check_whole("profile_steps", steps, low=1)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--profile-dir: cannot make {str(folder)!r}: {error.strerror}") from error
        self.file = folder / "steps.trace.json"
        self.steps = steps
        self._step_count = 0
        self._profile: profile | None = None

    def before_step(self) -> None:
        """Start the profiler after the warm-up."""
        if self._step_count == WARM_UP_STEPS:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()

    def after_step(self) -> None:
        """Count the step, and write the trace after the last one."""
        self._step_count += 1
        if self._step_count == WARM_UP_STEPS + self.steps:
            self.close()

    def close(self) -> None:
        """Write the steps recorded so far. Does nothing if there are none, or they were written before."""
        if self._profile is None:
            return
        self._profile.stop()
        self._profile.export_chrome_trace(str(self.file))
        log.info("the trace of %d steps is in %s", self._step_count - WARM_UP_STEPS, self.file)
        self._profile = None


def _log_settings(args: argparse.Namespace, url: str, llm: LLM, config: ServerConfig) -> None:
    """Log all settings at debug, with the values that `auto` was resolved to."""
    settings = {
        "url": url,
        "model": args.model,
        "names": list(config.model_names),
        "adapters": {name: adapter.name for name, adapter in llm.loaded.adapters.items()},
        "refused_adapters": llm.refused_adapters,
        "device": str(llm.model.device),
        "dtype": dtype_name(llm.model.dtype),
        "threads": torch.get_num_threads(),
        "cache": llm.session.cache_name,
        "cache_config": llm.session.cache_config,
        "sampling": llm.session.merged_defaults(config.sampling),
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
    """Serve until a signal stops the fleet. Returns 0. Raises `ConfigError` on options, `DeployError` if Ray fails."""
    from remask.deploy.settings import FleetSettings, Scaling

    args.model = args.positional_model or args.model
    if file_and_class(args.cache) is not None:
        raise ConfigError("--cache: replicas run in processes of their own, so a policy has to be in a package there")
    load_settings = model_settings(args)
    most_replicas = args.min_replicas if args.max_replicas is None else args.max_replicas
    settings = FleetSettings(
        model=args.model,
        cache=args.cache,
        llm={
            "cache_config": object_option("--cache-config", args.cache_config),
            **{name: value for name, value in load_settings.items() if name != "chat_template"},
        },
        engine=asdict(engine_config(args)),
        server=server_settings(args),
        chat_template=load_settings["chat_template"],
        **{name: getattr(args, name) for name in declared(Scaling)} | {"max_replicas": most_replicas},
    )
    logged_settings = {name: value for name, value in asdict(settings).items() if name != "server"}
    log.info("remask deploy: %s", json.dumps({"url": f"http://{args.host}:{args.port}", **logged_settings}))
    _run_fleet(settings, args)
    return 0


def _run_fleet(settings: "FleetSettings", args: argparse.Namespace) -> None:
    """Run the application until SIGTERM or SIGINT. Raises `DeployError` if Ray or a replica does not start."""
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
        print_notice(
            args,
            f"remask deploy: {settings.model}, {settings.min_replicas} to {settings.max_replicas} replicas\n"
            f"  API {url}/v1 (Ctrl-C stops the replicas)\n"
            f"  next: remask chat --base-url {url}/v1",
        )
        stop.wait()
        log.info("stopping: accepted requests have %g s to end", settings.server_config.drain_timeout)
        serve.delete(APPLICATION)
    finally:
        # This also ends a cluster that was started here, and Ray Serve on it.
        ray.shutdown()
