"""What the features of a layer did from pass to pass. Plain numbers."""

from dataclasses import dataclass

FEATURES = ("k", "v", "attention", "ffn")
WORDS = {"k": "K", "v": "V", "attention": "attention output", "ffn": "FFN output"}
PAIRS = (("k", "attention"), ("k", "ffn"), ("v", "attention"), ("v", "ffn"))  # what is seen early, what follows from it


@dataclass(frozen=True, slots=True)
class FeatureMeans:
    """Mean cosine similarity of a feature between a pass and the next; by layer, [layers]. NaN for too few passes."""

    prompt: float
    response: float
    prompt_layers: tuple[float, ...]
    response_layers: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Foresight:
    """How well the change of an early feature of a layer tells that of a late one, over response positions.

    Attributes:
        early, late: features.
        correlation: Pearson's r of their cosine distances, over all layers, positions and pairs of passes.
        layers: the same within each layer.
        overlap: of the share `ratio` of positions that moved most by the early feature, how many are among those that
            moved most by the late one; mean over layers and pairs of passes.
    """

    early: str
    late: str
    correlation: float
    layers: tuple[float, ...]
    overlap: float


@dataclass(frozen=True, slots=True)
class FeaturesReport:
    """Similarity of K, V, attention and FFN outputs between adjacent passes (dLLM-Cache, figures 1 and 2).

    Attributes:
        model, layers, requests, passes: what was measured; `passes` of all requests together.
        prompt_tokens: of the first request, whose `maps` begin with them.
        ratio: share of the response that is picked.
        chance: `Foresight.overlap` of positions drawn at random.
        means: by feature.
        foresight: of `PAIRS`.
        maps: by feature, similarity of the first request's positions, [pairs of passes][positions], mean over layers;
            NaN where a position was not computed in both passes.
        sample: cosine distances by feature at the same layers, positions and pairs of passes, a few drawn from all.
    """

    model: str
    layers: int
    requests: int
    passes: int
    prompt_tokens: int
    ratio: float
    chance: float
    means: dict[str, FeatureMeans]
    foresight: tuple[Foresight, ...]
    maps: dict[str, tuple[tuple[float, ...], ...]]
    sample: dict[str, tuple[float, ...]]


def reading(report: FeaturesReport) -> str:
    """The report in a paragraph."""
    if not report.maps["k"]:
        return f"{report.passes} passes of {report.requests} requests: too few to compare one with the next."
    prompt, response = (
        ", ".join(f"{WORDS[name]} {getattr(report.means[name], region):.4f}" for name in FEATURES)
        for region in ("prompt", "response")
    )
    steadier = [WORDS[name] for name in FEATURES if report.means[name].prompt > report.means[name].response]
    where = "every feature" if len(steadier) == len(FEATURES) else ", ".join(steadier) or "no feature"
    told = "; ".join(
        f"{WORDS[pair.early]} with {WORDS[pair.late]} {pair.correlation:.2f} (overlap {100 * pair.overlap:.0f} %)"
        for pair in report.foresight
    )
    return (
        f"Mean similarity from one pass to the next: prompt: {prompt}; response: {response}. The prompt is steadier "
        f"than the response in {where}. Correlation of changes within the response: {told}. Overlap is that of the "
        f"{100 * report.ratio:g} % of positions that move most by either; drawn at random, {100 * report.chance:.0f} % "
        "would be common."
    )
