"""The one exception for bad input: a message a user can act on, naming file, line and remedy."""


class InputError(ValueError):
    """Something a user gave (a file, a row, a setting, a model) cannot be used; the message says what to do."""
