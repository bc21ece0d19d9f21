"""The process that computes a checkpoint without remask: by the checkpoint's own code, or by classes of transformers.

Nothing here reads a checkpoint or a configuration by remask's code, so a mistake there shows. Which attention mask a
model's code takes is not looked up but tried: of the ways to call it that one is used under which a changed token
changes the rows that see it, and no other.
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

_UNREAD = r".*(rotary_emb\.inv_freq|\.[kv]_scale)"  # buffers that files may hold, which no class reads
_UNCHANGED = 1e-4  # of a row's size: what a changed token may move in rows that do not see it


@dataclass(frozen=True)
class Base:
    """The class of transformers that computes what a family computes.

    Attributes:
        keys: its configuration's keys by those of the family's `config.json`; `settings` are further ones.
        names: patterns of the family's names of tensors, and the class' names.
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
"""By the family's name, and of a family of several bases by `model_type`. Others have no class that computes them."""


@dataclass(frozen=True)
class Spec:
    """What the process is to load, and what it computes in and on.

    Attributes:
        overrides: keys that are laid over those of the checkpoint's `config.json`.
        trusted: the user allows the checkpoint's own code to be run.
        windowed: some layers attend to near positions alone.
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
    """A canvas of which logits are wanted.

    Attributes:
        tokens: token ids, int64 [T].
        rows: the rows that are read, int64 [P].
        sees: how many leading positions each row attends to, int64 [T].
        start: where the block that is denoised begins.
        temperature: that of the last logits of this block, which its rows take in; None: they take in nothing.
    """

    tokens: Ints
    rows: Ints
    sees: Ints
    start: int
    temperature: float | None


class ReferenceMissingError(Exception):
    """There is no reference: the message says why, and what to do."""


def serve(connection: Connection, spec: Spec) -> None:
    """Load the model, send what it is, and answer each `Canvas` with float32 logits [P, V] until the pipe is closed.

    An exception is sent in place of an answer as text, and ends the process.
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
        text = str(error) if isinstance(error, ReferenceMissingError) else f"{type(error).__name__}: {error}"
        connection.send(text)


def load(spec: Spec) -> tuple[Any, str]:
    """The model, and by which code it is computed. Raises `ReferenceMissingError` where none may be run."""
    folder = Path(spec.folder)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8")) | dict(spec.overrides)
    classes, code = raw.get("architectures") or [], raw.get("auto_map") or {}
    settings: dict[str, Any] = {"dtype": getattr(torch, spec.dtype), "attn_implementation": "eager"}
    own = next((name for name in ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel") if name in code), None)
    if own is not None and spec.trusted:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True, **spec.overrides)
        model = getattr(transformers, own).from_pretrained(folder, config=config, trust_remote_code=True, **settings)
        return _ready(model, spec), f"the checkpoint's own {type(model).__name__}"
    if len(classes) == 1 and hasattr(transformers, classes[0]) and own is None:
        own_class = getattr(transformers, classes[0])
        model, report = own_class.from_pretrained(folder, output_loading_info=True, **settings, **spec.overrides)
        _check(report, classes[0])
        return _ready(model, spec), f"transformers' {classes[0]}"
    base = BASES.get(spec.family) or BASES.get(str(raw.get("model_type")).casefold())
    if base is None:
        what = f"{own} in its folder" if own else "code, and config.json names none ('auto_map')"
        raise ReferenceMissingError(
            f"transformers has no class that computes the family {spec.family!r}, and the checkpoint has {what}. "
            + ("Read it, and allow it to be run with --trust-remote-code" if own else "Download all files of it")
        )
    keys = {key: value for key, value in raw.items() if key not in ("architectures", "auto_map")}
    keys |= {new: raw[old] for old, new in base.keys.items() if raw.get(old) is not None}
    config = transformers.AutoConfig.for_model(**keys | dict(base.settings) | {"model_type": base.model_type})
    cls: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, report = cls.from_pretrained(
        folder, config=config, key_mapping=dict(base.names), output_loading_info=True, **settings
    )
    _check(report, cls.__name__)
    return _ready(model, spec), f"transformers' {cls.__name__}, under the model's mask"


def _ready(model: Any, spec: Spec) -> Any:
    return model.to(spec.device).eval()


def _check(report: Mapping[str, Any], name: str) -> None:
    """Raise `ReferenceMissingError` where tensors of the files and of the class do not fit one another."""
    wrong = {
        kind: sorted(name for name in map(str, report.get(kind) or ()) if not re.fullmatch(_UNREAD, name))
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    found = [f"{kind.replace('_', ' ')} {', '.join(names[:4])}" for kind, names in wrong.items() if names]
    if found:
        raise ReferenceMissingError(f"the files are not those of transformers' {name}: {'; '.join(found)}")


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


Way: TypeAlias = Callable[[Tensor, torch.dtype], Mapping[str, Tensor]]
"""Arguments made of a mask, bool [T, T], and of the model's dtype."""

WAYS: Mapping[str, Way] = {
    "no mask": lambda _mask, _dtype: {},
    "a mask that is added": lambda mask, dtype: {"attention_mask": _added(mask, dtype)[None, None]},
    "a mask of heads": lambda mask, _dtype: {"attention_mask": mask[None, None]},
    "a mask of rows": lambda mask, _dtype: {"attention_mask": mask[None]},
}
"""How a model's code may be told what rows see."""


class DenoiserLogits:
    """Logits of DiffusionGemma: an encoder of what is committed, and a denoiser of one canvas behind it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._last: Tensor | None = None  # logits of the last pass over the canvas, [C, V]

    def __call__(self, canvas: Canvas) -> Tensor:
        """Return logits [P, V] of the rows that are read."""
        model, start = self._model, canvas.start
        tokens = torch.from_numpy(canvas.tokens)[None].to(model.device)
        committed = model.model.encoder(input_ids=tokens[:, :start]).past_key_values
        before = None
        if canvas.temperature is not None:
            assert self._last is not None
            before = (self._last / canvas.temperature)[None]
        inputs = {"past_key_values": committed, "decoder_input_ids": tokens[:, start:]}
        self._last = model(**inputs, self_conditioning_logits=before).logits[0]
        return self._last[torch.from_numpy(canvas.rows - start)]


class MaskedLogits:
    """Logits of a model whose rows see what a mask says, or what its own code makes of the tokens."""

    def __init__(self, model: Any, spec: Spec) -> None:
        self._model, self._windowed = model, spec.windowed
        model.config.use_cache = False
        self._ways: dict[str, Way] = {}  # by what rows see, as one that is causal by itself needs no mask where all are

    def __call__(self, canvas: Canvas) -> Tensor:
        """Return logits [P, V] of the rows that are read.

        Raises `ReferenceMissingError` where no way to call the code fits.
        """
        length, sees = len(canvas.tokens), canvas.sees
        kind = "all" if (sees == length).all() else "causal" if (sees == np.arange(length) + 1).all() else "blocks"
        if kind not in self._ways:
            self._ways[kind] = self._find_way(canvas)
        return self._logits(self._ways[kind], canvas.tokens, sees)[torch.from_numpy(canvas.rows)]

    def _logits(self, way: Way, tokens: Ints, sees: Ints) -> Tensor:
        """Logits [T, V] of all rows."""
        model = self._model
        mask = torch.from_numpy(np.arange(len(tokens))[None, :] < sees[:, None]).to(model.device)
        out = model(input_ids=torch.from_numpy(tokens)[None].to(model.device), **way(mask, model.dtype))
        found: Tensor = (out[0] if isinstance(out, tuple) else out.logits)[0]
        return found.float().cpu()

    def _find_way(self, canvas: Canvas) -> Way:
        """The first of the ways under which changed tokens change the rows that see them, and no other."""
        tokens, sees, said = canvas.tokens, canvas.sees, list[str]()
        length = len(tokens)
        vocab = self._model.config.get_text_config().vocab_size
        for name, way in WAYS.items():
            try:
                plain = self._logits(way, tokens, sees)
                faults = []
                for place in sorted(
                    {length - 1, int(sees[min(canvas.start, length - 1)]) - 1, max(0, canvas.start - 1), 1}
                ):
                    changed = tokens.copy()
                    changed[place] = (tokens[place] + vocab // 2) % vocab
                    faults += self._faults(plain, self._logits(way, changed, sees), place, sees)
            # Code that does not take such a mask raises errors of any kind.
            except Exception as error:
                faults = [" ".join(f"{type(error).__name__}: {error}".split())[:200]]
            if not faults:
                return way
            said.append(f"with {name}: {faults[0]}")
        raise ReferenceMissingError(f"its code cannot be called so that rows see what they see here: {'; '.join(said)}")

    def _faults(self, plain: Tensor, changed: Tensor, place: int, sees: Ints) -> list[str]:
        """Whether rows changed that do not see `place`, and whether those that see it did, in words."""
        moved = ((changed - plain).norm(dim=1) / plain.norm(dim=1)).numpy()
        blind = np.flatnonzero((sees <= place) & (moved > _UNCHANGED))
        aware = sees > place
        if self._windowed:  # far rows may see it through no layer
            aware &= np.abs(np.arange(len(sees)) - place) <= 1
        still = np.flatnonzero(aware & (moved == 0))
        faults = [f"row {blind[0]} sees position {place}"] if len(blind) else []
        return faults + ([f"row {still[0]} does not see position {place}"] if len(still) else [])
