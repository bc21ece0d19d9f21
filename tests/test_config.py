"""What `auto` means, and what is refused."""

import pytest
import torch

from remask import config
from remask.errors import RemaskError


def test_auto_keeps_float32_where_bfloat16_is_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "matmul_seconds", lambda _dtype: 1.0)
    dtype, why = config.resolve_dtype("auto", torch.device("cpu"))
    assert dtype is torch.float32
    assert "1.0x" in why


def test_auto_takes_bfloat16_where_it_gains_and_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "matmul_seconds", lambda dtype: 3.0 if dtype is torch.float32 else 1.0)
    dtype, why = config.resolve_dtype("auto", torch.device("cpu"))
    assert dtype is torch.bfloat16
    assert "3.0x" in why


def test_auto_on_an_accelerator_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(config, "matmul_seconds")
    assert config.resolve_dtype("auto", torch.device("meta"))[0] is torch.bfloat16


def test_a_named_dtype_is_taken_as_it_is() -> None:
    assert config.resolve_dtype("float16", torch.device("cpu")) == (torch.float16, "as asked")
    with pytest.raises(RemaskError, match="Did you mean 'float16'"):
        config.resolve_dtype("float61", torch.device("cpu"))


def test_matrix_products_are_really_timed() -> None:
    assert config.matmul_seconds(torch.float32, size=64, tries=2) > 0


def test_devices() -> None:
    assert config.resolve_device("cpu") == torch.device("cpu")
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert config.resolve_device("auto").type == expected
    for name in ("nonsense", "cuda:77"):
        with pytest.raises(RemaskError, match=f"device '{name}' cannot be used"):
            config.resolve_device(name)
