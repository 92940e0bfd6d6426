"""The site's pages are those of the repository, and a link that leads nowhere is found."""

import importlib.util
from pathlib import Path

import pytest

import chronicals

ROOT = Path(__file__).parent.parent


@pytest.fixture
def site(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("site_of_ours", ROOT / ".ci" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PAGES", tmp_path / "pages")
    monkeypatch.setattr(module, "SITE", tmp_path / "site")
    return module


def test_pages_lie_beside_each_other_as_in_the_repository(site):
    site.gather()
    pages = {str(path.relative_to(site.PAGES)) for path in site.PAGES.rglob("*.md")}
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= pages
    assert {"index.md", "reference.md", "CHANGELOG.md", "examples/index.md"} <= pages
    assert "](../index.md)" in (site.PAGES / "docs" / "README.md").read_text()
    assert "](examples/index.md)" in (site.PAGES / "index.md").read_text()


def test_the_reference_has_every_public_name(site):
    text = site.reference()
    assert text.count("::: chronicals.") == len(chronicals.__all__)
    assert "::: chronicals.training.ChronicalsTrainer\n" in text


def test_a_link_that_leads_nowhere_is_found(site):
    site.SITE.mkdir()
    (site.SITE / "a.html").write_text(
        '<h1 id="here">a</h1><a href="b.html#there">b</a><a href="c.html">c</a>'
        '<a href="https://example.org/x">x</a><img src="d.png"><a href="#here">h</a>'
    )
    (site.SITE / "b.html").write_text('<h1 id="theirs">b</h1><a href="a.html#here">a</a>')
    assert site.broken() == ["a.html: b.html#there", "a.html: c.html", "a.html: d.png"]
