"""`python -m baton`: the `baton` command where its console script is not on the PATH."""

from __future__ import annotations

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
