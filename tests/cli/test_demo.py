"""The main job: a page, eight questions, three caches, a table and a sentence that reads it."""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from remask.cli import main
from remask.cli.demo import Row, conclusion, table
from remask.tasks import page
from remask.tasks.town import is_correct

NONE = Row("none", 8, 8, 0, 3.0, 3.1, 7.04, 1000, 0)
REUSE, BICACHE = (
    replace(NONE, cache="reuse", correct_count=2, hit_count=7, tokens_per_second=11.2, work=300, depth=30),
    replace(NONE, cache="bicache", hit_count=7, tokens_per_pass=3.2, tokens_per_second=12.0, work=500, depth=6),
)


def test_the_table_and_its_sentence() -> None:
    assert table([NONE, REUSE, BICACHE]).splitlines() == [
        "cache    right   passes an answer  tokens/s  work   prefix hits",
        "none     8 of 8  3.0               7.0       100 %  0 of 8",
        "reuse    2 of 8  3.0               11.2      30 %   7 of 8",
        "bicache  8 of 8  3.0               12.0      50 %   7 of 8",
    ]
    told = conclusion([NONE, REUSE, BICACHE], 30)
    assert "Kept in all 30 layers, as other engines keep a prompt, the page leaves 2 of 8 answers right" in told
    assert "kept in the first 6 (the depth that ships" in told
    assert "it leaves as many right as no cache does, for 2.0 times less work" in told
    assert "1 fewer right" in conclusion([NONE, REUSE, replace(BICACHE, correct_count=7)], 30)
    assert "1 more right" in conclusion([replace(NONE, correct_count=7), REUSE, BICACHE], 30)


def test_the_questions_are_four_look_ups_a_record_and_counts_about_one_page() -> None:
    asked = page.demo_questions()
    assert Counter(item.kind for item in asked) == {"find": 2, "street": 2, "record": 1, "count": 3}
    assert len({item.question for item in asked}) == 8
    assert len({item.system for item in asked}) == 1
    assert all(is_correct(item, item.answer) for item in asked)
    assert {asked[number].kind for number in page.CARD_QUESTIONS} <= {"find", "street", "count"}


def test_it_speaks_before_it_loads_pytorch() -> None:
    code = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch': print('torch', file=sys.stderr); raise SystemExit(7)\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from remask.cli import main\n"
        "main(sys.argv[1:])"
    )
    told = {}
    for words in (("demo",), ("--quiet", "generate", "--model", "bundled", "--prompt", "x")):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        assert done.returncode == 7
        told[words[0]] = done.stderr.splitlines()
    assert told["demo"] == ["remask demo: loading PyTorch and the model, some seconds", "torch"]
    assert told["--quiet"] == ["torch"]


@pytest.mark.thorough
def test_all_answers_of_none_and_bicache_are_right_and_at_most_half_of_reuse(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--quiet", "demo"]) == 0
    out = capsys.readouterr().out
    assert "Answer from this page." in out
    rows = re.findall(r"^(none|reuse|bicache) +(\d) of 8 ", out, re.MULTILINE)
    right = {cache: int(count) for cache, count in rows}
    assert right["none"] == right["bicache"] == 8
    assert right["reuse"] <= 4
    assert out.count("[right]") == sum(right.values())
