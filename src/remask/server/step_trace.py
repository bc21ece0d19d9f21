"""The trace of engine steps that `--profile-dir` writes, made with torch's profiler."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from remask.checks.values import whole
from remask.errors import ConfigError

log = logging.getLogger(__name__)

WARM_UP = 3  # steps before the trace: they allocate memory and choose kernels


class StepTrace:
    """Records `steps` engine steps after the warm-up, once, and writes a Chrome trace into `folder`.

    Raises `ConfigError` if the folder cannot be made.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        whole("profile_steps", steps, low=1)
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
