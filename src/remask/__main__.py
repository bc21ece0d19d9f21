"""`python -m remask` is the command `remask`."""

import sys

from remask.cli import main

sys.exit(main())
