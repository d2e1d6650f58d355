"""`python -m fullshard`, and `torchrun … -m fullshard`."""

import sys

from fullshard.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
