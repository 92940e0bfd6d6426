"""``chronicals doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from chronicals.cli.common_options import AsJson
from chronicals.standard_json import to_json


def doctor_command(
    as_json: AsJson = False,
    test: Annotated[
        bool,
        typer.Option("--self-test/--no-self-test", help="Run each kernel against its definition"),
    ] = True,
    rates: Annotated[
        bool, typer.Option("--rates", help="Measure the card's rates for plans, and nothing else")
    ] = False,
) -> None:
    """Show what this machine has and what will run on it.

    It prints card, versions, the chosen attention and kernels, optional packages that are missing
    with the command that installs them, and a self-test of each kernel, which is left out where a
    package is too old for anything to run. The last line is the verdict; exit code 1 if a kernel
    differs from its definition. Attach `chronicals doctor --json` to a bug report.

    With `--rates` it measures instead, in less than a minute, how fast the card multiplies, attends
    and copies, and keeps that by card and versions in the cache folder, where `chronicals plan`
    finds it.
    """
    if rates:
        _measure_rates(as_json)
        return

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from chronicals.verification import inspect_machine, missing_extras, untested_versions
    from chronicals.versions import why_too_old

    machine = inspect_machine()
    extras = missing_extras()
    untested = untested_versions()
    too_old = why_too_old()
    results = []
    if test and too_old is None:
        from chronicals.verification import self_test  # is not there if a package is too old

        results = self_test()
    failed = [result for result in results if not result.passed]
    if as_json:
        kernels = [vars(result) for result in results]
        found = {
            "machine": machine,
            "missing_extras": extras,
            "untested_versions": untested,
            "kernels": kernels,
        }
        print(to_json(found, indent=2))  # noqa: T201
    else:
        console = Console()
        facts = Table("machine", "", show_edge=False)
        for name, value in machine.items():
            facts.add_row(name, str(value))
        table = Table("kernel", "runs as", "error", "plain error", "", show_edge=False)
        for result in results:
            verdict = "[green]ok[/]" if result.passed else "[bold red]differs[/]"
            table.add_row(
                result.name,
                result.runs_as,
                f"{result.error:.1e}",
                f"{result.plain_error:.1e}",
                verdict,
            )
        console.print(facts, *(["", table] if results else []))
        for lacking in extras.values():
            console.print(f"[dim]optional[/] {escape(lacking)}", soft_wrap=True)
        for words in untested:
            console.print(f"[yellow]untested[/] {escape(words)}", soft_wrap=True)
        if too_old is not None:
            console.print(f"[bold red]too old[/] {escape(too_old)}", soft_wrap=True)
        elif failed:
            console.print(
                f"[bold red]failed[/] {len(failed)} of {len(results)} kernels differ from their "
                "definitions"
            )
        else:
            console.print(
                "[bold green]passed[/] "
                f"{f'{len(results)} kernels' if test else 'without a self-test'}"
            )
    if failed:
        raise typer.Exit(1)


def _measure_rates(as_json: bool) -> None:
    """Measure the card's rates, keep them, and print them with the file they are in."""
    from rich.console import Console

    from chronicals.benchmark.card_rates import measure_card
    from chronicals.cards.rates import Rates, keep_rates

    measured = Rates.from_dict(measure_card())
    path = keep_rates(measured)
    if as_json:
        print(to_json({"file": str(path), "rates": measured.to_dict()}, indent=2))  # noqa: T201
        return
    console = Console()
    speeds = {form: max(rate for _, rate in curve) for form, curve in measured.products.items()}
    products = ", ".join(f"{rate / 1e12:.0f} TFLOP/s in {form}" for form, rate in speeds.items())
    console.print(
        f"{measured.card}: products up to {products}; copies {measured.copy / 1e9:.0f} GB/s, to and "
        f"from the host {measured.host / 1e9:.1f} GB/s; a launch {measured.launch * 1e6:.0f} µs",
        soft_wrap=True,
        highlight=False,
    )
    console.print(f"[bold green]kept[/] {path}", soft_wrap=True, highlight=False)
