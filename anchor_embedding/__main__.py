"""`python -m anchor_embedding …` and `torchrun … -m anchor_embedding …` are the command `anchor`."""

from .cli import main

if __name__ == "__main__":
    code = main()
    from .model.ranks import end_process

    end_process(code)
