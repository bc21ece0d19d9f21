"""Random requests on random block-causal models, in mixed batches, against a decoder that recomputes everything.

Both sides compute in float64; logits are read in float32. Decodes that turn on a rounding are not drawn.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from remask import LLM, EngineConfig, SamplingParams
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.request.result import Result
from tests.checkpoint import checkpoints
from tests.engine import kinds
from tests.engine.support import (
    CheckedTransformer,
    Work,
    first_clear,
    lively_weights,
    poisoned_engine,
    policy_of,
    request,
    run,
    small_config,
)
from tests.leftovers import lasting_folder
from tests.oracles import block_causal, sdar
from tests.oracles.block_causal import BlockDecode, Rule
from tests.oracles.decode import load
from tests.oracles.sdar import SdarModel
from tests.sampling_fields import flat_params

Line: TypeAlias = dict[str, Any]
NARROW = 1e-5


class Watch:
    """How close a decode came to another choice of tokens or positions."""

    def __init__(self, sampling: Line) -> None:
        self.sampling, self.narrowest = sampling, 1.0

    def uncertainty(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        best = logits.topk(2, -1).values
        self.narrowest = min(self.narrowest, float((best[:, 0] - best[:, 1]).min()))
        if self.sampling.get("remasking") == "joint_threshold":
            probability = real_uncertainty(logits)[0].sort().values
            limits = (probability - self.sampling[name] for name in ("threshold", "edit_threshold"))
            edges = (probability.diff().abs(), *(each.abs() for each in limits))
            self.narrowest = min(self.narrowest, *(float(each.min()) for each in edges if len(each)))
        return real_uncertainty(logits)

    def rule_of(self, sampling: Line) -> Rule:
        inner = real_rule_of(sampling)

        def rule(count: int, masked: list[int], confidence: Tensor, entropy: Tensor) -> list[int]:
            values = entropy[masked] if sampling.get("remasking") == "entropy_bounded" else confidence[masked]
            ranked = values.sort().values
            edges = [*ranked.diff().abs().tolist()]
            edges += (confidence[masked] - sampling.get("threshold", 9.0)).abs().tolist()
            edges += (ranked.cumsum(0) - sampling.get("eb_threshold", -9.0)).abs().tolist()
            self.narrowest = min(self.narrowest, *edges)
            return inner(count, masked, confidence, entropy)

        return rule


real_uncertainty, real_rule_of = block_causal.uncertainty, block_causal.rule_of


def oracle(model: str, line: Line) -> BlockDecode | None:
    """What the line decodes to; None where a rounding would decide that."""
    watch = Watch(line["sampling"])
    with (
        patch.object(block_causal, "uncertainty", watch.uncertainty),
        patch.object(block_causal, "rule_of", watch.rule_of),
    ):
        loaded = load(kinds.checkpoint(model).folder)
        assert isinstance(loaded, SdarModel)
        decoded = block_causal.decode(loaded, line)
    return None if watch.narrowest < NARROW else decoded


RULES: tuple[Line, ...] = (
    {},
    {"remasking": "low_confidence", "threshold": 0.5},
    {"threshold": 0.3, "fallback": "leftmost"},
    {"threshold": 0.9, "fallback": "confidence"},
    {"remasking": "sequential"},
    {"remasking": "entropy_bounded", "eb_threshold": 0.4},
    {"remasking": "entropy_bounded", "eb_threshold": 3.0},
)
POLICIES: tuple[tuple[str, Line], ...] = (
    ("none", {}),
    ("exact", {}),
    *(("exact", {"prefill_chunk": chunk}) for chunk in (1, 5, 8)),
)


def draw_line(rng: random.Random, model: str) -> Line:
    """Prompts end anywhere in a block, some before the first one is full; some begin alike."""
    trained = kinds.checkpoint(model).model.config.block_length
    given = None if trained and rng.random() < 0.6 else rng.choice([2, 3, 4, 5, 6, 8])
    block = given or trained or 0
    length = rng.choice([rng.randint(1, block), block * rng.randint(1, 3), rng.randint(1, 3 * block)])
    shared = random.Random(f"{model} {rng.randrange(2)}")
    prompt = kinds.tokens(shared, 20)[: rng.randint(0, length)]
    prompt += kinds.tokens(rng, length - len(prompt))
    sampling: Line = {"max_tokens": rng.randint(1, 12), **rng.choice(RULES)}
    if given:
        sampling["block_length"] = given
    if rng.random() < 0.7:
        sampling["steps_per_block"] = rng.choice([1, 2, 3, block, block + 2])
    if rng.random() < 0.3:
        sampling["stop_token_ids"] = rng.sample(range(kinds.MASK), 12)
    cache, config = rng.choice(POLICIES)
    return {"cache": cache, "cache_config": config, "prompt_token_ids": prompt, "sampling": sampling}


def drawn(rng: random.Random, model: str) -> tuple[Line, BlockDecode]:
    return first_clear(lambda: draw_line(rng, model), lambda line: oracle(model, line))


def work_of(line: Line, name: str, joins: int = 0) -> Work:
    sampling = flat_params({"ignore_eos": True, **line["sampling"]})
    policy = policy_of(line["cache"], **line["cache_config"])
    return Work(Request(name, line["prompt_token_ids"], sampling), policy, joins)


def trace(result: Result) -> list[tuple[list[int], list[int]]]:
    return [(list(transfer.positions), list(transfer.token_ids)) for transfer in result.trace]


def compare(model: str, line: Line, expected: BlockDecode, result: Result) -> None:
    assert result.error is None
    assert list(result.token_ids) == expected.output_ids
    assert trace(result) == [(positions, values) for _, positions, values in expected.transfers]
    stops = line["sampling"].get("stop_token_ids", [])
    assert result.finish_reason == ("stop" if set(expected.output_ids) & set(stops) else "length")
    check_work(model, line, expected, result)


def check_work(model: str, line: Line, expected: BlockDecode, result: Result) -> None:
    """Row-layers: every row up to the block's end in each pass, or each row as often as it must be."""
    shape, usage = kinds.checkpoint(model).model.config, result.usage
    block = line["sampling"].get("block_length", shape.block_length)
    prompt = len(line["prompt_token_ids"])
    first, passes = prompt // block, expected.kinds.count("d")
    assert usage.steps == passes
    if line["cache"] == "none":
        assert usage.forwards == passes
        ends = [(positions[0] // block + 1) * block for _, positions, _ in expected.transfers]
        assert usage.row_layers == sum(ends) * shape.layers
        return
    filled = first * block - usage.cached_tokens
    chunk = max(block, line["cache_config"].get("prefill_chunk", 512) // block * block)
    assert usage.forwards == passes + max(0, -(-filled // chunk) - 1)
    commits = expected.kinds.count("c") - 1  # the last one is left out, or is told to nobody
    assert usage.row_layers == (filled + (passes + commits) * block) * shape.layers


def limits(rng: random.Random, model: str) -> dict[str, Any]:
    return {
        "max_num_seqs": rng.choice([2, 5, 20]),
        "max_row_layers": rng.choice([None, 20, 150]),
        "page_size": kinds.checkpoint(model).block * rng.choice([1, 2, 3, 4]),
        "store_budget_tokens": rng.choice([0, 9, 30, 100]),
        "max_model_len": 64,
    }


def answers(model: str, work: Sequence[Work], settings: dict[str, Any]) -> dict[str, Result]:
    return run(poisoned_engine(kinds.checkpoint(model).model, **settings), work)


@pytest.mark.few(17)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("model", kinds.BLOCK_CAUSAL)
def test_mixed_batches(model: str, seed: int) -> None:
    rng = random.Random(f"{model} {seed}")
    lines = {str(number): drawn(rng, model) for number in range(10)}
    work = [work_of(line, name, rng.randrange(12)) for name, (line, _) in lines.items()]
    rng.shuffle(work)
    results = answers(model, work, limits(rng, model))
    for name, (line, expected) in lines.items():
        compare(model, line, expected, results[name])


def edited(rng: random.Random, model: str) -> tuple[Line, BlockDecode]:
    def draw() -> Line:
        line = draw_line(rng, model)
        kept = {"max_tokens", "block_length", "stop_token_ids"}
        line["sampling"] = {name: value for name, value in line["sampling"].items() if name in kept} | {
            "remasking": "joint_threshold",
            "threshold": rng.choice([0.3, 0.6]),
            "edit_threshold": rng.choice([0.0, 0.3, 0.6]),
            "max_post_steps": rng.choice([0, 1, 3, 6]),
            "min_transfer": rng.choice([1, 1, 2]),
            "penalty_lambda": rng.choice([0.0, 0.0, 1.5]),
        }
        return line

    return first_clear(draw, lambda line: oracle(model, line))


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", ["sdar", "llada2"])
def test_blocks_that_are_edited(model: str, seed: int) -> None:
    """Committed K/V are those of the last tokens, which later blocks and shared pages read."""
    rng = random.Random(f"{model} {seed} edited")
    lines = {str(number): edited(rng, model) for number in range(10)}
    assert any(each for _, expected in lines.values() for each in expected.edits)
    work = [work_of(line, name, rng.randrange(12)) for name, (line, _) in lines.items()]
    results = answers(model, work, limits(rng, model))
    for name, (line, expected) in lines.items():
        result = results[name]
        assert result.error is None, line
        assert list(result.token_ids) == expected.output_ids, line
        assert trace(result) == [(positions, values) for _, positions, values in expected.transfers]
        assert [list(transfer.edits) for transfer in result.trace] == expected.edits
        assert result.usage.steps == expected.kinds.count("d")


def test_early_stops_leave_a_block_after_a_step_that_wrote_one() -> None:
    rng, left = random.Random("early"), 0
    for _ in range(40):
        line = draw_line(rng, "llada2")
        line["sampling"] |= {"max_tokens": 12, "stop_token_ids": rng.sample(range(kinds.MASK), 12)}
        line["sampling"] |= {"block_length": 6, "steps_per_block": 6}
        late, early = (dict(line, sampling=line["sampling"] | {"early_stop": stop}) for stop in (False, True))
        expected = oracle("llada2", early)
        if expected is None:
            continue
        found = answers("llada2", [work_of(late, "late"), work_of(early, "early")], limits(rng, "llada2"))
        whole, short = found["late"], found["early"]
        assert short.token_ids == whole.token_ids == tuple(expected.output_ids)
        assert trace(short) == [(positions, values) for _, positions, values in expected.transfers]
        assert trace(short) == trace(whole)[: len(short.trace)]
        left += len(short.trace) < len(whole.trace)
    assert left


def test_models_that_commit_a_first_token_are_not_edited() -> None:
    model = CheckedTransformer(config := small_config("fast-dllm-v2"), lively_weights(config))
    engine = poisoned_engine(model, page_size=8)
    with pytest.raises(
        ConfigError, match="'joint_threshold' edits tokens, which is not defined on fast-dllm-v2 models"
    ):
        engine.add(request("r", 12, 8, remasking="joint_threshold"))


BLOCK, PART = 8, 4


@pytest.fixture(scope="module")
def folder() -> Path:
    raw = checkpoints.FAST_DLLM_V2 | {"bd_size": BLOCK, "max_position_embeddings": 128}
    return checkpoints.write(lasting_folder() / "model", raw, checkpoints.random_tensors(raw))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", engine=EngineConfig(max_num_seqs=5))


def decode(model: SdarModel, prompt: list[int], length: int, threshold: float, part: int | None) -> list[int]:
    """The whole sequence is recomputed in each pass, from the description of the authors' loop.

    Row i predicts position i + 1.
    """

    def logits(tokens: list[int]) -> Tensor:
        return model.forward(torch.tensor(tokens), BLOCK).logits

    mask = model.mask_id
    blocks = -(-(len(prompt) + length) // BLOCK)
    tokens = [*prompt, *[mask] * (blocks * BLOCK - len(prompt))]
    for block in range(len(prompt) // BLOCK, blocks):
        start, stop = block * BLOCK, (block + 1) * BLOCK
        if tokens[start] == mask and start >= len(prompt):
            out = logits(tokens[:start])[-1]
            out[mask] = -torch.inf
            tokens[start] = int(out.argmax())
        open_ = [p for p in range(start, stop) if p > max(start, len(prompt) - 1)]
        while open_:
            out = logits(tokens[:stop])
            probabilities = out.softmax(-1)
            out[:, mask] = -torch.inf
            here = open_ if part is None else [p for p in open_ if p < start + ((open_[0] - start) // part + 1) * part]
            best = {p: int(out[p - 1].argmax()) for p in here}
            sure = {p: float(probabilities[p - 1, best[p]]) for p in here}
            chosen = [p for p in here if sure[p] > threshold] or [max(here, key=lambda p: sure[p])]
            for p in chosen:
                tokens[p] = best[p]
            open_ = [p for p in open_ if p not in chosen]
    return tokens[len(prompt) : len(prompt) + length]


def cases(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    shared = [rng.randrange(kinds.MASK) for _ in range(40)]
    made = []
    for _ in range(8):
        prompt = shared[: rng.choice([0, 16, 24, 40])] + [rng.randrange(kinds.MASK) for _ in range(rng.randint(1, 20))]
        made.append(
            {
                "prompt": prompt[: rng.choice([len(prompt), max(1, len(prompt) // BLOCK * BLOCK)])],
                "length": rng.randint(1, 20),
                "threshold": rng.choice([0.02, 0.1, 0.9]),
                "part": rng.choice([None, PART]),
            }
        )
    return made


@pytest.mark.few(3)
@pytest.mark.parametrize("cache", ["none", "exact"])
@pytest.mark.parametrize("seed", range(3))
def test_random_requests_equal_the_dense_loop(llm: LLM, folder: Path, cache: str, seed: int) -> None:
    made, model = cases(seed), sdar.load(folder)
    params = [
        flat_params(
            max_tokens=case["length"],
            threshold=case["threshold"],
            sub_block_length=case["part"],
            steps_per_block=BLOCK,
            ignore_eos=True,
        )
        for case in made
    ]
    outputs = llm.generate([case["prompt"] for case in made], params, cache=cache)
    for case, output in zip(made, outputs, strict=True):
        assert list(output.token_ids) == decode(model, case["prompt"], case["length"], case["threshold"], case["part"])


def test_a_prompt_that_is_stored_whole_still_gives_the_first_token(llm: LLM) -> None:
    prompt = [token % kinds.MASK for token in range(48)]  # six blocks, three pages
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    first, again = (llm.generate(prompt, params, cache="exact")[0] for _ in range(2))
    assert again.usage.cached_tokens == 48
    assert first.token_ids == again.token_ids == tuple(llm.generate(prompt, params, cache="none")[0].token_ids)
