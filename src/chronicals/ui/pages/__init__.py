"""The pages, a file each: what is shown, and which command is called."""

from __future__ import annotations

from chronicals.ui.pages.configuration import add_configuration
from chronicals.ui.pages.runs import add_runs
from chronicals.ui.pages.stages import add_stages
from chronicals.ui.services import Services


def add_pages(services: Services) -> None:
    """Add all pages to NiceGUI's application."""
    for add in (add_runs, add_stages, add_configuration):
        add(services)
