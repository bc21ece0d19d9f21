"""`python -m remask_lab decisions`: measures one-pass decisions on questions whose truth is known.

The way in which questions are written is chosen on the first half of them; the second half is what is reported. Rows
are written as soon as they are measured, so the same command goes on where it was interrupted.
"""

import sys

from remask.llm import LLM
from remask_lab.decisions.measure import FORMS, halves, measure, speed
from remask_lab.decisions.questions import draw
from remask_lab.records.record import Sweep, about
from remask_lab.speed.command import command_parser, run_command


def main() -> None:
    """Measure, and print a line for each row."""
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
        parts = halves(draw(args.questions, args.seed))
        for kind, forms in FORMS.items():
            points = [("first", form, False) for form in forms]
            points += [("second", "default", False), ("second", "default", True)]
            for half, form, calibrate in points:
                items = [each for each in parts[half] if each.question["type"] == kind]
                point = {"kind": kind, "half": half, "form": form, "calibrate": calibrate}
                found = sweep.row(
                    point,
                    lambda q=items, f=forms[form], c=calibrate: measure(llm, q, f, calibrate=c),  # type: ignore[misc]
                )
                right, low, high = found["accuracy"]
                error, least, most = found["calibration_error"]
                print(
                    f"{kind} {half} half, {form}{', calibrated' if calibrate else ''}: right {right:.3f} "
                    f"[{low:.3f}, {high:.3f}] (chance {found['chance']:.3f}), calibration error {error:.3f} "
                    f"[{least:.3f}, {most:.3f}], log loss {found['log_loss']:.3f}, labels {found['label_mass']:.2f}",
                    flush=True,
                )
            rate = sweep.row({"kind": kind, "half": "speed"}, lambda k=kind: speed(llm, k, args.seed))  # type: ignore[misc]
            print(
                f"{kind}: {rate['alone']:.2f} questions a second alone, {rate['together']:.2f} at 60 a body", flush=True
            )


if __name__ == "__main__":
    sys.exit(run_command(main))
