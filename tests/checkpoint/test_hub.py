"""Models that a word or a hub id names, fetched by the real client from a hub on loopback."""

import gc
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import close_session, snapshot_download

from remask import LLM, EngineConfig
from remask.checkpoint import hub as hub_module
from remask.checkpoint.loaded import find_model
from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.shelf import SHELF
from remask.checkpoint.source import resolve_adapter, resolve_model
from remask.cli import main
from remask.engine.capacity import DeviceMemory
from remask.engine.fitting import widest_fit
from remask.errors import CheckpointError, ConfigError
from remask.loading import announce_download
from remask.machine.speeds import store_speed
from remask.model.sizes import FORMATS
from tests.checkpoint.checkpoints import (
    A2D,
    DIFFUSION_GEMMA,
    FAST_DLLM_V2,
    GIDD,
    LLADA,
    SDAR,
    random_tensors,
    same,
    write,
)
from tests.disks import small_disk
from tests.hub import SHA, Hub, running_hub
from tests.waiting import LONGEST_S, eventually

PAGE = (Path(__file__).parents[2] / "docs" / "shelf.md").read_text(encoding="utf-8")
NAME = "sdar-1.7b"
REPO = SHELF[NAME].hub
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a small model in two files under the id of `NAME`, and a cache of one's own."""
    with running_hub() as running:
        running.repos[REPO] = write(tmp_path / "served", SDAR, random_tensors(SDAR), shards=2)
        (tmp_path / "served" / "modeling_sdar.py").write_text("raise SystemExit")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # of the processes that a test starts
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        yield running
        # Where one file failed, threads of others still hold connections.
        for thread in threading.enumerate():
            if thread.name.startswith("download of "):
                thread.join(LONGEST_S)
        close_session()
        with warnings.catch_warnings():  # the client leaves connections that broke to the collector
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def test_a_word_starts_a_model(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_before: list[int] = []

    def watch(_: logging.LogRecord) -> bool:
        asked_before.append(len(hub.asked))
        return True

    monkeypatch.setattr(logging.getLogger("remask.loading"), "filters", [watch])
    (output,) = LLM(NAME, **CPU).generate([{"prompt_token_ids": [1, 2, 3]}], {"max_tokens": 4, "ignore_eos": True})
    assert len(output.token_ids) == 4
    assert asked_before == [0]
    (shown,) = re.findall(r"^WARNING (downloading .*)$", PAGE, re.MULTILINE)
    folder = str(tmp_path / "cache")
    assert caplog.messages == [shown.replace("/home/me/.cache/huggingface/hub", folder).replace("int8", "float32")]
    assert sorted(hub.files()) == sorted(path.name for path in hub.repos[REPO].iterdir() if path.suffix != ".py")
    asked = len(hub.asked)
    caplog.clear()
    LLM(NAME, **CPU)
    LLM(REPO, **CPU)
    assert (len(hub.asked), caplog.text) == (asked, "")


@pytest.mark.parametrize("command", ["eval likelihood", "quantize"])
def test_commands_that_read_files_first_say_what_they_download(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, command: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "response": "b"}\n')
    more = {
        "eval likelihood": ["--prompts", str(prompts), "--device", "cpu", "--dtype", "float32"],
        "quantize": ["--quantization", "int8", "--output", str(tmp_path / "int8")],
    }
    main(["--quiet", *command.split(), "--model", NAME, *more[command]])
    (said,) = [each for each in caplog.messages if each.startswith(f"downloading {NAME} ({REPO}) into ")]
    assert said.endswith("; it fits on cpu as float32") == (command == "eval likelihood")
    assert hub.files()


def test_a_word_brings_its_decoding_and_its_cache(hub: Hub, tmp_path: Path) -> None:
    hub.repos["GSAI-ML/LLaDA-8B-Instruct"] = write(tmp_path / "llada", LLADA, random_tensors(LLADA))
    llm = LLM("llada-8b", force=True, **CPU)
    assert (llm.session.cache_name, llm.session.sampling["block_length"]) == ("block-dual", 32)
    plain = LLM("GSAI-ML/LLaDA-8B-Instruct", **CPU)
    assert "block_length" not in plain.session.sampling
    blocks = "qwen3-0.6b-diffusion-bd3lm"
    hub.repos[SHELF[blocks].hub] = write(tmp_path / "a2d", A2D, random_tensors(A2D))
    assert LLM(blocks, **CPU).loaded.config.block_length == 32


@pytest.mark.parametrize(
    ("name", "raw", "more"),
    [
        ("qwen3-0.6b-diffusion-bd3lm", A2D, {}),
        ("llada-8b", LLADA, {"generation_config.json": {"max_new_tokens": 7}}),
        ("fast-dllm-v2-7b", FAST_DLLM_V2, {"remask.json": {"sampling": {"threshold": 0.5}, "quantization": "none"}}),
        ("gidd-unif-3b", GIDD, {"remask.json": {"cache": "none"}}),
        ("sdar-4b", SDAR, {}),
        ("diffusiongemma-26b-a4b", DIFFUSION_GEMMA, {"generation_config.json": {"max_denoising_steps": 9, "t_max": 2}}),
    ],
)
def test_what_the_shelf_says_is_carried_into_a_quantized_folder(
    hub: Hub, tmp_path: Path, name: str, raw: dict[str, Any], more: dict[str, Any]
) -> None:
    """The folder loads as the name does: by shape, sampling parameters and cache."""
    row = SHELF[name]
    hub.repos[row.hub] = write(tmp_path / "model", raw, random_tensors(raw))
    for file, content in more.items():
        (hub.repos[row.hub] / file).write_text(json.dumps(content))
    named, out = find_model(ModelSettings(name)), tmp_path / "out"
    assert main(["--quiet", "quantize", "--model", name, "--quantization", "int8", "--output", str(out)]) == 0
    kept = find_model(ModelSettings(str(out)))
    assert kept.quantization == "int8"
    assert (kept.config, kept.sampling, kept.default_names) == (named.config, named.sampling, named.default_names)
    assert dict(named.sampling).keys() >= row.sampling.keys()
    assert named.default_names["cache"] == more.get("remask.json", {}).get("cache", row.cache)
    same(*(each.load(torch.float32, torch.device("cpu"), quantization="int8").weights for each in (named, kept)))


def test_another_name_is_quantized_with_its_own_files_alone(hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    hub.repos[REPO].joinpath("generation_config.json").write_text('{"max_new_tokens": 5}')
    assert main(["--quiet", "quantize", "--model", REPO, "--quantization", "int8", "--output", str(out)]) == 0
    assert not (out / "remask.json").exists()
    written = json.loads((out / "config.json").read_text())
    assert written.pop("quantization_config") == {"quant_method": "remask", "version": 1, "kind": "int8"}
    assert written == SDAR
    assert find_model(ModelSettings(str(out))).sampling == {"max_tokens": 5}


def test_what_does_not_fit_is_refused_before_anything_is_asked(hub: Hub) -> None:
    with pytest.raises(ConfigError, match=r"llada2-flash: the weights do not fit: .* Nothing was downloaded; --force"):
        LLM("llada2-flash", **CPU)
    assert hub.asked == []
    with pytest.raises(CheckpointError, match="The hub does not have the model 'inclusionAI/LLaDA2"):
        LLM("llada2-flash", force=True, **CPU)


@pytest.mark.usefixtures("hub")
def test_the_list_and_a_start_choose_alike(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every model, in memory that has room for few of them and for most; both on CPUs with bfloat16 and without."""
    monkeypatch.setattr("remask.checkpoint.hub.cache_disk", lambda: (Path("x"), 10**12))
    monkeypatch.setattr("remask.cli.models.may_have_gpu", lambda: False)
    seen = set[str]()
    for free, flags in ((9, {"avx512_bf16"}), (17, set[str]()), (70, set[str]())):
        for place in ("remask.loading.memory", "remask.cli.models.memory"):
            monkeypatch.setattr(place, lambda free=free: (128 * 10**9, free * 10**9))
        for place in ("remask.machine.device.instructions", "remask.cli.models.instructions"):
            monkeypatch.setattr(place, lambda flags=flags: frozenset(flags))
        assert main(["models", "--json"]) == 0
        for row in [each for each in json.loads(capsys.readouterr().out) if each["hub"]]:
            seen.add(row["fits"])
            caplog.clear()
            if row["fits"] == "does not fit":
                with pytest.raises(ConfigError, match="do not fit"):
                    announce_download(ModelSettings(row["name"]), torch.device("cpu"))
            else:
                announce_download(ModelSettings(row["name"]), torch.device("cpu"))
                assert caplog.messages[0].endswith(f"; it fits on cpu as {row['fits'].split()[-1]}")
    assert seen >= {
        "does not fit",
        "fits as bfloat16",
        "fits as float32",
        "fits as int8",
        "fits as int4",
        "tight as int4",
    }


def test_what_fits_is_taken_where_nothing_is_said(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a word, a hub's id and a folder, of `LLM` and of commands alike, and it is told in one line."""
    folder, config = resolve_model(REPO), find_model(ModelSettings(REPO)).config
    monkeypatch.setattr("remask.engine.fitting.product_bytes", lambda _: 0)  # more than such a model saves
    dtype, shortest = FORMATS["float32"], EngineConfig(max_model_len=64)
    frees = (free for free in range(10**4, 10**9, 10**3))
    free = next(
        each for each in frees if widest_fit(config, dtype, DeviceMemory(each, each, 1.0), shortest).length >= 64
    )
    assert widest_fit(config, dtype, DeviceMemory(free, free, 1.0), shortest).quantization in ("int8", "int4")
    monkeypatch.setattr("remask.loading.memory", lambda: (10**12, free))
    monkeypatch.setattr("remask.machine.device.instructions", lambda: frozenset[str]())
    monkeypatch.setattr("remask.engine.sizing.cpu_memory", lambda: None)
    for model in (NAME, REPO, str(folder)):
        caplog.clear()
        kind = LLM(model, device="cpu", engine=shortest).loaded.quantization
        assert kind == widest_fit(config, dtype, DeviceMemory(free, free, 1.0), shortest).quantization
        (told,) = [each for each in caplog.messages if each.startswith(f"{model}: as float32 the weights take ")]
        assert f"the matrices are {kind}, with room for canvases of 64 tokens; --quantization and --dtype" in told
    words = ["generate", "--model", str(folder), "--device", "cpu", "--max-model-len", "64", "--input", "-"]
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt_token_ids": [1, 2, 3], "max_tokens": 4}\n'))
    assert main(words) == 0
    assert f"{kind} weights" in capsys.readouterr().err


def test_a_folder_of_the_name_comes_first(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write(tmp_path / "here" / NAME, SDAR, random_tensors(SDAR)).parent)
    assert LLM(NAME, **CPU).loaded.config.vocab == SDAR["vocab_size"]
    assert hub.asked == []


def test_a_connection_that_breaks_is_taken_up_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)
    (file,) = [path for path in hub.repos[REPO].iterdir() if path.name.startswith("model-00001")]
    hub.dropped[file.name] = 1000
    folder = resolve_model(NAME)
    assert (folder / file.name).read_bytes() == file.read_bytes()
    assert hub.ranges == ["bytes=1000-"]


@pytest.mark.thorough
def test_an_interrupted_download_goes_on(hub: Hub, tmp_path: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    # A run of the tests in the background ignores interrupts, and so would its children.
    code = "import signal; signal.signal(2, signal.default_int_handler); from remask.cli import main; exit(main())"
    words = [sys.executable, "-c", code, "models", "pull", NAME]
    hub.held = {"model-00002-of-00002.safetensors"}
    first = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert hub.reached.wait(LONGEST_S)
        blobs = tmp_path / "home" / "hub" / f"models--{REPO.replace('/', '--')}" / "snapshots" / SHA
        eventually((blobs / "model-00001-of-00002.safetensors").exists)
        first.send_signal(signal.SIGINT)
        _, told = first.communicate(timeout=LONGEST_S)
    finally:
        first.kill()
    assert (first.returncode, told.splitlines()[-1]) == (130, "remask models pull: interrupted")
    tries = [name for name in hub.files() if name == "model-00002-of-00002.safetensors"]
    assert len(tries) == 1, "the client tries a file that stands still five times, for which nobody waits"
    hub.held, begun = set(), len(hub.files())
    second = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert hub.files()[begun:] == ["model-00002-of-00002.safetensors"]
    assert second.stdout == f"{NAME}: {blobs}\n"
    assert "\r" not in second.stderr  # a bar is for terminals


def test_what_is_missing_is_told_in_a_sentence(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"The hub has no revision 'v9' of the model '{REPO}': give its hub id"):
        hub_module.fetch(REPO, "v9")
    with pytest.raises(CheckpointError, match="The hub does not have the model 'nobody/nothing', or not for everybody"):
        resolve_model("nobody/nothing")
    with pytest.raises(CheckpointError, match=r"or log in .*\. Did you mean 'nvidia/Nemotron-Labs-Diffusion-8B' or "):
        resolve_model("nvidia/Nemotron-Labs-Difusion-8B")
    with pytest.raises(CheckpointError, match="The hub does not have the adapter 'nobody/nothing'"):
        resolve_adapter("nobody/nothing")
    for name in ("org/a--b", "org/a..b", "org/a.git", "org/a--b:x.gguf"):
        with pytest.raises(
            CheckpointError, match=f"There is no folder of the model '{name}', and the hub allows no such"
        ):
            resolve_model(name)
    hub.gated = {REPO}
    with pytest.raises(CheckpointError, match=r"does not give the model .* accept the terms .* `hf auth login`"):
        resolve_model(NAME)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_an_adapter_and_a_file_come_whole(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "x.gguf"):
        (tmp_path / "adapter" / name).write_bytes(b"{}")
    hub.repos["org/name"] = tmp_path / "adapter"
    folder = resolve_adapter("org/name")
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    file = resolve_model("org/name:x.gguf")
    assert file.read_bytes() == b"{}"
    asked = len(hub.asked)
    assert (resolve_model("org/name:x.gguf"), len(hub.asked)) == (file, asked)
    with pytest.raises(
        CheckpointError, match=r"does not have the file of the model 'org/name:y\.gguf': check its name"
    ):
        resolve_model("org/name:y.gguf")
    hub.repos.clear()
    with pytest.raises(CheckpointError, match=r"does not have the model 'JetLM/SDAR-4B-Chat:x\.gguf', .*`\.$"):
        resolve_model("JetLM/SDAR-4B-Chat:x.gguf")  # of a known id, so no other one is meant
    with pytest.raises(CheckpointError, match=r"'JetLM/SDAR-4B-Chatt:x\.gguf', .*Did you mean 'JetLM/SDAR-4B-Chat' or"):
        resolve_model("JetLM/SDAR-4B-Chatt:x.gguf")
    for name in ("org/name:../x.gguf", "org/name:x.bin", "org/name:/x.gguf", "name:x.gguf"):
        with pytest.raises(CheckpointError, match="There is no model"):
            resolve_model(name)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_download_tells_how_far_it_is(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """A line now and then, on a terminal one bar for all files; what was on the disk before does not count."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)
    monkeypatch.setattr("remask.machine.progress.EVERY_S", 0.0)
    monkeypatch.setattr("remask.machine.progress._BAR_AFTER_S", 0.0)
    hub_module.fetch(REPO, weights=False)
    (begun,) = [path for path in hub.repos[REPO].iterdir() if path.name.startswith("model-00001")]
    hub.dropped[begun.name] = 1000
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr", stderr)
    folder = hub_module.fetch(REPO, progress=True)
    assert (folder / begun.name).read_bytes() == begun.read_bytes()
    shares = [int(share) for share in re.findall(rf"downloading {REPO}:\s+(\d+)\s?%", stderr.getvalue())]
    assert shares == sorted(shares)
    assert shares[-1] <= 100
    assert ("\r" in stderr.getvalue()) == terminal
    if not terminal:
        assert len(shares) > 4
    (tmp_path / "file").mkdir()
    hub.repos["org/name"] = tmp_path / "file"
    for name, progress in (("x.gguf", False), ("y.gguf", True)):
        (tmp_path / "file" / name).write_bytes(name.encode() * 400)
        stderr.seek(0)
        stderr.truncate()
        resolve_model(f"org/name:{name}", progress=progress)
        assert ("downloading org/name" in stderr.getvalue()) == progress


def test_without_a_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_model(NAME)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = f"http://127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", closed)
    assert resolve_model(NAME) == folder
    with pytest.raises(CheckpointError, match=r"and the hub cannot be reached \(ConnectError\): check") as told:
        resolve_model("sdar-4b")
    assert str(told.value).count("\n") == 0
    assert str(told.value).count(". ") == 0


def test_a_refusal_is_no_download_that_stopped(hub: Hub) -> None:
    hub.refused.add(REPO)
    with pytest.raises(
        CheckpointError, match=rf"The hub refuses the model '{REPO}' \(status 403\): see its page there"
    ):
        resolve_model(NAME)


def test_a_full_disk_in_the_words_of_the_transfer_library(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **keywords: Any) -> Any:
        if keywords.get("local_files_only"):
            return snapshot_download(*arguments, **keywords)
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(hub_module, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=rf"has no room for the model '{REPO}' \(I/O error: No space left"):
        resolve_model(NAME)


@pytest.mark.filterwarnings("ignore:Not enough free disk space")
def test_a_full_disk(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "served" / "model-00003.safetensors").write_bytes(bytes(1 << 20))
    with small_disk(tmp_path / "small", 128) as why:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "small" / "hub"))
        if why == "No space left on device":
            with pytest.raises(
                ConfigError, match=r"take 3.44 GB, and the disk of .*small/hub has .* MB left: free some"
            ):
                LLM(NAME, **CPU)
            assert hub.asked == []
        with pytest.raises(CheckpointError, match=rf"has no room for the model '{REPO}' \({why}\): free some, or set"):
            LLM(NAME, force=True, **CPU)
        (tmp_path / "served" / "model-00003.safetensors").unlink()


@pytest.mark.parametrize("native", [True, False], ids=["bf16", "plain"])
def test_the_list_knows_what_is_on_disk(
    hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, native: bool
) -> None:
    """What it says of a memory that is named does not depend on this machine's processor, memory or packages."""
    monkeypatch.setattr("remask.machine.device.instructions", lambda: frozenset({"avx512_bf16"} if native else ()))
    monkeypatch.setattr("remask.cli.models.memory", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    monkeypatch.setattr("remask.model.executors.find_spec", lambda name: find_spec(name) if native else None)
    assert main(["models", "--memory", "16"]) == 0
    assert f"```text\n{capsys.readouterr().out}```\n" in PAGE
    assert main(["models", "pull", NAME]) == 0
    assert main(["models", "--memory", "9"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert re.search(r" yes +- +fits as bfloat16 +\S+$", lines[NAME])
    assert re.search(r" no +MIT +tight as int4 +\S+$", lines["llada-8b"])
    assert re.search(r" no .* does not fit +-$", lines["llada2-flash"])
    assert main(["models", "--json"]) == 0
    (row,) = [each for each in json.loads(capsys.readouterr().out) if each["name"] == NAME]
    assert (row["hub"], row["on_disk"], row["download_bytes"]) == (REPO, True, 2 * row["parameters"])
    assert row["speed"] == "computed"
    store_speed(REPO, tokens=6, seconds=4.0)
    assert main(["models", "--json"]) == 0
    (row,) = [each for each in json.loads(capsys.readouterr().out) if each["name"] == NAME]
    assert (row["tokens_per_second"], row["speed"]) == (1.5, "measured")
    assert main(["models", "pull", "sdar-17b"]) == 2
    assert "Did you mean 'sdar-1.7b'" in capsys.readouterr().err


@pytest.mark.few(5)
@pytest.mark.parametrize("name", SHELF)
def test_every_row_is_of_a_family_that_runs_what_it_says(name: str) -> None:
    row = SHELF[name]
    small = f"{row.config.family}{'-blocks' if 'block_size' in row.overrides else ''}-tiny"
    llm = LLM(small, load_format="dummy", cache=row.cache, **CPU)
    (output,) = llm.generate([{"prompt_token_ids": [3, 5, 7]}], {**row.sampling, "max_tokens": 64})
    assert output.finish_reason in ("stop", "length")
    assert re.fullmatch(r"[\w-]+/[\w.-]+", row.hub)
    assert f"| `{name}` | [{row.hub}](" in PAGE
