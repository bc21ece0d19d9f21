"""The laboratory's commands, which `remask` finds by the entry point in `pyproject.toml`."""

from collections.abc import Mapping

from remask.cli.commands import Command

COMMANDS: Mapping[str, Command] = {
    "bench": Command(
        "remask_lab.cli.bench",
        "compare cache policies side by side",
        "lab",
        examples=(
            "remask bench --model bundled --requests 48 --json bench.json",
            "remask bench --model GSAI-ML/LLaDA-8B-Instruct --input prompts.jsonl --page answers.html",
        ),
        arguments="remask_lab.cli.options:bench",
        banner=(
            "the table goes to standard output, all figures into the file of --json",
            "remask bench --model {model} --caches all compares every cache",
        ),
    ),
    "profile ops": Command(
        "remask_lab.cli.profile_ops",
        "time a policy's operations, and set them against the machine's roofline",
        "lab",
        examples=(
            "remask profile ops --model bundled --cache bicache",
            "remask profile ops --model llada-100m --load-format dummy --dtype float32 --plot roofline.png",
        ),
        arguments="remask_lab.cli.options:profile_ops",
        banner=(
            "the table goes to standard output, all figures into the file of --json",
            "remask bench --model {model} compares whole answers",
        ),
    ),
    "analyze": Command(
        "remask_lab.cli.analyze",
        "look into a model while it denoises",
        "lab",
        examples=(
            "remask analyze depth --model bundled --samples 8 --plots pictures",
            "remask analyze prefix-similarity --model bundled --requests 8 --output similarity.json",
        ),
        banner=(
            "the findings go to standard output, all figures into the file of --output",
            "remask analyze --help lists the other subjects",
        ),
    ),
    "eval": Command(
        "remask_lab.cli.evaluate",
        "measure how good a model is",
        "lab",
        examples=(
            "remask eval tasks --model GSAI-ML/LLaDA-8B-Instruct --tasks remask_gsm8k --caches none,bicache --limit 9",
            "remask eval likelihood --model GSAI-ML/LLaDA-8B-Base --prompts pairs.jsonl --output likelihood.json",
        ),
        banner=(
            "the scores go to standard output, every row into the file of --output",
            "remask bench --model {model} compares speed",
        ),
    ),
    "verify": Command(
        "remask_lab.cli.verify",
        "compare a checkpoint, as remask computes it, with its own code or transformers'",
        "lab",
        examples=(
            "remask verify JetLM/SDAR-1.7B-Chat",
            "remask verify GSAI-ML/LLaDA-8B-Instruct --trust-remote-code --dtype bfloat16",
        ),
        opening="loading the model twice, here and in a process of its own",
        arguments="remask_lab.cli.options:verify",
    ),
}
