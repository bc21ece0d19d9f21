"""Block-causal and uniform models behind the server."""

import shutil
from pathlib import Path

from remask.engine.config import EngineConfig
from remask.llm import LLM
from tests.goldens import block_causal
from tests.server.serving import serving

URL = "/v1/completions"
TOKENIZER = Path(__file__).parents[2] / "src" / "remask" / "bundled_transit"


def sdar(folder: Path) -> LLM:
    """A golden model with the bundled tokenizer, whose words are part of its vocabulary."""
    shutil.copytree(block_causal.model_dir("sdar_b4"), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    return LLM(str(folder), cache="auto", dtype="float32", device="cpu", engine=EngineConfig(page_size=8))


def test_exact_pages_are_found_told_and_dropped(tmp_path: Path) -> None:
    prompt = list(range(10, 40))
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    with serving(sdar(tmp_path / "model"), model_names=["sdar"], sampling={}) as running:
        first, again = (running.client.post(URL, json=body).json() for _ in range(2))
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        found = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, again)]
        assert found == [0, 24]
        chunks = running.stream(body, URL)
        assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == first["choices"][0]["text"]
        running.settle()
        pages = running.cache()["pages"]
        assert pages["used"] > 0
        assert (pages["hit_tokens"], pages["asked_tokens"]) == (48, 72)
        assert running.client.delete("/v1/cache").json()["dropped"] > 0
        assert running.cache()["pages"]["used"] == 0


def test_a_uniform_model_streams_what_has_settled() -> None:
    llm = LLM("bundled-uniform", cache="auto", dtype="float32", device="cpu")
    body = {"prompt": "In winter: route from Cairo?", "max_tokens": 32, "block_length": 16, "seed": 3}
    with serving(llm, model_names=["uniform"], sampling={"max_tokens": 32}) as running:
        whole = running.client.post(URL, json={**body, "cache": "uniform-cache"}).json()["choices"][0]["text"]
        chunks = running.stream({**body, "cache": "uniform-cache", "stream_drafts": True}, URL)
        texts = [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]]
        assert "".join(texts) == whole
        assert len([text for text in texts if text]) <= 3, "a block is told when it is done, not before"
        own = {"sampler": "ancestral", "correction_steps": 40, "correction_temperature": 0.1}
        corrected = {**body, "cache": "uniform-cache", "uniform": own, "steps_per_block": 2, "temperature": 1.0}
        answer = running.client.post(URL, json=corrected).json()
        assert 1 <= answer["remask"]["correction_steps"] <= 40
        texts = [chunk["choices"][0]["text"] for chunk in running.stream(corrected, URL) if chunk["choices"]]
        assert [text for text in texts if text] == [answer["choices"][0]["text"]], "all of it settles at once"
        refused = running.refusal(URL, {**body, "cache": "bicache", "cache_config": {"depth": 1}})
        assert "not defined on uniform models" in refused["message"]
