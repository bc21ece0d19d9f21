"""Makes an A2D model of a base and its adapter.

    python -m training.adapt.export OUT --base smollm2 --adapter FOLDER [--block-size 8] [--apart]

OUT is a folder that remask and the authors' samplers load: the matrices merged, in float32, and the tokenizer, which
names the mask token. With `--apart` it is the adapter in PEFT's layout, which names the base and, in `remask.json`,
what makes a diffusion model of it.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from training.adapt.base import a2d_config, load_base, load_tokenizer, reference, seat_mask
from training.adapt.corpus import PIECES, pieces
from training.adapt.low_rank import LowRankLinear, adapter_config, add_low_rank, load_adapter

OVERRIDES = ("model_type", "mask_token_id", "eos_token_id", "right_shift_logits", "block_size")


def main() -> None:
    """Merge and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--block-size", type=int, help="of a block-causal model (`training.adapt.train --blocks`)")
    parser.add_argument("--apart", action="store_true", help="leave the base's weights where they are")
    args = parser.parse_args()
    tokenizer, model = load_tokenizer(args.base), load_base(args.base, torch.device("cpu"))
    found = dict(zip(PIECES, pieces(tokenizer), strict=True))
    (mask,), (end,), rows = found["mask"], found["end"], model.config.vocab_size
    print(seat_mask(model, mask))
    if args.apart:
        if mask >= rows:
            parser.error(f"--apart: {args.base} has no row for the mask token {mask}; export without it")
        export_apart(args.adapter, args.out, args.base, a2d_config(model.config, mask, end, args.block_size))
        return
    config = adapter_config(args.adapter)
    add_low_rank(model, config["r"], config["lora_alpha"])
    load_adapter(model, args.adapter)
    export(model, args.out, mask, end, args.block_size)
    tokenizer.save_pretrained(args.out)


def export(model: Any, out: Path, mask: int, end: int, block: int | None = None) -> None:
    """Write the merged weights in float32 and their `config.json`."""
    out.mkdir(parents=True, exist_ok=True)
    merge(model)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    _write(out / "config.json", a2d_config(model.config, mask, end, block))


def export_apart(adapter: Path, out: Path, base: str, config: dict[str, Any]) -> None:
    """Write the adapter beside what makes an A2D model of its base, keys of `config`."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(adapter / "adapter_model.safetensors", out)
    _write(out / "adapter_config.json", adapter_config(adapter) | {"base_model_name_or_path": reference(base)})
    _write(out / "remask.json", {"hf_overrides": {key: config[key] for key in OVERRIDES if key in config}})


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def merge(model: nn.Module) -> None:
    """Put a plain matrix in the place of every matrix that has a low-rank change."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LowRankLinear):
                child.base.weight = nn.Parameter(child.merged().detach(), requires_grad=False)
                setattr(parent, name, child.base)


if __name__ == "__main__":
    main()
