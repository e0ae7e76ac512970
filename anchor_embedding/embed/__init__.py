"""Texts to vectors and back: the embedder, and what is done with one."""
