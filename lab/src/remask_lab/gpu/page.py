"""A page on a run: what was proven, and tables of what was measured."""

from collections.abc import Mapping
from itertools import starmap
from typing import Any

from remask_lab.gpu.parts import PARTS
from remask_lab.gpu.results import Result
from remask_lab.records.markdown import markdown_table

SHOWN = 12  # kernels of a profile; its file has more


def page(results: Mapping[str, Result | None]) -> str:
    """The page in Markdown, from the `results` of parts. Parts that were not run are named."""
    return "\n\n".join(["# The engine on this device", *starmap(_section, results.items())]) + "\n"


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
    if "proven" in found:
        faults = "".join(f"\n- {fault}" for fault in [*found["faults"], *found["graph_faults"]])
        proven = ", ".join(found["proven"])
        seconds = ", ".join(f"{name} {taken:.1f} s" for name, taken in found["seconds"].items())
        lines.append(f"{found['executor']} against torch: {proven}. It took: {seconds}.{faults}")
    if "passed" in found:
        failed = "".join(f"\n- failed: {test}" for test in found["failed"])
        lines.append(f"{found['passed']} tests passed, {found['skipped']} were skipped.{failed}")
    if "shape" in found:
        lines.append(_shape(found["shape"], found.get("quantization")))
    if "products" in found:
        lines.append(_products(found["products"]))
    if "rows" in found:
        lines.append(_rows(found["rows"]))
    if "profiles" in found:
        lines += map(_profile, found["profiles"])
    lines += [f"Refused: {each['cell']}: {each['reason']}" for each in found.get("refused", ())]
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
    head = ["requests", "cache", "settings", "attention", "tokens a step", "tok/s", "ms a step", "roof, ms", "share"]
    return markdown_table(
        head,
        [
            [
                str(row["requests"]),
                row["cache"],
                ", ".join(f"{name}={value}" for name, value in row["settings"].items()),
                row["attention"],
                str(row["tokens_per_step"]),
                f"{row['tok_s']:.4g}",
                f"{row['ms_per_step']:.3g}",
                # Of the plain loop no passes are counted.
                f"{row['roof_ms_per_step']:.3g}" if "roof_ms_per_step" in row else "",
                f"{100 * row['share_of_roof']:.0f} %" if "share_of_roof" in row else "",
            ]
            for row in rows
        ],
    )


def _products(found: list[Mapping[str, Any]]) -> str:
    head = ["rows of a product", "error", "ms", "ms of the dense one"]
    rows = [
        [str(each["rows"]), f"{each['error']:.2%}", f"{each['ms']:.3g}", f"{each['dense_ms']:.3g}"] for each in found
    ]
    return markdown_table(head, rows)


def _profile(found: Mapping[str, Any]) -> str:
    launches = ", ".join(f"{count:.0f} {name}" for name, count in found["launches_per_step"].items())
    sentence = (
        f"{found['cell']}: {found['kernels_per_step']:.0f} kernels a step keep the device busy for "
        f"{found['busy_ms_per_step']:.3g} ms, {100 * found['busy_share']:.0f} % of the time under the profiler; the "
        f"host launches {launches or 'nothing'}, and waits for {found['wait_ms_per_step']:.3g} ms."
    )
    rows = [
        [f"`{each['name'][:90]}`", f"{each['ms_per_step']:.3g}", f"{each['per_step']:.1f}"]
        for each in found["kernels"][:SHOWN]
    ]
    return sentence + "\n\n" + markdown_table(["kernel", "ms a step", "times a step"], rows)
