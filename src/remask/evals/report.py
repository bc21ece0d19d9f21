"""A bench result as a Markdown table."""

from collections.abc import Mapping
from typing import Any

HEADER = (
    "cache",
    "accuracy (95 % interval)",
    "agreement",
    "tok/s",
    "speed",
    "work saved",
    "prefix hits",
    "cache memory",
)


def table(report: Mapping[str, Any]) -> str:
    """The results of `report`, one row a policy, and a line that says on what they were measured.

    "speed" and "work saved" are ratios to `none`: time, and row-layers computed (prefix-only passes included).
    """
    rows = [_row(result) for result in report["results"]]
    widths = [max(len(row[i]) for row in [HEADER, *rows]) for i in range(len(HEADER))]
    lines = [_line(HEADER, widths), "|" + "|".join("-" * (width + 2) for width in widths) + "|"]
    lines += [_line(row, widths) for row in rows]
    return "\n".join([*lines, "", _caption(report)])


def _row(result: Mapping[str, Any]) -> tuple[str, ...]:
    accuracy = "-"
    if result["accuracy"] is not None:
        low, high = result["accuracy_interval"]
        accuracy = f"{100 * result['accuracy']:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
    return (
        result["cache"],
        accuracy,
        f"{100 * result['agreement_with_none']:.1f} %",
        f"{result['throughput_tok_s']:.0f}",
        f"{result['ratio_to_none']:.2f}x",
        f"{result['work_ratio_to_none']:.2f}x",
        str(result["prefix_hits"]),
        f"{result['peak_memory_bytes'] / 1e6:.1f} MB",
    )


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def _caption(report: Mapping[str, Any]) -> str:
    work, machine = report["workload"], report["machine"]
    return (
        f"{work['requests']} requests over {work['prefixes']} shared prefixes, prefix ratio {work['prefix_ratio']}, "
        f"{work['concurrency']} at a time, {work['max_tokens']} tokens in {work['steps']} steps, blocks of "
        f"{work['block_length']}, seed {work['seed']}, medians of {work['rounds']} rounds; {work['model']}, "
        f"{machine['dtype']} on {machine.get('gpu', machine['cpu'])} ({machine['threads']} threads), "
        f"commit {report['commit'] or 'unknown'}."
    )
