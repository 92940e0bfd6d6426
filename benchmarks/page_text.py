"""Lays out the text of pages: lines of 120 columns, paragraphs of at most six lines.

    python benchmarks/page_text.py docs/training.md ...

The scripts that write pages call ``laid_out`` on what they wrote.
"""

import re
import sys
import textwrap
from pathlib import Path

COLUMNS = 120
MOST_LINES = 6

ITEM = re.compile(r"^(\s*)([-*] |\d+\. )?")
UNBROKEN = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)")
"""Code and links, which stay on one line."""

SENTENCE_END = re.compile(r"(?<=[.:;)`])\s+(?=[A-Z`\[*])")


def laid_out(text: str) -> str:
    """Return a page whose long paragraphs are wrapped and divided between sentences.

    Tables, headings, images, comments and blocks of code stay as they are.
    """
    lines = text.split("\n")
    result: list[str] = []
    in_code = False
    position = 0
    while position < len(lines):
        line = lines[position]
        if line.strip().startswith("```"):
            in_code = not in_code
        if in_code or not is_prose(line):
            result.append(line)
            position += 1
            continue
        end = position + 1
        while end < len(lines) and is_prose(lines[end]) and not ITEM.match(lines[end]).group(2):
            end += 1
        result += paragraph(lines[position:end])
        position = end
    return "\n".join(result)


def is_prose(line: str) -> bool:
    """Return whether a line belongs to a paragraph or a list."""
    return bool(line.strip()) and not line.strip().startswith(("```", "|", "#", "<!--", "!["))


def paragraph(lines: list[str]) -> list[str]:
    """Return the lines of a paragraph or a list's item, wrapped and divided where it is long."""
    indent, mark = ITEM.match(lines[0]).groups(default="")
    if all(len(line) <= COLUMNS for line in lines) and len(lines) <= MOST_LINES:
        return lines
    text = " ".join(line.strip() for line in lines)
    later = indent + " " * len(mark)
    wrapped = wrap(text, indent, later)
    if len(wrapped) <= MOST_LINES:
        return wrapped
    sentences = SENTENCE_END.split(text)
    parts = [sentences[0]]
    share = len(wrapped) // (len(wrapped) // MOST_LINES + 1) * COLUMNS
    for sentence in sentences[1:]:
        if len(parts[-1]) + len(sentence) > max(share, 3 * COLUMNS):
            parts.append(sentence)
        else:
            parts[-1] += " " + sentence
    divided = wrap(parts[0], indent, later)
    for part in parts[1:]:
        divided += ["", *wrap(part, later, later)]
    return divided


def wrap(text: str, first: str, later: str) -> list[str]:
    """Return lines of at most ``COLUMNS``; code and links are not broken."""
    whole = UNBROKEN.findall(text)
    # A run of x, which textwrap does not break, stands for each, and is as long.
    hidden = UNBROKEN.sub(lambda found: "\0" + "x" * (len(found.group()) - 1), text)
    lines = textwrap.wrap(
        hidden,
        COLUMNS,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
    remaining = iter(whole)
    return [re.sub("\0x*", lambda _: next(remaining), line) for line in lines]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(laid_out(page.read_text()))
