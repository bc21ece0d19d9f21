"""Stored documents that stand in any order in a prompt: accuracy and work, by depth, beside computing everything.

    python -m remask_lab.speed.parts

Runs the bundled model. The orders of a system prompt are cut into documents, and each request has those of its system
prompt in an order of its own, before a question of a plan or a look-up. So its prompts have hardly a common prefix, and
all of their documents in common. Prints a JSON line for each setting.
"""

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remask import LLM, EngineConfig, Output
from remask.engine.request import Request
from remask.request.segments import Segment
from remask.tasks.tariff import KINDS, TariffSettings, is_correct, make_workload, messages
from remask_lab.records.interval import clustered
from remask_lab.speed.command import command_parser, print_report, run_command

WORDS = 3
"""Tokens of an order: the title, the name, and what separates it from the next one."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, the kind of its question, the number of its system prompt, and its right answer."""

    request: Request
    kind: str
    prompt: int
    answer: str


def main() -> None:
    """Print accuracy and work of each setting."""
    parser = command_parser(__doc__)
    parser.add_argument("--requests", type=int, default=100, help="questions of each kind (default 100)")
    parser.add_argument("--prompts", type=int, default=4, help="system prompts of each kind (default 4)")
    parser.add_argument("--documents", type=int, default=5, help="documents of a system prompt (default 5)")
    parser.add_argument("--depths", type=int, nargs="*", default=[1, 2, 3, 4, 6, 8], help="depths of bicache")
    parser.add_argument("--intervals", type=int, nargs="*", default=[16], help="refresh intervals (default 16)")
    parser.add_argument("--ratios", type=float, nargs="*", default=[0.0, 0.1, 0.2, 0.5, 1.0], help="anchors of acache")
    args = parser.parse_args()
    llm = LLM("bundled-tariff", dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=8, max_model_len=192))
    work = workload(llm, args.prompts, args.requests, args.documents)
    parts = [len(part.positions) for asked in work for part in asked.request.segments]
    share = sum(parts) / sum(len(asked.request.prompt_token_ids) + 8 for asked in work)
    print_report(llm, requests=len(work), part_tokens=sorted(set(parts)), share_of_canvas=round(share, 3))
    settings: list[tuple[str, Mapping[str, Any]]] = [("none", {})]
    for interval in args.intervals:
        settings += [("bicache", {"depth": depth, "refresh_interval": interval}) for depth in args.depths]
    settings += [("acache", {"ratio": ratio}) for ratio in args.ratios]
    for cache, own in settings:
        print(json.dumps({"cache": cache, **own, **measure(llm, work, cache, own)}), flush=True)
    prefixed = [replace(each, request=as_prefix(each.request)) for each in work]
    for depth in args.depths[:2]:
        told = measure(llm, prefixed, "bicache", {"depth": depth})
        print(json.dumps({"cache": "bicache", "shared": "prefix", "depth": depth, **told}), flush=True)


def workload(llm: LLM, prompts: int, requests: int, documents: int) -> list[Asked]:
    """`requests` questions of either kind over `prompts` system prompts each, whose documents stand in random order."""
    made: list[Asked] = []
    for seed, kind in enumerate(KINDS):
        rng = random.Random(f"documents {kind}")
        for item in make_workload(requests, prompts, 31337 + seed, TariffSettings(kinds=(kind,))):
            orders = item.prompt.orders
            size = -(-len(orders) // documents)
            pieces = [orders[at : at + size] for at in range(0, len(orders), size)]
            rng.shuffle(pieces)
            shuffled = replace(item.prompt, orders=tuple(order for piece in pieces for order in piece))
            (request,) = llm.requests([messages(shuffled, item.question)], {"ignore_eos": True})
            at = _first(llm, request, shuffled.orders[0][0])
            segments = []
            for piece in pieces:
                # What ends the last order of a document is not its own: it is another token at the end of the list.
                segments.append(Segment(at, WORDS * len(piece) - 1))
                at += WORDS * len(piece)
            name = f"{kind} {len(made)}"
            asked = replace(request, id=name, prefix_length=0, find_prefix=False, segments=segments)
            made.append(Asked(asked, kind, item.prompt_index, item.reference))
    return made


def as_prefix(request: Request) -> Request:
    """The same request that shares everything up to the end of its last document, as a prefix."""
    return replace(request, segments=(), prefix_length=request.segments[-1].positions.stop)


def measure(llm: LLM, work: Sequence[Asked], cache: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Accuracy by kind with 95 % intervals, row-layers of the requests and of passes over parts, and what was found."""
    engine, policy = llm.new_engine(), llm.policy(cache, settings)
    asked = [each.request.with_policy(policy) for each in work]
    found = {output.id: output for output in llm.run(asked, engine=engine, progress=False)}
    usages = [output.usage for output in found.values()]
    return {
        **accuracy_by_kind(work, found),
        "row_layers": sum(usage.row_layers for usage in usages),
        "row_layers_of_parts": engine.stats.prefix_row_layers,
        "passes_over_parts": engine.stats.prefix_passes,
        "cached_share": round(sum(u.cached_tokens for u in usages) / sum(u.prompt_tokens for u in usages), 3),
    }


def accuracy_by_kind(work: Sequence[Asked], found: Mapping[str, Output]) -> dict[str, dict[str, Any]]:
    """Share of right answers of each kind with its 95 % interval. `found` has the answers by the requests' names."""
    told = {}
    for kind in KINDS:
        own = [each for each in work if each.kind == kind]
        right = [is_correct(found[each.request.id].text or "", each.answer) for each in own]
        bounds = [round(bound, 3) for bound in clustered(right, [each.prompt for each in own])]
        told[kind] = {"accuracy": round(sum(right) / len(own), 3), "interval": bounds}
    return told


def _first(llm: LLM, request: Request, title: str) -> int:
    """Where the first order stands in a prompt."""
    assert llm.tokenizer is not None
    tokens = list(request.prompt_token_ids)
    return next(at for at, token in enumerate(tokens) if llm.tokenizer.decode([token]).strip() == title)


if __name__ == "__main__":
    sys.exit(run_command(main))
