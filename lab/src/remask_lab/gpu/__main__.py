"""`python -m remask_lab gpu`, which `scripts/gpu` calls: names what is missing before anything else is imported."""

import sys
import time
from importlib.util import find_spec

START = time.monotonic()
# Packages that every part needs, by the names of their imports. `Part.needs` has the others.
NEEDED = {
    "numpy": "numpy",
    "safetensors": "safetensors",
    "torch": "torch",
    "tqdm": "tqdm",
    "transformers": "transformers",
    "xxhash": "xxhash",
    "yaml": "pyyaml",
}


def main() -> int:
    """Run the command. Returns 2 where packages are missing, else its status."""
    missing = [package for name, package in NEEDED.items() if find_spec(name) is None]
    if missing:
        print(f"error: scripts/gpu needs {', '.join(missing)}: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    from remask_lab.gpu.run import run

    return run(START)


if __name__ == "__main__":
    sys.exit(main())
