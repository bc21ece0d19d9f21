"""Attention that a shared prefix pays to what follows it, and the depth that this guarantees (BiCache appendix B)."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from remask.core.sampling import SamplingParams
from remask.depth.conversations import PromptSet
from remask.depth.profile import Cuts, ProfileSettings, run_depth
from remask.depth.similarity import KV, PrefixProbe
from remask.engine.request import Request
from remask.engine.running import RunningRequest
from remask.errors import ConfigError
from remask.llm import LLM
from remask_lab.subjects.leakage_report import Constants, LeakageReport, RatioLeakage
from remask_lab.subjects.mass import TILE, QueryTap, attention_scores
from remask_lab.subjects.passes import Look, Passes

Floats = NDArray[np.float64]
SAMPLES = 4  # requests per ratio, where nobody says how many
QUANTITIES = ("leakage", "deviation", "shift", "similarity", "value_norm", "least_norm")
LEAKAGE, DEVIATION, SHIFT, SIMILARITY, VALUE_NORM, LEAST_NORM = range(len(QUANTITIES))


def measure_leakage(
    llm: LLM, prompts: PromptSet, settings: ProfileSettings | None = None, steps: int = 4, progress: bool = False
) -> LeakageReport:
    """Denoise requests at every ratio under `none` and look at their prefixes' attention after each step.

    Requests are cut as `profile` cuts them, and denoised in `steps` steps, at most one a mask. Raises `ConfigError`
    where `Cuts` does, for the authors' profiler, whose canvases have no masks, and for less than a step.
    """
    settings = settings or ProfileSettings()
    if settings.official:
        raise ConfigError("official canvases have no masks, so there are no steps to look at; leave official out")
    if steps < 1:
        raise ConfigError(f"steps must be at least 1, got {steps}")
    samples = settings.samples or SAMPLES
    cuts = Cuts(llm, prompts, settings)
    numbers = range(samples)
    work = {ratio: [_request(cuts, n, place, steps) for n in numbers] for place, ratio in enumerate(cuts.ratios)}
    tap = QueryTap(llm.model.attention)
    passes = Passes(llm, [request for requests in work.values() for request in requests], tap)
    probe, policy = PrefixProbe(llm.model, passes.max_tokens), llm.policy("none")
    measured: dict[int, list[Floats]] = {}
    with tqdm(total=samples * len(work), desc="requests", unit="req", disable=not progress) as bar:
        for ratio, requests in work.items():
            measured[ratio] = []
            for request in requests:
                count = passes.prefix(request)
                seen: list[Floats] = []
                tap.queries = []
                alone = probe.states(request.prompt_token_ids[:count])
                passes.run(request, policy, _look(passes, tap, count, alone, seen))
                measured[ratio].append(np.stack(seen))
                bar.update()
    return summarise(measured, settings.tau, prompts.source)


def summarise(measured: Mapping[int, Sequence[Floats]], tau: float, source: str) -> LeakageReport:
    """The report of arrays [steps, quantities, layers], one a request, by ratio; they are not changed."""
    every = np.concatenate([trace for traces in measured.values() for trace in traces])
    constants = _constants(every)
    first = next(iter(measured.values()))
    return LeakageReport(
        tau=tau,
        layers=every.shape[-1],
        samples=len(first),
        steps=max(len(trace) for traces in measured.values() for trace in traces),
        source=source,
        constants=constants,
        ratios={ratio: _at_ratio(traces, constants, tau) for ratio, traces in measured.items()},
    )


def _constants(every: Floats) -> Constants:
    """Of all steps [n, quantities, layers]."""
    shift, deviation = every[:, SHIFT], every[:, DEVIATION]
    # Layer 1's K/V depend on token and position alone: they never shift, and any constant does.
    quotient = np.divide(shift, deviation, out=np.zeros_like(shift), where=shift > 0)
    return Constants(
        value_norm=tuple(every[:, VALUE_NORM].max(axis=0).tolist()),
        least_norm=tuple(every[:, LEAST_NORM].min(axis=0).tolist()),
        stability=tuple(quotient.max(axis=0).tolist()),
    )


def lower_bound(constants: Constants, deviation: Floats) -> Floats:
    """Least cosine similarity of the prefix's K/V where attention outputs deviate by at most `deviation` [layers].

    1 - (C deviation)^2 / (2 m^2): lemma 3 applied to assumptions A3 and A4.
    """
    stability, norm = np.array(constants.stability), np.array(constants.least_norm)
    bound: Floats = 1 - (stability * deviation) ** 2 / (2 * norm**2)
    return bound


def _at_ratio(traces: Sequence[Floats], constants: Constants, tau: float) -> RatioLeakage:
    steps = np.concatenate(traces)
    phi, deviation = steps[:, LEAKAGE].max(axis=0), steps[:, DEVIATION].max(axis=0)
    # Lemma 1: an attention output deviates by at most twice the leakage times the greatest value.
    bound = lower_bound(constants, 2 * np.array(constants.value_norm) * phi)
    sharper = lower_bound(constants, deviation)
    depths = [run_depth(trace[:, SIMILARITY].min(axis=0).tolist(), tau) for trace in traces]
    return RatioLeakage(
        leakage=tuple(steps[:, LEAKAGE].mean(axis=0).tolist()),
        greatest_leakage=tuple(phi.tolist()),
        deviation=tuple(deviation.tolist()),
        similarity=tuple(steps[:, SIMILARITY].min(axis=0).tolist()),
        bound=tuple(bound.tolist()),
        deviation_bound=tuple(sharper.tolist()),
        depth=min(depths),
        mean_depth=float(np.mean(depths)),
        guaranteed_depth=run_depth(bound.tolist(), tau),
        deviation_depth=run_depth(sharper.tolist(), tau),
    )


def _request(cuts: Cuts, number: int, place: int, steps: int) -> Request:
    cut = cuts.cut(number)[place]
    params = SamplingParams(max_tokens=cut.masks, steps=min(steps, cut.masks), ignore_eos=True)
    return Request(f"{number}:{place}", cut.prompt, params, cut.prefix)


def _look(passes: Passes, tap: QueryTap, count: int, alone: KV, seen: list[Floats]) -> Look:
    def look(running: RunningRequest) -> None:
        queries, tap.queries = tap.queries, []
        keys, values = passes.kv(running, len(running.branches[0].canvas))
        layers = [
            _layer(q[:count], k, v, k_alone, v_alone)
            for q, k, v, k_alone, v_alone in zip(queries, keys, values, *alone, strict=True)
        ]
        seen.append(torch.stack(layers, dim=1).cpu().double().numpy())

    return look


@torch.inference_mode()
def _layer(q: Tensor, k: Tensor, v: Tensor, k_alone: Tensor, v_alone: Tensor) -> Tensor:
    """`QUANTITIES` of one layer, float32 [6].

    `q` [P, heads, Dh] are the prefix rows', `k` and `v` [T, kv_heads, Dh] the canvas', `k_alone` and `v_alone`
    [P, kv_heads, Dh] those of the prefix alone. Vectors of K/V are divided by sqrt(P), so that prefixes of all lengths
    have norms of one size.
    """
    prefix, heads = q.shape[:2]
    values = v.float().repeat_interleave(heads // v.shape[1], dim=1)
    leakage, deviation = q.new_zeros((), dtype=torch.float32), q.new_zeros((), dtype=torch.float32)
    for at in range(0, prefix, TILE):
        scores = attention_scores(q[at : at + TILE], k).flatten(1, 2)  # [n, heads, T]
        weights, inner = scores.softmax(dim=-1), scores[..., :prefix].softmax(dim=-1)
        leakage += weights[..., prefix:].sum()
        full = torch.einsum("nhm,mhd->nhd", weights, values)
        alone = torch.einsum("nhm,mhd->nhd", inner, values[:prefix])
        deviation += (full - alone).norm(dim=-1).sum()
    inside = torch.cat([k[:prefix].float().flatten(), v[:prefix].float().flatten()])
    outside = torch.cat([k_alone.float().flatten(), v_alone.float().flatten()])
    scale = prefix**-0.5
    norms = torch.stack([inside.norm(), outside.norm()])
    found = [
        leakage / (prefix * heads),
        deviation / (prefix * heads),
        (inside - outside).norm() * scale,
        torch.dot(inside, outside) / norms.prod(),
        v.float().norm(dim=-1).max(),
        norms.min() * scale,
    ]
    return torch.stack(found)
