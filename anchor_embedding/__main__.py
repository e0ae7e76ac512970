"""`python -m anchor_embedding …` and `torchrun … -m anchor_embedding …` are the command `anchor`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
