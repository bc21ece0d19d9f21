"""The page of recipes: every published shape is there, and what it tells to type works."""

import json
import re
import shlex
from pathlib import Path

import pytest

from remask.checkpoint.shelf import CACHES, SHELF
from remask.cli import main
from remask.cli.main import parse
from remask.families import PRESETS
from remask.llm import LLM

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "recipes.md").read_text(encoding="utf-8")
SPEEDS = (DOCS / "lab" / "expected-speed.md").read_text(encoding="utf-8")
FAMILIES = {  # by the heading of its section
    "A2D": "a2d",
    "BERT-Chat": "modernbert",
    "LLaDA": "llada",
    "LLaDA-MoE": "llada-moe",
    "Dream and DiffuCoder": "dream",
    "iLLaDA": "illada",
    "GIDD": "gidd",
    "Sumi": "sumi",
    "SDAR": "sdar",
    "LLaDA2": "llada2",
    "Fast-dLLM v2": "fast-dllm-v2",
    "Stable-DiffCoder": "stable-diffcoder",
    "Nemotron-Labs-Diffusion": "nemotron-labs-diffusion",
    "DiffusionGemma": "diffusion-gemma",
}


def commands(text: str) -> list[str]:
    blocks = "\n".join(re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    return re.findall(r"^(remask .*?)(?:\s+#.*)?$", blocks, re.MULTILINE)


def test_every_published_shape_is_there() -> None:
    ours = re.compile(r"-tiny$|-100m$|-1b$|^smollm2-")
    for name in PRESETS:
        assert (f"`{name}`" in SPEEDS) == (not ours.search(name)), name


@pytest.mark.few(3)
@pytest.mark.parametrize("heading", FAMILIES)
def test_settings_are_taken_by_the_family(heading: str) -> None:
    """Each command's sampling parameters and cache run on a small model of the family, with shorter responses."""
    llm = LLM(f"{FAMILIES[heading]}-tiny", load_format="dummy", device="cpu", cache="auto")
    asked = [parse(shlex.split(each)[1:]) for each in commands(TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0])]
    answered = [args for args in asked if args.command in ("chat", "serve", "generate")]
    assert answered
    for args in answered:
        row = SHELF.get(next(filter(None, (vars(args).get(name) for name in ("positional_model", "model")))))
        named = json.loads(args.sampling) if args.sampling else {}
        sampling = {**(row.sampling if row else {}), **named, "max_tokens": 64}
        usual = llm.session.cache_name if row is None else row.cache
        cache = usual if args.cache in (None, "auto") else args.cache
        depth = {"depth": 1} if "bicache" in cache else {}  # so that nothing is profiled
        (output,) = llm.generate([{"prompt_token_ids": [3, 5, 7, 9]}], sampling, cache=cache, cache_config=depth)
        assert output.finish_reason in ("stop", "length")


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES.values())
def test_a_rehearsal_runs(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What the page says to try without the model: a bench on a small shape."""
    (rehearsal,) = [each for each in commands(TEXT) if "--load-format dummy" in each]
    words = shlex.split(rehearsal.replace("llada-tiny", f"{family}-tiny"))[1:]
    shape = PRESETS[f"{family}-tiny"]
    cached = "none" if shape.whole_canvas else CACHES[shape.kind]
    assert main(["--quiet", *(word.replace("block-dual", cached) for word in words)]) == 0
    assert "| none " in capsys.readouterr().out
