"""The options of `remask eval gen-ppl`."""

from typing import Any

from remask.cli.arguments.options import add_engine_options, add_model_options
from remask.cli.parser import examples

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_parser(subjects: Any) -> None:
    """Add the subject and its options."""
    perplexity = subjects.add_parser(
        "gen-ppl",
        help="generative perplexity under an external judge",
        epilog=examples(
            "remask eval gen-ppl --model GSAI-ML/LLaDA-8B-Base --judge gpt2-large --prompts texts.txt",
            "remask eval gen-ppl --model bundled --judge JUDGE --prompts texts.txt --caches none,bicache",
        ),
    )
    perplexity.add_argument("--judge", required=True, metavar="MODEL", help="causal language model: folder or hub id")
    perplexity.add_argument(
        "--judge-dtype",
        default="auto",
        choices=_DTYPES,
        metavar="|".join(_DTYPES),
        help="dtype of the judge (default auto)",
    )
    perplexity.add_argument(
        "--prompts", required=True, metavar="FILE", help="one text a line, or JSONL of text or prompt"
    )
    perplexity.add_argument(
        "--prompt-tokens", type=int, default=128, metavar="N", help="cut prompts to N tokens (default 128)"
    )
    perplexity.add_argument("--requests", type=int, default=64, metavar="N", help="number of prompts (default 64)")
    perplexity.add_argument("--caches", default="none", help="policies, separated by commas (default none)")
    perplexity.add_argument("--cache-config", metavar="JSON", help="settings, as one object per policy")
    perplexity.add_argument("--sampling", metavar="JSON", help="sampling parameters; each request has its own seed")
    perplexity.add_argument("--seed", type=int, default=0, help="seed of the first request and of the intervals")
    perplexity.add_argument("--output", metavar="FILE", help="write every response and its score to FILE, as JSON")
    add_model_options(perplexity)
    add_engine_options(perplexity)
