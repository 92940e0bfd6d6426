"""The server of the page: its address, its key and its routes."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from chronicals.config import ConfigurationError
from chronicals.ui.guard import ANY_ADDRESS, Guard, is_loopback, lasting_key
from chronicals.ui.place import Place
from chronicals.ui.services import Services

logger = logging.getLogger(__name__)

SECONDS_TO_CLOSE = 2
"""Longest wait for open pages when the server ends; they open again by themselves."""

SECONDS_TO_RETURN = 3.0
"""A page whose connection was lost for longer is built anew from the files."""

INSTALL = "nicegui is not installed; pip install 'chronicals[ui]'"


def serve(
    root: Path,
    host: str = "127.0.0.1",
    port: int = 8321,
    key: str | None = None,
    remote_code: bool = False,
    in_words: Callable[[str], str] = str,
    announce: Callable[[str], None] = logger.info,
) -> None:
    """Serve the page until Ctrl-C.

    Args:
        root: folder whose runs are shown, and whose files recipes may name.
        host: address to listen at.
        port: likewise.
        key: that lets in; by default a random one that is kept in the root.
        remote_code: permit recipes to run a model's own code.
        in_words: puts the fields that a message names into the form that they have in a recipe.
        announce: prints a line.

    Raises:
        ConfigurationError: NiceGUI is missing, the root is no folder, the port is taken, or others
            can reach the address and no key was chosen.
    """
    if not root.is_dir():
        raise ConfigurationError(f"root={str(root)!r}: is no folder")
    if not is_loopback(host) and key is None:
        raise ConfigurationError(
            f"host={host!r}: others can reach this address; choose a key, too (--key), or leave "
            "out host and tunnel to 127.0.0.1 by ssh -L"
        )
    _check_port(host, port)
    try:
        import nicegui  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise ConfigurationError(f"{INSTALL} ({error})") from None
    services = Services(Place(root.resolve()), remote_code, in_words)
    secret = key or lasting_key(services.place.kept / "key")
    page = _application(services)
    if not is_loopback(host):
        logger.warning(
            "host=%r: whoever can reach this address and has the key can start processes here, "
            "and what is sent is not encrypted",
            host,
        )
    shown = "127.0.0.1" if host in ANY_ADDRESS else host
    named = f"[{shown}]" if ":" in shown else shown
    announce(f"http://{named}:{port}/?key={quote(secret)}")
    config = uvicorn.Config(
        Guard(page, secret, host, port),
        host=host,
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=SECONDS_TO_CLOSE,
        server_header=False,
    )
    uvicorn.Server(config).run()


def _check_port(host: str, port: int) -> None:
    """Check that the address is free.

    Raises:
        ConfigurationError: it is not.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"port={port}: cannot be listened at on {host} ({error.strerror}); end what "
                "listens there, or choose another port"
            ) from None


def _application(services: Services) -> Callable:
    """Return the ASGI application with all pages."""
    from fastapi import FastAPI
    from nicegui import app, ui

    from chronicals.ui.files import add_files
    from chronicals.ui.frame import ICON
    from chronicals.ui.pages import add_pages

    application = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_static_files("/static", Path(__file__).parent / "static")
    app.on_startup(services.begin)
    app.on_shutdown(services.end)
    add_files(application, services)
    add_pages(services)
    ui.run_with(
        application,
        title="chronicals",
        favicon=ICON,
        reconnect_timeout=SECONDS_TO_RETURN,
        tailwind=False,
        show_welcome_message=False,
    )
    return application
