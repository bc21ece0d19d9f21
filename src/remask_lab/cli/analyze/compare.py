"""`remask analyze compare`: a page of responses side by side, differences marked, with forwards and times."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from remask.cli.options import add_model_options, check_folder, sampling_option
from remask.core.checks import listed
from remask.errors import ConfigError
from remask_lab.arguments.requests import add_source_options, open_requests
from remask_lab.cli.analyze.page import page
from remask_lab.records.record import Record, about, write_record
from remask_lab.subjects.compare import compare, reading, variant


def add_parser(subjects: Any) -> None:
    """Register the subject."""
    parser = subjects.add_parser("compare", help="responses to the same prompts side by side, differences marked")
    parser.add_argument(
        "--variants",
        required=True,
        metavar="JSON",
        help='what to compare, the first one with all others: ["none", {"cache": "dkv-decode", '
        '"cache_config": {"refresh_interval": 4}, "sampling": {}}]',
    )
    parser.add_argument("--page", metavar="FILE", help="where the page goes, as HTML")
    add_source_options(parser)
    parser.add_argument("--output", metavar="FILE", help="where responses and numbers go, as JSON")
    add_model_options(parser)
    parser.set_defaults(run=run, plots=None)


def run(args: argparse.Namespace) -> int:
    """Answer, print the responses and the reading, and save what was asked for."""
    check_folder("--page", args.page)
    given = _variants(args.variants)
    llm, work = open_requests(args)
    variants = [variant(llm, {"cache": one} if isinstance(one, str) else one) for one in given]
    cases = compare(llm, work, variants, progress=llm.progress)
    told = reading(cases)
    for number, case in enumerate(cases, start=1):
        print(f"Prompt {number}")
        for answer in case.answers:
            words = " ".join(f"[{piece.text}]" if piece.differs else piece.text for piece in answer.pieces)
            print(f"  {answer.variant} ({answer.forwards} forwards, {1e3 * answer.seconds:.0f} ms): {words}")
    print(f"\n{told}")
    settings = {"requests": len(work), "sampling": sampling_option(args), "variants": given}
    facts = about(llm, settings=settings)
    if args.output is not None:
        data = {"cases": [asdict(case) for case in cases], "reading": told}
        write_record(args.output, Record("analyze compare", facts, data))
        print(f"\nSaved as {args.output}")
    if args.page is not None:
        try:
            Path(args.page).write_text(page(llm.loaded.name, cases, told, facts), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--page: {args.page!r} cannot be written: {error.strerror}") from error
        print(f"Page: {args.page}")
    return 0


def _variants(text: str) -> list[Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--variants is not JSON: {error}") from error
    return list(listed("--variants", found, "policies"))
