"""The errors that this package raises on purpose; each is shown to the user as one line."""

import errno
from contextlib import contextmanager


class InputError(ValueError):
    """Something a user gave (a file, a row, a setting, a model) cannot be used; the message says what to do."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind if it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def one_line(error: BaseException, most: int = 200) -> str:
    """An error's message in one line of at most so many characters."""
    return " ".join(str(error).split())[:most]


class Stopped(Exception):
    """A run ended because it was told to (Ctrl-C, SIGTERM), with everything up to then saved;
    `signal` is its number, `remedy` how it goes on.
    """

    def __init__(self, message: str, signal: int, remedy: str = "go on with --resume"):
        super().__init__(message)
        self.signal = signal
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{super().__str__()}; {self.remedy}"


@contextmanager
def lost_without_room():
    """Context for a message: one for which the disk of a log has no room is lost, and work goes on."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
