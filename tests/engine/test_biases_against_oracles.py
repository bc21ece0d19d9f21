"""`logit_bias`, `min_p` and the penalties, greedy and drawn, in mixed batches and alone, against oracles."""

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from remask.engine.engine import Engine
from remask.errors import ConfigError
from remask.plan.canvas import Canvas
from remask.policies.dense import Dense
from remask.readers.implied import logit_readers
from remask.readers.logprobs import Logprobs
from remask.request.sampling_params import SamplingParams
from remask.sampling.filters import gumbel
from remask.sampling.rows import RowGroup
from remask.sampling.score import score
from remask.sampling.uniform_score import NoisyRows
from tests.engine import kinds
from tests.engine.support import Work, make_engine, poisoned_engine, request, run, small_config
from tests.engine.test_against_oracles import dense, model_of
from tests.engine.test_block_causal_against_oracles import answers, compare, draw_line, limits, oracle, work_of
from tests.oracles.biases import changed, filtered
from tests.oracles.canvas import Canvas as Tokens
from tests.sampling_fields import flat_params

VOCAB, MASK, ROWS = 24, 23, 5
PROMPT, WRITTEN = [1, 1, 2, 3], [3, 4, 4, 9]
STEP: Any = None  # none of these readers looks at its pass


def drawn_parameters(rng: random.Random) -> dict[str, Any]:
    """Some of them, of a size that changes what is chosen."""
    found = {
        "logit_bias": {str(token): rng.choice([-100, -1.5, 1.5, 3]) for token in rng.sample(range(kinds.MASK), 4)},
        "repetition_penalty": rng.choice([0.7, 1.3, 2.0]),
        "frequency_penalty": rng.choice([-1.0, 0.5, 2.0]),
        "presence_penalty": rng.choice([-1.0, 0.5, 2.0]),
    }
    return {name: found[name] for name in rng.sample(list(found), rng.randint(1, 4))}


@pytest.mark.parametrize("model", kinds.BLOCK_CAUSAL)
def test_block_causal_answers_are_those_of_the_oracle(model: str) -> None:
    """Bidirectional logits are changed by the same code, as the next test says."""
    rng = random.Random(f"biases {model}")
    lines: dict[str, Any] = {}
    other = 0
    while len(lines) < 8:
        line = draw_line(rng, model)
        plain = oracle(model, line)
        line = {**line, "sampling": {**line["sampling"], **drawn_parameters(rng)}}
        expected = oracle(model, line)
        if expected is not None:
            lines[str(len(lines))] = line, expected
            other += plain is not None and plain.output_ids != expected.output_ids
    assert other, "they change what is answered"
    results = answers(model, [work_of(line, name, rng.randrange(6)) for name, (line, _) in lines.items()],
                      limits(rng, model))  # fmt: skip
    for name, (line, expected) in lines.items():
        compare(model, line, expected, results[name])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("basis", ["logits", "filtered", "noisy"])
def test_rows_are_read_as_the_oracle_does(basis: Any, temperature: float) -> None:
    """Masked and block-causal rows, those of Dream, whose confidence is that of filtered logits, and uniform ones."""
    canvas = Canvas.masked(PROMPT, len(WRITTEN) + ROWS, MASK)
    places = np.arange(len(PROMPT), len(PROMPT) + len(WRITTEN))
    canvas.write(places, np.array(WRITTEN))
    canvas.settle(places, 0)
    own: dict[str, Any] = {"logit_bias": {"5": 2.0, "7": -100}, "repetition_penalty": 1.5, "frequency_penalty": 0.5,
           "presence_penalty": -0.5, "min_p": 0.4}  # fmt: skip
    params = flat_params({**own, "temperature": temperature})
    reads = [reader.on_device(STEP) for reader in logit_readers(params, canvas)]
    assert len(reads) == 3
    noisy = NoisyRows(np.arange(ROWS)) if basis == "noisy" else None
    group = RowGroup(slice(0, ROWS), None, "logits" if noisy else basis, temperature, None, None, 5, 2,
                     np.arange(ROWS) + 40, noisy=noisy, reads=[each for each in reads if each is not None])  # fmt: skip
    x = 2 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(3))
    tokens, confidence = score(x.clone(), [replace(group)], MASK)
    logits = changed(x, PROMPT, WRITTEN, own) / (temperature or 1)
    barred = logits.clone()
    barred[:, MASK] = -torch.inf
    kept = filtered(barred, own["min_p"])
    assert (kept == -torch.inf).sum() > ROWS
    noise = gumbel(kept, group.draws) if temperature else 0.0
    assert tokens.tolist() == (kept + noise).argmax(-1).tolist()
    measured = {"logits": logits * (temperature or 1), "filtered": filtered(logits, own["min_p"]), "noisy": barred}
    sure = measured[basis].softmax(-1).gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(confidence, sure)


@pytest.mark.parametrize("own", [{"repetition_penalty": 1.7}, {"frequency_penalty": 1.5, "presence_penalty": -0.5}])
def test_masked_answers_are_those_of_a_plain_loop(own: dict[str, Any]) -> None:
    """Tokens behind a position count as those before it; two blocks, one position a pass."""
    oracle = dense("llada")
    prompt, length = [3, 9, 9, 4, 12], 16
    canvas = Tokens(prompt, length, oracle.mask_id)
    noisy = [True] * length
    for block in (range(8), range(8, 16)):
        while any(noisy[place] for place in block):
            logits = oracle.predictions(oracle.forward(canvas.tokens).logits)[len(prompt) :].float()
            written = [int(canvas.tokens[len(prompt) + place]) for place in range(length) if not noisy[place]]
            logits = changed(logits, prompt, written, own)
            sure = logits.softmax(-1)
            logits[:, oracle.mask_id] = -torch.inf
            tokens = logits.argmax(-1)
            open_places = [place for place in block if noisy[place]]
            best = max(open_places, key=lambda place: float(sure[place, tokens[place]]))
            canvas.tokens[len(prompt) + best], noisy[best] = int(tokens[best]), False
    told: dict[str, Any] = {"max_tokens": length, "steps": length, "block_length": 8}
    work = [Work(request("changed", prompt, **told, **own), Dense()), Work(request("plain", prompt, **told), Dense())]
    results = run(poisoned_engine(model_of("llada")), work)
    assert list(results["changed"].token_ids) == canvas.tokens[len(prompt) :].tolist()
    assert results["plain"].token_ids != results["changed"].token_ids


def engine_of(model: str) -> Engine:
    return poisoned_engine(kinds.checkpoint(model).model, page_size=8) if model in kinds.RAW else make_engine(model)


def kind_of(model: str) -> str:
    return engine_of(model).model.config.kind


def asked(model: str, name: str, **own: Any) -> Work:
    block: dict[str, Any] = {} if kind_of(model) == "block_causal" else {"block_length": 4}
    prompt = kinds.tokens(random.Random(name), 6 + int(name))
    return Work(request(name, prompt, **block, **own), Dense())


@pytest.mark.parametrize(
    ("model", "own", "told"),
    [
        ("gidd", {"repetition_penalty": 1.1}, "repetition_penalty is for masked and block-causal.*written over again"),
        ("llada", {"logit_bias": {"99999": 1}}, "logit_bias names the token 99999, and the model has tokens"),
        ("sdar", {"remasking": "joint_threshold", "presence_penalty": 1}, "cannot be penalized"),
        ("llada", {"logit_bias": {"a": 1}}, "logit_bias must be an object of at most 1024 token ids"),
        ("llada", {"logit_bias": {"1": 1, 1: 2}}, "logit_bias must be an object"),
        ("llada", {"logit_bias": {"1": 101}}, r"logit_bias\[1\] must be a number from -100 to 100, got 101"),
        ("llada", {"min_p": 1.1}, "min_p must be a number from 0 to 1"),
        ("llada", {"repetition_penalty": 1e-300}, "repetition_penalty must be a number from 0.01 to 100"),
    ],
)
def test_what_cannot_be_is_refused(model: str, own: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        engine_of(model).add(request(prompt=[1, 2, 3], **own))


@pytest.mark.parametrize("model", ["llada", "sdar"])
@pytest.mark.parametrize("repetition", [0.01, 100.0])
@pytest.mark.parametrize("bias", [-100.0, 100.0])
def test_logprobs_are_numbers_at_the_ends_of_the_ranges(model: str, repetition: float, bias: float) -> None:
    own: dict[str, Any] = {"cfg_scale": 1000.0} if kind_of(model) == "masked" else {}
    own |= {"repetition_penalty": repetition, "frequency_penalty": math.copysign(2.0, bias), "temperature": 1e-300}
    item = asked(model, "2", logit_bias={5: bias, 7: -bias}, **own)
    item = replace(item, request=item.request.with_readers(Logprobs(3)))
    for step in run(engine_of(model), [item])["2"].trace:
        found = [*step.logprobs, *(value for row in step.top_logprobs for _, value in row)]
        assert found
        assert all(math.isfinite(value) for value in found)


def test_the_mask_is_no_token_to_prefer() -> None:
    with pytest.raises(ConfigError, match="logit_bias names the mask token"):
        engine_of("llada").add(request(logit_bias={small_config("llada").mask_id: 1.0}))


def test_a_reader_is_there_only_where_it_is_asked_for() -> None:
    canvas = Canvas.masked(PROMPT, 4, MASK)
    assert list(logit_readers(SamplingParams(), canvas)) == []
    neutral = SamplingParams(logit_bias={}, min_p=0.0, repetition_penalty=1.0)
    assert list(logit_readers(neutral, canvas)) == []
