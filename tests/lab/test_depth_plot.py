from dataclasses import replace
from pathlib import Path

import pytest

from remask.errors import ConfigError
from remask_lab.depth_plot import plot_depth
from tests.depth.test_table import TABLE


@pytest.mark.parametrize("name", ["depth.png", "depth.PNG"])
def test_png(tmp_path: Path, name: str) -> None:
    plot_depth(TABLE, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") > 1200, "wide enough for a README"


def test_svg_with_and_without_curves(tmp_path: Path) -> None:
    plot_depth(TABLE, tmp_path / "two.svg")
    plot_depth(replace(TABLE, curves={}, request_depths={}, definition="published"), tmp_path / "one.svg")
    two, one = ((tmp_path / name).read_text() for name in ("two.svg", "one.svg"))
    assert "<svg" in one
    assert "<!-- mean cosine similarity -->" in two
    assert "<!-- mean cosine similarity -->" not in one
    assert "<!-- r = 40 % -->" in two


def test_one_ratio(tmp_path: Path) -> None:
    plot_depth(replace(TABLE, entries={}, curves={50: (1.0, 0.5)}, request_depths={50: 1.0}), tmp_path / "a.png")


def test_other_formats_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.png or \.svg"):
        plot_depth(TABLE, tmp_path / "depth.gif")
    with pytest.raises(ConfigError, match="there is no folder"):
        plot_depth(TABLE, tmp_path / "none" / "depth.png")
