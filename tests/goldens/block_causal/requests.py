"""A golden run as the JSON lines that ask `remask generate` for it, and what must come back.

Nothing but the explicit stop ids stops a run: the end-of-text id is an ordinary token (`ignore_eos: true`). The
original keeps whole blocks; the answer's `token_ids` are cut at `max_tokens` and after the first stop id. The transfers
are those of whole blocks, since nothing interrupts one. Numbers of passes do not bind: commit passes may merge with
what follows.
"""

from dataclasses import dataclass
from typing import Any, Literal

from tests.sampling_fields import grouped


@dataclass(frozen=True)
class Run:
    """One recorded decode."""

    recorded: dict[str, Any]
    prompt: list[int]

    @property
    def id(self) -> str:
        """A name that is unique over all runs of all models."""
        return str(self.recorded["id"])

    def request_line(self, cache: Literal["exact", "none"] = "exact") -> dict[str, Any]:
        """The request that reproduces the run, with committed K/V reused or everything recomputed in each step."""
        line = {"id": self.id, "prompt_token_ids": self.prompt, "cache": cache, "cache_config": {}}
        return line | {"sampling": grouped(self._sampling())}

    def expected_ids(self) -> list[int]:
        """The response, trimmed."""
        ids: list[int] = self.recorded["output_ids_trimmed"]
        return ids

    def expected_transfers(self) -> list[tuple[list[int], list[int]]]:
        """The (absolute positions ascending, tokens) of every denoising pass, in order."""
        return [(event["pos"], event["tok"]) for event in self.recorded["transfers"]]

    def expected_edits(self) -> list[list[int]]:
        """Of every denoising pass the positions that held another token before."""
        return [event.get("edits", []) for event in self.recorded["transfers"]]

    def _sampling(self) -> dict[str, Any]:
        given = self.recorded["params"]
        sampling = {
            "temperature": 0.0,
            "ignore_eos": True,
            "max_tokens": given["gen_length"],
            "block_length": given["block_length"],
            "stop_token_ids": given["stop_ids"],
        }
        if given["strategy"] == "joint_threshold":  # no schedule, and the end of text is looked for after each block
            names = ("threshold", "edit_threshold", "max_post_steps", "min_transfer", "penalty_lambda")
            return sampling | {"remasking": "joint_threshold"} | {name: given[name] for name in names if name in given}
        sampling["steps_per_block"] = given["denoising_steps"]
        if given.get("eos_early_stop"):
            sampling["early_stop"] = True
        match given["strategy"]:
            case "low_confidence_static":
                return sampling | {"remasking": "low_confidence"}
            case "low_confidence_dynamic":
                named = {name: given[name] for name in ("threshold", "fallback")}
                return sampling | {"remasking": "low_confidence"} | named
            case "entropy_bounded":
                return sampling | {"remasking": "entropy_bounded", "eb_threshold": given["eb_threshold"]}
            case strategy:
                return sampling | {"remasking": strategy}


@dataclass(frozen=True)
class Visit:
    """A run at its place in a family: how many of its prompt rows are found in the pool, by page size."""

    run: Run
    prefill_length: int
    prompt_page_hits: dict[int, int]  # the pool holds pages of prompts alone
    all_page_hits: dict[int, int]  # and those of committed blocks


@dataclass(frozen=True)
class Family:
    """Runs with common left parts, served in this order from an empty pool."""

    id: str
    page_sizes: tuple[int, ...]
    visits: tuple[Visit, ...]
