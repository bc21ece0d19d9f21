"""Options that say which requests with shared prefixes a measurement runs."""

from typing import Any

from remask_lab.bench.names import PREFIX_TOKENS, PREFIXES, PROMPT_TOKENS, TASKS


def add_task_options(parser: Any) -> None:
    """Which task the requests are drawn from, and how hard they are."""
    parser.add_argument(
        "--task", metavar="NAME", help=f"{', '.join(TASKS)} (default: the one that the model is made for)"
    )
    parser.add_argument(
        "--task-settings", metavar="JSON", help='how hard it is: {"orders": 40, "kinds": ["plan", "lookup"]}'
    )


def add_workload_options(parser: Any, requests: int) -> None:
    """Which task, how many requests, of what length, and how they are denoised; `requests` is the default number."""
    add_task_options(parser)
    parser.add_argument("--requests", type=int, default=requests, metavar="N", help=f"questions (default {requests})")
    parser.add_argument("--prefixes", type=int, help=f"different shared prefixes (default {PREFIXES})")
    parser.add_argument(
        "--prefix-tokens", type=int, metavar="P", help=f"length of a random shared prefix (default {PREFIX_TOKENS})"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="Q", help=f"random tokens after it (default {PROMPT_TOKENS})"
    )
    parser.add_argument("--max-tokens", type=int, metavar="G", help="response length")
    parser.add_argument("--sampling", metavar="JSON", help="further sampling parameters")
    parser.add_argument("--seed", type=int, default=2024, help="of the workload (default 2024)")
