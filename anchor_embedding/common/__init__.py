"""Files, errors, settings, and how values are shown: what every room may use."""
