"""How far a prefix looks at what follows it, and what reusing its stored K/V in all layers costs, on documents."""

from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.adapt.ragged import Ragged

STORES: Final = ("masks", "other")  # what stood behind the prefix when its K/V were stored


@torch.no_grad()
def measure_reuse(
    model: Any, documents: Ragged, device: torch.device, mask: int, count: int = 96, prefix: int = 160, rest: int = 96
) -> dict[str, Any]:
    """Canvases of `prefix` clean tokens and `rest` behind them of which half are masked.

    Returns the loss in nats of the full pass, and as differences to it, with half widths of 95 % intervals over
    canvases: without the prefix (`alone`), and with the prefix's K/V stored behind masks and behind another text. For
    these also the share of masked positions whose best token stays, and the cosine of stored and own K and V by layer.
    """
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
    ids = gold.masked_fill(hidden, mask)
    behind = {"masks": torch.full_like(other, mask), "other": other}
    found: dict[str, Any] = {"loss": [], "alone": []}
    for name in STORES:
        found[name] = {"loss": [], "agree": [], "k": [], "v": []}
    for at in range(0, count, 16):
        part = slice(at, at + 16)
        now, shut = ids[part].to(device), hidden[part].to(device)
        own = model.model(input_ids=now, use_cache=True)
        loss, best = _read(model, own.last_hidden_state[:, prefix:], gold[part].to(device), shut, prefix)
        found["loss"] += loss.tolist()
        places = torch.arange(prefix, prefix + rest, device=device)[None]
        see = torch.ones(1, 1, rest, prefix + rest, dtype=torch.bool, device=device)
        lone = model.model(input_ids=now[:, prefix:], position_ids=places, use_cache=False).last_hidden_state
        found["alone"] += (_read(model, lone, gold[part].to(device), shut, prefix)[0] - loss).tolist()
        for name in STORES:
            stored = model.model(
                input_ids=torch.cat([now[:, :prefix], behind[name][part].to(device)], 1), use_cache=True
            ).past_key_values
            for mine, kept in zip(own.past_key_values.layers, stored.layers, strict=True):
                found[name]["k"].append(_cosine(mine.keys, kept.keys, prefix))
                found[name]["v"].append(_cosine(mine.values, kept.values, prefix))
            stored.crop(-rest)
            reused = model.model(
                input_ids=now[:, prefix:],
                position_ids=places,
                past_key_values=stored,
                attention_mask=see,
                use_cache=True,
            ).last_hidden_state
            changed, choice = _read(model, reused, gold[part].to(device), shut, prefix)
            found[name]["loss"] += (changed - loss).tolist()
            found[name]["agree"] += (choice == best).float().tolist()
    layers = len(own.past_key_values.layers)
    for name in STORES:
        for which in ("k", "v"):
            found[name][which] = np.reshape(found[name][which], (-1, layers)).mean(0).round(4).tolist()
        found[name]["agree"] = float(np.mean(found[name]["agree"]))
        found[name]["loss"] = _interval(found[name]["loss"])
    return found | {"loss": _interval(found["loss"]), "alone": _interval(found["alone"])}


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
    return [float(np.mean(values)), float(1.96 * np.std(values, ddof=1) / len(values) ** 0.5)]
