"""Table of the space of a run by part, for ``chronicals plan`` and ``chronicals train --check``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from chronicals.planning import Space

GIB = 2**30


def show_space(space: Space, console: Console) -> None:
    """Print what a card holds at its largest moment, host memory and disk, in GiB.

    On the CPU that moment is of host memory.

    Args:
        space: of the run, on one card or on the CPU.
        console: where it is printed.
    """
    from rich import box
    from rich.table import Table

    where = "one card" if space.is_on_card else "the CPU"
    table = Table(f"{where}, at {space.peak.name}", "GiB", box=box.SIMPLE)
    table.columns[1].justify = "right"
    if space.is_on_card:
        _add_rows(table, space.peak.parts)
        table.add_section()
        table.add_row("tensors, at most", f"{space.peak.held / GIB:.2f}")
        table.add_row("allocator's rounding of weights", f"{space.rounding / GIB:.2f}")
        if space.graphs:
            table.add_row("pool of CUDA graphs", f"{space.graphs / GIB:.2f}")
        table.add_row("the driver's own", f"{space.driver / GIB:.2f}")
        of_card = f" of {space.total / GIB:.2f}" if space.total else ""
        table.add_row("[bold]in all[/]", f"[bold]{space.on_card / GIB:.2f}[/]{of_card}")
    for title, parts in (("host memory", space.host), ("disk", space.disk)):
        table.add_section()
        table.add_row(f"[bold]{title}[/]", f"[bold]{sum(parts.values()) / GIB:.2f}[/]")
        _add_rows(table, parts)
    console.print(table)
    moments = ", ".join(f"{name} {size / GIB:.2f}" for name, size in space.moments.items())
    console.print(f"Moments of a step: {moments}.", soft_wrap=True, highlight=False)
    console.print(
        f"In no part: {'; '.join(space.uncounted)}.", soft_wrap=True, markup=False, highlight=False
    )


def _add_rows(table: Table, parts: Mapping[str, int]) -> None:
    """Add a row for each part, the largest first."""
    for name, size in sorted(parts.items(), key=lambda part: -part[1]):
        table.add_row(f"  {name}", f"{size / GIB:.2f}")
