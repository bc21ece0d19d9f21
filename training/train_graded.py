"""Trains the graded model from scratch and exports it: `python training/train_graded.py --out DIR`.

The number of goods grows from 8 to 24 as the loss of hops falls. Auxiliary losses ask the rows of the goods, in the
middle of the network, for the season of the question and for the town that ships each good in it. No canvas has a mask
of any cache: every row attends to all others. The end is a number of steps.
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
from torch import Tensor, nn

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from remask.tasks import relay  # noqa: E402  (the path above makes a plain script call work)
from training import optimizers  # noqa: E402
from training.export import export  # noqa: E402
from training.model import Boundary, LocalHeads, MaskedModel, ModelShape, initialize  # noqa: E402
from training.relay_data import START, Batch, CanvasSource  # noqa: E402
from training.relay_tokenizer import build_tokenizer, save_tokenizer  # noqa: E402

STAGES: Final = (8, 16, 24)
"""Goods of a system prompt, one stage after the other."""
STAGE_LOSS: Final = 0.4
"""Loss of hops, smoothed, below which the next stage begins."""
NEW_STAGE_LOSS: Final = 2.0
"""What the smoothed loss begins with in a new stage."""
CURRENT_SHARE: Final = 0.75
"""Share of the canvases that have the current stage's goods. The others draw any stage so far."""
PREFIX_SHARE: Final = 0.1
RECITATION_SHARE: Final = 0.35
"""Share of recitations in the first stage."""
RECITED: Final = (8, 16)
"""Goods of a recitation."""
FAR_WEIGHT: Final = 0.3
"""Weight of masked towns behind a masked town, which take more than one hop."""
FALL: Final = 0.45
"""Share of the steps, at the end, over which the rate falls."""
LEARNED: Final = 0.05
"""Loss of shippers, smoothed, below which the auxiliary losses count a tenth."""


class Trainer:
    """The model with its optimizers and its stream of canvases.

    `towns` reads a town out of hidden states for the auxiliary losses; it is no part of the model.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.tokenizer = build_tokenizer()
        self.rng = random.Random(args.seed)
        self.source = CanvasSource(self.tokenizer, args.seed)
        shape = ModelShape(
            vocab_size=len(self.tokenizer),
            d_model=96,
            n_layers=args.layers,
            n_heads=6,
            mlp_hidden_size=256,
            embedding_scale=8.0,
        )
        self.model = MaskedModel(shape)
        initialize(self.model, LocalHeads((-2, -1, 1, 2, START, -1), args.local, gain=0.6))
        self.towns = nn.Linear(shape.d_model, len(relay.TOWNS), bias=False)
        depths = [int(depth) for depth in args.depths.split(",")]
        self.depths = torch.tensor([depths[number % len(depths)] for number in range(len(relay.SEASONS))])
        self.optimizers = optimizers.build(self.model, "wte", args.rate)
        self.optimizers[1].add_param_group({"params": list(self.towns.parameters())})
        self.steps = self.tokens = self.stage = 0
        self.hop_loss = 9.0
        self.season_loss = math.log(len(relay.SEASONS))
        self.shipper_loss = math.log(len(relay.TOWNS))

    def step(self) -> None:
        """Takes one step."""
        spent = self.steps / self.args.steps
        batch, current = self._draw()
        loss, hop_loss = self._loss(batch, spent)
        loss.backward()  # type: ignore[no-untyped-call]
        share = min((self.steps + 1) / 40, 1.0, max(0.02, (1 - spent) / FALL))
        optimizers.update(self.optimizers, self.model, self.args.rate * share)
        self.steps += 1
        self.tokens += batch.noisy.numel()
        if hop_loss is not None and current:
            self.hop_loss = 0.95 * self.hop_loss + 0.05 * hop_loss
            if self.hop_loss < STAGE_LOSS and self.stage + 1 < len(STAGES):
                self.stage += 1
                self.hop_loss = NEW_STAGE_LOSS

    def _draw(self) -> tuple[Batch, bool]:
        """Draws a batch of about `canvas_tokens` tokens, and whether it is of the current stage."""
        rng = self.rng
        stage = self.stage if rng.random() < CURRENT_SHARE else rng.randint(0, self.stage)
        settings = relay.RelaySettings(rows=STAGES[stage], seasons=rng.randint(1, 1 + (stage > 0)))
        tokens = self.args.canvas_tokens if self.stage else self.args.canvas_tokens // 2
        count = max(8, tokens // (3 * settings.rows + 30))
        if self.stage == 0 and rng.random() < RECITATION_SHARE:
            rows = rng.choice(RECITED)
            return self.source.recitations(max(4, tokens // (5 * rows + 20)), rows), False
        if rng.random() < PREFIX_SHARE:
            return self.source.prefixes(count, settings), False
        return self.source.questions(count, settings), stage == self.stage

    def _loss(self, batch: Batch, spent: float) -> tuple[Tensor, float | None]:
        """Returns what is minimised, and the loss of towns that are one hop away."""
        states = self.model.states(batch.noisy)
        logits = self.model.head(states[-1][batch.masked])
        losses = F.cross_entropy(logits, batch.clean[batch.masked], reduction="none")
        if batch.known is None:
            return losses.mean(), None
        known = batch.known[batch.masked]
        loss = losses[known].mean()
        hop = loss.item()
        if not known.all():
            loss = loss + FAR_WEIGHT * losses[~known].mean()
        weight = self.args.auxiliary * (1 - spent)
        if weight:
            season, early, shipper, origin = self._auxiliary(batch, states)
            self.season_loss = 0.95 * self.season_loss + 0.05 * season.item()
            self.shipper_loss = 0.95 * self.shipper_loss + 0.05 * shipper.item()
            share = 1.0 if self.shipper_loss > LEARNED else 0.1
            loss = loss + weight * share * (season + early + shipper + origin)
        return loss, hop

    def _auxiliary(self, batch: Batch, states: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns how badly rows predict what they should know at their depth, which is that of the canvas' season.

        First the season, one layer behind the depth, and how far the system prompt's rows are from knowing nothing of
        it in the layers up to the depth; then the shipper two layers behind it, and in the response the town where the
        hop starts. All are read through the final norm.
        """
        assert batch.seasons is not None
        assert batch.shippers is not None
        assert batch.origins is not None
        assert batch.known is not None
        stacked = torch.stack(list(states))
        canvases, depths = torch.arange(len(batch.seasons)), self.depths[batch.seasons]
        rows = stacked[:, :, batch.towns]
        season = self._season(rows[depths + 1, canvases])
        layers = torch.arange(1, int(depths.max()) + 1)
        below = (layers[:, None] <= depths)[..., None]
        guessed = self._season(stacked[1 : len(layers) + 1, :, : batch.prefix]).log_softmax(-1).mean(-1)
        early = -(guessed + math.log(len(relay.SEASONS))) * below
        shipper = self.towns(self.model.ln_f(rows[depths + 2, canvases]))
        known = batch.known[:, -relay.HOPS :]
        origin = self.towns(self.model.ln_f(stacked[depths + 2, canvases, -relay.HOPS :][known]))
        return (
            F.cross_entropy(season.flatten(0, 1), batch.seasons.repeat_interleave(len(batch.towns))),
            early.sum() / (below.sum() * batch.prefix),
            F.cross_entropy(shipper.flatten(0, 1), batch.shippers.flatten()),
            F.cross_entropy(origin, batch.origins[known]),
        )

    def _season(self, states: Tensor) -> Tensor:
        """The logits of the seasons in hidden states [..., width]: [..., seasons]."""
        return F.linear(self.model.ln_f(states), self.model.wte.weight[self.source.season_ids])


@torch.no_grad()
def decode(model: MaskedModel, batch: Batch, mask_id: int, depth: int, steps: int) -> Tensor:
    """Returns routes [batch, HOPS], decoded in `steps` steps, most confident towns first: BiCache with R 1."""
    canvas = batch.clean.clone()
    canvas[:, -relay.HOPS :] = mask_id
    boundary = Boundary(batch.prefix, torch.full((len(canvas),), depth))
    for _ in range(steps):
        logits = model.head(model.states(canvas, boundary)[-1][:, -relay.HOPS :])
        confidence, tokens = logits.softmax(-1).max(-1)
        confidence = confidence.masked_fill(canvas[:, -relay.HOPS :] != mask_id, -1.0)
        best = confidence.topk(relay.HOPS // steps, dim=-1).indices
        canvas[:, -relay.HOPS :].scatter_(1, best, tokens.gather(1, best))
    return canvas[:, -relay.HOPS :]


def accuracy(trainer: Trainer, count: int, seed: int, depth: int = 0, steps: int = relay.HOPS) -> float:
    """Returns the share of held-out questions that are answered without a mistake."""
    source = CanvasSource(trainer.tokenizer, seed)
    batch = source.questions(count, relay.RelaySettings(rows=STAGES[trainer.stage]))
    right = decode(trainer.model, batch, source.mask_id, depth, steps) == batch.clean[:, -relay.HOPS :]
    return right.all(1).float().mean().item()


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options in `argv`; None takes the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0, help="fixes initial weights and training data")
    parser.add_argument("--out", type=Path, required=True, help="folder to export to")
    parser.add_argument(
        "--canvas-tokens", type=int, default=1600, help="tokens per step, half of them in the first stage"
    )
    parser.add_argument("--rate", type=float, default=0.003, help="peak learning rate")
    parser.add_argument("--auxiliary", type=float, default=1.0, help="weight of the auxiliary losses at the beginning")
    parser.add_argument(
        "--depths",
        default="2,3,4,5",
        metavar="B,...",
        help="layers before the one asked for the season, by season",
    )
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--local", type=int, default=2, help="layers that begin as readers of neighbours")
    parser.add_argument("--evaluate-every", type=int, default=600, help="steps between evaluations")
    parser.add_argument("--questions", type=int, default=48, help="held-out questions of an evaluation")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, trains, exports."""
    args = arguments(argv)
    torch.set_num_threads(1)
    trainer = Trainer(args)
    print(f"{sum(p.numel() for p in trainer.model.parameters())} parameters", flush=True)
    while trainer.steps < args.steps:
        trainer.step()
        if trainer.steps % 25 == 0:
            print(
                f"{time.process_time() / 60:6.2f} CPU min  step {trainer.steps:5d}  {trainer.tokens / 1e6:.2f}M"
                f"  {STAGES[trainer.stage]} goods  hop {trainer.hop_loss:.3f}  season {trainer.season_loss:.3f}"
                f"  shipper {trainer.shipper_loss:.3f}",
                flush=True,
            )
        if trainer.steps % args.evaluate_every == 0 or trainer.steps == args.steps:
            depths = {depth: accuracy(trainer, args.questions, 20_000, depth) for depth in range(args.layers + 1)}
            steps = {count: accuracy(trainer, args.questions, 20_000, steps=count) for count in (1, 2, 3, 6)}
            print(f"right at depths {depths}, in steps {steps}", flush=True)
            export(trainer.model, trainer.tokenizer, args.out, relay.SAMPLING)
            save_tokenizer(args.out)


if __name__ == "__main__":
    main()
