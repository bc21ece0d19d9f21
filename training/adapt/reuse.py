"""How far a prefix looks at what follows it, and what reusing its stored K/V in all layers costs.

    python -m training.adapt.reuse OUT.json --adapter FOLDER --html FOLDER [FOLDER ...] [--device cuda]

tells it of documents by the share of their prefix, and of pages of the task `town`, by what the prefix stood before
when its K/V were stored.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from remask.tasks import town
from remask_lab.bench.documents import read_documents
from remask_lab.records.interval import mean_interval
from training.adapt.base import load_base, load_tokenizer, look_both_ways
from training.adapt.low_rank import adapter_config, add_low_rank, load_adapter
from training.adapt.ragged import Ragged

SHARES: Final = (20, 50, 80, 91)  # percent of a document that are its prefix
STORES: Final = ("nothing", "masks", "other")  # what stood behind the prefix when its K/V were stored
AT_ONCE: Final = 16


def measure_reuse(
    model: Any, documents: Ragged, device: torch.device, mask: int, count: int = 96, prefix: int = 160, rest: int = 96
) -> dict[str, Any]:
    """`compare_stores` on canvases of `prefix` clean tokens and `rest` behind them of which half are masked."""
    rng = np.random.default_rng(3)
    long = [number for number in range(len(documents)) if len(documents[number]) >= prefix + rest]

    def draw(size: int) -> Tensor:
        rows = []
        for number in rng.choice(long, count):
            start = rng.integers(len(documents[number]) - size + 1)
            rows.append(documents[number][start : start + size])
        return torch.from_numpy(np.stack(rows)).long()

    gold, other = draw(prefix + rest), draw(rest)
    hidden = torch.zeros_like(gold, dtype=torch.bool)
    # Row p - 1 predicts position p: the first position behind the prefix is predicted by a row of the prefix.
    hidden[:, prefix + 1 :] = torch.from_numpy(rng.random((count, rest - 1)) < 0.5)
    parts = [slice(at, at + AT_ONCE) for at in range(0, count, AT_ONCE)]
    return compare_stores(model, [(prefix, gold[part], hidden[part], other[part]) for part in parts], device, mask)


@torch.no_grad()
def compare_stores(
    model: Any, batches: Iterable[tuple[int, Tensor, Tensor, Tensor]], device: torch.device, mask: int
) -> dict[str, Any]:
    """What reusing a prefix's K/V in all layers costs, by what stood behind it when they were stored.

    A batch is the length of its prefixes, token ids [B, T], which of them are masked [B, T], and what another request
    has behind the prefix [B, U]. Returns the loss in nats of the full pass, and as differences to it, with half
    widths of 95 % intervals over canvases: without the prefix (`alone`), and with K/V stored behind each of `STORES`.
    For these also the share of masked positions whose best token stays, and the cosine of stored and own K and V by
    layer.
    """
    found: dict[str, Any] = {"loss": [], "alone": []}
    for name in STORES:
        found[name] = {"loss": [], "agree": [], "k": [], "v": []}
    for prefix, whole, covered, others in batches:
        gold, hidden, other = (each.to(device) for each in (whole, covered, others))
        ids, rest = gold.masked_fill(hidden, mask), gold.shape[1] - prefix
        own = model.model(input_ids=ids, use_cache=True)
        loss, best = _read(model, own.last_hidden_state[:, prefix:], gold, hidden, prefix)
        found["loss"] += loss.tolist()
        places = torch.arange(prefix, prefix + rest, device=device)[None]
        see = torch.ones(1, 1, rest, prefix + rest, dtype=torch.bool, device=device)
        lone = model.model(input_ids=ids[:, prefix:], position_ids=places, use_cache=False).last_hidden_state
        found["alone"] += (_read(model, lone, gold, hidden, prefix)[0] - loss).tolist()
        behind = {"nothing": other[:, :0], "masks": torch.full_like(gold[:, prefix:], mask), "other": other}
        for name in STORES:
            shown = torch.cat([ids[:, :prefix], behind[name]], 1)
            stored = model.model(input_ids=shown, use_cache=True).past_key_values
            for mine, kept in zip(own.past_key_values.layers, stored.layers, strict=True):
                found[name]["k"].append(_cosine(mine.keys, kept.keys, prefix))
                found[name]["v"].append(_cosine(mine.values, kept.values, prefix))
            if follows := behind[name].shape[1]:
                stored.crop(-follows)
            reused = model.model(
                input_ids=ids[:, prefix:],
                position_ids=places,
                past_key_values=stored,
                attention_mask=see,
                use_cache=True,
            ).last_hidden_state
            changed, choice = _read(model, reused, gold, hidden, prefix)
            found[name]["loss"] += (changed - loss).tolist()
            found[name]["agree"] += (choice == best).float().tolist()
    layers = len(own.past_key_values.layers)
    for name in STORES:
        for which in ("k", "v"):
            found[name][which] = np.reshape(found[name][which], (-1, layers)).mean(0).round(4).tolist()
        found[name]["agree"] = float(np.mean(found[name]["agree"]))
        found[name]["loss"] = _interval(found[name]["loss"])
    return found | {"loss": _interval(found["loss"]), "alone": _interval(found["alone"])}


def main() -> None:
    """Measure what a store is filled under, on documents by the share of their prefix, and on pages of `town`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--html", type=Path, nargs="+", required=True)
    parser.add_argument("--documents", type=int, default=128)
    parser.add_argument("--pages", type=int, default=160)
    parser.add_argument("--canvas", type=int, default=640)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    device, tokenizer = torch.device(args.device), load_tokenizer(args.base)
    model, config = load_base(args.base, device), adapter_config(args.adapter)
    add_low_rank(model, config["r"], config["lora_alpha"])
    load_adapter(model, args.adapter)
    look_both_ways(model)
    mask, found = tokenizer.mask_token_id, dict[str, Any]()
    documents = Ragged.of(tokenizer(list(read_documents(args.html)), add_special_tokens=False)["input_ids"])
    for share in SHARES:
        prefix = args.canvas * share // 100
        sizes = {"count": args.documents, "prefix": prefix, "rest": args.canvas - prefix}
        found[f"documents-{share}"] = measure_reuse(model, documents, device, mask, **sizes)
    found["town"] = compare_stores(model, _towns(tokenizer, args.pages), device, mask)
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _towns(tokenizer: Any, pages: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """A page, a question and its masked answer each; another request asks about the same page."""
    asked = town.make_workload(2 * pages, pages, seed=11, settings=town.TownSettings(shops=8))
    by_page: dict[int, list[town.TownRequest]] = defaultdict(list)
    for each in asked:
        by_page[each.page].append(each)
    for request, second in (requests for requests in by_page.values() if len(requests) == 2):
        page, _ = request.messages
        first, other, none = (
            tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
            for turns in (request.messages, second.messages, [page, {"role": "user", "content": "?"}])
        )
        shared = next(place for place, (a, b) in enumerate(zip(first, none, strict=False)) if a != b)
        gold, behind = (
            torch.tensor([[*prompt, *tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]])
            for prompt, answer in ((first, request.answer), (other, second.answer))
        )
        yield shared, gold, torch.arange(gold.shape[1])[None] >= len(first), behind[:, shared:]


def _read(model: Any, rows: Tensor, gold: Tensor, mask: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Mean loss [B] of the masked positions, and their best tokens, one after the other."""
    number, place = mask.nonzero(as_tuple=True)
    logits = model.lm_head(rows[number, place - prefix - 1]).float()
    each = F.cross_entropy(logits, gold[number, place], reduction="none")
    total = torch.zeros(len(gold), device=each.device).index_add_(0, number, each)
    return total / mask.sum(1), logits.argmax(-1)


def _cosine(mine: Tensor, kept: Tensor, prefix: int) -> float:
    """Mean over tokens of the prefix, K or V of all heads as one vector; [B, heads, T, dim]."""
    own, other = (each[:, :, :prefix].transpose(1, 2).flatten(2).float() for each in (mine, kept))
    return float(F.cosine_similarity(own, other, dim=-1).mean())


def _interval(values: list[float]) -> list[float]:
    """Mean, and half the width of its 95 % interval."""
    mean = float(np.mean(values))
    return [mean, mean_interval(values, range(len(values)))[1] - mean]


if __name__ == "__main__":
    main()
