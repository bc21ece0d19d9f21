"""Many questions over one document, each answered by one pass over it: nothing is generated.

python examples/decisions.py
"""

import json
from pathlib import Path

from remask import LLM

BODY = json.loads((Path(__file__).parent / "decisions.json").read_text(encoding="utf-8"))


def main() -> None:
    """Print each answer with what it was chosen from."""
    with LLM("bundled-tariff", cache="bicache") as llm:
        found = llm.decide(BODY["state"], BODY["questions"])
    for name, decision in found.answers.items():
        shares = ", ".join(f"{choice} {share:.2f}" for choice, share in decision.probabilities.items())
        print(f"{name}: {decision.choice}   [{shares}; all labels {decision.label_mass:.2g}]")
    print(f"{found.usage.forwards} passes, no token generated")


if __name__ == "__main__":
    main()
