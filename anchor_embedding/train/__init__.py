"""A recipe in, a run folder out."""
