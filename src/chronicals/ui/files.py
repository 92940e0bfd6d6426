"""Files of runs and jobs as they are: reports, logs, recipes. None of them runs in the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chronicals.config import ConfigurationError
from chronicals.config.recipe import RESUME_FILE
from chronicals.ui.runs import REPORT
from chronicals.ui.services import Services

if TYPE_CHECKING:
    from fastapi import FastAPI

PLAIN = "text/plain; charset=utf-8"

SHUT_IN = {
    "content-security-policy": "sandbox; default-src 'none'; img-src data:; style-src "
    "'unsafe-inline'; frame-ancestors 'self'"
}
"""A report has texts of data and models. It is shown without scripts, requests or our cookie."""


def add_files(application: FastAPI, services: Services) -> None:
    """Add the routes of files to the application."""
    from fastapi import HTTPException
    from fastapi.responses import FileResponse, Response

    def found(run: str, name: str, media_type: str, headers: dict[str, str]) -> Response:
        try:
            folder = services.runs.named(run).folder
            path = services.place.inside(folder / name)
        except ConfigurationError as error:
            raise HTTPException(404, str(error)) from None
        if not path.is_file():
            raise HTTPException(404, f"{run}: has no {name}")
        return FileResponse(path, media_type=media_type, headers=headers)

    @application.get("/file/report")
    def report(run: str) -> Response:
        return found(run, REPORT, "text/html", SHUT_IN)

    @application.get("/file/recipe")
    def recipe(run: str) -> Response:
        return found(run, RESUME_FILE, PLAIN, {})

    @application.get("/file/log")
    def log(job: str) -> Response:
        known = services.jobs.named(job)
        if known is None or not known.log.is_file():
            raise HTTPException(404, f"{job}: has no output")
        return FileResponse(known.log, media_type=PLAIN)
