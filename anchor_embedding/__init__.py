"""Turn a decoder language model into a text embedder: Anchor Embedding's two stages, packed, tested and measured.

The front door is `Embedder`; torch and transformers load when it is first used.
"""

__version__ = "0.1.0"
__all__ = ["Embedder", "__version__"]


def __getattr__(name):
    if name == "Embedder":
        from .embed.embedder import Embedder

        return Embedder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
