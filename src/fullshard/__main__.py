"""`python -m fullshard`, and `torchrun … -m fullshard`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # `-m` puts the working directory first, where a file of the user's would replace a module of Python.
        sys.path.append(sys.path.pop(0))
    from fullshard.cli.main import main

    sys.exit(main())
