"""The web page: a thin client over the folders of runs, which calls what the command line calls.

Its processes outlive it, and everything that it shows is read from files, so that a page that is
opened again, in another tab or after the server was killed, shows the same.
"""

from typing import Any

__all__ = ["serve"]


def __getattr__(name: str) -> Any:
    """Import the server when it is asked for: processes of jobs start without it."""
    if name == "serve":
        from chronicals.ui.server import serve

        return serve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
