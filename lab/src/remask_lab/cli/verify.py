"""`remask verify`: compares a checkpoint's logits and answers here with those of its own code, or transformers'."""

import argparse
import random

from remask.checkpoint.load import read_config
from remask.checkpoint.quantized_files import stored_quantization
from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.source import find_source
from remask.checks import in_words
from remask.checks.values import check_whole
from remask.cli.options import object_option, size_text
from remask.engine.config import EngineConfig
from remask.engine.proof import TOLERANCE
from remask.errors import ConfigError
from remask.llm import LLM, Output
from remask.loading import announce_download
from remask.text.prompts import Prompt
from remask_lab.records.machine import host, versions
from remask_lab.verify.compare import Comparison, compare

QUESTION = "Why is the sky blue?"
PROMPT_TOKENS = 12  # of a random prompt for a model without a tokenizer
EXACT = {"block_causal": "exact"}  # the cache policy that is exact on a kind of models; other kinds take "none"


def run(args: argparse.Namespace) -> int:
    """Compare, and print the report. Returns 0 if the two are `equal`, else 1."""
    check_whole("--max-tokens", args.max_tokens, low=1)
    overrides = object_option("--hf-overrides", args.hf_overrides)
    announce_download(ModelSettings(args.model), None)
    source = find_source(args.model, overrides, progress=args.progress)
    if not source.weights.is_dir() or source.adapter is not None or stored_quantization(source.weights) is not None:
        raise ConfigError(
            f"model {args.model!r}: only a folder or hub id with safetensors can be verified, neither quantized nor a "
            "GGUF file nor an adapter; merge or convert it, or verify what it was made of"
        )
    _, config = read_config(source.weights, source.overrides)
    llm = LLM(
        args.model,
        dtype=args.dtype,
        device=args.device,
        hf_overrides=overrides,
        quantization="none",
        cache=EXACT.get(config.kind, "none"),
        engine=EngineConfig(max_num_seqs=1, audit=0, overlap=False, graphs=False),
        progress=args.progress,
    )
    prompt = _prompt(llm, args.prompt)
    sampling = {"max_tokens": args.max_tokens, "seed": 0} | object_option("--sampling", args.sampling)
    comparison = compare(llm, source, prompt, sampling, trusted=args.trust_remote_code)
    print("\n".join(report(llm, comparison)))
    return 0 if equal(llm, comparison) else 1


def _prompt(llm: LLM, text: str | None) -> Prompt:
    """`text` or `QUESTION`, as a user's message if there is a chat template; random tokens if there is no tokenizer.

    Raises `ConfigError` on a text without a tokenizer.
    """
    tokenizer, config = llm.tokenizer, llm.loaded.config
    if tokenizer is not None:
        question = text or QUESTION
        return [{"role": "user", "content": question}] if tokenizer.has_chat_template else question
    if text is not None:
        raise ConfigError("--prompt: the model has no tokenizer; leave it out, and random tokens are asked")
    special = {config.mask_id, *config.stop_ids}
    tokens = [token for token in range(config.vocab) if token not in special]
    return random.Random(0).choices(tokens, k=PROMPT_TOKENS)


def equal(llm: LLM, comparison: Comparison) -> bool:
    """Whether logits differ by no more than rounding (`TOLERANCE`), and the answers are the same."""
    answer, reference = comparison.answers
    return comparison.worst <= TOLERANCE[llm.model.dtype] and answer.token_ids == reference.token_ids


def report(llm: LLM, comparison: Comparison) -> list[str]:
    """The lines of the report, which a user may paste into an issue."""
    config, limit, machine = llm.loaded.config, TOLERANCE[llm.model.dtype], host()
    dtype = str(llm.model.dtype).removeprefix("torch.")
    rows = "; ".join(comparison.differing) or "nowhere another"
    return [
        f"remask verify {llm.loaded.name}: {'equal' if equal(llm, comparison) else 'NOT EQUAL'}",
        f"reference: {comparison.reference}, {dtype} on {llm.model.device}",
        f"model: {config.family}, {in_words((config.kind,))}, {size_text(config.parameters)} parameters, "
        f"fingerprint {llm.loaded.fingerprint}",
        f"compared: {comparison.passes} passes, {comparison.rows} rows of {comparison.vocab} logits",
        f"logits: rows are apart by {comparison.worst:.2g} of their size at most, {comparison.mean:.2g} in the mean "
        f"({limit:g} is rounding); single ones by {comparison.logit:.2g}",
        f"log-probabilities of the most probable token: apart by {comparison.log_prob:.2g} at most",
        f"most probable token: {comparison.same} of {comparison.rows} rows the same; {rows}",
        f"answer: {_answer_text(*comparison.answers)}",
        f"versions: {', '.join(f'{name} {number}' for name, number in versions().items())}",
        f"machine: {machine['cpu']}, {machine['system']}",
    ]


def _answer_text(answer: Output, reference: Output) -> str:
    """The length and the steps of the answer, and the first token in which it differs from the reference's."""
    tokens, other = answer.token_ids, reference.token_ids
    text = f"{len(tokens)} tokens in {answer.usage.steps} steps"
    if tokens == other:
        return f"{text}, the same"
    length = min(len(tokens), len(other))
    index = next((index for index in range(length) if tokens[index] != other[index]), length)
    return f"{text}, not the same from token {index} on (of {len(other)})"
