"""The command `anchor`: it parses arguments and calls the library."""
