"""Errors that a command shows as one message, without a traceback."""


class UsageError(Exception):
    """The command line is wrong: exit code 2."""


class CommandError(Exception):
    """The command line is right, the work failed: exit code 1."""
