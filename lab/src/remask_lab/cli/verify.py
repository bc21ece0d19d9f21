"""`remask verify`: whether a checkpoint is computed here as its own code, or transformers', computes it."""

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
from remask.llm import LLM
from remask.loading import announce_download
from remask.text.prompts import Prompt
from remask_lab.records.machine import host, versions
from remask_lab.verify.compare import Comparison, compare

QUESTION = "Why is the sky blue?"
PROMPT_TOKENS = 12  # random ones, where there is no tokenizer
EXACT = {"block_causal": "exact"}  # the cache of a kind that loses nothing; others have none


def run(args: argparse.Namespace) -> int:
    """Compare, and print the report. Returns 0 where all is equal, else 1."""
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
    """The text, as the user's turn where there is a chat template; random tokens where there is no tokenizer."""
    tokenizer, config = llm.tokenizer, llm.loaded.config
    if tokenizer is not None:
        asked = text or QUESTION
        return [{"role": "user", "content": asked}] if tokenizer.has_chat_template else asked
    if text is not None:
        raise ConfigError("--prompt: the model has no tokenizer; leave it out, and random tokens are asked")
    special = {config.mask_id, *config.stop_ids}
    plain = [token for token in range(config.vocab) if token not in special]
    return random.Random(0).choices(plain, k=PROMPT_TOKENS)


def equal(llm: LLM, found: Comparison) -> bool:
    """Whether rows are as near as rounding leaves them, and the answers are the same."""
    own, theirs = found.answers
    return found.worst <= TOLERANCE[llm.model.dtype] and own.token_ids == theirs.token_ids


def report(llm: LLM, found: Comparison) -> list[str]:
    """The lines to paste."""
    config, (own, theirs) = llm.loaded.config, found.answers
    limit, facts = TOLERANCE[llm.model.dtype], host()
    dtype = str(llm.model.dtype).removeprefix("torch.")
    same = own.token_ids == theirs.token_ids
    answer = f"{len(own.token_ids)} tokens in {own.usage.steps} steps, "
    if same:
        answer += "the same"
    else:
        pairs = zip(own.token_ids, theirs.token_ids, strict=False)
        shorter = min(len(own.token_ids), len(theirs.token_ids))
        first = next((at for at, (one, other) in enumerate(pairs) if one != other), shorter)
        answer += f"not the same from token {first} on (of {len(theirs.token_ids)})"
    where = "; ".join(found.differing) or "nowhere another"
    return [
        f"remask verify {llm.loaded.name}: {'equal' if equal(llm, found) else 'NOT EQUAL'}",
        f"reference: {found.reference}, {dtype} on {llm.model.device}",
        f"model: {config.family}, {in_words((config.kind,))}, {size_text(config.parameters)} parameters, "
        f"fingerprint {llm.loaded.fingerprint}",
        f"compared: {found.passes} passes, {found.rows} rows of {found.vocab} logits",
        f"logits: rows are apart by {found.worst:.2g} of their size at most, {found.mean:.2g} in the mean "
        f"({limit:g} is rounding); single ones by {found.logit:.2g}",
        f"log-probabilities of the most probable token: apart by {found.log_prob:.2g} at most",
        f"most probable token: {found.same} of {found.rows} rows the same; {where}",
        f"answer: {answer}",
        f"versions: {', '.join(f'{name} {number}' for name, number in versions().items())}",
        f"machine: {facts['cpu']}, {facts['system']}",
    ]
