"""`python -m remask_lab decisions`: measures one-pass decisions on questions with known answers.

The form in which questions are written is chosen on the first half of them, and results are those of the second. Rows
are written as soon as they are measured, so that the same command resumes after an interruption.
"""

import sys
from functools import partial

from remask.llm import LLM
from remask_lab.decisions.measure import FORMS, halves, measure, speed
from remask_lab.decisions.questions import draw
from remask_lab.records.record import Sweep, about
from remask_lab.speed.command import command_parser, run_command


def main() -> None:
    """Measure what the options name, and print a line for each row."""
    parser = command_parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    parser.add_argument(
        "--questions", type=int, default=400, help="half yes or no, half choices (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=59, help="default: %(default)s")
    parser.add_argument("--json", help="the file of the result")
    args = parser.parse_args()
    with LLM(args.model, device="cpu", dtype="float32", cache="none") as llm:
        facts = about(llm, seed=args.seed, settings={"questions": args.questions})
        sweep = Sweep(args.json, "decisions", facts)
        by_half = halves(draw(args.questions, args.seed))
        for kind, forms in FORMS.items():
            points = [("first", form, False) for form in forms]
            points += [("second", "default", False), ("second", "default", True)]
            for half, form, calibrate in points:
                questions = [item for item in by_half[half] if item.question["type"] == kind]
                point = {"kind": kind, "half": half, "form": form, "calibrate": calibrate}
                result = sweep.row(point, partial(measure, llm, questions, forms[form], calibrate=calibrate))
                share, low, high = result["accuracy"]
                error, least, most = result["calibration_error"]
                print(
                    f"{kind} {half} half, {form}{', calibrated' if calibrate else ''}: right {share:.3f} "
                    f"[{low:.3f}, {high:.3f}] (chance {result['chance']:.3f}), calibration error {error:.3f} "
                    f"[{least:.3f}, {most:.3f}], log loss {result['log_loss']:.3f}, labels {result['label_mass']:.2f}",
                    flush=True,
                )
            rates = sweep.row({"kind": kind, "half": "speed"}, partial(speed, llm, kind, args.seed))
            text = f"{rates['alone']:.2f} questions a second alone, {rates['together']:.2f} at 60 a body"
            print(f"{kind}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
