"""``chronicals benchmark``."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import chronicals
from chronicals.cli.options import make_room_for, values_of, with_known_names, with_recipe_flags

REFUSED_FIELDS = {
    "trust_remote_code": "runs no code of a model",
    "chat_template": "takes the tokenizer with the template that it has",
    "resize_embeddings": "trains the embedding as the model has it",
    "base_model": "starts from a whole model, not from an adapter",
}
"""Fields of a recipe that a benchmark does not take, with the reason."""

PEERS_FOLDER = Path(chronicals.__file__).parents[2] / "benchmarks"
"""Folder of ``peers`` in a checkout; an installed package has none."""


@with_recipe_flags
def benchmark_command(
    recipe: Annotated[
        Path | None, typer.Argument(help="YAML file with any of the fields below")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="full, lora or qlora (default: what the recipe does, else full)"),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Measured steps of a round (default: 20, 8 for 8B)")
    ] = None,
    warm_up: Annotated[
        int,
        typer.Option(min=1, help="Steps before them that are not counted, compilation included"),
    ] = 5,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Peers, with commas or repeated: transformers,torch-compile,liger,unsloth,trl; "
            "those installed run"
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="Another arm of ours, field=value[,field=value]; may be repeated"),
    ] = None,
    scouted_variant: Annotated[
        list[str] | None,
        typer.Option(help="The same, run once, after the decisive rounds; may be repeated"),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=0, help="Decisive rounds of ours and the two fastest peers")
    ] = 3,
    time_limit: Annotated[
        float | None, typer.Option(min=0, help="Seconds for all of it, preparation included")
    ] = None,
    arm_timeout: Annotated[float, typer.Option(help="Seconds one process may take")] = 300,
    reference_steps: Annotated[
        int, typer.Option(min=1, max=5, help="First steps that are compared with fp32")
    ] = 5,
    loss_tolerance: Annotated[
        float, typer.Option(help="Largest relative deviation of a loss from fp32")
    ] = 0.01,
    norm_tolerance: Annotated[float, typer.Option(help="The same for a gradient norm")] = 0.10,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print where the time goes; a trace beside the output")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Write everything to this JSON file, and bars beside it as PNG"),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep weights and compilers' caches here for later benchmarks"),
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record (default: git's)")] = None,
    **flags: Any,
) -> None:
    """Measure how fast a recipe trains here.

    Real tokens/s of whole steps, beside MFU, a reference step and the peers.

    `chronicals benchmark` measures the Qwen2.5-0.5B shape with random weights; `--model
    llama-3.1-8b` the other built-in shape, or any `--model DIR_OR_HUB` with any `--data FILE`;
    `--data fixed` (packs full with one document) and `--data ragged` (documents of very different
    lengths) are made here, and for `--objective dpo` or `orpo` `--data pairs-30`, `pairs-50` and
    `pairs-70` (pairs of answers, the prompt being that share of the tokens). Each arm trains in a
    process of its own on the same weights, documents, order and labels.

    An arm has no speed if its losses or gradient norms deviate from plain fp32 on the same steps,
    or a gradient is zero. For this comparison the learning rate is constant; where no flag and no
    recipe sets it, it is small, and LoRA+ is off.
    """
    from chronicals.config import ConfigurationError, Recipe

    if recipe is not None:  # report what is wrong in it before the imports, which take seconds
        with_known_names(Recipe.from_yaml(recipe, **flags))
    peers = values_of("against", against or [])
    if peers:
        _require_checkout()

    import torch
    from rich.console import Console
    from rich.markup import escape

    from chronicals.benchmark import rounds as benchmark_rounds
    from chronicals.benchmark.parity import Tolerance
    from chronicals.benchmark.plan import estimate_on_cpu, plan_work
    from chronicals.benchmark.record import draw_row, to_dict, write_row
    from chronicals.distributed import require_one_process

    began = time.perf_counter()
    console = Console(stderr=True)
    require_one_process("benchmark")
    make_room_for(output)
    if output and output.suffix == ".png":
        raise ConfigurationError(
            f"output={str(output)!r}: the bars are written there; name a file that ends in .json"
        )
    name, data, fields, mode_of_recipe = _recipe(recipe, flags)
    mode = mode or mode_of_recipe
    trace = output.with_suffix(".trace.json").absolute() if profile and output else None
    session_class = benchmark_rounds.BenchmarkSession
    if peers:
        from peers.names import chosen_peers
        from peers.rounds import PeerSession

        session_class = PeerSession
        peers = chosen_peers(peers, data, mode != "full", fields.get("objective"))
    options = benchmark_rounds.Options(
        against=peers,
        variants=[_changes(text) for text in variant or []],
        scouted=[_changes(text) for text in scouted_variant or []],
        rounds=rounds,
        time_limit=time_limit,
        arm_timeout=arm_timeout,
        reference_steps=reference_steps,
        trace=trace,
        tolerance=Tolerance(loss_tolerance, norm_tolerance),
    )

    def keep(row: benchmark_rounds.MeasuredRow) -> None:
        if output:
            write_row(to_dict(row, commit), output)

    with _ended_by_sigterm(), contextlib.ExitStack() as scratch:
        place = folder or Path(
            scratch.enter_context(tempfile.TemporaryDirectory(prefix="chronicals-benchmark-"))
        )
        work = plan_work(place, name, data, mode, fields, steps, warm_up)
        for changes in (*options.variants, *options.scouted):
            work.config(**changes)  # raises before any arm runs if a field is unknown or wrong
        if not torch.cuda.is_available():
            console.print(escape(str(estimate_on_cpu(work, options))))
        with console.status("") as status:

            def say(words: str) -> None:
                status.update(escape(words))
                console.print(f"[dim]{time.perf_counter() - began:4.0f} s  {escape(words)}[/]")

            row = benchmark_rounds.measure_row(work, options, say, keep, began, session_class)
        result = to_dict(row, commit)
    _print(result, profile)
    if output:
        draw_row(result, output.with_suffix(".png"))
        files = [output, output.with_suffix(".png"), *([trace] if trace else [])]
        console.print(f"[bold]written[/] {', '.join(map(str, files))}")
    if result["arms"].get("ours", {}).get("status") != "measured":
        raise typer.Exit(1)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does.

    The arms are ended and the scratch folder is deleted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def find_peers() -> bool:
    """Make ``peers`` importable. Returns False if this is not a checkout."""
    if not (PEERS_FOLDER / "peers" / "__init__.py").exists():
        return False
    if str(PEERS_FOLDER) not in sys.path:
        sys.path.append(str(PEERS_FOLDER))
    return True


def _require_checkout() -> None:
    """Raise typer.Exit with status 2 if the peers are not there, and say how to get them."""
    from rich.console import Console

    if find_peers():
        return
    address = "REPOSITORY"
    for url in importlib.metadata.metadata("chronicals").get_all("Project-URL") or []:
        label, _, link = url.partition(", ")
        if label.lower() in ("repository", "source"):
            address = link
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        "[bold red]error[/] --against: the peers are part of a checkout, not of the installed "
        "package; get a checkout of this version and install it:\n"
        f"  git clone --branch v{chronicals.__version__} {address} chronicals\n"
        "  pip install --editable ./chronicals"
    )
    raise typer.Exit(2)


def _recipe(recipe: Path | None, flags: dict[str, Any]) -> tuple[str, str, dict[str, Any], str]:
    """Return model, data, the fields that were set, and the mode that they ask for."""
    from chronicals.benchmark.pairs import PAIR_OBJECTIVES
    from chronicals.benchmark.work import DECIDED_FIELDS, SIZE_FIELDS
    from chronicals.config import ConfigurationError, Recipe

    for name in (
        *DECIDED_FIELDS,
        "lr_scheduler",
        "warmup_steps",
        "warmup_ratio",
        "warmup_from_zero",
        "validation_data",
    ):
        if name in flags:
            raise ConfigurationError(
                f"{name}={flags[name]!r}: a benchmark decides it itself (--steps are measured); "
                "leave it out"
            )
    if recipe is None:
        usual = "pairs-50" if flags.get("objective") in PAIR_OBJECTIVES else "fixed"
        plan = Recipe(**{"model": "qwen2.5-0.5b", "data": usual, **flags})
    else:
        plan = Recipe.from_yaml(recipe, **flags)
    with_known_names(plan)
    if not isinstance(plan.data, str) or plan.columns:
        raise ConfigurationError(
            "data: a benchmark takes one file as it is, without weight or columns; or built-in data"
        )
    for name, reason in REFUSED_FIELDS.items():
        value = getattr(plan, name)
        if value:
            raise ConfigurationError(f"{name}={value!r}: a benchmark {reason}; leave it out")
    config = plan.config()
    names = config.explicit | (set(SIZE_FIELDS) if recipe else set())
    fields = {name: value for name, value in config.to_dict().items() if name in names}
    mode = "lora" if config.use_lora else "full"
    return plan.model, plan.data, fields, "qlora" if config.quantization else mode


def _changes(text: str) -> dict[str, Any]:
    """Return the fields of a variant, ``field=value,field=value``."""
    import yaml

    from chronicals.benchmark.work import STEP_CONTENT_FIELDS
    from chronicals.config import ConfigurationError

    outside_of_lists = r",(?![^\[]*\])"
    pairs = [part.partition("=") for part in re.split(outside_of_lists, text)]
    if not all(name and sign for name, sign, _ in pairs):
        raise ConfigurationError(
            f"variant={text!r}: expected field=value, with commas between several"
        )
    try:
        changes = {name.strip(): yaml.safe_load(value) for name, _, value in pairs}
    except yaml.YAMLError as error:
        raise ConfigurationError(
            f"variant={text!r}: a value that is not YAML: {' '.join(str(error).split())}"
        ) from error
    wrong = STEP_CONTENT_FIELDS & changes.keys()
    if wrong:
        raise ConfigurationError(
            f"variant={text!r}: {min(wrong)} decides what a step holds or trains, and arms are "
            "compared step by step; "
            "measure it as a row of its own"
        )
    return changes


def _print(result: dict[str, Any], profile: bool) -> None:
    """Print the record of a row: tables of speeds and proofs, ratios, the reference step, notes."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(emoji=False)
    row = result["row"]
    floor = result["floor"]
    gaps = None
    for arm in result["arms"].values():
        gaps = gaps or ((arm.get("profile") or {}).get("share") or {}).get("gaps")
    console.print(_speeds(result), _proofs(result), "")
    for name, arm in result["arms"].items():
        if arm.get("reason"):
            console.print(
                f"[yellow]{escape(name)}[/]: {escape(str(arm['reason']))}", soft_wrap=True
            )
    for name, ratio in result["ratios"].items():
        by_round = ", ".join(f"{part:.3f}" for part in ratio["by_round"])
        console.print(f"ours / {escape(name)}: [bold]{ratio['median']:.3f}[/] (rounds {by_round})")
    if floor:
        names = ("products", "attention", "elementwise", "loss", "optimizer")
        parts = ", ".join(f"{name} {1e3 * floor[name]:.2f}" for name in names)
        rate = floor["tokens_per_second"]
        time = 1e3 * floor["seconds"]
        console.print("reference step (best time seen of each part, not a bound): ", end="")
        console.print(f"{rate:,.0f} tokens/s = {time:.2f} ms ({parts})")
    needed = result["needed_flops_a_token"]
    beside = "" if needed is None else f", {needed / 1e9:.2f} GFLOP needed for each"
    console.print(f"{row['tokens_a_step']:,} real tokens a step{beside}")
    saved = (result["arms"].get("ours") or {}).get("tokens_saved")
    if saved is not None:
        console.print(
            f"{row['prompt_share']:.0%} of them prompts; ours computes {saved:.0%} fewer, because "
            "answers share a prompt"
        )
    if gaps is not None:
        console.print(f"launch gaps: {gaps:.1%} of the time no kernel runs")
    if profile:
        _print_profile(console, result)
    for note in result["notes"]:
        console.print(f"[yellow]{escape(note)}[/]")


def _speeds(result: dict[str, Any]) -> Any:
    """Return the table of speeds.

    A row has the median of the real tokens per second, half the distance of the quartiles, a bar,
    MFU, the ratio to the reference step, and memory.
    """
    from rich.markup import escape
    from rich.table import Table

    row = result["row"]
    arms = result["arms"]
    table = Table(
        title=escape(f"{row['model']}, {row['mode']}, {row['data']}"), title_justify="left"
    )
    for column in ("arm", "tokens/s", "±", "", "MFU", "of ref. step", "GiB"):
        table.add_column(column, justify="left" if column in ("arm", "") else "right", no_wrap=True)
    rates = {
        name: arm["tokens_per_second"]["median"]
        for name, arm in arms.items()
        if "tokens_per_second" in arm
    }
    for name in sorted(arms, key=lambda name: -rates.get(name, 0.0)):
        arm = arms[name]
        if name not in rates:
            table.add_row(escape(name), f"[yellow]{arm['status']}[/]")
            continue
        low, high = arm["tokens_per_second"]["quartiles"]
        rate = rates[name]
        mfu = arm["mfu"]
        share = arm["share_of_floor"]
        table.add_row(
            f"[bold]{escape(name)}[/]" if name.startswith("ours") else name,
            f"{rate:,.0f}",
            f"{(high - low) / 2 / rate:.1%}",
            "█" * max(1, round(12 * rate / max(rates.values()))),
            "-" if mfu is None else f"{mfu:.1%}",
            "-" if share is None else f"{share:.1%}",
            f"{arm['peak_gib']:.1f}",
        )
    return table


def _proofs(result: dict[str, Any]) -> Any:
    """Return the table of the proofs of each speed.

    They are loss, gradient norm, deviation from fp32, trained parameters, padding and warm-up.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        "arm", "loss", "grad norm", "from fp32", "trained", "padding", "warm-up", show_edge=False
    )
    for name, arm in result["arms"].items():
        if "tokens_per_second" not in arm:
            continue
        norm = next(norm for norm in reversed(arm["grad_norms"]) if norm is not None)
        last = f"{arm['last_loss']:.3f}" if arm["last_loss"] is not None else "?"
        away = arm["parity"]["loss"]["largest_deviation"]
        table.add_row(
            escape(name),
            f"{arm['first_loss']:.3f} → {last}",
            f"{norm:.3f}",
            f"{away:.1e}" if away is not None else "-",
            f"{arm['trained_share']:.2%}",
            f"{arm['padding_share']:.1%}",
            f"{arm['warm_up_seconds']:.1f} s",
        )
    return table


def _print_profile(console: Any, result: dict[str, Any]) -> None:
    """Print the time of each category and the longest kernels, for every arm with a profile."""
    from rich.markup import escape
    from rich.table import Table

    for arm_name, arm in result["arms"].items():
        profile = arm.get("profile")
        if not profile:
            continue
        table = Table(
            "where the time goes",
            "share",
            "ms a step",
            title=escape(arm_name),
            title_justify="left",
        )
        for kind, share in sorted(profile["share"].items(), key=lambda item: -item[1]):
            table.add_row(kind, f"{share:.1%}", f"{profile['milliseconds_a_step'][kind]:.2f}")
        longest = Table("kernel", "kind", "calls a step", "ms a step")
        for kernel in profile["kernels"][:15]:
            name = escape(kernel["name"][:70])
            calls = kernel["calls_a_step"]
            time = kernel["milliseconds_a_step"]
            longest.add_row(name, kernel["kind"], f"{calls:.0f}", f"{time:.2f}")
        console.print(table, longest)
