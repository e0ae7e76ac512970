"""Several models side by side, and a report of them."""
