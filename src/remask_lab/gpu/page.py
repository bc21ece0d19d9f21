"""A page on a run: what was proven, and tables of what was measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remask_lab.gpu.decide import Decision
from remask_lab.gpu.parts import PARTS
from remask_lab.gpu.results import Result
from remask_lab.records.markdown import markdown_table


def page(results: Mapping[str, Result | None], decision: Decision | None, file: Path | None) -> str:
    """The page in Markdown, from the `results` of parts, and the `decision` that was written to `file`.

    Parts that were not run are named.
    """
    parts = [_decision(decision, file), *(_section(name, result) for name, result in results.items())]
    return "\n\n".join(["# The engine on this device", *parts]) + "\n"


def _decision(decision: Decision | None, file: Path | None) -> str:
    title = "## Defaults of this device"
    if decision is None:
        return f"{title}\n\nNone were written: they follow from the parts 'proof' and 'policies'."
    overlap, graphs = ("on" if on else "off" for on in (decision.overlap, decision.graphs))
    chosen = f"attention {decision.attention}, overlap {overlap}, graphs {graphs}. Kept in {file}."
    return "\n".join([title, "", chosen, "", *(f"- {why}" for why in decision.why)])


def _section(name: str, result: Result | None) -> str:
    title = f"## {PARTS[name].about}"
    if result is None:
        return f"{title}\n\nNot run."
    lines = [title, f"Commit {result.commit}."]
    if not result.done:
        lines.append(f"**Not done**: {result.error}")
    found = result.found
    if "peaks" in found:
        lines.append(_machine(found))
    if "status" in found:
        lines.append(f"Its last line: {found['last']}")
    if "proven" in found:
        faults = "".join(f"\n- {fault}" for fault in [*found["faults"], *found["graph_faults"]])
        proven = ", ".join(found["proven"])
        lines.append(f"{found['executor']} against torch, with and without graphs: {proven}.{faults}")
    if "passed" in found:
        failed = "".join(f"\n- failed: {test}" for test in found["failed"])
        lines.append(f"{found['passed']} tests passed, {found['skipped']} were skipped.{failed}")
    if "rows" in found:
        lines += [_shape(found["shape"], found["quantization"]), _rows(found["rows"])]
        lines += [f"Refused: {each['cell']}: {each['reason']}" for each in found["refused"]]
    return "\n\n".join(lines)


def _machine(found: Mapping[str, Any]) -> str:
    gpu, versions = found.get("gpu"), found["versions"]
    place = f"{gpu['name']}, {gpu['memory'] / 2**30:.0f} GiB" if gpu else found["host"]["cpu"]
    rates = [
        [dtype, f"{peak['flops_s'] / 1e12:.3g}", f"{peak['bytes_s'] / 1e12:.3g}"]
        for dtype, peak in found["peaks"].items()
    ]
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "python"))
    return f"{place}; {named}.\n\n" + markdown_table(["dtype", "products, TFLOP/s", "copies, TB/s"], rates)


def _shape(shape: Mapping[str, Any], quantization: str | None) -> str:
    few = "" if quantization is None else f", matrices {quantization}"
    return (
        f"{shape['preset']} with random weights, {shape['dtype']}{few}: canvas {shape['canvas']}, shared prefix "
        f"{shape['prefix']}, {shape['response']} new tokens in blocks of {shape['block']}. One block's cycle of passes "
        "is timed, after the prefix-only pass and a first block."
    )


def _rows(rows: list[Mapping[str, Any]]) -> str:
    head = [
        "requests",
        "cache",
        "settings",
        "tokens a step",
        "tok/s",
        "ms a step",
        "host ms",
        "at the roof",
        "share of it",
    ]
    return markdown_table(
        head,
        [
            [
                str(row["requests"]),
                row["cache"],
                ", ".join(f"{name}={value}" for name, value in row["settings"].items()),
                str(row["tokens_per_step"]),
                f"{row['tok_s']:.4g}",
                f"{row['ms_per_step']:.3g}",
                f"{row['host_ms_per_step']:.3g}",
                f"{row['roof_ms_per_step']:.3g}",
                f"{100 * row['share_of_roof']:.0f} %",
            ]
            for row in rows
        ],
    )
