"""A golden trace as the JSON lines that ask `remask generate` for it, and which of its figures are binding.

The end-of-text id under `ignore_eos: true`: the original stops after a block once every row of its batch has that id
anywhere on the canvas, and at the end overwrites all from a row's first one with PAD. A request that ignores it does
neither: it decodes every block and returns the canvas as it is, end-of-text and MASK ids included. The expected ids are
therefore the recorded window tokens, not the recorded `output`, and where the original stopped early (T4 without a
cache, T4b) only the blocks that it ran are compared. `min_tokens` keeps its meaning: the id may not be chosen at the
first `min_tokens` response positions.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Trace:
    """One whole generation: `parameters` as recorded, `tensors` named `<strategy>.<tensor>`."""

    parameters: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def name(self) -> str:
        """The trace's name, unique over all traces."""
        return str(self.parameters["name"])

    @property
    def model(self) -> str:
        """The name of its model."""
        return str(self.parameters["model"])

    @property
    def blocks(self) -> int:
        """How many blocks cover the response."""
        return -(-int(self.parameters["max_length"]) // int(self.parameters["block_length"]))

    def canvas(self, row: int) -> Tensor:
        """The canvas [S] before the first step: prompt, then noise."""
        canvas = self.tensors["x_prior"][row].clone()
        canvas[: self.parameters["prompt_length"]] = self.tensors["prompt"][row]
        return canvas

    def steps_table(self, strategy: str) -> list[tuple[int, int, int, int, int, str, int, int]]:
        """Per step: block, step, log-SNR index, window start and end, kind, first and end of the recomputed rows.

        The official run of an ancestral trace recorded none; its windows are those of the baseline.
        """
        strategies = self.parameters["strategies"]
        steps = strategies[strategy].get("steps_table", strategies["baseline"]["steps_table"])
        return [tuple(step) for step in steps]


@dataclass(frozen=True)
class Run:
    """One batch row of a trace under one strategy: what one request asks for."""

    trace: Trace
    strategy: str
    row: int

    @property
    def id(self) -> str:
        """A name that is unique over all traces."""
        return f"{self.trace.name}-{self.strategy}-{self.row}"

    @property
    def cache(self) -> str:
        """The cache policy that the strategy is."""
        return {"baseline": "none", "prefix": "block-prefix"}.get(self.strategy, "uniform-cache")

    @property
    def blocks_run(self) -> int:
        """How many blocks the original ran before an end-of-text id on the canvas stopped it."""
        return len(self._tensor("z")) // int(self.trace.parameters["steps"])

    def request_line(self) -> dict[str, Any]:
        """The request that reproduces the run: one line of `remask generate --input`."""
        given, canvas = self.trace.parameters, self.trace.canvas(self.row).tolist()
        prompt = given["prompt_length"]
        config = {"refresh_next": int(self.strategy.removeprefix("uniform_r"))} if self.cache == "uniform-cache" else {}
        sampling = {
            "uniform": {
                "sampler": given["sampling_method"],
                "tokens_per_step": given["tokens_per_step"],
                "schedule": given["noise_schedule"],
                "canvas_length": given["canvas_length"],
                "initial_canvas": canvas[prompt:],
            },
            "steps_per_block": given["steps"],
            "block_length": given["block_length"],
            "temperature": given["temperature"],
            "min_tokens": given["min_length"],
            "max_tokens": given["max_length"],
            "ignore_eos": True,
        }
        line = {"id": self.id, "prompt_token_ids": canvas[:prompt], "cache": self.cache}
        return line | {"cache_config": config, "sampling": sampling}

    def expected_ids(self) -> list[int]:
        """The response's leading tokens that bind: all `max_tokens` of them unless the original stopped early."""
        given = self.trace.parameters
        last = self._tensor("z_next")[given["steps"] - 1 :: given["steps"], self.row]
        return [int(token) for token in last.flatten()[: given["max_length"]]]

    def expected_moves(self) -> list[tuple[list[int], list[int]]]:
        """The (positions ascending, new tokens) of every step of `blocks_run` that changed a token, in order.

        A selected position whose token was the argmax already moves nothing and is not listed.
        """
        moves = []
        steps = zip(self.trace.steps_table(self.strategy), self._tensor("z"), self._tensor("z_next"), strict=True)
        for (_, _, _, start, *_), before, after in steps:
            changed = (before[self.row] != after[self.row]).nonzero()[:, 0]
            if len(changed):
                moves.append(((start + changed).tolist(), after[self.row, changed].tolist()))
        return moves

    def expected_forwards(self) -> int | None:
        """Forward passes of the whole request; None where they do not bind.

        Without a cache a pass that could change nothing may be skipped, and the prefix strategy may take its prefix
        pass apart or in one with a block's first. Uniform-Cache runs every step.
        """
        return self.trace.blocks * int(self.trace.parameters["steps"]) if self.cache == "uniform-cache" else None

    def expected_rows(self) -> int | None:
        """Rows computed by those passes in each layer; None where they do not bind or not all blocks were run."""
        if self.cache != "uniform-cache" or self.blocks_run < self.trace.blocks:
            return None
        return sum(end - first for *_, first, end in self.trace.steps_table(self.strategy))

    def _tensor(self, name: str) -> Tensor:
        return self.trace.tensors[f"{self.strategy}.{name}"]
