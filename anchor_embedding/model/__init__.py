"""A text becomes a vector, and a vector the beginning of a text: tokens, packing, decoders."""
