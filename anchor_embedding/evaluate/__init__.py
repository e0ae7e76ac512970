"""Scores, and what their differences mean."""
