"""What commands of the laboratory refuse, and the sentence that says why."""

import pytest

from remask.cli import main

DUMMY = ["--model", "llada-tiny", "--load-format", "dummy", "--dtype", "float32", "--device", "cpu"]
REFUSED: dict[str, list[tuple[list[str], str]]] = {
    "analyze depth --model llada-tiny --load-format dummy --dtype float32 --device cpu": [
        (["--task", "nofile"], "--task must be NAME=FILE, got 'nofile'"),
        (["--task", "a=/nowhere/p.jsonl"], "cannot be read"),
        (["--system-prompts", "1"], "need at least 2"),
        (["--samples", "0"], "samples must be a whole number from 1"),
        (["--ratios", "51", "--canvas", "20"], "cannot be cut at a prefix ratio of 51 %"),
    ],
    "bench --model llada-tiny --load-format dummy --caches none": [
        (["--caches", "none,bicahe"], "Did you mean 'bicache'"),
        (["--cache-config", '{"reuse": {}}', "--caches", "none"], "not among --caches"),
        (["--depths", "99"], "exceeds the model's"),
        (["--prefix-match", "longest"], "give --task transit"),
        (["--json", "nowhere/at/all.json"], "--json: there is no folder 'nowhere/at'"),
    ],
    "bench --model bundled": [
        (["--requests", "0"], "--requests must be a whole number from 1"),
        (["--prefixes", "0"], "--prefixes must be a whole number from 1"),
        (["--depths", "one"], "--depths must be numbers"),
        (["--sampling", '{"stepz": 1}'], "Unknown sampling parameter 'stepz'"),
        (["--sampling", '{"cache_salt": "a"}'], "it belongs in the request"),
        (["--cache-config", "[]"], "--cache-config"),
        (["--task", "gsm8k", "--prefix-tokens", "5"], "--prefix-tokens and --prompt-tokens shape random workloads"),
        (["--prefix-match", "longest", "--without-prefix"], "leave one of them out"),
        (["--csv", "nowhere/at/all.csv"], "--csv: there is no folder"),
        (["--plots", "nowhere/at/all"], "--plots: there is no folder"),
    ],
    "bench --model bundled-uniform": [
        (["--prompt-tokens", "5"], "this model has a task"),
        (["--prefix-match", "longest"], "give --task transit"),
        (["--prefix-match", "longest", "--batch-invariant"], "batch_invariant=True needs prefix_match='exact'"),
        (["--caches", "bicache"], "uniform"),
        (["--max-tokens", "150"], "max_model_len is 128"),
    ],
    "bench --device cpu --rounds 1 --model bundled-transit --dtype float32 --prompt from --max-tokens 2": [
        (["--variants", "{"], "--variants is not JSON"),
        (["--variants", "{}"], "--variants must be a JSON list"),
        (["--variants", "[]"], "give at least one policy"),
        (["--variants", "[1]"], "a variant is an object"),
        (["--variants", '[{"cach": "none"}]'], "a variant is an object of cache, cache_config and sampling"),
        (["--variants", '[{"cache": 1}]'], "cache is a name"),
        (["--variants", '["none", "none"]'], "variant 'none' is there twice"),
        (["--variants", '[{"sampling": {"step": 1}}]'], "Did you mean 'steps'"),
        (["--variants", '["uniform-cache"]'], "uniform-cache: this cache policy is not defined"),
        (["--variants", '["none"]', "--caches", "none"], "leave --caches out"),
        (["--caches", "none", "--task", "transit"], "leave --task out"),
        (["--caches", "none", "--requests", "3"], "leave --requests out"),
        (["--caches", "none", "--without-prefix"], "leave --without-prefix out"),
        (["--caches", "none", "--page", "no/where/p.html"], "--page: there is no folder"),
        (["--caches", "none", "--page", "."], "--page: '.' cannot be written"),
    ],
    "bench --rounds 1 --model bundled-tariff --dtype float32 --device cpu": [
        (["--task", "tarif"], "Did you mean 'tariff'"),
        (["--task-settings", '{"orders": 8}'], "name it with --task"),
        (["--task", "random", "--task-settings", '{"orders": 8}'], "the task random has no settings"),
        (["--task", "gsm8k", "--task-settings", '{"orders": 8}'], "Unknown setting of the task gsm8k 'orders'"),
        (["--task", "tariff", "--task-settings", '{"order": 8}'], "Did you mean 'orders'"),
        (["--task", "tariff", "--task-settings", '{"orders": 99}'], "orders must be a whole number from 4 to 64"),
        (["--task", "tariff", "--task-settings", '["orders"]'], "--task-settings must be a JSON object"),
        (["--task", "transit", "--task-settings", '{"rows": 2}'], "rows must be a whole number from 4"),
    ],
    "profile ops --model llada-tiny --load-format dummy --requests 2 --rounds 2": [
        (["--steps", "0"], "--steps must be a whole number from 1"),
        (["--requests", "0"], "--requests must be a whole number from 1"),
        (["--prefix-tokens", "-1"], "--prefix-tokens must be a whole number from 0"),
        (["--max-tokens", "600"], "the model has 512"),
        (["--cache", "bicahe"], "Did you mean 'bicache'"),
        (["--cache-config", '{"depth": 1}'], "takes no settings"),
        (["--cache", "uniform-cache"], "not defined on masked models"),
        (["--json", "nowhere/at/all.json"], "--json: there is no folder 'nowhere/at'"),
        (["--plot", "nowhere/at/all.png"], "--plot: there is no folder 'nowhere/at'"),
    ],
}
UNFIT = [
    (["--model", "bundled-uniform"], "is a uniform one"),
    (["--model", "sdar-tiny", "--load-format", "dummy"], "is a block_causal one"),
    ([*DUMMY, "--output", "/nowhere/x.json"], "there is no folder"),
    ([*DUMMY, "--plots", "/nowhere/x"], "there is no folder"),
]
WORKLOADS = [
    (["--model", "bundled-transit", "--prefix-tokens", "5"], "this model has a task"),
    ([*DUMMY, "--requests", "0"], "--requests must be a whole number from 1"),
]
SUBJECTS = ("prefix-similarity", "depth")
CASES = [(command, options, message) for command, rows in REFUSED.items() for options, message in rows]
CASES += [(f"analyze {subject}", options, message) for subject in SUBJECTS for options, message in UNFIT]
CASES += [(f"analyze {subject}", *case) for subject in SUBJECTS[:1] for case in WORKLOADS]
CASES += [(f"analyze {subject}", [*DUMMY, "--tau", "1.5"], "tau must lie between 0 and 1") for subject in SUBJECTS]


@pytest.mark.parametrize(("command", "options", "message"), CASES)
def test_it_is_refused(command: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quiet", *command.split(), *options]) == 2
    assert message in capsys.readouterr().err
