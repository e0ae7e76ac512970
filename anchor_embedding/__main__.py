"""`python -m anchor_embedding …` and `torchrun … -m anchor_embedding …` are the command `anchor`; so
is every process of a launched run.
"""

import os

from .cli.main import main

if __name__ == "__main__":
    if "ANCHOR_LIFELINE" in os.environ:  # it was started by `launch`, and ends with it
        from .train.launch import run_worker

        code = run_worker(main)
    else:
        code = main()
    from .model.ranks import end_process

    end_process(code)
