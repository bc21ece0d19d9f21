"""Trains the adapter, in phases.

    python -m training.adapt.train OUT --corpus CORPUS.npz --base smollm2 [--start ADAPTER] [--phases ...]

A phase is `NAME:AMOUNT`, where the amount is a number of tokens (`40M`) or a time (`120s`), and NAME one of `PHASES`:
`documents` masks prose anywhere, `conversations` masks answers. The base first writes conversations for `--write`
seconds, into OUT/conversations.npz. OUT/state.pt is written every `--save` seconds: the same command goes on
from there. At the end OUT/adapter is the adapter in PEFT's layout, OUT/log.jsonl the course, with losses on what is
held out before and after each phase.

With `--blocks` the model becomes block-causal, with blocks of these lengths in turn.
"""

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.adapt.base import load_base, look_both_ways, seat_mask
from training.adapt.block_canvases import BlockStream, draw_canvas, stack_blocks, visible
from training.adapt.canvases import Batch, Canvas, Canvases, Stream, stack
from training.adapt.corpus import load_corpus
from training.adapt.low_rank import add_low_rank, load_adapter, save_adapter
from training.adapt.ragged import Ragged, load_ragged, save_ragged
from training.adapt.reuse import measure_reuse
from training.adapt.write import write_conversations

PHASES: Final[Mapping[str, Mapping[str, float]]] = MappingProxyType(
    {
        "documents": {"document": 0.7, "talk": 0.15, "solved": 0.15},
        "conversations": {"talk": 0.55, "solved": 0.2, "town": 0.15, "document": 0.1},
        "answers": {"talk": 0.6, "town": 0.15, "document": 0.15, "solved": 0.1},
        "mixed": {"talk": 0.4, "document": 0.33, "town": 0.15, "solved": 0.12},
    }
)
WARM_UP: Final = 40  # steps
FALL: Final = 0.6  # share of the last phase over which the rate falls to nothing
HELD: Final = ("document", "talk", "solved", "town")


@dataclass(frozen=True, slots=True)
class Phase:
    """What is drawn, and until when.

    Attributes:
        name: in `PHASES`.
        tokens: of the canvases, in all; None where it ends by the clock.
        seconds: None where it ends by tokens.
    """

    name: str
    tokens: float | None
    seconds: float | None

    @classmethod
    def parse(cls, text: str) -> "Phase":
        """Reads `NAME:AMOUNT`. Raises `ValueError`."""
        name, _, amount = text.partition(":")
        if name not in PHASES:
            raise ValueError(f"phase {name!r} is none of {', '.join(PHASES)}")
        if amount.endswith("s"):
            return cls(name, None, float(amount[:-1]))
        scale = {"k": 1e3, "M": 1e6}.get(amount[-1:], 1.0)
        return cls(name, float(amount.rstrip("kM")) * scale, None)

    def progress(self, tokens: float, seconds: float) -> float:
        """From 0 to 1."""
        share = tokens / self.tokens if self.tokens is not None else seconds / (self.seconds or 1)
        return min(1.0, share)


class Adapter(nn.Module):
    """The base with its adapter: logits of rows.

    All rows attend to all, or to those that a batch names.
    """

    def __init__(self, model: Any, rank: int, alpha: float, compiled: bool) -> None:
        super().__init__()
        self.model = model
        look_both_ways(model)
        self.trained = add_low_rank(model, rank, alpha)
        if compiled:
            for layer in model.model.layers:
                layer.compile(dynamic=False)

    def forward(self, ids: Tensor, rows: Tensor, attention: Tensor | None = None) -> Tensor:
        """Logits [rows, vocabulary] of the flat places `rows` of `ids` [B, T], with `Batch.attention`."""
        words = {} if attention is None else {"attention_mask": visible(attention), "position_ids": attention[:, 2]}
        hidden = self.model.model(input_ids=ids, use_cache=False, **words).last_hidden_state
        logits: Tensor = self.model.lm_head(hidden.reshape(-1, hidden.shape[-1])[rows])
        return logits


class Trainer:
    """The adapter, its optimizer, and how far they have come."""

    def __init__(self, adapter: Adapter, rate: float, device: torch.device) -> None:
        self.adapter, self.rate, self.device = adapter, rate, device
        self.optimizer = torch.optim.AdamW(
            adapter.trained, lr=rate, betas=(0.9, 0.97), weight_decay=0.0, fused=device.type == "cuda"
        )
        self.phase, self.step, self.tokens, self.seconds = 0, 0, 0, 0.0  # within the phase

    def autocast(self) -> torch.autocast:
        """Products in bfloat16 on CUDA devices."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def learn(self, batch: Batch, scale: float) -> Tensor:
        """One step. Returns the mean loss in nats."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * scale * min(1.0, (self.step + 1) / WARM_UP)
        ids, rows, gold, weight, attention = batch.to(self.device)
        with self.autocast():
            logits = self.adapter(ids, rows, attention)
        each = F.cross_entropy(logits.float(), gold.long(), reduction="none")
        loss = (each * weight).sum() / weight.sum()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.adapter.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += ids.numel()
        return loss.detach()

    def save(self, file: Path) -> None:
        """Write all that an interrupted run needs to go on."""
        state = {
            "factors": [parameter.detach().cpu() for parameter in self.adapter.trained],
            "optimizer": self.optimizer.state_dict(),
            **{name: getattr(self, name) for name in ("phase", "step", "tokens", "seconds")},
        }
        torch.save(state, file.with_suffix(".tmp"))
        os.replace(file.with_suffix(".tmp"), file)

    def load(self, file: Path) -> None:
        """Go on from what `save` wrote."""
        state = torch.load(file, map_location="cpu")
        with torch.no_grad():
            for parameter, kept in zip(self.adapter.trained, state["factors"], strict=True):
                parameter.copy_(kept)
        self.optimizer.load_state_dict(state["optimizer"])
        for name in ("phase", "step", "tokens", "seconds"):
            setattr(self, name, state[name])


@torch.no_grad()
def held_out(trainer: Trainer, canvases: Canvases, count: int) -> dict[str, Any]:
    """Loss in nats and share of right tokens on `count` held-out canvases of 256 tokens, by kind, answers half masked.

    `gsm8k-25` to `-100` are GSM8K's test answers behind their question, as plain text, with these shares masked, and
    `reuse` what `measure_reuse` finds.
    """
    # Shapes that are seen once are not worth compiling for.
    with torch.compiler.set_stance("force_eager"):
        return _held_out(trainer, canvases, count)


def _held_out(trainer: Trainer, canvases: Canvases, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in HELD:
        rng = np.random.default_rng(7)
        drawn = [getattr(canvases, name)(rng, 512 if name == "town" else 256) for _ in range(count)]
        found[name] = _loss(trainer, [_half(rng, each) for each in drawn])
    for share in (25, 50, 75, 100):
        found[f"gsm8k-{share}"] = _loss(trainer, list(_answers(canvases, share / 100, 2 * count)))
    documents = canvases.corpus["documents_held"]
    with trainer.autocast():
        found["reuse"] = measure_reuse(trainer.adapter.model, documents, trainer.device, canvases.mask, count)
    return found


def _half(rng: np.random.Generator, canvas: Canvas) -> Canvas:
    """The canvas with half of what was masked and counts unmasked, so that all draws have one rate."""
    masked = (canvas.ids != canvas.gold) & (rng.random(len(canvas.ids)) < 0.5)
    ids = np.where(masked, canvas.ids, canvas.gold)
    return Canvas(ids, canvas.gold, np.where(masked & (canvas.weight == 1), 1, 0).astype(np.float32))


def _answers(canvases: Canvases, share: float, count: int) -> Iterator[Canvas]:
    rng, pairs = np.random.default_rng(7), canvases.corpus["plain_held"]
    for number in range(min(count, len(pairs) // 2)):
        question, answer = pairs[2 * number][-160:], pairs[2 * number + 1][:200]
        gold = np.full(360, canvases.end, np.int32)
        end = len(question) + len(answer)
        gold[:end] = np.concatenate([question, answer])
        masked = np.arange(360) >= len(question)
        masked &= rng.random(360) < share
        answered = masked & (np.arange(360) < end)
        yield Canvas(np.where(masked, canvases.mask, gold).astype(np.int32), gold, answered.astype(np.float32))


@torch.no_grad()
def held_out_blocks(
    trainer: Trainer, canvases: Canvases, count: int, blocks: Sequence[int], length: int
) -> dict[str, Any]:
    """Loss in nats and share of right tokens on held-out canvases of a block-causal model, by kind and block length."""
    found: dict[str, Any] = {}
    with torch.compiler.set_stance("force_eager"):
        for name in HELD:
            for block in blocks:
                rng = np.random.default_rng(7)
                drawn = [draw_canvas(canvases, rng, {name: 1}, [block], length) for _ in range(max(1, count // 8))]
                parts = (stack_blocks(drawn[at : at + 8]) for at in range(0, len(drawn), 8))
                found[f"{name}-{block}"] = _batch_loss(trainer, parts)
    return found


def _loss(trainer: Trainer, canvases: Sequence[Canvas]) -> dict[str, float]:
    return _batch_loss(trainer, (stack(canvases[at : at + 64]) for at in range(0, len(canvases), 64)))


@torch.no_grad()
def _batch_loss(trainer: Trainer, batches: Iterable[Batch]) -> dict[str, float]:
    total, right, count = 0.0, 0, 0
    for batch in batches:
        ids, rows, gold, _, attention = batch.to(trainer.device)
        if not len(rows):
            continue
        with trainer.autocast():
            logits = trainer.adapter(ids, rows, attention).float()
        total += F.cross_entropy(logits, gold.long(), reduction="sum").item()
        right += int((logits.argmax(-1) == gold).sum())
        count += len(rows)
    return {"loss": total / max(count, 1), "right": right / max(count, 1), "tokens": count}


def main() -> None:
    """Write conversations, train, export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--start", type=Path, help="adapter to go on from")
    parser.add_argument("--conversations", type=Path, nargs="*", default=[], help="files of conversations to use too")
    parser.add_argument("--phases", nargs="+", default=["documents:40M", "conversations:100M"])
    parser.add_argument("--write", type=float, default=60.0, help="seconds in which the base writes conversations")
    parser.add_argument("--write-batch", type=int, default=4096)
    parser.add_argument("--write-most", type=int, default=50_000)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32_768, help="of a step")
    parser.add_argument("--blocks", type=int, nargs="+", default=[], help="lengths of blocks of a block-causal model")
    parser.add_argument("--length", type=int, default=1024, help="of a canvas of blocks (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--save", type=float, default=30.0)
    parser.add_argument("--held", type=int, default=256, help="canvases of each kind on which losses are measured")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    course = Course(args.out / "log.jsonl")
    phases = [Phase.parse(text) for text in args.phases]
    corpus = load_corpus(args.corpus)
    model = load_base(args.base, device)
    course.say("base", seconds=course.seconds, mask=seat_mask(model, Canvases(corpus, Ragged.of([])).mask))

    written = args.out / "conversations.npz"
    if not written.exists() and args.write > 0:
        asked = [corpus["asked"][number].tolist() for number in range(len(corpus["asked"]))]
        new = write_conversations(model, corpus["pieces"], asked, args.write, args.write_batch, args.write_most)
        save_ragged(written, conversations=new)
        course.say("written", conversations=len(new) // 2, tokens=len(new.values))
    files = [*args.conversations, *([written] if written.exists() else [])]
    talks = [load_ragged(file)["conversations"] for file in files]
    conversations = Ragged.of(each[number] for each in talks for number in range(len(each)))

    adapter = Adapter(model, args.rank, float(args.rank), args.compile)
    if args.start is not None:
        load_adapter(model, args.start)
    trainer = Trainer(adapter, args.rate, device)
    if (args.out / "state.pt").exists():
        trainer.load(args.out / "state.pt")
    canvases = Canvases(corpus, conversations)
    held = Canvases(corpus, conversations, held=True)

    def losses() -> dict[str, Any]:
        if args.blocks:
            return held_out_blocks(trainer, held, args.held, args.blocks, args.length)
        return held_out(trainer, held, args.held)

    course.say("held out", **losses())
    for number in range(trainer.phase, len(phases)):
        trainer.phase = number
        mix = PHASES[phases[number].name]
        seed = number, trainer.tokens
        stream: Stream | BlockStream = Stream(canvases, mix, args.tokens, seed)
        if args.blocks:
            stream = BlockStream(canvases, mix, args.tokens, seed, args.blocks, args.length)
        course.say("phase", number=number, **asdict(phases[number]), mix=dict(mix))
        run_phase(trainer, phases[number], stream, args, course, last=number == len(phases) - 1)
        trainer.step, trainer.tokens, trainer.seconds = 0, 0, 0.0
        save_adapter(
            model,
            args.out / (f"adapter-{number}" if number < len(phases) - 1 else "adapter"),
            float(args.rank),
            args.base,
        )
        course.say("held out", **losses())


def run_phase(
    trainer: Trainer,
    phase: Phase,
    stream: Stream | BlockStream,
    args: argparse.Namespace,
    course: "Course",
    *,
    last: bool,
) -> None:
    """Learn until the phase is over. In the last one the rate falls to nothing."""
    loader = iter(
        torch.utils.data.DataLoader(
            stream, batch_size=None, num_workers=args.workers, prefetch_factor=4 if args.workers else None
        )
    )
    start = told = saved = time.monotonic()
    before, losses = trainer.seconds, list[Tensor]()
    while True:
        trainer.seconds = before + time.monotonic() - start
        share = phase.progress(trainer.tokens, trainer.seconds)
        if share >= 1:
            break
        scale = min(1.0, max(0.02, (1 - share) / FALL)) if last else 1.0
        losses.append(trainer.learn(next(loader), scale))
        if trainer.step % 20 == 0:
            losses[-1].item()  # the queue of the device stays short, so that the clock tells how far it is
        if time.monotonic() - told > 10:
            told = time.monotonic()
            mean = torch.stack(losses).mean().item()
            losses.clear()
            course.say("loss", step=trainer.step, tokens=trainer.tokens, seconds=trainer.seconds, loss=mean)
        if time.monotonic() - saved > args.save:
            saved = time.monotonic()
            trainer.save(args.out / "state.pt")


class Course:
    """The log: one JSON object a line, printed too."""

    def __init__(self, file: Path) -> None:
        self.file, self.start = file, time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.start

    def say(self, event: str, **facts: Any) -> None:
        """Write a line."""
        line = json.dumps({"event": event, "at": round(self.seconds, 1), **facts})
        print(line, flush=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
