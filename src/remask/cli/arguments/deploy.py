"""The options of `remask deploy`."""

import argparse

from remask.checkpoint.bundled import BUNDLED
from remask.cli.arguments.options import add_engine_options, add_model_options, add_tensor_parallel
from remask.cli.arguments.serve import add_answer_options, add_server_options
from remask.engine.config import AUTO
from remask.server.limits import IntakeLimits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.allow_abbrev = False
    parser.add_argument("served", nargs="?", metavar="MODEL", help="the same as --model, which it overrides")
    add_model_options(parser, BUNDLED)
    add_tensor_parallel(parser)
    add_engine_options(parser)
    parser.set_defaults(store_budget_tokens=AUTO)  # a server's engine is alone on its device
    add_answer_options(parser)
    add_server_options(parser, IntakeLimits)
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument(
        "--ray-address", metavar="ADDRESS", help="address of a running Ray cluster (default: start one here)"
    )
    fleet.add_argument(
        "--min-replicas", type=int, default=1, metavar="N", help="minimum number of replicas (default 1)"
    )
    fleet.add_argument(
        "--max-replicas", type=int, metavar="N", help="maximum number of replicas (default --min-replicas)"
    )
    fleet.add_argument(
        "--target-ongoing-requests",
        type=float,
        metavar="N",
        help="open requests a replica to scale for (default --max-num-seqs)",
    )
    fleet.add_argument(
        "--upscale-delay", type=float, default=30.0, metavar="S", help="seconds of higher load before one is added"
    )
    fleet.add_argument(
        "--downscale-delay", type=float, default=600.0, metavar="S", help="seconds of lower load before one is removed"
    )
    fleet.add_argument("--routing", default="prefix", metavar="NAME", help="prefix or round-robin (default prefix)")
    fleet.add_argument(
        "--balance",
        type=float,
        default=1.25,
        help="multiple of the mean load at which prefixes spill over (default 1.25)",
    )
    fleet.add_argument("--num-cpus", type=float, default=1.0, help="CPUs that Ray sets aside per replica (default 1)")
    fleet.add_argument("--num-gpus", type=float, default=0.0, help="GPUs that Ray sets aside per replica (default 0)")
