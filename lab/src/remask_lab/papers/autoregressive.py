"""Times an autoregressive model of the same size, through `transformers` with its KV cache."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from remask.errors import ConfigError
from remask.llm import LLM
from remask_lab.bench.workload import Workload
from remask_lab.likelihood.perplexity import load_causal_model


class Autoregressive:
    """A causal language model that generates with its KV cache. It is only timed; its answers are not used.

    Args:
        llm: the model to compare with. Without a `name` the causal model has its shape and random weights.
        name: folder or hub id of a causal language model. Code in it never runs.

    Raises `CheckpointError` where the named model cannot be loaded, and `ConfigError` where none is named and the model
    has experts.
    """

    def __init__(self, llm: LLM, name: str | None) -> None:
        kind: Any = llm.model.dtype
        if name is None:
            model: Any = _same_shape(llm)
        else:
            model = load_causal_model("--ar-model", name, kind)
        self._model = model.to(llm.model.device, kind).eval()
        self.name = name or "random weights of our model's shape, causal"

    @property
    def parameters(self) -> int:
        """The number of weights; tied ones count once."""
        return sum(weight.numel() for weight in self._model.parameters())

    @torch.inference_mode()
    def seconds(self, workload: Workload, lengths: Sequence[int], batch: int) -> float:
        """Seconds to generate an answer of `lengths[i]` tokens, at least 1, to each request i, `batch` at a time.

        A batch runs until its longest answer is complete. The prompts of a batch are cut to the length of its shortest
        one, and token ids are taken modulo the vocabulary.
        """
        vocab = self._model.config.vocab_size
        device = self._model.device
        prompts = [task.request.prompt_token_ids for task in workload.tasks]
        start = time.perf_counter()
        for first in range(0, len(prompts), batch):
            batched = prompts[first : first + batch]
            length = max(lengths[first : first + batch])
            shortest = min(map(len, batched))
            ids = torch.tensor([[token % vocab for token in prompt[:shortest]] for prompt in batched], device=device)
            mask = torch.ones_like(ids)
            output = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=length, min_new_tokens=length, do_sample=False, use_cache=True
            )
            assert output.shape[1] == shortest + length
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start


def _same_shape(llm: LLM) -> Any:
    """A Llama of random weights with the shape of `llm`. Raises `ConfigError` where `llm` has experts."""
    shape = llm.loaded.config
    if shape.mixture is not None:
        raise ConfigError(
            "a causal model of the same shape is made for dense models, and this one has experts; name a causal model "
            "with --ar-model"
        )
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_length,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)
