"""Which share of the settings of other tools' configurations ``chronicals convert`` knows.

    python benchmarks/convert_coverage.py --output results.json AXOLOTL/examples FACTORY/examples …

reads every YAML file under the folders, and every command line that starts a training in their
Markdown and Python files. A setting that is not set (``null``) counts as one; the entries of a list
of data sets count one by one. A file of none of the tools is listed, and not counted.
"""

from __future__ import annotations

import argparse
import collections
import json
import shlex
import tempfile
from pathlib import Path

from chronicals.config import ConfigurationError
from chronicals.convert import Conversion, convert
from chronicals.convert.reading import commands

WITH_COMMANDS = (".md", ".py", ".sh")
WITH_SETTINGS = (".yaml", ".yml")


def conversions(folder: Path, refused: list[str]) -> list[Conversion]:
    """The conversions of all files and commands under a folder; files of no tool are ``refused``."""
    found: list[Conversion] = []
    for file in sorted(folder.rglob("*")):
        if file.suffix in WITH_SETTINGS:
            try:
                found.append(convert(file))
            except ConfigurationError as error:
                refused.append(str(error)[:160])
        elif file.suffix in WITH_COMMANDS:
            found += of_commands(file.read_text(), refused)
    return found


def of_commands(text: str, refused: list[str]) -> list[Conversion]:
    """The conversions of the command lines in a text, each read from a script of its own."""
    found: list[Conversion] = []
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "train.sh"
        try:
            for _, words in commands(text):
                script.write_text(shlex.join(words))
                found.append(convert(script))
        except ConfigurationError as error:
            refused.append(str(error)[:160])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--source", action="append", default=[], help="repository and commit")
    parser.add_argument("--show", action="store_true", help="print what is not known")
    given = parser.parse_args()
    refused: list[str] = []
    kinds: dict[str, collections.Counter[str]] = {}
    unknown: collections.Counter[str] = collections.Counter()
    files: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    for folder in given.folders:
        for conversion in conversions(folder, refused):
            tool = conversion.theirs.tool
            files[tool] += 1
            for line in conversion.lines:
                kinds.setdefault(tool, collections.Counter())[line.answer.kind] += 1
                if line.answer.kind == "not known":
                    unknown[f"{tool} {line.setting.name}"] += 1
            try:
                conversion.recipe()
            except ConfigurationError as error:
                refusals[str(error).rpartition(f"{conversion.theirs.file}")[2][:140]] += 1
    result = {}
    for tool, counts in kinds.items():
        total = counts.total()
        result[tool] = {
            "configurations": files[tool],
            "settings": total,
            **counts,
            "share known": round(1 - counts["not known"] / total, 5),
        }
    every = sum(counts.total() for counts in kinds.values())
    lost = sum(counts["not known"] for counts in kinds.values())
    result["all"] = {"settings": every, "share known": round(1 - lost / every, 5)}
    print(json.dumps(result, indent=1))
    if given.show:
        for name, count in [*unknown.most_common(), *refusals.most_common(60)]:
            print(count, name)
    if given.output:
        found = {
            "sources": given.source,
            **result,
            "of no tool": len(refused),
            "not known": dict(unknown),
        }
        given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
