"""Trains the bundled uniform model from scratch: `python training/train_uniform.py --out DIR`.

Every canvas is drawn afresh, so there is no data set and no epoch. Training ends after a number of steps; the defaults
are those of the bundled model. The loss is the cross-entropy of the clean token at every position of the window,
whether noise replaced it or not, because the model does not know which tokens are noise. Evaluations decode with the
engine.

`--attention full` trains the same model without GIDD's structured mask: rows of the prompt and of completed blocks see
noise too. With `--mistakes` completed blocks hold wrong departures, which such a model learns to revise.
`--loss bound` minimises the variational bound of the noise in place of the cross-entropy, in nats a token.
`--start FOLDER` begins from an exported model in place of random weights.
`--stop-after SECONDS` ends the process after so much CPU time, and the same command goes on from there.
"""

import argparse
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from remask.llm import LLM  # noqa: E402
from remask.request.sampling_params import SamplingParams  # noqa: E402  (the path above makes a plain script call work)
from remask.sampling.noise import Noise  # noqa: E402
from remask_lab.bench.workload import TIMETABLE_SAMPLING, timetable_workload  # noqa: E402
from remask_lab.likelihood.noise_bound import Levels, chain, divergences  # noqa: E402
from remask_lab.records.interval import wilson  # noqa: E402
from training import optimizers  # noqa: E402
from training.uniform_data import Batch, TimetableSource  # noqa: E402
from training.uniform_export import export  # noqa: E402
from training.uniform_model import DenseGidd, GiddShape, initialize  # noqa: E402
from training.uniform_tokenizer import build_tokenizer  # noqa: E402

LEVELS: Final = 1000
"""Steps of the chain whose bound is minimised."""

CACHES: Final[tuple[tuple[str, Mapping[str, int]], ...]] = (
    ("none", {}),
    ("block-prefix", {}),
    ("uniform-cache", {"refresh_next": 0}),
    ("uniform-cache", {"refresh_next": 1}),
    ("uniform-cache", {"refresh_next": 4}),
)
"""What the last evaluation decodes with."""


class Trainer:
    """The model with its optimizers and its stream of canvases."""

    def __init__(
        self,
        seed: int,
        canvas_tokens: int,
        rate: float,
        device: torch.device,
        *,
        structured: bool = True,
        mistakes: bool = False,
        precision: torch.dtype = torch.bfloat16,
        start: Path | None = None,
        bound: bool = False,
    ) -> None:
        torch.manual_seed(seed)
        self.device, self.canvas_tokens, self.rate = device, canvas_tokens, rate
        tokens = GiddShape(0).max_position_embeddings
        self.tokenizer = build_tokenizer(tokens)
        self.noise = Noise(1000.0, -9.0, 9.0, len(self.tokenizer), self.tokenizer.mask_token_id)  # as exported
        self.chain = chain(self.noise, LEVELS, "cosine") if bound else None
        self.source = TimetableSource(self.tokenizer, seed, mistakes=mistakes, chain=self.chain)
        self.model = DenseGidd(GiddShape(vocab_size=len(self.tokenizer), structured_attention=structured))
        initialize(self.model)
        if start is not None:
            stored = load_file(start / "model.safetensors")
            self.model.load_state_dict({name.removeprefix("model."): weight for name, weight in stored.items()})
        self.model.to(device)
        self.precision = precision
        self.optimizers = optimizers.build(self.model, "embed_tokens", rate)
        self.steps = 0
        self.tokens = 0

    def step(self, spent: float) -> float:
        """Takes one step; `spent` is the share of the steps that is over. Returns the mean loss of the window's rows.

        Canvases are half as long in the first 70 % of the steps, as noise after the window has little to teach, and so
        are the steps in tokens, as the first hundreds of updates are needed whatever their size.
        """
        length = self.model.shape.max_position_embeddings // (2 if spent < 0.7 else 1)
        batch = self.source.draw(self.canvas_tokens // self.model.shape.max_position_embeddings, length)
        tokens, noisy, window = (tensor.to(self.device) for tensor in (batch.tokens, batch.noisy, batch.window))
        with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            logits = self.model(tokens, noisy, window)
        loss = self.loss(logits, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers.update(self.optimizers, self.model, self.rate * optimizers.learning_rate(self.steps, spent))
        self.steps += 1
        self.tokens += tokens.numel()
        return loss.item()

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """The mean loss of the window's rows, whose `logits` [N, V] are given: cross-entropy, or the bound in nats."""
        window, clean = batch.window, batch.clean[batch.window].to(logits.device)
        if self.chain is None or batch.steps is None:
            return F.cross_entropy(logits.float(), clean)
        steps = batch.steps[:, None].expand(window.shape)[window]
        levels = [
            Levels(own.clean.to(logits.device), own.uniform.to(logits.device))
            for own in (self.chain.at(steps), self.chain.at(steps - 1))
        ]
        noisy = batch.tokens[window].to(logits.device)
        # A step stands for all of them: each is drawn with the same probability.
        return LEVELS * divergences(logits, clean, noisy, levels[0], levels[1], self.noise.mask_id).mean()

    def save(self, path: Path) -> None:
        """Writes all that the next step depends on."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "source": self.source.state,
            "steps": self.steps,
            "tokens": self.tokens,
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)

    def load(self, path: Path) -> None:
        """Goes on from what `save` wrote."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        self.source.state = state["source"].cpu()
        self.steps, self.tokens = state["steps"], state["tokens"]


def measure(folder: Path, questions: int, seed: int, cache: str = "none", **settings: object) -> str:
    """Asks the exported model for `questions` held-out timetables; returns the share that is right in full."""
    llm = LLM(str(folder), dtype="float32")
    workload = timetable_workload(llm, questions, seed, SamplingParams.from_mapping(TIMETABLE_SAMPLING))
    policy = llm.policy(cache, settings)
    outputs = {output.id: output for output in llm.run([task.request.with_policy(policy) for task in workload.tasks])}
    right = sum(bool(task.correct(outputs[task.request.id].text)) for task in workload.tasks)
    places = [
        (word, rightly)
        for task in workload.tasks
        for word, rightly in zip(str(outputs[task.request.id].text).split(), str(task.answer).split(), strict=False)
    ]
    share = sum(word == rightly for word, rightly in places) / len(places)
    low, high = wilson(right, questions)
    return f"{right / questions:.3f} ({low:.3f} to {high:.3f}, n = {questions}), departures {share:.4f}"


def main() -> None:
    """Parses the command line, trains, exports on the way and at the end, and measures what was exported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="fixes initial weights and training data")
    parser.add_argument("--out", type=Path, required=True, help="folder to export to")
    parser.add_argument("--canvas-tokens", type=int, default=2048, help="tokens per step")
    parser.add_argument("--rate", type=float, default=0.003, help="peak learning rate")
    parser.add_argument("--evaluate-every", type=int, default=1000, help="steps between exports with an evaluation")
    parser.add_argument("--eval-questions", type=int, default=100, help="questions of the last evaluation")
    parser.add_argument("--eval-seed", type=int, default=20_000, help="seed of the evaluations")
    parser.add_argument(
        "--attention", choices=("structured", "full"), default="structured", help="what rows of clean tokens see"
    )
    parser.add_argument("--mistakes", action="store_true", help="completed blocks hold mistakes, and are learned from")
    parser.add_argument(
        "--loss", choices=("cross-entropy", "bound"), default="cross-entropy", help="what training minimises"
    )
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="begin from this exported model")
    parser.add_argument(
        "--float32", action="store_true", help="compute in float32: faster where the processor has no bfloat16"
    )
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="save and end after so much CPU time")
    options = parser.parse_args()
    if options.mistakes and options.attention == "structured":
        parser.error("--mistakes: under structured attention completed blocks are never revised; add --attention full")

    if options.mistakes and options.loss == "bound":
        parser.error("--mistakes: mistakes in completed blocks are no noise of the chain; leave one of both out")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(
        options.seed,
        options.canvas_tokens,
        options.rate,
        device,
        structured=options.attention == "structured",
        mistakes=options.mistakes,
        precision=torch.float32 if options.float32 else torch.bfloat16,
        start=options.start,
        bound=options.loss == "bound",
    )
    saved = options.out.with_name(options.out.name + ".training")
    if saved.exists():
        trainer.load(saved)
    begin = time.process_time()
    smooth = math.nan
    while trainer.steps < options.steps:
        if options.stop_after is not None and time.process_time() - begin > options.stop_after:
            trainer.save(saved)
            print(f"stopped after step {trainer.steps}; the same command goes on from there", flush=True)
            return
        loss = trainer.step(trainer.steps / options.steps)
        smooth = loss if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss
        if trainer.steps % 50 == 0:
            minutes = (time.process_time() - begin) / 60
            print(
                f"{minutes:6.2f} CPU min  step {trainer.steps:5d}  {trainer.tokens / 1e6:6.2f}M tokens  "
                f"loss {smooth:.4f}",
                flush=True,
            )
        if trainer.steps % options.evaluate_every == 0 and trainer.steps < options.steps:
            export(trainer.model, trainer.tokenizer, options.out)
            print(f"accuracy {measure(options.out, 24, options.eval_seed + trainer.steps)}", flush=True)

    export(trainer.model, trainer.tokenizer, options.out)
    saved.unlink(missing_ok=True)
    for cache, settings in CACHES:
        result = measure(options.out, options.eval_questions, options.eval_seed, cache, **settings)
        print(f"{cache} {settings or ''}: {result}", flush=True)


if __name__ == "__main__":
    main()
