"""The pages, a file each: what is shown, and which command is called."""

from __future__ import annotations

from chronicals.ui.pages.benchmark import add_benchmark
from chronicals.ui.pages.chat import add_chat
from chronicals.ui.pages.configuration import add_configuration
from chronicals.ui.pages.data import add_data
from chronicals.ui.pages.doctor import add_doctor
from chronicals.ui.pages.experts import add_experts
from chronicals.ui.pages.export import add_export
from chronicals.ui.pages.mixture import add_mixture
from chronicals.ui.pages.runs import add_runs
from chronicals.ui.pages.stages import add_stages
from chronicals.ui.pages.tuner import add_tuner
from chronicals.ui.services import Services

PAGES = (
    add_runs,
    add_chat,
    add_data,
    add_configuration,
    add_mixture,
    add_stages,
    add_tuner,
    add_benchmark,
    add_experts,
    add_export,
    add_doctor,
)


def add_pages(services: Services) -> None:
    """Add all pages to NiceGUI's application."""
    for add in PAGES:
        add(services)
