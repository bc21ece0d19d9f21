"""An external causal language model that scores texts, and the loading of such models through `transformers`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from remask.errors import CheckpointError, ConfigError

ROWS = 256  # rows of logits in float32 at a time


class Judge:
    """A causal language model that `transformers` loads, with its own tokenizer. Code in its folder never runs.

    Args:
        name: hub id or local folder.
        dtype: `auto` for the checkpoint's own, or `float32`, `bfloat16`, `float16`.
        device: where it runs.

    Raises `CheckpointError` where it cannot be loaded.
    """

    def __init__(self, name: str, dtype: str = "auto", device: torch.device | str = "cpu") -> None:
        self.name = name
        kind: Any = dtype if dtype == "auto" else getattr(torch, dtype)
        with _loading("The judge", name):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = load_causal_model("The judge", name, kind)
        self._model = model.to(device).eval()
        self._limit: int | None = getattr(model.config, "max_position_embeddings", None)

    @property
    def dtype(self) -> str:
        """The dtype of the weights."""
        return str(self._model.dtype).removeprefix("torch.")

    @torch.inference_mode()
    def score(self, prompt: str, response: str) -> tuple[float, int]:
        """Returns the negative log-likelihood of `response` after `prompt` in nats, and the number of scored tokens.

        Prompt and response are encoded apart, so that no token spans both. The judge's begin token stands first, where
        it has one. The first token of a response is scored only where a token stands before it.

        Raises `ConfigError` where both together exceed the judge's positions.
        """
        begin = self._tokenizer.bos_token_id
        before = ([] if begin is None else [begin]) + self._encode(prompt)
        own = self._encode(response)
        ids = before + own
        if self._limit is not None and len(ids) > self._limit:
            raise ConfigError(
                f"prompt and response have {len(ids)} tokens of the judge {self.name!r}, which reads {self._limit}; "
                "use shorter prompts or responses, or another judge"
            )
        first = max(1, len(before))
        if len(ids) <= first:
            return 0.0, 0
        tokens = torch.tensor([ids], device=self._model.device)
        logits: Tensor = self._model(input_ids=tokens).logits[0, first - 1 : -1]
        targets, total = tokens[0, first:], 0.0
        for at in range(0, len(targets), ROWS):
            rows = slice(at, at + ROWS)
            total += float(F.cross_entropy(logits[rows].float(), targets[rows], reduction="sum"))
        return total, len(targets)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids


def load_causal_model(what: str, name: str, dtype: torch.dtype | str) -> Any:
    """Load a causal language model from a folder or the hub. `what` names it in errors. Code in its folder never runs.

    Raises `CheckpointError` where it cannot be loaded.
    """
    with _loading(what, name):
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
    return model


@contextmanager
def _loading(what: str, name: str) -> Iterator[None]:
    try:
        yield
    # A missing name, a missing file and a foreign architecture surface as OSError, ValueError, KeyError and others.
    except Exception as error:
        raise CheckpointError(
            f"{what} {name!r} cannot be loaded: {error}\nGive the folder or the hub id of a causal language model that "
            "transformers knows, with its tokenizer."
        ) from error
