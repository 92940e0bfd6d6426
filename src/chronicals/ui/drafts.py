"""Drafts: what was typed into forms, in files, so that a reload or another tab shows the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from chronicals.ui.place import Place, read_record, write_record


@dataclass(frozen=True)
class Drafts:
    """The drafts of a place, one for each form."""

    place: Place

    def _file(self, form: str) -> Path:
        folder = self.place.kept / "drafts"
        folder.mkdir(exist_ok=True)
        return folder / f"{form}.json"

    def texts(self, form: str) -> dict[str, str]:
        """Return the texts of a form's fields that were filled in."""
        return read_record(self._file(form), {})

    def revision(self, form: str) -> int:
        """Return a number that differs after each change."""
        try:
            return self._file(form).stat().st_mtime_ns
        except OSError:
            return 0

    def write(self, form: str, texts: Mapping[str, str]) -> None:
        """Replace the texts of a form."""
        write_record(self._file(form), dict(texts))

    def fill_in(self, form: str, name: str, text: str) -> None:
        """Set the text of a field; an empty one leaves the field to its default."""
        texts = self.texts(form)
        texts.pop(name, None)
        if text.strip():
            texts[name] = text
        self.write(form, texts)
