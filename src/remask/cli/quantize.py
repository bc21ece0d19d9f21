"""`remask quantize`: write a checkpoint of quantized weights."""

import argparse
import logging
from pathlib import Path

import torch

from remask.checkpoint.load import check_tensors, read_config
from remask.checkpoint.quantised_files import save_quantised
from remask.checkpoint.source import resolve
from remask.errors import ConfigError, UnknownNameError
from remask.model.quantised import check_sizes
from remask.model.quantization_names import QUANTIZATIONS

log = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, and say how large it is."""
    if args.quantization not in QUANTIZATIONS:
        raise UnknownNameError("quantization", args.quantization, QUANTIZATIONS)
    folder = resolve(args.model)
    family, config = read_config(folder)
    check_sizes(args.quantization, config)
    check_tensors(folder, family, config, torch.bfloat16)
    try:
        size = save_quantised(folder, family, config, args.quantization, Path(args.output), args.progress)
    except OSError as error:
        raise ConfigError(f"--output: {args.output!r} cannot be written: {error.strerror or error}") from error
    print(f"{args.output}: {config.parameters:,} parameters in {size / 1e9:.3f} GB ({args.quantization})")
    return 0
