"""The command line: a file a command, or related ones; parses, calls, prints."""

from chronicals.cli.app import main

__all__ = ["main"]


def __dir__() -> list[str]:
    return sorted(__all__)
