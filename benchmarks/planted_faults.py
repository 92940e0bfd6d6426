"""Writes docs/gate.md: every rule of the gate, and what it finds in a file with one fault planted
for it.

``python benchmarks/planted_faults.py [--out docs/gate.md]``; a second on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from page_text import laid_out  # noqa: E402

from chronicals.data import build_store  # noqa: E402
from chronicals.data.reading.gate import RULES, DataReport  # noqa: E402
from data.planted_faults import ALONG, PLANTED, WIDTH, encoder, planted, rule_of  # noqa: E402  the tests' own table

INTRODUCTION = """\
# The data checks

Before the first step every row is checked. What is wrong is logged as a table and written to `train_dataset.json` and
`eval_dataset.json` in `output_dir`: each broken rule, how often, in which rows, and what to do. `chronicals train --check`
stops after the checks; `chronicals data show recipe.yaml`, or `FILE --model M`, shows rows as the model will see them.

The first line counts the rows by kind, and what becomes of them: every row that was read is trained, held out, or left out
for the rule that is named. `--check` prints the same as a table, and `report.html` has it, too:

```
train_dataset: 400 rows (200 chat, 200 instruction): 378 (188 chat, 190 instruction) trained, \
20 (10 chat, 10 instruction) held out, 2 left out (2 empty_answer), 378 documents, …
```

Documents and tokens are those that are trained. Of pairs and judged answers they are named: `200 rows (200 preference),
400 answers, 200 shared prompts`.

A rule is an error where it concerns a larger fraction of the rows than its limit, else a warning. All errors are reported at
once, and training does not start. Rows that cannot be used are left out. A limit is changed by the rule's name, in a recipe
or as `--gate duplicate_row=0.1`; `evaluate` takes those of the run, or `--gate`:

```yaml
gate:
  empty_answer: 0.01    # up to one row in a hundred may have an empty answer; such rows are left out
  duplicate_row: 0.2    # an error if more than a fifth of the rows are duplicates
```

This page is written by `python benchmarks/planted_faults.py`. Its last column says what the checks report for a file of sound
rows with one such fault planted in it: chats, or the rows of the objective that it names.

| rule | an error above | what it finds | what to do | found in a planted file |
|---|---|---|---|---|
"""


def found(rule: str) -> str:
    """The rule's verdict on each file planted for it."""
    names = [name for name in PLANTED if rule_of(name) == rule]
    return (
        "; ".join(" ".join([*name.split("/")[1:2], verdict(name)]) for name in names)
        or "tests of its own"
    )


def verdict(name: str) -> str:
    """On a planted file, in which the rule must find that row, and nothing that does not come
    along.
    """
    rule = rule_of(name)
    with tempfile.TemporaryDirectory() as folder:
        path, tokenizer, number = planted(name, Path(folder))
        report: DataReport = build_store(path, encoder(name, tokenizer), WIDTH, Path(folder)).report
    finding = report.findings[rule]
    if finding.rows != [number] or set(report.findings) != {rule} | ALONG.get(name, set()):
        raise SystemExit(
            f"{name}: planted in row {number}, found {json.dumps(asdict(report)['findings'])}"
        )
    along = "".join(f", with `{other}`" for other in sorted(set(report.findings) - {rule}))
    return f"{report.level(rule, {})}, row {number} of {report.rows}{along}"


def page() -> str:
    random.seed(0)
    lines = []
    for rule, (what, remedy, share) in RULES.items():
        above = {None: "never, it is no fault", 0: "any", 1: "never"}.get(
            share
        ) or f"{share:.0%} of the rows"
        lines.append(f"| `{rule}` | {above} | {what} | {remedy} | {found(rule)} |")
    return laid_out(INTRODUCTION + "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gate.md")
    parser.parse_args().out.write_text(page())


if __name__ == "__main__":
    main()
