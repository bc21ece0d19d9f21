"""Block-wise generation with drawn tokens, and the correction of what was generated.

A draw is a race: of a row's tokens the one with the smallest e / p wins, e exponential and p its probability. The
numbers e are -log u, with u uniform, from a counter: a function of the request's seed, the step, the row's position
and the token. `Decided` is told how near a decision was to another one: the quotient of the winner and the second, less
one, or a gap of probabilities.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.oracles import philox
from tests.oracles.canvas import Decode
from tests.oracles.gidd import GiddModel, GiddPass, structured
from tests.oracles.uniform import Blocks, Pick, Step, generate, noise, step_scores, strategy
from tests.oracles.uniform_sampling import adaptive_selection, filtered, marginal, mixture, posterior, schedule

Decided = Callable[[float], None]


def race(chances: Tensor, seed: int, step: int, positions: Tensor, decided: Decided) -> Tensor:
    """One token of every row of `chances` [L, V], drawn; `positions` [L] are those of the rows."""
    times = -torch.from_numpy(philox.uniform(seed, step, positions.tolist(), chances.shape[1])).log()
    order = (chances / times).sort(-1, descending=True)
    decided(float((order.values[:, 0] / order.values[:, 1] - 1).min()))
    return order.indices[:, 0]


def best(logits: Tensor, decided: Decided) -> Tensor:
    """The argmax of every row."""
    top = logits.topk(2, -1)
    decided(float((top.values[:, 0] - top.values[:, 1]).min()))
    return top.indices[:, 0]


def adaptive(model: GiddModel, sampling: Mapping[str, Any], steps: int, decided: Decided) -> Pick:
    """The adaptive sampler: where to change is decided as ever, what stands there then is drawn."""
    count = sampling.get("tokens_per_step", 1)

    def pick(step: Step) -> Tensor:
        scores = step_scores(model, step)
        ranked = scores.sort(descending=True).values
        if count < len(scores) and ranked[count - 1] > 0:
            decided(float(ranked[count - 1] - ranked[count]))
        decided(float(ranked[:count][ranked[:count] > 0].min()) if (ranked > 0).any() else 1.0)
        chosen = adaptive_selection(scores, count)
        if sampling.get("temperature", 0.0) == 0:
            return best(step.logits, decided).where(chosen, step.tokens)
        chances = filtered(step.logits, sampling["temperature"], sampling.get("top_k"), sampling.get("top_p"))
        number = step.block * steps + step.number - 1
        return race(chances, sampling["seed"], number, torch.arange(step.start, step.stop), decided).where(
            chosen, step.tokens
        )

    return pick


def ancestral(model: GiddModel, sampling: Mapping[str, Any], steps: int, decided: Decided) -> Pick:
    """The ancestral samplers. What the posterior cannot explain: MASK follows the forward process, others stay."""
    grid = schedule(sampling.get("schedule", "cosine"), steps, *model.log_snr_range)
    reverse = marginal if sampling["sampler"] == "ancestral_marginal" else posterior

    def pick(step: Step) -> Tensor:
        clean = filtered(step.logits, sampling.get("temperature", 0.0), sampling.get("top_k"), sampling.get("top_p"))
        now, then = (mixture(noise(model), float(grid[steps - step.number + late])) for late in (1, 0))
        chances = reverse(clean, step.tokens, now, then)
        here = now.alpha * clean.gather(-1, step.tokens[:, None])[:, 0] + now.beta_pi[step.tokens]
        same = torch.nn.functional.one_hot(step.tokens, clean.shape[-1]).to(clean.dtype)
        forward = then.alpha * clean + then.beta_pi
        unexplained = forward.where((step.tokens == model.mask_id)[:, None], same)
        chances = unexplained.where((here == 0)[:, None], chances)
        number = step.block * steps + step.number - 1
        return race(chances, sampling["seed"], number, torch.arange(step.start, step.stop), decided)

    return pick


class Correction:
    """GIDD's self-correction on a canvas whose blocks are done, its prompt clean and all else noise.

    Without a cache every step computes everything. With the prefix cache steps after the first leave out the prompt;
    with Uniform-Cache they compute the blocks that the last step changed, and everything if it changed none. The other
    positions keep what they were last proposed.
    """

    def __init__(self, model: GiddModel, blocks: Blocks, cache: str, decided: Decided) -> None:
        self.model, self.blocks, self.cache, self.decided = model, blocks, cache, decided
        self.positions = torch.arange(blocks.canvas)
        self.scope = (self.positions >= blocks.prompt) & (self.positions < blocks.prompt + blocks.response)
        self.changed: list[int] | None = None
        self.out: GiddPass | None = None
        self.proposed = torch.zeros(blocks.canvas, dtype=torch.long)
        self.chance = torch.zeros(blocks.canvas, dtype=torch.float64)

    def rows(self) -> Tensor:
        """What the next step computes."""
        everything = torch.ones_like(self.scope)
        if self.changed is None or self.cache == "none":
            return everything
        if self.cache == "block-prefix":
            return self.positions >= self.blocks.prompt
        if not self.changed:
            return everything
        block = (self.positions - self.blocks.prompt).div(self.blocks.length, rounding_mode="floor")
        return torch.isin(block, block[self.changed])

    def run(self, tokens: Tensor, sampling: Mapping[str, Any], step: int) -> bool:
        """Takes one step on `tokens`, in place; False where nothing is left."""
        rows = self.rows()
        seen = structured(self.positions >= self.blocks.prompt)
        self.out = self.model.forward(tokens, rows, None if self.out is None else self.out.kv, seen)
        at = (rows & self.scope).nonzero()[:, 0]
        logits = self.out.logits[at].clone()
        logits[:, self.model.mask_id] = -torch.inf
        logits[at < self.blocks.prompt + sampling.get("min_tokens", 0), self.model.eos_id] = -torch.inf
        temperature = sampling.get("correction_temperature", 0.1)
        if temperature == 0:
            self.proposed[at], chances = best(logits, self.decided), logits.softmax(-1)
        else:
            chances = (logits / temperature).softmax(-1)
            self.proposed[at] = race(chances, sampling["seed"], step, at, self.decided)
        self.chance[at] = chances.gather(-1, self.proposed[at][:, None])[:, 0]
        open_to_change = self.scope & (self.proposed != tokens)
        ranked = self.chance.where(open_to_change, 0).sort(descending=True)
        count = min(sampling.get("correction_tokens", 1), int(open_to_change.sum()))
        if count and ranked.values[count] > 0:
            self.decided(float(ranked.values[count - 1] - ranked.values[count]))
        self.changed = sorted(ranked.indices[:count].tolist())
        tokens[self.changed] = self.proposed[self.changed]
        return bool(self.changed) or len(at) < int(self.scope.sum())


def decode(model: GiddModel, line: Mapping[str, Any], decided: Decided) -> Decode:
    """Decodes a request line as it says, `initial_canvas` and `seed` given; then corrects the response where asked to.

    Stop tokens in `stop_token_ids` cut the response when all is done; without a correction, with their block.
    """
    sampling = line["sampling"]
    prompt, block = list(line["prompt_token_ids"]), sampling["block_length"]
    tokens = torch.tensor([*prompt, *sampling["initial_canvas"]])
    steps = sampling.get("steps_per_block", block)
    blocks = Blocks(len(prompt), sampling["max_tokens"], block, steps, len(tokens))
    how = strategy(model, blocks, line["cache"], line.get("cache_config", {}))
    grid = schedule(sampling.get("schedule", "cosine"), steps, *model.log_snr_range)
    maker = adaptive if sampling.get("sampler", "adaptive") == "adaptive" else ancestral
    pick = maker(model, sampling, steps, decided)
    transfers: list[tuple[int, list[int], list[int]]] = []
    rows: list[list[int]] = []

    def note(before: Tensor) -> None:
        changed = (tokens != before).nonzero()[:, 0]
        if len(changed):
            transfers.append((len(rows) - 1, changed.tolist(), tokens[changed].tolist()))

    before = tokens.clone()
    correcting = sampling.get("correction_steps", 0)
    for step in generate(model, tokens, blocks, how, grid, sampling.get("min_tokens", 0), pick):
        rows.append(step.out.rows)
        note(before)
        before = tokens.clone()
        complete = min(step.stop - len(prompt), blocks.response)
        if not correcting and step.number == steps and _stop(tokens, blocks, complete, sampling) is not None:
            break
    correction = Correction(model, blocks, line["cache"], decided)
    for _ in range(correcting):
        going_on = correction.run(tokens, sampling, len(rows))
        assert correction.out is not None
        rows.append(correction.out.rows)
        note(before)
        before = tokens.clone()
        if not going_on:
            break
    stop = _stop(tokens, blocks, complete, sampling)
    length = blocks.response if stop is None else stop
    return Decode(tokens[blocks.prompt : blocks.prompt + length].tolist(), transfers, rows)


def _stop(tokens: Tensor, blocks: Blocks, complete: int, sampling: Mapping[str, Any]) -> int | None:
    """Length of the response up to the first stop token among its `complete` ones, that token included."""
    stops = torch.tensor(sampling.get("stop_token_ids", []), dtype=torch.long)
    found = torch.isin(tokens[blocks.prompt : blocks.prompt + complete], stops).nonzero()[:, 0]
    return int(found[0]) + 1 if len(found) else None
