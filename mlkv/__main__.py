"""`python -m mlkv`: see mlkv.cli."""

import sys

from mlkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
