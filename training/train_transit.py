"""Trains the transit model from scratch and exports it: `python training/train_transit.py --minutes 30 --out DIR`.

Two phases. First only cloze recitations of tables, until their loss shows that the lookup has emerged; then rides with
masked responses, with a share of recitations kept (half of them masked anywhere, as in pre-training). Every canvas has
a table drawn afresh, so there is no data set and no epoch.
"""

import argparse
import math
import random
import sys
import time
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from remask.tasks import transit  # noqa: E402
from training import optimizers  # noqa: E402  (the path above makes a plain script call work)
from training.export import export, load_weights  # noqa: E402
from training.model import MaskedModel, ModelShape, initialize  # noqa: E402
from training.transit_data import CanvasSource  # noqa: E402
from training.transit_evaluate import measure  # noqa: E402
from training.transit_tokenizer import build_tokenizer, save_tokenizer  # noqa: E402

WARMUP_ROWS: Final = (8, 12, 16, 24)
WARMUP_TOKENS: Final = 1200
"""Tokens per step while the lookup emerges, which takes some hundred updates whatever their size."""
RIDE_ROWS: Final = (32, 40, 48, 56, 64)
RIDE_TURNS: Final = 4
RECITATION_SHARE: Final = 0.2
LOOKUP_LOSS: Final = 0.2
SETTINGS: Final = (
    ("blocks of 2, 8 steps", 2, 8, True),
    ("blocks of 2, 8 steps, system prompt removed", 2, 8, False),
    ("blocks of 4, 8 steps", 4, 8, True),
    ("blocks of 4, 16 steps", 4, 16, True),
    ("one block, 8 steps", 16, 8, True),
    ("one block, 16 steps", 16, 16, True),
)
"""The decodings that the last evaluation measures: name, block length, steps, whether the system prompt is sent."""


class Trainer:
    """The model with its optimizers and its stream of canvases."""

    def __init__(self, seed: int, canvas_tokens: int, rate: float, device: torch.device) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.canvas_tokens = canvas_tokens
        self.tokenizer = build_tokenizer()
        self.source = CanvasSource(self.tokenizer, seed)
        self.rng = random.Random(seed)
        self.model = MaskedModel(ModelShape(vocab_size=len(self.tokenizer)))
        initialize(self.model)
        self.model.to(device)
        self.optimizers = optimizers.build(self.model, "wte", rate)
        self.peak_rate = rate
        self.steps = 0
        self.tokens = 0
        self.in_warmup = True
        self.lookup_loss = math.inf

    def step(self, spent: float) -> float:
        """Takes one step; `spent` is the share of the time that is over. Returns the mean loss of the masked tokens."""
        noisy, clean, masked, cloze = self._draw()
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(noisy, masked)
        loss = F.cross_entropy(logits.float(), clean[masked])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers.update(self.optimizers, self.model, self.peak_rate * optimizers.learning_rate(self.steps, spent))
        self.steps += 1
        self.tokens += noisy.numel()
        value = loss.item()
        if cloze:
            self.lookup_loss = value if math.isinf(self.lookup_loss) else 0.9 * self.lookup_loss + 0.1 * value
            self.in_warmup = self.in_warmup and self.lookup_loss > LOOKUP_LOSS
        return value

    def _draw(self) -> tuple[Tensor, Tensor, Tensor, bool]:
        """Draws one batch of about `canvas_tokens` tokens, and returns whether it is a cloze recitation."""
        rng = self.rng
        full = False
        if recite := self.in_warmup or rng.random() < RECITATION_SHARE:
            full = not self.in_warmup and rng.random() < 0.5
            rows = rng.choice(WARMUP_ROWS if self.in_warmup else RIDE_ROWS)
            tokens = WARMUP_TOKENS if self.in_warmup else self.canvas_tokens
            batch = self.source.recitations(max(1, tokens // (8 * rows + 27)), rows, full)
        else:
            rows = rng.choice(RIDE_ROWS)
            length = 4 * rows + 22 + 33 * RIDE_TURNS
            batch = self.source.rides(max(1, self.canvas_tokens // length), rows, RIDE_TURNS)
        noisy, clean, masked = (tensor.to(self.device) for tensor in batch)
        return noisy, clean, masked, recite and not full


def main() -> None:
    """Parses the command line, trains for the given time, exports, and measures what was exported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="training time, evaluations included")
    parser.add_argument("--seed", type=int, default=0, help="fixes initial weights and training data")
    parser.add_argument("--out", type=Path, required=True, help="folder to export to")
    parser.add_argument("--canvas-tokens", type=int, default=4800, help="tokens per step after the warm-up")
    parser.add_argument("--rate", type=float, default=0.003, help="peak learning rate")
    parser.add_argument("--evaluate-every", type=float, default=4.0, help="minutes between exports with an evaluation")
    parser.add_argument("--eval-questions", type=int, default=300, help="questions of the last evaluation")
    parser.add_argument("--eval-seed", type=int, default=20_000, help="seed of the evaluations")
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(options.seed, options.canvas_tokens, options.rate, device)
    begin = time.monotonic()
    evaluated = begin
    smooth = math.nan
    while (spent := (time.monotonic() - begin) / (60 * options.minutes)) < 1:
        warm = trainer.in_warmup
        loss = trainer.step(spent)
        smooth = loss if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss
        if trainer.steps % 25 == 0 or warm != trainer.in_warmup:
            minutes = (time.monotonic() - begin) / 60
            phase = "cloze" if trainer.in_warmup else "rides"
            print(
                f"{minutes:6.2f} min  step {trainer.steps:5d}  {trainer.tokens / 1e6:6.2f}M tokens  {phase}"
                f"  loss {smooth:.3f}  lookup {trainer.lookup_loss:.3f}",
                flush=True,
            )
        if time.monotonic() - evaluated > 60 * options.evaluate_every:
            export(trainer.model, trainer.tokenizer, options.out, transit.SAMPLING)
            save_tokenizer(options.out)
            accuracy = measure(trainer.model, trainer.tokenizer, 48, options.eval_seed + trainer.steps)
            print(f"accuracy {accuracy}", flush=True)
            evaluated = time.monotonic()

    export(trainer.model, trainer.tokenizer, options.out, transit.SAMPLING)
    save_tokenizer(options.out)
    load_weights(trainer.model, options.out)
    for name, block_length, steps, with_system in SETTINGS:
        result = measure(
            trainer.model,
            trainer.tokenizer,
            options.eval_questions,
            options.eval_seed,
            block_length=block_length,
            steps=steps,
            with_system=with_system,
        )
        print(f"{name}: {result}", flush=True)


if __name__ == "__main__":
    main()
