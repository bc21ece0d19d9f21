"""The process that computes a checkpoint without remask: by the checkpoint's own code, or by classes of transformers.

Nothing here reads a checkpoint or a configuration by remask's code, so a mistake there shows. How a model's code takes
its attention mask is found by trial: the first way is used in which a changed token changes the logits of the rows that
see it, and of no others.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

Ints: TypeAlias = NDArray[np.int64]

_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")
_UNREAD = r".*(rotary_emb\.inv_freq|\.[kv]_scale)"  # buffers in files that classes ignore
_UNCHANGED = 1e-4  # change of a row that counts as none, as a share of its norm


@dataclass(frozen=True)
class Base:
    """The class of transformers that computes the same as a family's models.

    Attributes:
        model_type: of the class' configuration.
        keys: its configuration's keys, by those of the family's `config.json`.
        names: the class' names of tensors, by patterns of the family's names.
        settings: further values of its configuration.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


_LAYER = r"^model\.transformer\.blocks\.(\d+)\."
BASES: Mapping[str, Base] = {
    "llada": Base(
        "llama",
        {
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_kv_heads": "num_key_value_heads",
            "n_layers": "num_hidden_layers",
            "mlp_hidden_size": "intermediate_size",
            "embedding_size": "vocab_size",
            "max_sequence_length": "max_position_embeddings",
            "weight_tying": "tie_word_embeddings",
        },
        {
            r"^model\.transformer\.wte\.": "model.embed_tokens.",
            r"^model\.transformer\.ln_f\.": "model.norm.",
            r"^model\.transformer\.ff_out\.": "lm_head.",
            _LAYER + r"q_proj\.": r"model.layers.\1.self_attn.q_proj.",
            _LAYER + r"k_proj\.": r"model.layers.\1.self_attn.k_proj.",
            _LAYER + r"v_proj\.": r"model.layers.\1.self_attn.v_proj.",
            _LAYER + r"attn_out\.": r"model.layers.\1.self_attn.o_proj.",
            _LAYER + r"attn_norm\.": r"model.layers.\1.input_layernorm.",
            _LAYER + r"ff_norm\.": r"model.layers.\1.post_attention_layernorm.",
            _LAYER + r"ff_proj\.": r"model.layers.\1.mlp.gate_proj.",
            _LAYER + r"up_proj\.": r"model.layers.\1.mlp.up_proj.",
            _LAYER + r"ff_out\.": r"model.layers.\1.mlp.down_proj.",
        },
    ),
    "llada-moe": Base(
        "qwen3_moe", {"expert_intermediate_size": "moe_intermediate_size"}, settings={"norm_topk_prob": False}
    ),
    "dream": Base("qwen2"),
    "fast-dllm-v2": Base("qwen2"),
    "sdar": Base("qwen3"),
    "sdar-moe": Base("qwen3_moe"),
    "illada": Base("llama"),
    "stable-diffcoder": Base("llama"),
    "a2d-llama": Base("llama"),
    "a2d-qwen2": Base("qwen2"),
    "a2d-qwen3": Base("qwen3"),
    "nemotron-labs-diffusion": Base("ministral3", names={r"^encoder\.": "model.", r"^diffusion_head\.": "lm_head."}),
}
"""By the family's name, or the `model_type` of a checkpoint. Other families have no class in transformers."""


@dataclass(frozen=True)
class Spec:
    """The model that the process loads.

    Attributes:
        overrides: values that replace those of the checkpoint's `config.json`.
        trusted: whether the user allows the checkpoint's own code to run.
        windowed: whether some layers attend to near positions alone.
    """

    folder: str
    family: str
    overrides: Mapping[str, Any]
    dtype: str
    device: str
    trusted: bool
    windowed: bool


@dataclass(frozen=True)
class Canvas:
    """A canvas whose logits are requested.

    Attributes:
        tokens: token ids, int64 [T].
        rows: the rows whose logits are requested, int64 [P].
        sees: number of leading positions that each row attends to, int64 [T].
        start: first position of the block that is denoised.
        temperature: temperature at which the block's rows take in the logits of its last pass; None if they do not.
    """

    tokens: Ints
    rows: Ints
    sees: Ints
    start: int
    temperature: float | None


class ReferenceMissingError(Exception):
    """There is no reference. The message says why, and what to do."""


def serve(connection: Connection, spec: Spec) -> None:
    """Load the model, send its name and versions, and answer each `Canvas` with float32 logits [P, V].

    It ends when the pipe is closed, and at an exception, whose text it sends in place of an answer.
    """
    torch.set_grad_enabled(False)
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, name = load(spec)
        logits = DenoiserLogits(model) if hasattr(model, "_prepare_denoiser_inputs") else MaskedLogits(model, spec)
        connection.send((name, f"transformers {transformers.__version__}"))
        while True:
            connection.send(logits(connection.recv()).float().cpu().numpy())
    except EOFError:
        return
    except Exception as error:
        message = str(error) if isinstance(error, ReferenceMissingError) else f"{type(error).__name__}: {error}"
        connection.send(message)


def load(spec: Spec) -> tuple[Any, str]:
    """Load the model, and return it with the name of the code that computes it.

    That is the checkpoint's own code if the user trusts it, else a class of transformers: the one that `config.json`
    names, or that of `BASES`. Raises `ReferenceMissingError` where there is none, or the files do not fit it.
    """
    folder = Path(spec.folder)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8")) | dict(spec.overrides)
    architectures, auto_map = content.get("architectures") or [], content.get("auto_map") or {}
    auto_class = next((name for name in _AUTO_CLASSES if name in auto_map), None)
    settings: dict[str, Any] = {"dtype": getattr(torch, spec.dtype), "attn_implementation": "eager"}
    if auto_class is not None and spec.trusted:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True, **spec.overrides)
        settings |= {"config": config, "trust_remote_code": True}
        model = getattr(transformers, auto_class).from_pretrained(folder, **settings)
        name = f"the checkpoint's own {type(model).__name__}"
    elif auto_class is None and len(architectures) == 1 and hasattr(transformers, architectures[0]):
        cls = getattr(transformers, architectures[0])
        model, report = cls.from_pretrained(folder, output_loading_info=True, **settings, **spec.overrides)
        _check(report, architectures[0])
        name = f"transformers' {architectures[0]}"
    else:
        model, name = _load_base(spec, content, settings, auto_class)
    return model.to(spec.device).eval(), name


def _load_base(
    spec: Spec, content: Mapping[str, Any], settings: Mapping[str, Any], auto_class: str | None
) -> tuple[Any, str]:
    """`load` by the class of `BASES`; `content` is that of `config.json`, and `settings` are for `from_pretrained`."""
    base = BASES.get(spec.family) or BASES.get(str(content.get("model_type")).casefold())
    if base is None:
        code = f"{auto_class} in its folder" if auto_class else "code, and config.json names none ('auto_map')"
        raise ReferenceMissingError(
            f"transformers has no class that computes the family {spec.family!r}, and the checkpoint has {code}. "
            + ("Read it, and allow it to be run with --trust-remote-code" if auto_class else "Download all files of it")
        )
    keys = {key: value for key, value in content.items() if key not in ("architectures", "auto_map")}
    keys |= {theirs: content[ours] for ours, theirs in base.keys.items() if content.get(ours) is not None}
    config = transformers.AutoConfig.for_model(**keys | dict(base.settings) | {"model_type": base.model_type})
    cls: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, report = cls.from_pretrained(
        spec.folder, config=config, key_mapping=dict(base.names), output_loading_info=True, **settings
    )
    _check(report, cls.__name__)
    return model, f"transformers' {cls.__name__}, under the model's mask"


def _check(report: Mapping[str, Any], name: str) -> None:
    """Raise `ReferenceMissingError` where the tensors of the files are not those of the class `name`."""
    problems = {
        kind: sorted(name for name in map(str, report.get(kind) or ()) if not re.fullmatch(_UNREAD, name))
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    descriptions = [f"{kind.replace('_', ' ')} {', '.join(names[:4])}" for kind, names in problems.items() if names]
    if descriptions:
        raise ReferenceMissingError(f"the files are not those of transformers' {name}: {'; '.join(descriptions)}")


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is added to scores: 0 where `mask` is True, else the least number of `dtype`."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


Way: TypeAlias = Callable[[Tensor, torch.dtype], Mapping[str, Tensor]]
"""Makes arguments of a mask, bool [T, T], and of the model's dtype."""

WAYS: Mapping[str, Way] = {
    "no mask": lambda _mask, _dtype: {},
    "a mask that is added": lambda mask, dtype: {"attention_mask": _additive(mask, dtype)[None, None]},
    "a mask of heads": lambda mask, _dtype: {"attention_mask": mask[None, None]},
    "a mask of rows": lambda mask, _dtype: {"attention_mask": mask[None]},
}
"""Ways to give a model's code an attention mask."""


class DenoiserLogits:
    """Logits of DiffusionGemma, which encodes the committed tokens and denoises one canvas behind them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._last: Tensor | None = None  # logits of the last pass over the canvas, [C, V]

    def __call__(self, canvas: Canvas) -> Tensor:
        """Return logits [P, V] of the rows that are read."""
        model, start = self._model, canvas.start
        tokens = torch.from_numpy(canvas.tokens)[None].to(model.device)
        committed = model.model.encoder(input_ids=tokens[:, :start]).past_key_values
        previous = None
        if canvas.temperature is not None:
            assert self._last is not None
            previous = (self._last / canvas.temperature)[None]
        inputs = {"past_key_values": committed, "decoder_input_ids": tokens[:, start:]}
        self._last = model(**inputs, self_conditioning_logits=previous).logits[0]
        return self._last[torch.from_numpy(canvas.rows - start)]


class MaskedLogits:
    """Logits of a model that takes an attention mask, or whose code makes the right one itself."""

    def __init__(self, model: Any, spec: Spec) -> None:
        self._model, self._windowed = model, spec.windowed
        model.config.use_cache = False
        self._ways: dict[str, Way] = {}  # by kind of mask: code that is causal by itself needs no causal mask

    def __call__(self, canvas: Canvas) -> Tensor:
        """Return logits [P, V] of the rows that are read.

        Raises `ReferenceMissingError` where no way to call the code fits.
        """
        length, sees = len(canvas.tokens), canvas.sees
        mask_kind = "all" if (sees == length).all() else "causal" if (sees == np.arange(length) + 1).all() else "blocks"
        if mask_kind not in self._ways:
            self._ways[mask_kind] = self._find_way(canvas)
        return self._logits(self._ways[mask_kind], canvas.tokens, sees)[torch.from_numpy(canvas.rows)]

    def _logits(self, way: Way, tokens: Ints, sees: Ints) -> Tensor:
        """Logits [T, V] of all rows."""
        model = self._model
        mask = torch.from_numpy(np.arange(len(tokens))[None, :] < sees[:, None]).to(model.device)
        output = model(input_ids=torch.from_numpy(tokens)[None].to(model.device), **way(mask, model.dtype))
        logits: Tensor = (output[0] if isinstance(output, tuple) else output.logits)[0]
        return logits.float().cpu()

    def _find_way(self, canvas: Canvas) -> Way:
        """The first of `WAYS` under which changed tokens change the rows that see them, and no others."""
        tokens, sees, reasons = canvas.tokens, canvas.sees, list[str]()
        length = len(tokens)
        vocab = self._model.config.get_text_config().vocab_size
        for name, way in WAYS.items():
            try:
                plain = self._logits(way, tokens, sees)
                faults = []
                for position in sorted(
                    {length - 1, int(sees[min(canvas.start, length - 1)]) - 1, max(0, canvas.start - 1), 1}
                ):
                    changed = tokens.copy()
                    changed[position] = (tokens[position] + vocab // 2) % vocab
                    faults += self._faults(plain, self._logits(way, changed, sees), position, sees)
            # Code that does not take such a mask raises errors of any kind.
            except Exception as error:
                faults = [" ".join(f"{type(error).__name__}: {error}".split())[:200]]
            if not faults:
                return way
            reasons.append(f"with {name}: {faults[0]}")
        raise ReferenceMissingError(
            f"its code takes no mask under which rows see what they should: {'; '.join(reasons)}"
        )

    def _faults(self, plain: Tensor, changed: Tensor, position: int, sees: Ints) -> list[str]:
        """What is wrong, in words: rows that changed without seeing `position`, or that see it and did not change."""
        change = ((changed - plain).norm(dim=1) / plain.norm(dim=1)).numpy()
        leaking = np.flatnonzero((sees <= position) & (change > _UNCHANGED))
        seeing = sees > position
        if self._windowed:  # far rows may see it through no layer
            seeing &= np.abs(np.arange(len(sees)) - position) <= 1
        unchanged = np.flatnonzero(seeing & (change == 0))
        faults = [f"row {leaking[0]} sees position {position}"] if len(leaking) else []
        return faults + ([f"row {unchanged[0]} does not see position {position}"] if len(unchanged) else [])
