"""``chronicals doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from chronicals.standard_json import to_json


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
    test: Annotated[bool, typer.Option("--self-test/--no-self-test", help="Run each kernel against its definition")] = True,
) -> None:
    """What this machine has, what will run on it, and a self-test of each kernel.

    Exit code 1 if a kernel differs from its definition.
    """
    from rich.console import Console
    from rich.table import Table

    from chronicals.verification import inspect_machine, self_test

    machine, results = inspect_machine(), self_test() if test else []
    failed = [result for result in results if not result.passed]
    if as_json:
        print(to_json({"machine": machine, "kernels": [result.to_dict() for result in results]}, indent=2))  # noqa: T201
    else:
        console = Console()
        facts = Table("machine", "", show_edge=False)
        for name, value in machine.items():
            facts.add_row(name, str(value))
        kernels = Table("kernel", "runs as", "error", "plain error", "", show_edge=False)
        for result in results:
            verdict = "[green]ok[/]" if result.passed else "[bold red]differs[/]"
            kernels.add_row(result.name, result.runs_as, f"{result.error:.1e}", f"{result.plain_error:.1e}", verdict)
        console.print(facts, *(["", kernels] if results else []))
    if failed:
        raise typer.Exit(1)
