"""What each paper claims, and whether our tables show it: verdicts and figures follow from the kept results.

A claim names rows of one of our tables. What cannot be measured here has a reason in their place.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from remask_lab.papers.definition import load_table
from remask_lab.papers.show import results_of
from remask_lab.records.interval import percent_text
from remask_lab.records.markdown import markdown_table
from remask_lab.records.record import Record

Result: TypeAlias = Mapping[str, Any]
Test: TypeAlias = Callable[[Mapping[str, Result]], tuple[bool, str]]
"""Whether the rows of a table show it, and their figures."""

YES, NO, UNTESTED = "yes", "**no**", "not run"
REAL_MODELS = "needs the paper's model and benchmark: no checkpoint of that size and no GPU was at hand"


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim, and the test of it on the results of `table`; without a table `because` says why there is none.

    Attributes:
        paper: short name.
        said: the claim, with the paper's figures.
        because: what else a reader must know of the verdict.
        instead: the verdict of a claim without a table.
    """

    paper: str
    said: str
    table: str | None = None
    test: Test | None = None
    because: str = ""
    instead: str = UNTESTED


def loses(name: str, than: str) -> Test:
    """`name` has fewer right answers than `than`, beyond the 95 % interval."""
    return lambda rows: (_below(rows[name], rows[than]), f"{_right(rows[than])} to {_right(rows[name])}")


def keeps(name: str, than: str, *, work: bool = True) -> Test:
    """`name` has as many right answers as `than` within its interval, with less work unless that is not asked."""

    def test(rows: Mapping[str, Result]) -> tuple[bool, str]:
        row, other = rows[name], rows[than]
        saved = row["work_ratio_to_none"]
        shown = not _below(row, other) and (saved > 1 or not work)
        return shown, f"{_right(other)} and {_right(row)}, with 1/{saved:.2f} of the work"

    return test


def ahead(name: str, than: str) -> Test:
    """`name` has more right answers than `than`, beyond the interval of `than`."""
    return lambda rows: (_below(rows[than], rows[name]), f"{_right(rows[name])} against {_right(rows[than])}")


def faster(name: str) -> Test:
    """`name` takes less time than its baseline and computes fewer row-layers."""

    def test(rows: Mapping[str, Result]) -> tuple[bool, str]:
        row = rows[name]
        shown = row["ratio_to_none"] > 1 and row["work_ratio_to_none"] > 1
        return shown, f"{row['ratio_to_none']:.2f}x the speed, 1/{row['work_ratio_to_none']:.2f} of the work"

    return test


def quicker(name: str, than: str) -> Test:
    """`name` makes more tokens a second than `than`."""
    key = "throughput_tok_s"
    return lambda rows: (rows[name][key] > rows[than][key], f"{rows[name][key]:.0f} and {rows[than][key]:.0f} tokens/s")


def deepens(*names: str) -> Test:
    """The depth does not fall along the rows, and rises from the first to the last."""

    def test(rows: Mapping[str, Result]) -> tuple[bool, str]:
        depths = [rows[name]["prefix_depth"] for name in names]
        return depths == sorted(depths) and depths[-1] > depths[0], f"depths {', '.join(f'{at:g}' for at in depths)}"

    return test


def all_of(*tests: Test) -> Test:
    """All of `tests`."""

    def test(rows: Mapping[str, Result]) -> tuple[bool, str]:
        found = [each(rows) for each in tests]
        return all(shown for shown, _ in found), "; ".join(figure for _, figure in found)

    return test


BICACHE, DLLM, DKV, UNIFORM = "BiCache", "dLLM-Cache", "dKV-Cache", "Uniform-Cache"
CLAIMS = (
    Claim(
        BICACHE,
        "reuse of a shared prefix in all layers loses the answers (table 1: GSM8K 56.3 to 30.9 %, ARC-C 86.1 to 0.0 %)",
        "bicache-1",
        loses("vLLM", "No caching"),
    ),
    Claim(
        BICACHE,
        "at the profiled depth answers stay (at most 0.8 points lost in table 1), for less work",
        "bicache-1",
        keeps("BiCache", "No caching"),
        "that the model has such a depth was trained into it ([how](graded-model.md#how-it-was-trained)); that reuse "
        "below it costs nothing was not",
    ),
    Claim(
        BICACHE,
        "fewer steps are no substitute (ours; the paper has no such row)",
        "bicache-1",
        loses("No caching, half of the steps", "No caching"),
    ),
    Claim(
        BICACHE,
        "on top of Fast-dLLM it is faster still (+51.6 to +98.3 %)",
        "bicache-1",
        all_of(keeps("BiCache + Fast-dLLM", "Fast-dLLM"), faster("BiCache + Fast-dLLM")),
        "passes of 50 rows on a CPU take as long as their overhead, so time says little here",
    ),
    Claim(
        BICACHE,
        "the same with longer responses (table 3)",
        "bicache-3",
        all_of(loses("vLLM", "No caching"), keeps("BiCache", "No caching")),
        "responses of 8 tokens; trained with BiCache's own mask, and right in one step too",
    ),
    Claim(
        BICACHE,
        "too low a tau loses answers (table 4: 55.5 % at 0.97, 39.1 % at 0.91)",
        "bicache-4",
        all_of(loses("BiCache, tau 0.91", "no caching"), keeps("BiCache, tau 0.97", "no caching")),
        "all but the lowest of the paper's taus read one depth here",
    ),
    Claim(
        BICACHE,
        "rarer refreshes lose a little (table 4: 55.5 % at R 16, 53.5 % at R 64)",
        "bicache-4",
        loses("BiCache, R 64", "BiCache, R 1"),
        "no answer depends on R here: prefix rows depend on the question, and on nothing that is decoded",
    ),
    Claim(
        BICACHE,
        "the depth grows with the share of the prefix (figure 5)",
        "bicache-5",
        deepens("GPQA", "ARC-C", "MATH", "GSM8K"),
    ),
    Claim(BICACHE, "accuracy on ARC-C, GPQA, MATH and GSM8K, tokens a second of a B200", because=REAL_MODELS),
    Claim(
        DLLM,
        "answers stay for a fraction of the work, at the usual Kp 100, Kr 8 and rho 0.25",
        "dllm-main",
        keeps("dLLM-Cache", "no caching"),
        "of 16 steps two refresh; four times as many do in the paper",
    ),
    Claim(
        DLLM,
        "answers stay for a fraction of the work, at settings that suit the response",
        "dllm-main",
        keeps("dLLM-Cache, Kr 4, rho 0.5", "no caching"),
    ),
    Claim(
        DLLM,
        "more right answers than an eighth of the steps",
        "dllm-autoregressive",
        ahead("dLLM-Cache", "LLaDA in 32 steps"),
    ),
    Claim(
        DLLM,
        "with SlowFast faster than an autoregressive model of its size",
        "dllm-autoregressive",
        quicker("dLLM-Cache + SlowFast", "Llama 3 8B"),
        "against random weights of our model's shape, on a CPU",
    ),
    Claim(DLLM, "accuracy and speed on eight benchmarks, up to 9.1x", because=REAL_MODELS),
    Claim(
        DKV,
        "-Decode keeps the answers (table 1)",
        "dkv-1",
        keeps("dKV-Cache-Decode (confidence)", "Base (confidence)"),
    ),
    Claim(
        DKV,
        "half of the steps lose them (table 2)",
        "dkv-2",
        all_of(loses("Half-Steps, T = L", "Dream-7B, T = L"), keeps("dKV-Cache-Decode, T = L", "Dream-7B, T = L")),
    ),
    Claim(
        DKV,
        "-Prefill and -PD are faster than -Decode with long prompts (table 2, GSM8K)",
        "dkv-2",
        all_of(
            keeps("dKV-Cache-PD, T = L", "Dream-7B, T = L"),
            quicker("dKV-Cache-PD, T = L", "dKV-Cache-Decode, T = L"),
        ),
    ),
    Claim(
        DKV,
        "-Greedy keeps nearly all answers of random order (table 1)",
        because="in random order no bundled model answers enough without a cache to see a loss",
    ),
    Claim(
        DKV,
        "Right-Shift harms, Un-Shift is best (table 4)",
        because="the table runs on random weights of Dream's shape, which show that the variants differ and no quality",
    ),
    Claim(
        UNIFORM,
        "faster than the base and the prefix cache at equal answers (table 6.1)",
        "thesis-6-1",
        all_of(keeps("Cached, s32/b32, r512", "Base, s32/b32, r512"), faster("Cached, s32/b32, r512")),
    ),
    Claim(
        UNIFORM,
        "the same under ancestral sampling (table B.1)",
        "thesis-b-1",
        all_of(keeps("Cached, s32/b32", "Base, s32/b32"), faster("Cached, s32/b32")),
        "at temperature 0: at 1 the model answers hardly a route",
    ),
    Claim(
        UNIFORM,
        "how often the next block is refreshed hardly matters (table 6.10)",
        "thesis-6-10",
        all_of(keeps("Cached, r 0", "Base"), keeps("Cached, r 4", "Base")),
        "only the first of two blocks has a next one, of 3 tokens",
    ),
    Claim(
        UNIFORM,
        "cached and uncached lose alike as steps fall (figure 6.5)",
        "thesis-figure-6-5",
        all_of(
            loses("Uniform, 32 steps", "Uniform, 512 steps"),
            keeps("Cached, 512 steps", "Uniform, 512 steps"),
            keeps("Cached, 128 steps", "Uniform, 128 steps"),
        ),
    ),
    Claim(
        UNIFORM,
        "too high a threshold of drift loses answers (ours; section 6.6.4 has the variant as slower, with fewer rows)",
        "thesis-6-10",
        loses("Cached, r 4, rows refreshed by a drift of 0.3", "Cached, r 4"),
        "at a threshold of 0.3; 0.003 and 0.03 lose nothing, with fewer rows and in more time "
        "([caches by decoding](caches.md#bundled-uniform))",
    ),
    Claim(
        UNIFORM,
        "correction steps mend poor samples under a cache too (future work there, section 7.3)",
        "corrections",
        all_of(
            loses("Half of the steps, 0 corrections", "Half of the steps, 32 corrections"),
            keeps("Half of the steps, 32 corrections, cached", "Half of the steps, 32 corrections"),
        ),
    ),
    Claim(UNIFORM, "perplexities of 3B and 10B models", because=REAL_MODELS),
    Claim(
        "Elastic-Cache, SlowFast",
        "speed and accuracy of their tables",
        because="made from notes on the authors' code; " + REAL_MODELS,
    ),
    Claim(
        "prefix caching by hashed pages",
        "exact pages give the same tokens for less work",
        because="no table: on block-causal models tests compare every token with `none` "
        "([exact](policies.md#exact)), and [the log](log.md#the-engine-in-figures) has the gain",
        instead=YES,
    ),
)


def claims_table(records: Iterable[Record]) -> str:
    """All claims in Markdown, with what `records` of the papers' tables show of them.

    Of several records of one table the first counts. Raises `RecordError` where one is of another version of its table,
    and `UnknownNameError` or `KeyError` where a claim names a table or a row that is not there.
    """
    by_table: dict[str, Record] = {}
    for record in records:
        by_table.setdefault(record.about["settings"]["table"], record)
    lines = [[claim.paper, claim.said, *_judged(claim, by_table)] for claim in CLAIMS]
    return markdown_table(["paper", "what it says", "shown here", "at which scale", "figures, reasons"], lines)


def _judged(claim: Claim, records: Mapping[str, Record]) -> list[str]:
    """The verdict, the scale and the figures of a claim."""
    if claim.table is None or claim.test is None:
        return [claim.instead, "-", claim.because]
    record = records.get(claim.table)
    if record is None:
        return [UNTESTED, "-", f"no results are kept of {claim.table}"]
    rows = results_of(load_table(claim.table), record)
    shown, figures = claim.test(rows)
    model, size = record.about["model"], record.about["parameters"] / 1e6
    scale = f"`{model}`, {size:.1f}M parameters ([{claim.table}](#{_anchor(claim.table)}))"
    return [YES if shown else NO, scale, f"{figures}. {_sentence(claim.because)}".strip()]


def _anchor(name: str) -> str:
    """The anchor of a table's section, as Markdown makes it of the heading."""
    heading = f"{name}: {load_table(name).title}".lower()
    return "".join(letter for letter in heading if letter.isalnum() or letter in " -").replace(" ", "-")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _right(row: Result) -> str:
    return percent_text(row["accuracy"], row["accuracy_interval"])


def _below(row: Result, other: Result) -> bool:
    """Whether the interval of `row` lies below the share of `other`."""
    # An interval may end a rounding error short of its share.
    return bool(max(row["accuracy"], row["accuracy_interval"][1]) < other["accuracy"])
