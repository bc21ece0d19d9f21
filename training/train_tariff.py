"""Trains the tariff model from scratch and exports it: `python training/train_tariff.py --out DIR`.

The number of orders grows from 8 to 40 as the loss of plan questions falls. An auxiliary loss asks the orders' rows, in
the middle of the network, what each order costs under the plan of the question. The end is a number of steps. The same
recipe trains a model of another family (`--family`).
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from remask.tasks import tariff  # noqa: E402  (the path above makes a plain script call work)
from training import optimizers  # noqa: E402
from training.export import export  # noqa: E402
from training.mixture import Experts  # noqa: E402
from training.model import Boundary, LocalHeads, MaskedModel, ModelShape, initialize  # noqa: E402
from training.tariff_data import RESPONSE_LENGTH, Batch, CanvasSource  # noqa: E402
from training.tariff_tokenizer import build_tokenizer, save_tokenizer  # noqa: E402

STAGES: Final = (8, 20, 40)
"""Orders of a system prompt, one stage after the other."""
STAGE_LOSS: Final = 0.2
"""Loss of plan questions, smoothed, below which the next stage begins."""
NEW_STAGE_LOSS: Final = 2.0
"""What the smoothed loss begins with in a new stage."""
CURRENT_SHARE: Final = 0.75
"""Share of the canvases that have the current stage's orders. The others draw any stage so far."""
PREFIX_SHARE: Final = 0.1
RECITATION_SHARE: Final = 0.35
"""Share of recitations in the first stage."""
RECITED: Final = (8, 16)
"""Orders of a recitation."""
AUXILIARY_END: Final = 0.7
"""Share of the steps over which the weight of the auxiliary losses falls to 0."""
LEARNED: Final = 0.05
"""Loss of prices, smoothed, below which the auxiliary losses count a tenth."""
QUESTION: Final = -13
"""From an asked item of the response to the question's; a model with a shift predicts it from a row further back."""
EXPERTS: Final = Experts(count=8, active=2, hidden=128)
"""Of a mixture: those that compute a row are together as wide as the dense model's MLP."""
BALANCE: Final = 0.01
"""Weight of the loss that makes experts be used alike."""


class Trainer:
    """The model with its optimizers and its stream of canvases."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.tokenizer = build_tokenizer()
        self.rng = random.Random(args.seed)
        shape = ModelShape(
            vocab_size=len(self.tokenizer),
            d_model=96,
            n_layers=args.layers,
            n_heads=6,
            mlp_hidden_size=256,
            embedding_scale=8.0,
            family=args.family,
            experts=EXPERTS if args.family == "llada-moe" else None,
        )
        self.model = MaskedModel(shape)
        self.source = CanvasSource(self.tokenizer, args.seed, shape.shift)
        initialize(self.model, LocalHeads((-2, -1, 1, 2, QUESTION + shape.shift, -1), args.local, gain=0.6))
        depths = [int(depth) for depth in args.depths.split(",")]
        self.depths = torch.tensor([depths[number % len(depths)] for number in range(len(tariff.PLANS))])
        self.optimizers = optimizers.build(self.model, "wte", args.rate)
        self.steps = self.tokens = self.stage = 0
        self.plan_loss = 9.0
        self.auxiliary_loss = math.log(tariff.PRICES)

    def step(self) -> None:
        """Takes one step."""
        spent = self.steps / self.args.steps
        batch, current = self._draw()
        loss, plan_loss = self._loss(batch, spent)
        loss.backward()  # type: ignore[no-untyped-call]
        share = min((self.steps + 1) / 40, 1.0, max(0.02, (1 - spent) / 0.35))
        optimizers.update(self.optimizers, self.model, self.args.rate * share)
        self.steps += 1
        self.tokens += batch.noisy.numel()
        if plan_loss is not None and current:
            self.plan_loss = 0.95 * self.plan_loss + 0.05 * plan_loss
            if self.plan_loss < STAGE_LOSS and self.stage + 1 < len(STAGES):
                self.stage += 1
                self.plan_loss = NEW_STAGE_LOSS

    def _draw(self) -> tuple[Batch, bool]:
        """Draws a batch of about `canvas_tokens` tokens, and whether it is of the current stage."""
        rng = self.rng
        stage = self.stage if rng.random() < CURRENT_SHARE else rng.randint(0, self.stage)
        settings = tariff.TariffSettings(orders=STAGES[stage], plans=rng.randint(1, 1 + (stage > 0)))
        tokens = self.args.canvas_tokens if self.stage else self.args.canvas_tokens // 2
        count = max(8, tokens // (3 * settings.orders + 38))
        kind = rng.random()
        if self.stage == 0 and rng.random() < RECITATION_SHARE:
            orders = rng.choice(RECITED)
            return self.source.recitations(max(4, tokens // (5 * orders + 20)), orders), False
        if kind < PREFIX_SHARE:
            return self.source.prefixes(count, settings), False
        if kind < PREFIX_SHARE + self.args.lookups:
            return self.source.questions(count, settings, "lookup"), False
        return self.source.questions(count, settings, "plan"), stage == self.stage

    def _loss(self, batch: Batch, spent: float) -> tuple[Tensor, float | None]:
        """Returns what is minimised, and the loss of a plan question's response."""
        states = self.model.states(batch.noisy, self._boundary(batch))
        logits = self.model.head(states[-1][self.model.predicting(batch.masked)])
        loss = F.cross_entropy(logits, batch.clean[batch.masked]) + BALANCE * self.model.imbalance
        if batch.plans is None:
            return loss, None
        response = loss.item()
        weight = self.args.auxiliary * max(0.0, 1 - spent / AUXILIARY_END)
        if weight:
            plan, price = self._auxiliary(batch, states)
            self.auxiliary_loss = 0.95 * self.auxiliary_loss + 0.05 * price.item()
            loss = loss + weight * (1.0 if self.auxiliary_loss > LEARNED else 0.1) * (plan + price)
        return loss, response

    def _boundary(self, batch: Batch) -> Boundary | None:
        """For a share of the canvases, the boundary below which their plan's questions need nothing."""
        if batch.plans is None or not self.args.alone:
            return None
        alone = torch.rand(batch.plans.shape) < self.args.alone
        return Boundary(batch.prefix, self.depths[batch.plans] * alone)

    def _auxiliary(self, batch: Batch, states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns how badly the orders' rows predict the plan one layer after its depth, and the price two after it."""
        assert batch.plans is not None
        assert batch.prices is not None
        orders = len(batch.names)
        stacked = torch.stack(list(states))[:, :, batch.names]
        canvases = torch.arange(len(batch.plans))
        depths = self.depths[batch.plans]
        plan = self.model.head(stacked[depths + 1, canvases])[..., self.source.plan_ids]
        price = self.model.head(stacked[depths + 2, canvases])[..., self.source.price_ids]
        return (
            F.cross_entropy(plan.flatten(0, 1), batch.plans.repeat_interleave(orders)),
            F.cross_entropy(price.flatten(0, 1), batch.prices.flatten()),
        )


@torch.no_grad()
def decode(model: MaskedModel, batch: Batch, mask_id: int, depth: int) -> Tensor:
    """Returns responses [batch, RESPONSE_LENGTH], one token a step, most confident first: BiCache with R 1."""
    canvas = batch.clean.clone()
    canvas[:, -RESPONSE_LENGTH:] = mask_id
    boundary = Boundary(batch.prefix, torch.full((len(canvas),), depth))
    last = canvas.shape[1] - model.shape.shift
    for _ in range(RESPONSE_LENGTH):
        logits = model.head(model.states(canvas, boundary)[-1][:, last - RESPONSE_LENGTH : last])
        confidence, tokens = logits.softmax(-1).max(-1)
        best = confidence.masked_fill(canvas[:, -RESPONSE_LENGTH:] != mask_id, -1.0).argmax(-1, keepdim=True)
        canvas[:, -RESPONSE_LENGTH:].scatter_(1, best, tokens.gather(1, best))
    return canvas[:, -RESPONSE_LENGTH:]


def accuracy(trainer: Trainer, count: int, seed: int, kind: str, depths: list[int]) -> list[float]:
    """Returns the share of held-out questions that are answered without a mistake, at each boundary depth."""
    settings = tariff.TariffSettings(orders=STAGES[trainer.stage])
    source = CanvasSource(trainer.tokenizer, seed)
    batch = source.questions(count, settings, kind)
    want = batch.clean[:, -RESPONSE_LENGTH:]
    return [
        (decode(trainer.model, batch, source.mask_id, depth) == want).all(1).float().mean().item() for depth in depths
    ]


def main() -> None:
    """Parses the command line, trains, exports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--seed", type=int, default=0, help="fixes initial weights and training data")
    parser.add_argument("--out", type=Path, required=True, help="folder to export to")
    parser.add_argument(
        "--family",
        choices=("llada", "dream", "llada-moe"),
        default="llada",
        help="architecture: dream predicts a position one row before it, llada-moe has experts (default llada)",
    )
    parser.add_argument(
        "--canvas-tokens", type=int, default=1600, help="tokens per step, half of them in the first stage"
    )
    parser.add_argument("--rate", type=float, default=0.003, help="peak learning rate")
    parser.add_argument("--lookups", type=float, default=0.2, help="share of look-ups")
    parser.add_argument("--auxiliary", type=float, default=1.0, help="weight of the auxiliary loss at the beginning")
    parser.add_argument(
        "--depths", default="2,3,4", metavar="B,...", help="depth at which plans are needed, plan by plan"
    )
    parser.add_argument(
        "--alone", type=float, default=0.5, help="share of canvases with a prefix alone below its depth"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--local", type=int, default=2, help="layers that begin as readers of neighbours")
    parser.add_argument("--evaluate-every", type=int, default=900, help="steps between evaluations")
    parser.add_argument("--questions", type=int, default=24, help="held-out questions of an evaluation, by kind")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trainer = Trainer(args)
    print(f"{sum(p.numel() for p in trainer.model.parameters())} parameters", flush=True)
    while trainer.steps < args.steps:
        trainer.step()
        if trainer.steps % 25 == 0:
            print(
                f"{time.process_time() / 60:6.2f} CPU min  step {trainer.steps:5d}  {trainer.tokens / 1e6:.2f}M"
                f"  {STAGES[trainer.stage]} orders  loss {trainer.plan_loss:.3f}  prices {trainer.auxiliary_loss:.3f}",
                flush=True,
            )
        if trainer.steps % args.evaluate_every == 0 or trainer.steps == args.steps:
            every = range(trainer.model.shape.n_layers + 1)
            depths = list(every) if trainer.steps == args.steps else [0, *every[1:-1:2], every[-1]]
            for kind in tariff.KINDS:
                print(
                    f"{kind} at depths {depths}: {accuracy(trainer, args.questions, 20_000, kind, depths)}", flush=True
                )
            export(trainer.model, trainer.tokenizer, args.out, tariff.SAMPLING)
            save_tokenizer(args.out)


if __name__ == "__main__":
    main()
