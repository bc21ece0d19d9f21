"""What the Python files of a checkpoint hold in tests: a model of transformers around an oracle's forward pass."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tests.oracles import experts, gidd, sumi

FILE = "modeling_own.py"
CODE = "from lab.tests.own_code import OwnConfig, OwnModel\n"
AUTO_MAP = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}


def logits(folder: Path, model_type: str, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Those of all rows [T, V]. Each of the models takes a mask of another form, or none."""
    if model_type == "sumi":
        assert mask is None
        return sumi.load(folder).predict(tokens.tolist())
    if model_type == "gidd":
        assert mask is None or mask.dtype == torch.bool
        return gidd.load(folder).forward(tokens, visible=None if mask is None else mask[0, 0]).logits
    model = experts.load(folder)
    if isinstance(model, experts.LladaMoeModel):
        assert mask is None
        return model.forward(tokens).logits
    assert mask is not None
    return model.under(mask[0, 0] == 0, tokens).logits


class OwnConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """Any keys."""


class OwnModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """The oracle of the folder's files."""

    config_class = OwnConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.nothing = torch.nn.Parameter(torch.zeros(1))
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        """As of the classes of transformers."""
        found = logits(Path(self.config._name_or_path), self.config.model_type, input_ids[0], attention_mask)
        return SimpleNamespace(logits=found[None])
