"""Whole GIDD generations under every strategy against the recorded traces, tensor by tensor."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.goldens import uniform as goldens
from tests.goldens.uniform import Trace
from tests.oracles import gidd, uniform
from tests.oracles.gidd import GiddModel
from tests.oracles.test_uniform_goldens import close
from tests.oracles.uniform import Blocks, Pick, Step
from tests.oracles.uniform_sampling import filtered, mixture, posterior, schedule
from tests.sampling_fields import ungrouped

SCORES, PROBABILITIES = 5e-6, 1e-5
EACH_STRATEGY = pytest.mark.parametrize("strategy", goldens.STRATEGIES)
CACHES = {"baseline": "none", "prefix": "block-prefix"}
ADAPTIVE = [name for name in goldens.trace_names() if goldens.trace(name).parameters["sampling_method"] == "adaptive"]
ANCESTRAL = sorted(set(goldens.trace_names()) - set(ADAPTIVE))


def replay(trace: Trace, strategy: str, row: int, pick: Pick | None = None) -> Iterator[tuple[int, Step, Tensor]]:
    """The oracle's steps over the blocks that the original ran: (number, step, window tokens after it)."""
    given, model = trace.parameters, model_of(trace)
    tokens = trace.canvas(row)
    blocks = Blocks(given["prompt_length"], given["max_length"], given["block_length"], given["steps"], len(tokens))
    config = {"refresh_next": int(strategy.removeprefix("uniform_r"))} if strategy not in CACHES else {}
    how = uniform.strategy(model, blocks, CACHES.get(strategy, "uniform-cache"), config)
    grid = schedule(given["noise_schedule"], given["steps"], *model.log_snr_range)
    steps = uniform.generate(
        model, tokens, blocks, how, grid, given["min_length"], pick or uniform.greedy(model, given["tokens_per_step"])
    )
    for number, step in zip(range(len(trace.tensors[f"{strategy}.z"])), steps, strict=False):
        yield number, step, tokens[step.start : step.stop]


def model_of(trace: Trace) -> GiddModel:
    return gidd.load(goldens.model_dir(trace.model))


@pytest.mark.few(4)
@EACH_STRATEGY
@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_trace(name: str, strategy: str) -> None:
    trace = goldens.trace(name)
    recorded = {key.removeprefix(f"{strategy}."): value for key, value in trace.tensors.items()}
    close(schedule(trace.parameters["noise_schedule"], trace.parameters["steps"]),
          torch.tensor(trace.parameters["log_snrs"]), 1e-5)  # fmt: skip
    for row in range(trace.parameters["batch"]):
        for number, step, after in replay(trace, strategy, row):
            _, _, _, start, stop, _, first, end = trace.steps_table(strategy)[number]
            assert (step.start, step.stop, step.out.rows[0]) == (start, stop, end - first)
            assert torch.equal(step.tokens, recorded["z"][number, row])
            assert torch.equal(after, recorded["z_next"][number, row])
            assert torch.equal(step.logits.argmax(-1), recorded["argmax"][number, row])
            close(step.logits.amax(-1), recorded["max_logit"][number, row])
            close(step.logits.logsumexp(-1), recorded["logsumexp"][number, row])
            scores = uniform.step_scores(model_of(trace), step)
            close(scores, recorded["score"][number, row], SCORES)
            expected = [
                place for place in recorded["pos"][number, row].tolist() if recorded["score"][number, row, place] > 0
            ]
            best = scores.topk(trace.parameters["tokens_per_step"]).indices
            assert {place for place in best.tolist() if scores[place] > 0} == set(expected)
            if "logits" in recorded:
                close(step.logits, recorded["logits"][number, row])


@EACH_STRATEGY
@pytest.mark.parametrize("name", ANCESTRAL)
def test_ancestral_trace(name: str, strategy: str) -> None:
    """The original's draws are forced; the distributions that it drew from must match."""
    trace = goldens.trace(name)
    model, given = model_of(trace), trace.parameters
    recorded = {key.removeprefix(f"{strategy}."): value for key, value in trace.tensors.items()}
    grid = schedule(given["noise_schedule"], given["steps"])
    drawn = iter(recorded["z_next"][:, 0])
    for number, step, _ in replay(trace, strategy, 0, lambda _: next(drawn)):
        assert torch.equal(step.tokens, recorded["z"][number, 0])
        clean = filtered(step.logits, given["temperature"])
        now, then = (
            mixture(uniform.noise(model), float(grid[given["steps"] - step.number + later])) for later in (1, 0)
        )
        chances = posterior(clean, step.tokens, now, then)
        close(chances.sum(-1), torch.ones(len(chances)), 1e-5)
        if "x_hat" in recorded:
            close(clean, recorded["x_hat"][number, 0], PROBABILITIES)
        if "p_s_given_t" in recorded:
            close(chances, recorded["p_s_given_t"][number, 0], PROBABILITIES)


def test_kv_after_steps() -> None:
    trace = goldens.trace("T1_unif_b8")
    model = model_of(trace)
    recorded = {key: value for key, value in trace.tensors.items() if key.startswith("uniform_r4.kv_after.")}
    wanted = {tuple(map(int, key.split(".")[2][1:].split("s"))) for key in recorded}
    assert wanted
    compared = set()
    for _, step, _ in replay(trace, "uniform_r4", 0):
        if (step.block, step.number) in wanted:
            for place, name in enumerate("kv"):
                expected = recorded[f"uniform_r4.kv_after.b{step.block}s{step.number}.{name}"][:, 0]
                close(torch.stack([model.sink(layer)[place] for layer in range(model.layers)]), expected[:, :1])
                close(getattr(step.out.kv, name), expected[:, 1:])
            compared.add((step.block, step.number))
    assert compared == wanted


@pytest.mark.thorough
@pytest.mark.parametrize("name", goldens.MODELS)
def test_requests_for_traces(name: str) -> None:
    """The front door agrees with the traces' figures in the form in which an engine is held to them."""
    runs = goldens.runs(name)
    assert runs
    for run in runs:
        done = uniform.decode(gidd.load(goldens.model_dir(name)), ungrouped(run.request_line()))
        expected, moves = run.expected_ids(), run.expected_moves()
        assert done.output_ids[: len(expected)] == expected
        ran = run.blocks_run * run.trace.parameters["steps"]
        assert [transfer[1:] for transfer in done.transfers if transfer[0] < ran] == moves
        assert run.expected_forwards() in (None, done.forwards)
        rows = run.expected_rows()
        assert rows is None or done.row_layers == rows * len(done.rows[0])


def test_only_the_traces_that_stopped_at_an_end_of_text_id_bind_in_part() -> None:
    short = {
        run.id.rsplit("-", 1)[0]
        for name in goldens.MODELS
        for run in goldens.runs(name)
        if run.blocks_run < run.trace.blocks
    }
    stopped_by_noise = {f"T4b_unif_eos_in_noise-{strategy}" for strategy in goldens.STRATEGIES}
    assert short == stopped_by_noise | {"T4_unif_eos-baseline", "T4_unif_eos-prefix"}


def test_recorded_outputs_are_the_expected_ids_with_everything_from_an_end_of_text_id_on_as_pad() -> None:
    for run in (run for name in goldens.MODELS for run in goldens.runs(name)):
        given = run.trace.parameters
        output = run.trace.tensors[f"{run.strategy}.output"][run.row, given["prompt_length"] :].tolist()
        expected = run.expected_ids()
        if given["eos_token_id"] in expected:
            cut = expected.index(given["eos_token_id"])
            expected[cut:] = [given["pad_token_id"]] * (len(expected) - cut)
        assert output[: len(expected)] == expected
