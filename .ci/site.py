"""Build the site: put the pages together, let Zensical build them, and follow every link.

    python .ci/site.py            # pages, build, links
    python .ci/site.py --pages    # the pages alone, into build/site-pages

A link that leads nowhere, to a page, a file or a heading, is an error.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "site-pages"
SITE = ROOT / "build" / "site"
COPIED = ("docs", "examples", "benchmarks/results")
SINGLE = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "benchmarks/NOTES.md", "pyproject.toml")
LINK = re.compile(r"(?<=\]\()([^)\s#]+)")


def gather() -> None:
    """Copy the pages, and the files that they lead to, to the places that they have here."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for folder in COPIED:
        shutil.copytree(ROOT / folder, PAGES / folder)
    for name in SINGLE:
        (PAGES / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, PAGES / name)
    shutil.copy(ROOT / "README.md", PAGES / "index.md")
    examples = sorted(path.name for path in (ROOT / "examples").iterdir() if path.is_file())
    listed = "".join(f"- [{name}]({name})\n" for name in examples)
    (PAGES / "examples" / "index.md").write_text(f"# Examples\n\n{listed}")
    (PAGES / "reference.md").write_text(reference())
    for page in PAGES.rglob("*.md"):
        parts = LINK.split(page.read_text())  # texts and links by turns
        parts[1::2] = [_in_site(link, page) for link in parts[1::2]]
        page.write_text("".join(parts))


def _in_site(target: str, page: Path) -> str:
    """Return a link with the place that its target has in the site; sources are copied there."""
    if ":" in target:
        return target
    path = (page.parent / target).resolve()
    if path == PAGES / "README.md":
        return target.replace("README.md", "index.md")
    if path == PAGES / "examples":
        return f"{target.rstrip('/')}/index.md"
    source = ROOT / path.relative_to(PAGES) if path.is_relative_to(PAGES) else path
    if source.is_file() and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, path)
    return target


def reference() -> str:
    """Return the page of the public names, which mkdocstrings fills from their docstrings."""
    tree = ast.parse((ROOT / "src" / "chronicals" / "__init__.py").read_text())
    homes = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOME"
    )
    names = [home.replace(":", ".").rstrip(".") for home in homes.values()]
    return "# Reference\n\n" + "".join(f"::: {name}\n\n" for name in names)


class Page(HTMLParser):
    """Links and anchors of a built page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif value and ((tag == "a" and name == "href") or (tag == "img" and name == "src")):
                self.links.append(value)


def broken() -> list[str]:
    """Return the links of the built site that lead nowhere."""
    pages = {path: Page(path) for path in SITE.rglob("*.html") if path.name != "404.html"}
    wrong: list[str] = []
    for path, page in pages.items():
        for link in page.links:
            if urlparse(link).scheme or link.startswith("//"):
                continue
            name, anchor = urldefrag(unquote(link))
            target = (path.parent / name).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            found = target.exists() and (
                not anchor or target not in pages or anchor in pages[target].anchors
            )
            if not found:
                wrong.append(f"{path.relative_to(SITE)}: {link}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", action="store_true", help="put the pages together, and stop")
    given = parser.parse_args()
    gather()
    if given.pages:
        return 0
    zensical = Path(sys.executable).with_name("zensical")
    done = subprocess.run([zensical, "build", "--clean", "--strict"], cwd=ROOT)
    if done.returncode:
        return done.returncode
    wrong = broken()
    for link in wrong:
        print(f"leads nowhere: {link}", file=sys.stderr)
    print(f"{len(list(SITE.rglob('*.html')))} pages, {len(wrong)} broken links")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
