"""Parts of a self-contained HTML page: tables, images, and the page around them."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem } table { border-collapse: collapse }
th, td { text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top } thead th { border-bottom: 1px solid #ccc }
th { font-weight: 500; color: #666 } img { width: 100% } pre { white-space: pre-wrap; margin: 0; font: inherit }
.error { color: #b00 } .warning { color: #a60 } details { margin-top: 1rem }
"""


def write_page(
    path: Path, title: str, facts: Mapping[str, object], sections: Iterable[tuple[str, str]]
) -> None:
    """Write a page.

    Args:
        path: of the file.
        title: of the page.
        facts: by name, for the table at the top.
        sections: title and HTML of each.
    """
    name = html.escape(title)
    parts = [f"<h1>{name}</h1>{pairs(facts)}"]
    for heading, content in sections:
        parts.append(f"\n<h2>{html.escape(heading)}</h2>\n{content}")
    path.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>\n'
        f"<style>{STYLE}</style></head>\n<body>{''.join(parts)}\n</body></html>\n",
        encoding="utf-8",
    )


def image(about: str, svg: bytes) -> str:
    """Render an image, within the page itself.

    Args:
        about: what it shows.
        svg: the image.
    """
    data = base64.b64encode(svg).decode()
    return f'<img alt="{html.escape(about)}" src="data:image/svg+xml;base64,{data}">'


def pairs(facts: Mapping[str, object]) -> str:
    """Render facts by name, a row each."""
    rows = (
        f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>"
        for k, v in facts.items()
    )
    return f"<table>{''.join(rows)}</table>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], classes: bool = False) -> str:
    """Render a table; the first cell of a row is its class, if asked."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = []
    for row in rows:
        cells = "".join(f"<td><pre>{html.escape(cell)}</pre></td>" for cell in row)
        body.append(
            f'<tr class="{html.escape(row[0])}">{cells}</tr>' if classes else f"<tr>{cells}</tr>"
        )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
