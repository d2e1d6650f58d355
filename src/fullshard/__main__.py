"""`python -m fullshard`, and `torchrun … -m fullshard`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # `-m` puts the working directory first, where a file would replace a module of Python. Modules that a
        # run names are found there all the same: see `append_working_directory_to_path`.
        sys.path.pop(0)
    from fullshard.cli.main import main

    sys.exit(main())
