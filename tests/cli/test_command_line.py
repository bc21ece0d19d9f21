"""The command line itself: misspelled words, usage, examples, checks before weights are read, and closed pipes."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remask.checks import plugins
from remask.cli import main
from remask.cli.commands import BUILTIN_COMMANDS, LAB_COMMANDS, MOVED_COMMANDS, all_commands
from remask.cli.main import parse
from remask.cli.parser import Parser, examples
from remask.errors import ConfigError, RemaskError

START = "import sys; from remask.cli import main; sys.exit(main())"
MISSPELLED = {
    "generat --model x": ("remask COMMAND ...", "Unknown command 'generat'. Did you mean 'generate'?"),
    "generate --modle bundled-tariff --prompt x": (
        "remask generate (--prompt",
        "no option --modle; did you mean --model?",
    ),
    "generate --modle=bundled-tariff --prompt x": (
        "remask generate (--prompt",
        "no option --modle; did you mean --model?",
    ),
    "serve bundled-tariff --treads 2": (
        "remask serve [MODEL] [options]",
        "no option --treads; did you mean --threads?",
    ),
    "serve one two": ("remask serve [MODEL] [options]", "'two' cannot be used here"),
    "analyze dpeth --model x": ("remask analyze SUBJECT ...", "Unknown subject 'dpeth'. Did you mean 'depth'?"),
    "analyze depth --modl x": ("remask analyze depth ", "no option --modl; did you mean --model?"),
    "generate --load-format dumy --model x --prompt x": ("remask generate", "Did you mean 'dummy'?"),
    "generate --model x --prompt x --version": ("remask generate", "--version comes before the command"),
    "generate --log-level loud": (
        "remask generate",
        "Unknown --log-level 'loud'. Available: debug, error, info, warning.",
    ),
    "--log-format yaml generate": ("remask COMMAND", "Unknown --log-format 'yaml'. Available: json, text."),
    "generate --quantization int9": ("remask generate", "Unknown --quantization 'int9'. Did you mean 'int"),
    "generate --eviction lur": ("remask generate", "Unknown --eviction 'lur'. Did you mean 'lru'?"),
    "generate --prefix-match longets": ("remask generate", "Unknown --prefix-match 'longets'. Did you mean 'longest'?"),
    "generate --prefix-sharing aut": ("remask generate", "Unknown --prefix-sharing 'aut'. Did you mean 'auto'?"),
    "generate --attention trition": ("remask generate", "Unknown --attention 'trition'. Did you mean 'triton'?"),
    "generate --zzz": ("remask generate", "there is no option --zzz\n"),
    "--quite generate": ("remask COMMAND ...", "no option --quite; did you mean --quiet?"),
    "generate --model bundled-tariff": ("remask generate (--prompt TEXT | --input FILE) --model MODEL", "is required"),
}


@pytest.mark.parametrize("line", MISSPELLED)
def test_a_misspelled_word_is_named_with_the_nearest(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    usage, error = MISSPELLED[line]
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"usage: {usage}"), "the usage of the command that failed"
    assert error in told.err
    assert len(told.err.splitlines()) <= 4, "the usage fits on a screen"


def test_the_second_word_of_a_command_counts_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "pul", "x"]) == 2
    assert "Unknown command 'models pul'. Did you mean 'models pull'?" in capsys.readouterr().err


@pytest.mark.parametrize("old", MOVED_COMMANDS)
def test_a_command_of_another_name_names_what_does_it_now(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quiet", *old.split(), "--model", "x"]) == 2
    assert (
        capsys.readouterr().err == f"remask: error: there is no command {old!r} any more; use {MOVED_COMMANDS[old]}\n"
    )
    words = MOVED_COMMANDS[old].replace(",", "").split()[1:3]
    assert {" ".join(words), words[0]} & set(all_commands())


@pytest.mark.parametrize("name", LAB_COMMANDS)
def test_a_command_of_a_package_that_is_not_installed_says_how_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {*LAB_COMMANDS} | {*BUILTIN_COMMANDS} == {*all_commands()}
    monkeypatch.setattr(sys.modules["remask.cli.main"], "all_commands", lambda: dict(BUILTIN_COMMANDS))
    assert main([*name.split(), "--model", "x"]) == 2
    told = capsys.readouterr().err
    install = "pip install './lab' (in remask's repository)"
    assert told == f"remask: error: the command {name!r} is part of remask-lab; install it with: {install}\n"


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        (None, "pip install 'remask[lab]'"),
        ({"archive_info": {}, "url": "file:///dist/remask-0.1.0-py3-none-any.whl"}, "pip install 'remask[lab]'"),
        ({"dir_info": {"editable": True}, "url": "file:///remask"}, "pip install './lab' (in remask's repository)"),
        ({"vcs_info": {"vcs": "git"}, "url": "https://x.org"}, "pip install './lab' (in remask's repository)"),
    ],
)
def test_what_installs_an_extra_follows_from_where_remask_came_from(
    monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None, line: str
) -> None:
    """pip leaves a note of what is not from an index (PEP 610)."""
    note = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(plugins, "distribution", lambda _: SimpleNamespace(read_text=lambda _: note))
    monkeypatch.setattr(plugins, "requires", lambda _: ["torch>=2.8", "remask-lab ; extra == 'lab'"])
    assert plugins.install_command("lab") == line


def test_abbreviations_and_values_are_no_misspellings() -> None:
    args = parse(["generate", "--mod", "bundled-tariff", "--prompt", "--not an option"])
    assert (args.model, args.prompt) == ("bundled-tariff", "--not an option")
    assert parse(["analyze", "depth", "--model", "x", "--seed", "-1"]).seed == -1


@pytest.mark.parametrize(
    "words", ["--quiet --log-level info --log-format json {}", "{} --quiet --log-level=info --log-format json"]
)
@pytest.mark.parametrize("command", ["generate --model x --prompt y", "models pull z", "analyze depth --model x"])
def test_what_all_commands_have_stands_before_or_after_them(words: str, command: str) -> None:
    args = parse(shlex.split(words.format(command)))
    assert (args.quiet, args.log_level, args.log_format) == (True, "info", "json")
    plain = parse(shlex.split(command))
    assert (plain.quiet, plain.log_level, plain.log_format) == (False, "warning", "text")
    assert parse(shlex.split(f"--quiet {command}")).log_level == "warning"


def test_servers_log_what_they_do_unless_they_are_told_to_be_quiet() -> None:
    assert [parse(words.split()).log_level for words in ("serve", "deploy", "--quiet serve")] == [
        "info",
        "info",
        "warning",
    ]


HEAVY = ("torch", "numpy", "transformers", "pydantic", "fastapi", "huggingface_hub", "openai", "httpx")
LIGHT = (
    *MISSPELLED,
    "chat --base-url http://127.0.0.1:9/v1",
    "generate --model x --input nowhere.jsonl",
    "--help",
    "--version",
)


def test_help_misspelled_words_and_a_chat_with_a_server_import_no_pytorch() -> None:
    """One process does all of it, and what it has imported at the end is what any of them imports."""
    code = (
        "import contextlib, io, json, sys\n"
        "from remask.cli import main\n"
        "ended = []\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "        try:\n"
        "            ended.append(main(words))\n"
        "        except SystemExit as end:\n"
        "            ended.append(end.code)\n"
        "print(json.dumps([ended, list(sys.modules)]))"
    )
    helps = [
        [*own.prog.split()[1:], "--help"]
        for name in all_commands()
        for own in (Parser(prog=f"remask {name}"), *filled(name))
    ]
    lines = [*helps, *(line.split() for line in LIGHT)]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(lines)], capture_output=True, text=True, input="", check=True
    )
    ended, modules = json.loads(done.stdout)
    assert ended[: len(helps)] == [0] * len(helps)
    assert len(helps) > 20, "those of subjects too"
    assert set(ended[len(helps) : -4]) == {2}
    assert ended[-4:] == [0, 2, 0, 0]
    assert "remask_lab.cli.analyze" in modules
    assert not set(HEAVY) & set(modules)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own in action.choices.values():
                yield from parsers(own)


def command_parser(name: str) -> argparse.ArgumentParser:
    parser = Parser(prog=f"remask {name}")
    all_commands()[name].add_arguments(parser)
    return parser


def filled(name: str) -> list[argparse.ArgumentParser]:
    return list(parsers(command_parser(name)))[1:]


def examples_in(epilog: str) -> tuple[str, ...]:
    """The commands of the examples at the end of a help; none of any other text."""
    before = examples()
    return tuple(map(str.strip, epilog.removeprefix(before).splitlines())) if epilog.startswith(before) else ()


@pytest.mark.parametrize("name", all_commands())
def test_every_help_ends_with_two_examples_that_the_parser_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = [all_commands()[name].examples, *(examples_in(own.epilog or "") for own in filled(name))]
    for commands in told:
        assert len(commands) == 2
        for example in commands:
            words = shlex.split(example)
            assert " ".join(words[1:]).startswith(name)
            assert parse(words[1:]).run is not None
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    help_text = capsys.readouterr().out
    assert help_text.endswith("examples:\n" + "".join(f"  {example}\n" for example in told[0]))


def shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    help_text = capsys.readouterr().out
    assert help_text.startswith(f"usage: remask {words[0]}")
    return set(re.findall(r"^  (?:-h, )?(--[\w-]+)", help_text, re.MULTILINE))


@pytest.mark.parametrize("name", ["serve", "chat", "generate", "bench"])
def test_a_short_help_shows_what_most_need_and_another_one_all(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    few, every = shown([name, "--help"], capsys), shown([name, "--help=all"], capsys)
    assert few < every
    assert len(few) <= 22
    (own,) = parsers(command_parser(name))
    assert every == {
        next(flag for flag in each.option_strings if flag.startswith("--"))
        for each in own._actions
        if each.option_strings
    }
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert f"{len(every - few)} more options: 'remask {name} --help=all' lists them" in " ".join(
        capsys.readouterr().out.split()
    )
    with pytest.raises(SystemExit) as ended:
        main([name, "--help=al"])
    assert ended.value.code == 2
    assert "--help=all for all" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--config", "--conf"])
def test_a_file_gives_flags_by_name_or_by_section(flag: str, tmp_path: Path) -> None:
    """An abbreviation reads it too, and the command line wins."""
    file = tmp_path / "flags.yaml"
    file.write_text("concurrency: 3\nmodel: {model: x, dtype: float32}\nfurther options: {seed: 5}\n", encoding="utf-8")
    args = parse(["bench", flag, str(file), "--dtype", "bfloat16"])
    assert (args.model, args.dtype, args.concurrency, args.seed) == ("x", "bfloat16", 3, 5)
    file.write_text("engine: {overlap: false, graphs: true}\nmodel: x\ntask: --odd\ndetail: true\n", encoding="utf-8")
    args = parse(["bench", flag, str(file)])
    assert (args.overlap, args.graphs, args.task, args.detail) == (False, True, "--odd", True)
    for content, message in (
        ("engine: {dtyp: x}", "Unknown flag"),
        ("model: {seed: 5}", "section model"),
        ("model: {config: x}", "another file"),
    ):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(RemaskError, match=message):
            parse(["bench", flag, str(file)])


def test_dates_of_a_file_are_texts_and_other_values_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("sampling: {stop: 2024-01-01}\n", encoding="utf-8")
    assert parse(["serve", "bundled", "--config", str(file)]).sampling == '{"stop": "2024-01-01"}'
    file.write_text("sampling: {stop: !!set {a}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is no value of JSON"):
        parse(["serve", "bundled", "--config", str(file)])


def test_the_whole_help_ends_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    examples = capsys.readouterr().out.rpartition("examples:\n")[2].splitlines()
    assert len(examples) == 2
    for example in examples:
        parse(shlex.split(example)[1:])


@pytest.mark.few(3)
@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
@pytest.mark.parametrize("words", ["--help", "generate --help-fields", "--quiet generate --model MODEL --input FILE"])
def test_a_reader_that_leaves_ends_it_quietly(words: str, tmp_path: Path) -> None:
    """As other tools are: 141 is what a shell says of a process that SIGPIPE has ended."""
    golden = Path(__file__).parents[1] / "goldens" / "llada"
    lines = tmp_path / "in.jsonl"
    one = {"prompt_token_ids": [1, 2, 3], "sampling": {"max_tokens": 8}}
    lines.write_text("".join(json.dumps(one) + "\n" for _ in range(3)), encoding="utf-8")
    command = [word.replace("MODEL", str(golden)).replace("FILE", str(lines)) for word in words.split()]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-c", START, *command], stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "remask", "serve", "--port", "x"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "remask serve: error: " in done.stderr
