"""Trains the bundled uniform model from scratch and exports it: `python training/train_uniform.py --out DIR`.

It is the twin of the graded model: the same task and the same tokenizer, with uniform noise in the place of masks. The
number of goods grows from 8 to 24 as the loss of hops falls. The loss is the cross-entropy of the right token at every
row of the window, whether noise replaced it or not, because the model does not know which tokens are noise. Auxiliary
losses ask the rows of the goods, early in the network, for the season and for the town that ships each good in it. The
end is a number of steps.

`--attention full` trains the same model without GIDD's structured mask: rows of the prompt and of completed blocks see
noise too. `--loss bound` minimises the variational bound of the noise in place of the cross-entropy, in nats a token.
`--start FOLDER` begins from an exported model, all goods at once, in place of random weights.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from remask.denoising.noise import Noise  # noqa: E402  (the path above makes a plain script call work)
from remask.tasks import relay  # noqa: E402
from training import optimizers  # noqa: E402
from training.model import LocalHeads  # noqa: E402
from training.noise_bound import Levels, chain, divergences  # noqa: E402
from training.relay_data import START  # noqa: E402
from training.relay_noise import NoisyBatch, NoisySource  # noqa: E402
from training.relay_tokenizer import build_tokenizer  # noqa: E402
from training.uniform_export import export  # noqa: E402
from training.uniform_model import DenseGidd, GiddShape, initialize  # noqa: E402

STAGES: Final = (8, 16, 24)
"""Goods of a system prompt, one stage after the other."""
MISTAKEN: Final = (0.0, 0.1, 0.2)
"""Share of the canvases whose wrong tokens are towns, by stage: what look-ups need before they are there is noise."""
STAGE_LOSS: Final = 0.5
"""Loss of hops, smoothed, below which the next stage begins."""
NEW_STAGE_LOSS: Final = 2.0
"""What the smoothed loss begins with in a new stage."""
CURRENT_SHARE: Final = 0.75
"""Share of the canvases that have the current stage's goods. The others draw any stage so far."""
LEG_SHARE: Final = 0.5
"""Share of the questions in two seasons that are about routes of two legs."""
RECITATION_SHARE: Final = 0.35
"""Share of recitations in the first stage."""
RECITED: Final = (8, 16)
"""Goods of a recitation."""
RIGHT_WEIGHT: Final = 0.3
"""Weight of the tokens of the window that are right as they stand."""
FALL: Final = 0.45
"""Share of the steps, at the end, over which the rate falls."""
LEARNED: Final = 0.05
"""Loss of shippers, smoothed, below which the auxiliary losses count a tenth."""
LEVELS: Final = 1000
"""Steps of the chain whose bound is minimised."""
DECODED: Final = (1, 2, 3, 6, 9)
"""Numbers of steps that evaluations decode in."""


class Trainer:
    """The model with its optimizers and its stream of canvases.

    `towns` reads a town out of hidden states for the auxiliary losses; it is no part of the model.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.tokenizer = build_tokenizer()
        self.noise = Noise(1000.0, -9.0, 9.0, len(self.tokenizer), self.tokenizer.mask_token_id)  # as exported
        self.chain: Levels | None = chain(self.noise, LEVELS, "cosine") if args.loss == "bound" else None
        self.rng = random.Random(args.seed)
        shape = GiddShape(
            len(self.tokenizer), num_hidden_layers=args.layers, structured_attention=args.attention == "structured"
        )
        self.source = NoisySource(self.tokenizer, args.seed, shape.max_position_embeddings, self.chain)
        self.model = DenseGidd(shape)
        initialize(self.model, LocalHeads((-2, -1, 1, 2, START, -1), args.local, gain=0.6))
        self.stage = 0
        if args.start is not None:
            stored = load_file(args.start / "model.safetensors")
            self.model.load_state_dict({name.removeprefix("model."): weight for name, weight in stored.items()})
            self.stage = len(STAGES) - 1
        self.towns = nn.Linear(shape.hidden_size, len(relay.TOWNS), bias=False)
        self.optimizers = optimizers.build(self.model, "embed_tokens", args.rate)
        self.optimizers[1].add_param_group({"params": list(self.towns.parameters())})
        self.steps = self.tokens = 0
        self.hop_loss = self.far_loss = 9.0
        self.season_loss = math.log(len(relay.SEASONS))
        self.shipper_loss = math.log(len(relay.TOWNS))

    def step(self) -> None:
        """Takes one step."""
        spent = self.steps / self.args.steps
        batch, current = self._draw()
        loss, hop_loss = self.loss(batch, spent)
        loss.backward()  # type: ignore[no-untyped-call]
        share = min((self.steps + 1) / 40, 1.0, max(0.02, (1 - spent) / FALL))
        optimizers.update(self.optimizers, self.model, self.args.rate * share)
        self.steps += 1
        self.tokens += batch.tokens.numel()
        if hop_loss is not None and current:
            self.hop_loss = 0.95 * self.hop_loss + 0.05 * hop_loss
            if self.hop_loss < STAGE_LOSS and self.stage + 1 < len(STAGES):
                self.stage += 1
                self.hop_loss = NEW_STAGE_LOSS

    def loss(self, batch: NoisyBatch, spent: float = 1.0) -> tuple[Tensor, float | None]:
        """Returns what is minimised, and the loss of wrong towns that are one hop away from a right one.

        Nothing is one hop away in a recitation, nor where the bound is minimised.
        """
        made = batch.made
        states = self.model.states(batch.tokens, batch.noisy)
        last = states[-1][:, : made.clean.shape[1]]
        if batch.steps is not None:
            loss, hop = self._bound(batch, self.model.head(last[batch.window])), None
        elif made.seasons is None:
            return F.cross_entropy(self.model.head(last[batch.wrong]), made.clean[batch.wrong]), None
        else:
            loss, hop = self._towns_loss(batch, self.model.head(last[batch.window]))
        weight = self.args.auxiliary * (1 - spent)
        if weight and made.seasons is not None:
            season, shipper, origin = self._auxiliary(batch, states)
            self.season_loss = 0.95 * self.season_loss + 0.05 * season.item()
            self.shipper_loss = 0.95 * self.shipper_loss + 0.05 * shipper.item()
            share = 1.0 if self.shipper_loss > LEARNED else 0.1
            loss = loss + weight * share * (season + shipper + origin)
        return loss, hop

    def _draw(self) -> tuple[NoisyBatch, bool]:
        """Draws a batch of about `canvas_tokens` tokens, and whether it is of the current stage."""
        rng = self.rng
        self.source.mistaken = MISTAKEN[self.stage]
        stage = self.stage if rng.random() < CURRENT_SHARE else rng.randint(0, self.stage)
        settings = relay.RelaySettings(rows=STAGES[stage], seasons=rng.randint(1, 1 + (stage > 0)))
        tokens = self.args.canvas_tokens if self.stage else self.args.canvas_tokens // 2
        if self.stage == 0 and rng.random() < RECITATION_SHARE:
            rows = rng.choice(RECITED)
            return self.source.recitations(max(4, tokens // (5 * rows + 20)), rows), False
        count = max(8, tokens // (3 * settings.rows + 35))
        if settings.seasons > 1 and rng.random() < LEG_SHARE:
            return self.source.leg(count, replace(settings, legs=2), rng.randrange(2)), False
        return self.source.questions(count, settings), stage == self.stage

    def _towns_loss(self, batch: NoisyBatch, logits: Tensor) -> tuple[Tensor, float]:
        """The weighted loss of the window's rows, whose `logits` [N, V] are given, and that of towns one hop away."""
        losses = F.cross_entropy(logits, batch.made.clean[batch.window], reduction="none")
        wrong, known = batch.wrong[batch.window], batch.known[batch.window]
        loss = losses[known].mean()
        hop = loss.item()
        far = wrong & ~known
        if far.any():
            loss = loss + self.args.far * losses[far].mean()
            self.far_loss = 0.95 * self.far_loss + 0.05 * losses[far].mean().item()
        if not wrong.all():
            loss = loss + RIGHT_WEIGHT * losses[~wrong].mean()
        return loss, hop

    def _bound(self, batch: NoisyBatch, logits: Tensor) -> Tensor:
        """The mean bound of the window's rows, whose `logits` [N, V] are given, in nats a token."""
        assert self.chain is not None
        assert batch.steps is not None
        steps = batch.steps[:, None].expand(batch.window.shape)[batch.window]
        clean = batch.made.clean[batch.window]
        noisy = batch.tokens[:, : batch.window.shape[1]][batch.window]
        before, after = self.chain.at(steps), self.chain.at(steps - 1)
        # A step stands for all of them: each is drawn with the same probability.
        return LEVELS * divergences(logits, clean, noisy, before, after, self.noise.mask_id).mean()

    def _auxiliary(self, batch: NoisyBatch, states: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns how badly rows predict what they should know, read through the final norm.

        The season where layer `depth` ends, in the rows of the goods; a layer further the shipper, and in the response
        the town where the hop starts.
        """
        made = batch.made
        assert made.seasons is not None
        assert made.shippers is not None
        assert made.origins is not None
        depth, length = self.args.depth, made.clean.shape[1]
        norm, names = self.model.norm, self.model.embed_tokens.weight[self.source.canvases.season_ids]
        season = F.linear(norm(states[depth][:, made.towns]), names)
        shipper = self.towns(norm(states[depth + 1][:, made.towns]))
        known = batch.known[:, -relay.HOPS :]
        origin = self.towns(norm(states[depth + 1][:, length - relay.HOPS : length][known]))
        return (
            F.cross_entropy(season.flatten(0, 1), made.seasons.repeat_interleave(len(made.towns))),
            F.cross_entropy(shipper.flatten(0, 1), made.shippers.flatten()),
            F.cross_entropy(origin, made.origins[known]) if known.any() else origin.sum(),
        )

    @torch.no_grad()
    def decode(self, batch: NoisyBatch, rows: range, steps: int, changes: int) -> Tensor:
        """Returns the tokens of `rows`, from noise, in `steps` steps of `changes` tokens each: those that gain most."""
        window = slice(rows.start, rows.stop)
        tokens = torch.cat([batch.made.clean[:, : rows.start], batch.tokens[:, rows.start :]], dim=1)
        tokens[:, rows.start :] = self.source.noise(len(tokens), tokens.shape[1] - rows.start)
        noisy = (torch.arange(tokens.shape[1]) >= rows.start).expand(tokens.shape)
        for _ in range(steps):
            chances = self.model.head(self.model.states(tokens, noisy)[-1][:, window]).softmax(-1)
            most, best = chances.max(-1)
            gains = most - chances.gather(-1, tokens[:, window, None])[..., 0]
            chosen = torch.zeros_like(gains, dtype=torch.bool).scatter(1, gains.topk(changes).indices, value=True)
            tokens[:, window] = torch.where(chosen, best, tokens[:, window])
        return tokens[:, window]

    def evaluated(self, count: int, seed: int) -> str:
        """Share of held-out questions that are right, by steps of one and of all tokens, and of each leg in three."""
        source = NoisySource(self.tokenizer, seed, self.model.shape.max_position_embeddings)
        rows = STAGES[self.stage]
        batch = source.questions(count, relay.RelaySettings(rows=rows))
        stop = batch.made.clean.shape[1]
        told = []
        for changes in (1, 3, relay.HOPS):
            span = range(stop - relay.HOPS, stop)
            shares = {steps: self._right(batch, span, steps, changes) for steps in DECODED}
            told.append(f"{changes} tokens a step: {shares}")
        for number in range(2):
            batch = source.leg(count, relay.RelaySettings(rows=rows, legs=2), number)
            stop = batch.made.clean.shape[1] - relay.HOPS + (number + 1) * relay.LEG
            told.append(f"leg {number}: {self._right(batch, range(stop - relay.LEG, stop), relay.LEG, relay.LEG)}")
        return "\n".join(told)

    def _right(self, batch: NoisyBatch, rows: range, steps: int, changes: int) -> float:
        hits = self.decode(batch, rows, steps, changes) == batch.made.clean[:, rows.start : rows.stop]
        return round(hits.all(1).float().mean().item(), 3)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options in `argv`; None takes the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--seed", type=int, default=0, help="fixes initial weights and training data")
    parser.add_argument("--out", type=Path, required=True, help="folder to export to")
    parser.add_argument(
        "--canvas-tokens", type=int, default=1200, help="tokens per step, half of them in the first stage"
    )
    parser.add_argument("--rate", type=float, default=0.003, help="peak learning rate")
    parser.add_argument("--auxiliary", type=float, default=1.0, help="weight of the auxiliary losses at the beginning")
    parser.add_argument("--far", type=float, default=0.3, help="weight of towns that take more than one hop")
    parser.add_argument("--depth", type=int, default=3, help="layers before the one asked for the season")
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--local", type=int, default=2, help="layers that begin as readers of neighbours")
    parser.add_argument(
        "--attention", choices=("structured", "full"), default="structured", help="what rows of clean tokens see"
    )
    parser.add_argument(
        "--loss", choices=("cross-entropy", "bound"), default="cross-entropy", help="what training minimises"
    )
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="begin from this exported model")
    parser.add_argument("--evaluate-every", type=int, default=900, help="steps between evaluations")
    parser.add_argument("--questions", type=int, default=24, help="held-out questions of an evaluation")
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
                f"  {STAGES[trainer.stage]} goods  hop {trainer.hop_loss:.3f}  far {trainer.far_loss:.3f}"
                f"  season {trainer.season_loss:.3f}  shipper {trainer.shipper_loss:.3f}",
                flush=True,
            )
        if trainer.steps % args.evaluate_every == 0 or trainer.steps == args.steps:
            print(trainer.evaluated(args.questions, 20_000), flush=True)
            export(trainer.model, trainer.tokenizer, args.out)


if __name__ == "__main__":
    main()
