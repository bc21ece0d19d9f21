"""Forward passes and answers beside llama.cpp, on one model file: CPU time, and logits compared.

    python -m remask_lab.speed.llama_cpp [--model llada-100m] [--kinds f32,q8_0,q4_0] [--prompt 512] [--response 64]

Needs the package `llama-cpp-python`, which is no dependency: pip install llama-cpp-python (it is compiled). For each
kind a file with random weights is written into a temporary folder, and both read it: we with `int8` where it is `q8_0`,
with `int4` where it is `q4_0`, and in float32. A pass is over the whole canvas, and reads the logits of the response.
Both have as many threads, and passes take turns. llama.cpp computes the whole canvas in every step of a diffusion
model, so an answer takes it the passes of as many steps; ours is an answer of the engine under each policy.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from remask import LLM, EngineConfig, SamplingParams
from remask.checkpoint.dummy import dummy_weights
from remask.checkpoint.presets import preset
from remask.checks.values import one_of
from remask.engine.request import Request
from remask.engine.uncached import pack_uncached
from remask.errors import ConfigError
from remask.model.pool import Pool
from remask.model.quantization_names import Quantization
from remask.plan.canvas import Canvas
from remask_lab.arguments.common import check_least, separated
from remask_lab.speed.command import command_parser, print_report, run_command
from remask_lab.speed.gguf_file import TYPES, write_gguf

PACKAGE, INSTALL = "llama_cpp", "pip install llama-cpp-python"
OURS: dict[str, Quantization | None] = {"f32": None, "q8_0": "int8", "q4_0": "int4"}
CACHES = ("none", "block-dual")

Pass = Callable[[], NDArray[np.float32]]


def main() -> None:
    """Measure and print one JSON object, and a line for each kind as it is done."""
    parser = command_parser(__doc__)
    parser.add_argument("--model", default="llada-100m", help="preset whose shape is taken (default llada-100m)")
    parser.add_argument("--kinds", default=",".join(TYPES), help=f"of {', '.join(TYPES)}, separated by commas")
    parser.add_argument("--prompt", type=int, default=512, help="tokens before the response")
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--steps", type=int, help="of an answer; without it one a token")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    check_least(args, prompt=1, response=1, block=1, threads=1, turns=1)
    kinds = separated(args.kinds)
    for kind in kinds:
        one_of("--kinds", kind, TYPES)
    if find_spec(PACKAGE) is None:
        raise ConfigError(f"this needs llama-cpp-python, which is no dependency: {INSTALL}")
    config = preset(args.model)
    weights = dummy_weights(config, torch.float32, torch.device("cpu"))
    rng = np.random.default_rng(0)
    canvas = Canvas.masked(rng.integers(0, 256, args.prompt).tolist(), args.response, config.mask_id)
    results, exact = [], None
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            path = Path(folder) / f"{kind}.gguf"
            write_gguf(path, config, weights, kind)
            llm = open_ours(path, OURS[kind], args)
            found, own = compare(llm, path, kind, canvas, args, exact)
            exact = own if kind == "f32" else exact
            results.append({"kind": kind, "file_bytes": path.stat().st_size, **found})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
            path.unlink()
    names = ("model", "prompt", "response", "steps", "block", "threads", "turns")
    shape = {name: getattr(args, name) for name in names}
    print_report(llm, llama_cpp=version("llama-cpp-python"), **shape, results=results)


def compare(
    llm: LLM, path: Path, kind: str, canvas: Canvas, args: argparse.Namespace, exact: NDArray[np.float32] | None
) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """What both take for a pass and for an answer on the file `path`, how far logits are apart, and our logits.

    `exact` are those of float32 weights; None where they were not computed.
    """
    steps = args.steps or args.response
    ours = our_pass(llm, canvas)
    with their_pass(path, canvas, args.threads) as theirs:
        logits = ours(), theirs()  # the first pass of a shape makes kernels
        times = [(cpu_seconds(ours), cpu_seconds(theirs)) for _ in range(args.turns)]
    own, other = (statistics.median(each) for each in zip(*times, strict=True))
    found: dict[str, Any] = {
        "ours": OURS[kind] or "float32",
        "pass_s": {"ours": own, "llama.cpp": other},
        "answer_s": {"llama.cpp": steps * other},
        "logits_apart": apart(*logits),
        "same_first": float((logits[0].argmax(1) == logits[1].argmax(1)).mean()),
    }
    if exact is not None:
        found["from_float32"] = {"ours": apart(logits[0], exact), "llama.cpp": apart(logits[1], exact)}
    for cache in CACHES:
        found["answer_s"][cache] = cpu_seconds(lambda cache=cache: answer(llm, canvas, steps, args.block, cache))  # type: ignore[misc]
    found["times_less"] = {cache: steps * other / found["answer_s"][cache] for cache in CACHES}
    return found, logits[0]


def open_ours(path: Path, kind: Quantization | None, args: argparse.Namespace) -> LLM:
    """The model of the file in this engine."""
    limits = EngineConfig(max_num_seqs=1, store_budget_tokens=0)
    return LLM(str(path), dtype="float32", device="cpu", threads=args.threads, quantization=kind, engine=limits)


def our_pass(llm: LLM, canvas: Canvas) -> Pass:
    """A pass over `canvas`, which returns the logits [N, V] of its noisy positions."""
    model, noisy = llm.model, np.arange(len(canvas)) >= canvas.prompt
    pool = Pool(model.config, len(canvas), 1, model.kv_dtype, model.device, model.dtype)

    def run() -> NDArray[np.float32]:
        with torch.inference_mode():
            logits = model.head(model.forward(pack_uncached(model, [canvas], [noisy]), pool))
        found: NDArray[np.float32] = logits.float().numpy()
        return found

    return run


@contextmanager
def their_pass(path: Path, canvas: Canvas, threads: int) -> Iterator[Pass]:
    """The same pass by llama.cpp.

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
        for place, token in enumerate(canvas.tokens.tolist()):
            batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, place, 1
            batch.seq_id[place][0], batch.logits[place] = 0, True

        def run() -> NDArray[np.float32]:
            if (memory := lib.llama_get_memory(context)) is not None:
                lib.llama_memory_clear(memory, True)
            if (code := lib.llama_decode(context, batch)) != 0:
                raise ConfigError(f"llama.cpp computes no pass over {count} tokens: it returned {code}")
            rows = lib.llama_get_logits(context)
            # Without a cache llama.cpp makes logits of all rows, whichever are asked for.
            return np.ctypeslib.as_array(rows, shape=(count * vocab,)).reshape(-1, vocab)[first:].copy()

        yield run
    finally:
        lib.llama_batch_free(batch)
        if context:
            lib.llama_free(context)
        if model:
            lib.llama_model_free(model)


def answer(llm: LLM, canvas: Canvas, steps: int, block: int, cache: str) -> None:
    """An answer of the engine, of as many tokens as `canvas` has noisy positions."""
    tokens = len(canvas) - canvas.prompt
    own = min(block, tokens) if tokens % block == 0 else tokens
    params = SamplingParams(max_tokens=tokens, steps=steps, block_length=own, ignore_eos=True)
    prompt = canvas.tokens[: canvas.prompt].tolist()
    list(llm.run([Request(cache, prompt, params, policy=llm.policy(cache))], progress=False))


def apart(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """The root of the mean squared difference, as a share of that of the numbers."""
    return float(np.sqrt(np.mean((one - other) ** 2) / np.mean(other**2)))


def cpu_seconds(act: Callable[[], object]) -> float:
    """CPU time of this process in a call, that of all threads."""
    start = time.process_time()
    act()
    return time.process_time() - start


if __name__ == "__main__":
    sys.exit(run_command(main))
