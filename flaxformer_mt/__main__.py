"""`python -m flaxformer_mt` is the command line."""

import sys

from flaxformer_mt.cli import main

if __name__ == "__main__":
    sys.exit(main())
