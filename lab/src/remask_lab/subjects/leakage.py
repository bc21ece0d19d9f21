"""`remask analyze leakage`: attention from a shared prefix to what follows it, and the depth that it guarantees.

The definitions and the bound are those of BiCache's appendix B.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from remask.depth.conversations import PromptSet
from remask.depth.profile import Cuts
from remask.depth.prompts import default_prompts, read_prompts
from remask.depth.rule import ProfileSettings
from remask.depth.similarity import KV, PrefixProbe
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from remask_lab.asked import Outcome, open_without_pool
from remask_lab.drawing import K_COLOR, distinct_line, label, new_panels
from remask_lab.instruments.attention import TILE, QueryTap, attention_scores
from remask_lab.instruments.depths import run_depth, states
from remask_lab.instruments.series import Floats
from remask_lab.instruments.watch import Passes, check_masked, leading_kv
from remask_lab.observe import ObservedPass
from remask_lab.records.markdown import text_table
from remask_lab.records.record import about

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTITIES = ("leakage", "deviation", "shift", "similarity", "value_norm", "least_norm")
LEAKAGE, DEVIATION, SHIFT, SIMILARITY, VALUE_NORM, LEAST_NORM = range(len(QUANTITIES))


def measure(args: argparse.Namespace) -> Outcome:
    """Denoise requests at the ratios that `args` name and measure their prefixes' attention."""
    own = {name: getattr(args, name) for name in ("tau", "samples", "canvas", "response", "seed")}
    settings = ProfileSettings(ratios=tuple(args.ratios), **own)
    llm = open_without_pool(args)
    check_masked(llm)
    prompts = default_prompts(llm.loaded) if args.prompts is None else read_prompts(args.prompts, llm.loaded)
    report = measure_leakage(llm, prompts, settings, args.steps, progress=llm.session.progress)
    own |= {"ratios": list(args.ratios), "steps": args.steps, "prompts": args.prompts}
    facts = about(llm, seed=args.seed, settings=own)
    header = f"{llm.loaded.name}: {report.layers} layers, tau {report.tau:g} ({report.source})"
    return Outcome(facts, report, f"{header}\n\n{text(report)}", reading(report), lambda: figures(report))


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of the bound, per layer, over all requests, steps and ratios that were measured.

    Attributes:
        value_norm: V, greatest norm of a value vector of any head and position (A1).
        least_norm: m, least norm of the prefix's K/V, alone or in a canvas (A3).
        stability: C, greatest quotient of the shift of the prefix's K/V and its attention deviation (A4).
    """

    value_norm: tuple[float, ...]
    least_norm: tuple[float, ...]
    stability: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RatioLeakage:
    """What was measured at one prefix ratio, per layer over requests and steps, and what it guarantees.

    Attributes:
        leakage: share of attention that prefix rows give to what follows them; `greatest_leakage` is phi.
        deviation: greatest mean distance between their attention output and that over the prefix alone.
        similarity: the least.
        bound: lower bound of the similarity from phi, as the appendix has it; `deviation_bound` from `deviation`.
        depth: least depth of a request, over all its steps; `mean_depth` the mean.
        guaranteed_depth, deviation_depth: leading layers whose bounds exceed tau.
    """

    leakage: tuple[float, ...]
    greatest_leakage: tuple[float, ...]
    deviation: tuple[float, ...]
    similarity: tuple[float, ...]
    bound: tuple[float, ...]
    deviation_bound: tuple[float, ...]
    depth: int
    mean_depth: float
    guaranteed_depth: int
    deviation_depth: int


@dataclass(frozen=True, slots=True)
class LeakageReport:
    """Leakage and bounds by prefix ratio in percent; `steps` denoising steps of `samples` requests at each."""

    tau: float
    layers: int
    samples: int
    steps: int
    source: str
    constants: Constants
    ratios: Mapping[int, RatioLeakage]


def reading(report: LeakageReport) -> str:
    """What the numbers show, in one paragraph."""
    low, high = min(report.ratios), max(report.ratios)
    first, last = report.ratios[low], report.ratios[high]
    means = {ratio: 100 * float(np.mean(own.leakage)) for ratio, own in report.ratios.items()}
    parts = []
    if low == high:
        parts.append(f"At r = {low} % prefix rows give {means[low]:.1f} % of their attention to what follows them.")
    else:
        falls = all(means[b] <= means[a] for a, b in zip(sorted(means), sorted(means)[1:], strict=False))
        parts.append(
            f"From r = {low} % to {high} % the attention that prefix rows give to what follows them goes from "
            f"{means[low]:.1f} % to {means[high]:.1f} % (mean over layers), "
            + ("falling all the way" if falls else "not falling all the way")
            + f"; attention without preferences would give {100 - low} % and {100 - high} %."
        )
    parts.append(
        f"Every request keeps at least {_span(first.depth, last.depth)} of {report.layers} layers above {report.tau:g} "
        f"in all steps; the appendix's bound guarantees {_span(first.guaranteed_depth, last.guaranteed_depth)}, and "
        f"{_span(first.deviation_depth, last.deviation_depth)} with the measured deviation of attention in place of "
        "twice leakage times value."
    )
    slack = [own.depth - own.guaranteed_depth for own in report.ratios.values()]
    parts.append(
        "The bound reaches the measured depth at every ratio."
        if not any(slack)
        else f"The bound falls short of the measured depth by {np.mean(slack):.1f} layers on average over the ratios."
    )
    return " ".join(parts)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} (lowest r) to {last} (highest r)"


def measure_leakage(
    llm: LLM, prompts: PromptSet, settings: ProfileSettings | None = None, steps: int = 4, progress: bool = False
) -> LeakageReport:
    """Denoise requests at every ratio under `none` and measure their prefixes' attention in each step.

    Requests are cut as `profile` cuts them, and denoised in `steps` steps, at most one a mask. Raises `ConfigError`
    where `Cuts` does, for the authors' profiler, whose canvases have no masks, and for less than a step.
    """
    settings = settings or ProfileSettings()
    if settings.official:
        raise ConfigError("official canvases have no masks, so there are no steps to measure; leave official out")
    if steps < 1:
        raise ConfigError(f"steps must be at least 1, got {steps}")
    samples = settings.samples or 4
    cuts = Cuts(llm.session, prompts, settings)
    numbers = range(samples)
    work = {ratio: [_request(cuts, n, place, steps) for n in numbers] for place, ratio in enumerate(cuts.ratios)}
    tap = QueryTap(llm.model.attention)
    passes = Passes(llm, [request for requests in work.values() for request in requests], tap)
    probe, policy = PrefixProbe(llm.model, passes.max_tokens), llm.session.policy("none")
    measured: dict[int, list[Floats]] = {}
    with tqdm(total=samples * len(work), desc="requests", unit="req", disable=not progress) as bar:
        for ratio, requests in work.items():
            measured[ratio] = []
            for request in requests:
                count = passes.prefix(request)
                tap.take()
                alone = states(probe, request.prompt_token_ids[:count])
                measured[ratio].append(np.stack(passes.run(request, policy, partial(_quantities, tap, count, alone))))
                bar.update()
    return summarise(measured, settings.tau, prompts.source)


def _request(cuts: Cuts, number: int, place: int, steps: int) -> Request:
    cut = cuts.cut(number)[place]
    params = SamplingParams(max_tokens=cut.masks, steps=min(steps, cut.masks), ignore_eos=True)
    return Request(f"{number}:{place}", cut.prompt, params, cut.prefix)


def _quantities(tap: QueryTap, count: int, alone: KV, observed: ObservedPass) -> Floats:
    """`QUANTITIES` of a pass whose first `count` positions are the prefix, [quantities, layers]."""
    queries = tap.take()
    keys, values = leading_kv(observed, len(observed.tokens))
    layers = [
        _layer(q[:count], k, v, k_alone, v_alone)
        for q, k, v, k_alone, v_alone in zip(queries, keys, values, *alone, strict=True)
    ]
    found: Floats = torch.stack(layers, dim=1).cpu().double().numpy()
    return found


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


def text(report: LeakageReport) -> str:
    """One line a ratio, then the constants by layer."""
    ratios = text_table(
        report.ratios.items(),
        {
            "ratio %": lambda row: str(row[0]),
            "leakage %": lambda row: f"{100 * np.mean(row[1].leakage):.1f}",
            "greatest %": lambda row: f"{100 * max(row[1].greatest_leakage):.1f}",
            "least depth": lambda row: str(row[1].depth),
            "mean depth": lambda row: f"{row[1].mean_depth:.2f}",
            "bound from leakage": lambda row: str(row[1].guaranteed_depth),
            "from deviation": lambda row: str(row[1].deviation_depth),
        },
    )
    constants = text_table(
        range(report.layers),
        {
            "layer": lambda layer: str(layer + 1),
            "V (values)": lambda layer: f"{report.constants.value_norm[layer]:.3f}",
            "m (K/V norm)": lambda layer: f"{report.constants.least_norm[layer]:.3f}",
            "C (stability)": lambda layer: f"{report.constants.stability[layer]:.3f}",
        },
    )
    return f"{ratios}\n\n{constants}"


def figures(report: LeakageReport) -> dict[str, Figure]:
    """Leakage over the ratio, and the depth that was measured beside those that are guaranteed."""
    figure, (left, right) = new_panels(
        f"attention leakage and guaranteed depth (tau = {report.tau:g}, {report.samples} requests per ratio)",
        2,
        how="left: below the dotted line, prefix rows attend to the rest less than its length would suggest",
    )
    ratios, rows = list(report.ratios), list(report.ratios.values())
    shares = 100 * np.array([row.leakage for row in rows])
    left.fill_between(ratios, shares.min(axis=1), shares.max(axis=1), color=K_COLOR, alpha=0.2, label="range of layers")
    left.plot(ratios, shares.mean(axis=1), ".-", color=K_COLOR, label="mean of layers")
    left.plot(ratios, [100 - ratio for ratio in ratios], ":", color="gray", label="even attention: 1 - r")
    lines: dict[str, list[float]] = {
        "measured, mean of requests": [row.mean_depth for row in rows],
        "measured, least of requests": [row.depth for row in rows],
        "guaranteed by the attention's deviation": [row.deviation_depth for row in rows],
        "guaranteed by the leakage": [row.guaranteed_depth for row in rows],
    }
    for index, (name, depths) in enumerate(lines.items()):
        distinct_line(right, index, ratios, depths, name)
    x = "prefix ratio r (% of the canvas)"
    label(left, "attention of prefix rows to the rest", x, "share (%)", grid="both")
    label(right, "depth: measured and guaranteed", x, f"depth (of {report.layers} layers)", grid="both")
    left.set_ylim(0, 100)
    right.set_ylim(0, report.layers * 1.05)
    left.legend(fontsize="small", loc="upper right")
    right.legend(fontsize="small", loc="upper left")
    return {"leakage": figure}
