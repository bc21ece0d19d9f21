"""The report of a run: what was proven, and tables of what was measured."""

from collections.abc import Mapping
from itertools import starmap
from typing import Any

from remask_lab.gpu.parts import PARTS
from remask_lab.gpu.results import Result
from remask_lab.records.markdown import markdown_table

SHOWN = 12  # kernels of a profile; its file has more


def page(results: Mapping[str, Result | None]) -> str:
    """The report in Markdown, a section for each part in `results`; None stands for a part that was not run."""
    return "\n\n".join(["# The engine on this device", *starmap(_section, results.items())]) + "\n"


def _section(name: str, result: Result | None) -> str:
    """The section of one part: its commit and error, then a paragraph or table for each key of its finding."""
    title = f"## {PARTS[name].title}"
    if result is None:
        return f"{title}\n\nNot run."
    lines = [title, f"Commit {result.commit}."]
    if not result.done:
        lines.append(f"**Not done**: {result.error}")
    finding = result.found
    if "peaks" in finding:
        lines.append(_machine(finding))
    if "proven" in finding:
        faults = "".join(f"\n- {fault}" for fault in [*finding["faults"], *finding["graph_faults"]])
        proven = ", ".join(finding["proven"])
        seconds = ", ".join(f"{name} {duration:.1f} s" for name, duration in finding["seconds"].items())
        lines.append(f"{finding['executor']} against torch: {proven}. It took: {seconds}.{faults}")
    if "passed" in finding:
        failed = "".join(f"\n- failed: {test}" for test in finding["failed"])
        lines.append(f"{finding['passed']} tests passed, {finding['skipped']} were skipped.{failed}")
    if "shape" in finding:
        lines.append(_shape(finding["shape"], finding.get("quantization")))
    if "products" in finding:
        lines.append(_products(finding["products"]))
    if "rows" in finding:
        lines.append(_rows(finding["rows"]))
    if "profiles" in finding:
        lines += map(_profile, finding["profiles"])
    lines += [f"Refused: {refusal['cell']}: {refusal['reason']}" for refusal in finding.get("refused", ())]
    return "\n\n".join(lines)


def _machine(finding: Mapping[str, Any]) -> str:
    """Device and versions, and the measured peaks by dtype."""
    gpu, versions = finding.get("gpu"), finding["versions"]
    place = f"{gpu['name']}, {gpu['memory'] / 2**30:.0f} GiB" if gpu else finding["host"]["cpu"]
    rates = [
        [dtype, f"{peak['flops_s'] / 1e12:.3g}", f"{peak['bytes_s'] / 1e12:.3g}"]
        for dtype, peak in finding["peaks"].items()
    ]
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "python"))
    return f"{place}; {named}.\n\n" + markdown_table(["dtype", "products, TFLOP/s", "copies, TB/s"], rates)


def _shape(shape: Mapping[str, Any], quantization: str | None) -> str:
    """The model and the requests of a part, in a sentence."""
    quantization_text = "" if quantization is None else f", {quantization} weights"
    return (
        f"{shape['preset']} with random weights, {shape['dtype']}{quantization_text}: canvas {shape['canvas']}, "
        f"shared prefix {shape['prefix']}, {shape['response']} new tokens in blocks of {shape['block']}. One block's "
        "cycle of passes is timed, after the prefix-only pass and a first block."
    )


def _rows(rows: list[Mapping[str, Any]]) -> str:
    """A table of `measure_cell`'s results, one a row."""
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
                # The costs of the plain loop are not counted.
                f"{row['roof_ms_per_step']:.3g}" if "roof_ms_per_step" in row else "",
                f"{100 * row['share_of_roof']:.0f} %" if "share_of_roof" in row else "",
            ]
            for row in rows
        ],
    )


def _products(products: list[Mapping[str, Any]]) -> str:
    """A table of `time_products`' results, one a row."""
    head = ["rows of a product", "error", "ms", "ms of the dense one"]
    rows = [
        [str(product["rows"]), f"{product['error']:.2%}", f"{product['ms']:.3g}", f"{product['dense_ms']:.3g}"]
        for product in products
    ]
    return markdown_table(head, rows)


def _profile(profile: Mapping[str, Any]) -> str:
    """A result of `profile_cell`: a sentence, and a table of the first `SHOWN` kernels."""
    launches = ", ".join(f"{count:.0f} {name}" for name, count in profile["launches_per_step"].items())
    sentence = (
        f"{profile['cell']}: {profile['kernels_per_step']:.0f} kernels a step keep the device busy for "
        f"{profile['busy_ms_per_step']:.3g} ms, {100 * profile['busy_share']:.0f} % of the time under the profiler; "
        f"the host launches {launches or 'nothing'}, and waits for {profile['wait_ms_per_step']:.3g} ms."
    )
    rows = [
        [f"`{kernel['name'][:90]}`", f"{kernel['ms_per_step']:.3g}", f"{kernel['per_step']:.1f}"]
        for kernel in profile["kernels"][:SHOWN]
    ]
    return sentence + "\n\n" + markdown_table(["kernel", "ms a step", "times a step"], rows)
