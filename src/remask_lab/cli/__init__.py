"""The laboratory's commands, which `remask` finds by the entry point in `pyproject.toml`."""

from collections.abc import Mapping

from remask.cli.commands import Command

COMMANDS: Mapping[str, Command] = {
    "demo": Command(
        "remask_lab.cli.demo",
        "cache policies side by side on a bundled model",
        "lab",
        opening="loading PyTorch and the model, a few seconds; then questions are answered under each cache policy",
    ),
    "bench": Command("remask_lab.cli.bench", "compare cache policies side by side", "lab"),
    "bench serve": Command("remask_lab.cli.bench_serve", "put load on a running server", "server"),
    "profile-ops": Command(
        "remask_lab.cli.profile_ops", "time a policy's operations, and set them against the machine's roofline", "lab"
    ),
    "analyze": Command("remask_lab.cli.analyze", "look into a model while it denoises", "lab"),
    "eval": Command("remask_lab.cli.evaluate", "measure how good a model is", "lab"),
}
