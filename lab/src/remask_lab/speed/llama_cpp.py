"""Beside llama.cpp, on one GGUF file of the `llada` architecture with given weights, as llama.cpp lays it out."""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from remask import LLM, EngineConfig, SamplingParams
from remask.checkpoint.loaded import dummy_weights
from remask.checks import Quantization
from remask.checks.values import check_choice
from remask.engine.pack import pack_uncached
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.families import preset
from remask.model.config import ModelConfig
from remask.model.pool import Pool
from remask.model.weights import Weights
from remask.plan.canvas import Canvas
from remask_lab.arguments import split_names
from remask_lab.speed.command import cpu_seconds, in_turns, report

TYPES = ("f32", "q8_0", "q4_0")
_BYTES = 256  # tokens that a text needs at least
PACKAGE, INSTALL = "llama_cpp", "pip install llama-cpp-python"
OURS: dict[str, Quantization | None] = {"f32": None, "q8_0": "int8", "q4_0": "int4"}
CACHES = ("none", "block-dual")

Pass = Callable[[], NDArray[np.float32]]


def llama_cpp(args: argparse.Namespace) -> dict[str, Any]:
    """Forward passes and answers beside llama.cpp, on one model file: CPU seconds, and the difference of logits.

    Needs the package `llama-cpp-python`, which is no dependency: pip install llama-cpp-python (it is compiled). For
    each kind a file with random weights is written into a temporary folder. Both read it, remask with `int8` for
    `q8_0`, with `int4` for `q4_0`, and in float32. A pass computes the whole canvas and the logits of the response.
    Both use as many threads, and passes take turns. llama.cpp computes the whole canvas in every step of a diffusion
    model, so its time for an answer is that of a pass times the steps; the engine answers under each policy.
    """
    kinds = split_names(args.kinds)
    for kind in kinds:
        check_choice("--kinds", kind, TYPES)
    if find_spec(PACKAGE) is None:
        raise ConfigError(f"this needs llama-cpp-python, which is no dependency: {INSTALL}")
    config = preset(args.model)
    weights = dummy_weights(config, torch.float32, torch.device("cpu"))
    rng = np.random.default_rng(0)
    canvas = Canvas.masked(rng.integers(0, 256, args.prompt).tolist(), args.response, config.mask_id)
    results, float32_logits = [], None
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            path = Path(folder) / f"{kind}.gguf"
            write_gguf(path, config, weights, kind)
            llm = open_ours(path, OURS[kind], args)
            row, logits = compare(llm, path, kind, canvas, args, float32_logits)
            float32_logits = logits if kind == "f32" else float32_logits
            results.append({"kind": kind, "file_bytes": path.stat().st_size, **row})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
            path.unlink()
    return report(llm, llama_cpp=version("llama-cpp-python"), results=results)


def compare(
    llm: LLM, path: Path, kind: str, canvas: Canvas, args: argparse.Namespace, exact: NDArray[np.float32] | None
) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Compare a pass and an answer on the model file `path`: CPU seconds of both, and how much their logits differ.

    Returns the row of results and our logits [N, V]. `exact` are our logits with float32 weights, if known.
    """
    steps = args.steps or args.response
    ours = our_pass(llm, canvas)
    with their_pass(path, canvas, args.threads) as theirs:
        logits = ours(), theirs()  # the first pass of a shape makes kernels
        times = in_turns({"ours": ours, "theirs": theirs}, args.turns, cpu_seconds, first=0)
    our_seconds, their_seconds = (statistics.median(seconds) for seconds in times.values())
    row: dict[str, Any] = {
        "ours": OURS[kind] or "float32",
        "pass_s": {"ours": our_seconds, "llama.cpp": their_seconds},
        "answer_s": {"llama.cpp": steps * their_seconds},
        "logits_apart": rms_error(*logits),
        "same_first": float((logits[0].argmax(1) == logits[1].argmax(1)).mean()),
    }
    if exact is not None:
        row["from_float32"] = {"ours": rms_error(logits[0], exact), "llama.cpp": rms_error(logits[1], exact)}
    for cache in CACHES:
        row["answer_s"][cache] = cpu_seconds(partial(answer, llm, canvas, steps, args.block, cache))
    row["times_less"] = {cache: steps * their_seconds / row["answer_s"][cache] for cache in CACHES}
    return row, logits[0]


def open_ours(path: Path, kind: Quantization | None, args: argparse.Namespace) -> LLM:
    """Open a model file in float32 on the CPU, with matrices quantized as `kind`."""
    limits = EngineConfig(max_num_seqs=1, store_budget_tokens=0)
    return LLM(str(path), dtype="float32", device="cpu", threads=args.threads, quantization=kind, engine=limits)


def our_pass(llm: LLM, canvas: Canvas) -> Pass:
    """A function that runs a pass over `canvas`, and returns the logits [N, V] of its noisy positions."""
    model, noisy = llm.model, np.arange(len(canvas)) >= canvas.prompt
    pool = Pool(model.config, len(canvas), 1, model.kv_dtype, model.device, model.dtype)

    def run() -> NDArray[np.float32]:
        with torch.inference_mode():
            logits = model.head(model.forward(pack_uncached(model, [canvas], [noisy]), pool))
        array: NDArray[np.float32] = logits.float().numpy()
        return array

    return run


@contextmanager
def their_pass(path: Path, canvas: Canvas, threads: int) -> Iterator[Pass]:
    """A function like that of `our_pass` which llama.cpp runs; it holds the model until the context ends.

    Raises `ConfigError` where it cannot read the file or compute the pass.
    """
    import llama_cpp as lib  # type: ignore[import-not-found,unused-ignore]

    count, first = len(canvas), canvas.prompt
    silent = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(silent, None)
    lib.llama_backend_init()
    settings = lib.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = count
    settings.n_threads = settings.n_threads_batch = threads
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    context = lib.llama_init_from_model(model, settings) if model else None
    batch = lib.llama_batch_init(count, 0, 1)
    try:
        if not context:
            raise ConfigError(f"llama.cpp cannot load {path}; its version may not know the architecture llada")
        lib.llama_set_causal_attn(context, False)
        vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        batch.n_tokens = count
        for index, token in enumerate(canvas.tokens.tolist()):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, index, 1
            batch.seq_id[index][0], batch.logits[index] = 0, True

        def run() -> NDArray[np.float32]:
            if (memory := lib.llama_get_memory(context)) is not None:
                lib.llama_memory_clear(memory, True)
            if (code := lib.llama_decode(context, batch)) != 0:
                raise ConfigError(f"llama.cpp computes no pass over {count} tokens: it returned {code}")
            rows = lib.llama_get_logits(context)
            # Without a cache llama.cpp computes logits of all rows, whichever are requested.
            return np.ctypeslib.as_array(rows, shape=(count * vocab,)).reshape(-1, vocab)[first:].copy()

        yield run
    finally:
        lib.llama_batch_free(batch)
        if context:
            lib.llama_free(context)
        if model:
            lib.llama_model_free(model)


def answer(llm: LLM, canvas: Canvas, steps: int, block: int, cache: str) -> None:
    """Let the engine answer the prompt of `canvas` with as many tokens as it has noisy positions."""
    tokens = len(canvas) - canvas.prompt
    block_length = min(block, tokens) if tokens % block == 0 else tokens
    params = SamplingParams(max_tokens=tokens, steps=steps, block_length=block_length, ignore_eos=True)
    prompt = canvas.tokens[: canvas.prompt].tolist()
    list(llm.session.run([Request(cache, prompt, params, policy=llm.session.policy(cache))], progress=False))


def rms_error(logits: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """The root mean square of the difference, relative to that of `reference`."""
    return float(np.sqrt(np.mean((logits - reference) ** 2) / np.mean(reference**2)))


def write_gguf(path: Path, config: ModelConfig, weights: Weights, kind: str) -> None:
    """Write a GGUF file of `weights`, float32 on the CPU, with matrices of the type `kind`, and a filler vocabulary.

    Raises `ConfigError` where `config` is not of the `llada` family, or has fewer than 256 tokens.
    """
    if config.family != "llada" or config.vocab < _BYTES:
        raise ConfigError(f"files are written of llada models with {_BYTES} tokens or more, and not of {config.family}")
    writer = gguf.GGUFWriter(path, "llada")
    _write_keys(writer, config)
    _write_tokenizer(writer, config)
    matrix_type = getattr(GGMLQuantizationType, kind.upper())

    def add(name: str, values: NDArray[np.float32]) -> None:
        matrix = values.ndim == 2
        writer.add_tensor(
            f"{name}.weight",
            gguf.quantize(values, matrix_type) if matrix else values,
            raw_dtype=matrix_type if matrix else None,
        )

    add("token_embd", weights.embed.numpy())
    add("output_norm", weights.norm.numpy())
    if not config.tied:
        add("output", weights.head.numpy())
    q, kv, intermediate = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.intermediate
    for number, layer in enumerate(weights.layers):
        qkv, gate_up = layer.qkv.numpy(), layer.gate_up.numpy()
        for name, values in {
            "attn_norm": layer.named_tensors()["attn_norm"].numpy(),
            "attn_q": _interleave_heads(qkv[:q], config.heads),
            "attn_k": _interleave_heads(qkv[q : q + kv], config.kv_heads),
            "attn_v": qkv[q + kv :],
            "attn_output": layer.out.numpy(),
            "ffn_norm": layer.ffn_norm.numpy(),
            "ffn_gate": gate_up[:intermediate],
            "ffn_up": gate_up[intermediate:],
            "ffn_down": layer.down.numpy(),
        }.items():
            add(f"blk.{number}.{name}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave_heads(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of a projection, whose heads are halves, into the pairs that llama.cpp's RoPE rotates."""
    return np.ascontiguousarray(rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape))


def _write_keys(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Write the shape, and that attention is bidirectional and a row predicts its own position."""
    writer.add_name("random weights")
    writer.add_vocab_size(config.vocab)
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_block_count(config.layers)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_causal_attention(False)
    writer.add_bool("diffusion.shift_logits", False)


def _write_tokenizer(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Write a vocabulary of the 256 bytes in GPT-2's alphabet, and fillers that no text contains."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    substitutes = iter(range(_BYTES, 2 * _BYTES))
    tokens = [chr(byte if byte in printable else next(substitutes)) for byte in range(_BYTES)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *(f"filler{number}" for number in range(_BYTES, config.vocab))])
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * config.vocab)
    writer.add_token_merges(["a b"])  # the writer leaves out empty lists
    writer.add_eos_token_id(config.stop_ids[0])
    writer.add_pad_token_id(config.stop_ids[0])
    writer.add_mask_token_id(config.mask_id)
