"""Writes the tables of README.md and docs/measured.md, between their marks, and draws the plots,
from the result files.

    python benchmarks/figures.py

A table of rows is of one commit: the newest in README.md, one table a commit in docs/measured.md.
It shows the newest measurement of a row, with the range over all of that commit.
"""

import itertools
import json
import statistics
from collections.abc import Iterable

import measured_rows
import plots
from cards_table import several_cards
from experts_table import experts
from measured_rows import RESULTS, ROOT, Row
from page_text import laid_out

PICKED = [
    "rmsnorm 4096 forward",
    "rmsnorm 4096 backward",
    "add_rmsnorm 4096 backward",
    "swiglu 14336 forward",
    "swiglu 14336 backward",
    "qk_rope 32/8x128 forward",
]
OPTIMIZERS = [
    "fused_adamw_ bfloat16 weights, bfloat16 states",
    "fused_adamw_ bfloat16 weights, float32 states",
    "gradient_norm bfloat16",
]
FP8_LAYERS = [
    "fp8_linear 4096 to 14336",
    "fp8_linear 14336 to 4096",
    "fp8_linear 4096 to 4096",
    "fp8_linear 2048 to 8192",
]
HEADS = [
    "linear_cross_entropy bf16 dW 8192x4096x128256",
    "linear_cross_entropy bf16 dW 16384x896x151936",
]


def load(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def with_range(values: list[float], form: str) -> str:
    """The first of them, and the range where there are others."""
    words = format(values[0], form)
    low = format(min(values), form)
    high = format(max(values), form)
    return words if low == high else f"{words} ({low} to {high})"


def speeds() -> list[str]:
    """Ours beside the fastest peer, a row a line."""
    lines = [
        "| | chronicals, tokens/s | fastest peer, tokens/s | speedup | MFU | measured on |",
        "|---|---|---|---|---|---|",
    ]
    for row in measured_rows.with_peers():
        peer = row.peers[0]
        ours = row.rates("ours")
        theirs = row.rates(peer)
        cells = [
            row.name,
            with_range(ours, ",.0f"),
            f"{peer} {with_range(theirs, ',.0f')}{attention_of(row, peer)}{in_16_bit(row)}",
            with_range(row.ratios(peer) or [ours[0] / theirs[0]], ".2f"),
            mfu(row.arms["ours"]),
            row.place,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def attention_of(row: Row, peer: str) -> str:
    """Said of a plain peer with torch's attention, which was its fastest or, without a date, its
    only one.
    """
    return " (SDPA)" if "sdpa" in row.arms[peer]["settings"].split(", ") else ""


def in_16_bit(row: Row) -> str:
    """What must be said of a peer beside ours in FP8."""
    return " in bf16" if row.result.get("row", {}).get("fields", {}).get("use_fp8") else ""


def memories() -> list[str]:
    """Our leanest arm beside the leanest peer, a row a line; arms with fields that no peer has
    are a line of their own.
    """
    found = measured_rows.with_frontier()
    lines = [
        "| | chronicals, nothing saved | chronicals, least memory | with | leanest peer |",
        "|---|---|---|---|---|",
    ]
    for row in found:
        plain = memory_and_speed(row.arms["ours"])
        peer = row.least(row.peers)
        theirs = f"{peer}{in_bf16_alone(row.arms[peer])}: {memory_and_speed(row.arms[peer])}"
        for unlike_peers in (False, True):
            names = row.variants(unlike_peers=unlike_peers)
            if names and (name := row.least(names)) != "ours":
                cells = [
                    row.name,
                    plain,
                    memory_and_speed(row.arms[name]),
                    settings(name),
                    "-" if unlike_peers else theirs,
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def settings(name: str) -> str:
    """The fields of an arm of ours, in words."""
    words = [
        value if field == "memory" else f"{field}={value}"
        for field, value in measured_rows.fields(name).items()
    ]
    return f"`{', '.join(words)}`" if words else "the row's own settings"


def in_bf16_alone(arm: dict) -> str:
    """What must be said of a peer that keeps less of what it trains than ours does."""
    return " (weights and states bf16)" if "weights and states bf16" in arm["settings"] else ""


def memory_and_speed(arm: dict) -> str:
    return f"{arm['peak_gib']:.1f} GiB, {arm['tokens_per_second']['median']:,.0f} tokens/s"


def promise() -> str:
    """Return the README's first sentence with figures: our speed beside the fastest peer's."""
    rows = {row.name: row for row in measured_rows.with_peers()}
    small, large = rows["0.5B LoRA, ragged"], rows["8B LoRA, fixed"]
    lean = min(large.arms[name]["peak_gib"] for name in large.variants(unlike_peers=True))
    return (
        f"Measured beside Unsloth, TRL and torch.compile at their best settings, LoRA trains "
        f"{small.ratios(small.peers[0])[0]:.2f} times as fast\n"
        f"as the fastest of them on a 0.5B and {large.ratios(large.peers[0])[0]:.2f} times on an "
        f"8B, and an 8B fits in {lean:.1f} GiB.\n"
    )


def summary() -> str:
    """Return the README's figures: the plot of speed and a table of it."""
    lines = [
        f"![speed beside the peers]({address(plots.SPEED)})",
        "",
        *speeds(),
        "",
        "Whole training steps on one card, random weights, 16,384 tokens a step (8,192 for the "
        "8B).",
        "Every arm trains on the same weights, documents and labels. `fixed`: documents of 2048 "
        "tokens; `ragged`: of 32",
        "to 2048, peers packed where that is their fastest way. MFU: share of the card's bf16 "
        "peak.",
    ]
    return "\n".join(lines) + "\n"


def overview() -> list[str]:
    """Return what docs/measured.md says first: least memory, and rows apart from the tables."""
    lines = [
        "",
        "## Least memory",
        "",
        f"![tokens per second over peak memory]({shown(plots.MEMORY)})",
        "",
        *memories(),
        "",
        "## Bases in 4 bits and mixtures",
        "",
    ]
    return lines + [f"- {every_arm(row)}" for row in measured_rows.with_peers(apart=True)]


def every_arm(row: Row) -> str:
    """A sentence on a row apart from the tables: every arm, the fastest first."""
    names = {"ours": "chronicals"}
    told = [
        f"{names.get(name, name if name in row.peers else f'with {settings(name)}')} "
        f"{memory_and_speed(arm)}"
        for name, arm in row.arms.items()
    ]
    base = ", the base in NF4" if row.in_4_bits else ""
    return f"{row.name}{base} ({row.place}): {'; '.join(told)}."


def address(plot: str) -> str:
    """A plot's path from the root of the repository."""
    return f"benchmarks/results/{plot}"


def arms() -> list[str]:
    """An arm a line."""
    lines = [
        "## Rows",
        "",
        "`chronicals benchmark`, random weights, whole steps; every arm has the same weights, "
        "documents, order, labels; only "
        "documents' tokens count. Rounds: decisive ones, in alternating order; an arm without one "
        "ran in the scouting round "
        "alone. Padding: ratio of the positions computed. The reference step takes for each part "
        "(products, attention, "
        "elementwise bytes, loss, optimizer) the best time seen, by itself or in our own step; it "
        "is not a bound "
        "([how](benchmark.md)). It and MFU are those of 16 bit: an arm in FP8 has neither. In "
        "brackets: the range over several "
        "measurements. A table is of one commit: compare the arms of a row, and rows of one table.",
        "",
        f"![real tokens per second by row and arm]({shown(plots.ROWS)})",
    ]
    found = measured_rows.rows()
    for commit, rows in itertools.groupby(found, key=lambda row: row.commit):
        measured = list(rows)
        said = "" if any("date" in row.result for row in measured) else EARLIER
        lines += ["", f"At `{commit}`{said}:", "", *arms_at_one_commit(measured)]
    return lines + without_speed(found)


EARLIER = ", before plain peers could take flash attention"


def arms_at_one_commit(rows: Iterable[Row]) -> list[str]:
    lines = [
        "| row | arm | real tokens/s | ours, times as fast | MFU | of the reference step | peak "
        "GiB | padding | loss "
        "| last gradient norm | trained | rounds |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        first = f"{row.title}: {row.place}"
        for name, arm in row.compared.items():
            norms = [norm for norm in arm["grad_norms"] if norm is not None]
            ratios = row.ratios(name)
            lines.append(
                f"| {first} | {name} | {with_range(row.rates(name), ',.0f')} | "
                f"{with_range(ratios, '.2f') if ratios else '-'} "
                f"| {mfu(arm)} | {share(arm)} | {arm['peak_gib']:.1f} | {arm['padding_share']:.0%} "
                f"| {arm['first_loss']:.3f} → {arm['last_loss']:.3f} | {norms[-1]:.2f} "
                f"| {arm['trained_share']:.1%} | {arm['rounds'] or 'scouting'} |"
            )
            first = ""
    return lines


def without_speed(found: list[Row]) -> list[str]:
    """Arms that failed or were refused, and peers for which there was no time; those that were
    not installed are no result.
    """
    lines = []
    for row in found:
        for name, arm in row.result["arms"].items():
            if arm["status"] in ("failed", "refused"):
                lines.append(
                    f"- {row.title}, {name}: {arm['status']}: "
                    f"{' '.join(str(arm['reason']).split())[:300]}"
                )
        late = [note for note in row.result["notes"] if ": not measured in the scouting" in note]
        lines += [f"- {row.title}, {note}" for note in late if not note.startswith("ours")]
    return ["", "Without a speed:", "", *lines] if lines else []


def preferences() -> list[str]:
    """DPO and ORPO on pairs of answers, an arm a line, and how each ran; nothing where no row
    was measured.
    """
    found = measured_rows.preferences()
    if not found:
        return []
    lines = [
        "",
        "`chronicals benchmark --objective dpo` and `orpo`, random weights, whole steps, "
        "lognormal lengths. Real tokens are "
        "those of prompt and answer of both sides, in every arm. Saved: those of them that are "
        "not computed, because answers "
        "share their prompt. Padding: ratio of the positions computed. TRL's ORPO trains the "
        "prompts, too, and is compared "
        "with fp32 by that definition ([how](benchmark.md)).",
    ]
    for commit, rows in itertools.groupby(found, key=lambda row: row.commit):
        lines += ["", f"At `{commit}`:", "", *preferences_at_one_commit(list(rows))]
    return lines + without_speed(found)


def preferences_at_one_commit(rows: list[Row]) -> list[str]:
    lines = [
        "| row | prompts | arm | real tokens/s | ours, times as fast | peak GiB | saved | padding "
        "| loss | rounds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    settings = []
    for row in rows:
        first = f"{row.title}: {row.place}"
        prompts = f"{row.result['row']['prompt_share']:.0%}"
        for name, arm in row.arms.items():
            ratios = row.ratios(name)
            saved = arm.get("tokens_saved")
            lines.append(
                f"| {first} | {prompts} | {name} | {with_range(row.rates(name), ',.0f')} "
                f"| {with_range(ratios, '.2f') if ratios else '-'} | {arm['peak_gib']:.1f} "
                f"| {'-' if saved is None else f'{saved:.0%}'} | {arm['padding_share']:.0%} "
                f"| {arm['first_loss']:.3f} → {arm['last_loss']:.3f} | "
                f"{arm['rounds'] or 'scouting'} |"
            )
            settings.append(f"- {row.title}, {name}: {arm['settings']}")
            first = prompts = ""
    return [*lines, "", "How they ran:", "", *settings]


def mfu(arm: dict) -> str:
    """Over the peak of bf16, which says nothing of an arm in FP8."""
    return "-" if arm.get("mfu") is None or arm.get("fp8") else f"{arm['mfu']:.0%}"


def share(arm: dict) -> str:
    """Of the reference step, which is one of products in 16 bit."""
    return "-" if arm["share_of_floor"] is None else f"{arm['share_of_floor']:.0%}"


def shown(plot: str) -> str:
    """A plot's address in docs/measured.md."""
    return f"../{address(plot)}"


def ladders() -> list[str]:
    """One lever after the other."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("ladder-*-h200.json")):
        result = json.loads(path.read_text())
        lines += [
            "",
            "## One lever after the other",
            "",
            f"One lever after the other, {result['kind']}, the 0.5B shape on real text, 8 packs "
            "of 2048 a step "
            "(padded rows hold other documents in a step):",
            "",
            "| and with it | real tokens/s | peak GiB | first loss | last gradient norm |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {name} | {rung['tokens_per_second']['median']:,.0f} | {rung['peak_gib']:.1f} | "
            f"{rung['losses'][0]:.4f} "
            f"| {rung['grad_norms'][-1]:.3f} |"
            for name, rung in result["rungs"].items()
        ]
    return lines


def frontiers() -> list[str]:
    """What each policy of memory costs and saves, and where the peers stand; the numbers are
    those of the plot's points.
    """
    lines: list[str] = []
    for row in measured_rows.rows():
        if not row.scouted:
            continue
        lines += [
            "",
            f"Memory and speed, {row.title} ({row.place}):",
            "",
            f"![tokens per second over peak memory]({shown(plots.frontier_name(row))})",
            "",
            "| | arm | real tokens/s | peak GiB |",
            "|---|---|---|---|",
        ]
        for number, (name, arm) in enumerate(row.arms.items(), start=1):
            lines.append(
                f"| {number} | {name} | {arm['tokens_per_second']['median']:,.0f} | "
                f"{arm['peak_gib']:.1f} |"
            )
    return lines


def proofs() -> list[str]:
    """What FP8 does to training, whether it holds or not."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("fp8-proof*-h200.json")):
        result = json.loads(path.read_text())
        steps = len(result["runs"]["bf16"]["losses"])
        start = "trained" if "pretraining" in result else "random"
        plot = shown(path.with_suffix(".png").name)
        lines += [
            "",
            f"Training in FP8 beside bf16 from the same {start} weights over the same real text, "
            f"{steps} steps, 1.04 billion "
            "parameters of width 2048; it holds where losses differ by at most 0.5 % and twice "
            "what other kernels make, "
            "and every layer's gradient has a cosine of 0.99 with that in fp32 and its norm "
            "within 10 %:",
            "",
            f"![losses over those of bf16]({plot})",
            "",
            "| | difference of losses, last third | between runs in bf16 | lowest cosine | norm "
            "off by | holds |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {name} | {one['paired_loss_difference']:.2%} | {one['between_bf16_runs']:.2%} | "
            f"{one['lowest_cosine']:.3f} "
            f"| {one['norm_deviation']:.0%} | {'yes' if one['holds'] else 'no'} |"
            for name, one in result["verdicts"].items()
        ]
    return lines


def patched_step() -> list[str]:
    rows = load("patched-step-h200.json")["rows"]
    lines = [
        "",
        "A plain loop around a model of transformers, the same shape in bf16, torch's AdamW, "
        "16,384 tokens a step, with "
        "`flash-attn-4` installed; loss and gradient norm are those of the first step on the same "
        "weights:",
        "",
        "| | tokens/s | peak GiB | loss | gradient norm |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        rate = row["tokens"] / statistics.median(row["milliseconds"]) * 1e3
        name = name.replace("patched", "`patch_model`")
        lines.append(
            f"| {name} | {rate:,.0f} | {row['peak_gib']:.1f} | {row['loss']:.4f} | "
            f"{row['grad_norm']:.3f} |"
        )
    return lines


def kernels() -> list[str]:
    rows = load("kernels-h200.json")
    rate = rows["copy_bytes_per_second"]
    lines = [
        "",
        f"Kernels on the same card, bf16, cold cache (copy {rate / 1e12:.2f} TB/s), Liger 0.8.5 "
        "or torch in the same run:",
        "",
        "| kernel | | times as fast |",
        "|---|---|---|",
    ]
    for name in PICKED:
        row = rows["rows"][name]
        times = {arm: statistics.median(samples) for arm, samples in row["milliseconds"].items()}
        share = row["bytes"] / (times["ours"] * 1e-3) / rate
        lines.append(
            f"| {name} | {share:.0%} of the copy rate | {times['liger'] / times['ours']:.2f} "
            "(Liger) |"
        )
    optimizers = load("optimizers-h200.json")
    for name in OPTIMIZERS:
        row = optimizers["rows"][name]
        times = {arm: statistics.median(samples) for arm, samples in row["milliseconds"].items()}
        share = row["bytes"] / (times["ours"] * 1e-3) / optimizers["copy_bytes_per_second"]
        without = ", which keeps no master and states in bf16" if "adamw" in name else ""
        lines.append(
            f"| {name} | {share:.0%} of the copy rate | {times['torch'] / times['ours']:.2f} "
            f"(torch{without}) |"
        )
    for name in HEADS:
        times = {
            arm: statistics.median(samples)
            for arm, samples in rows["rows"][name]["milliseconds"].items()
        }
        beside = f"{times['liger'] / times['ours']:.2f} (Liger)" if "liger" in times else "-"
        lines.append(
            f"| {name} | {times['ours'] / times['products']:.2f} times its three products | "
            f"{beside} |"
        )
    fp8 = load("fp8-h200.json")
    for name, row in fp8["rows"].items():
        times = {arm: statistics.median(samples) for arm, samples in row["milliseconds"].items()}
        if name.startswith("fp8 "):
            share = row["bytes"] / (times["ours"] * 1e-3) / fp8["copy_bytes_per_second"]
            if "compile" in times:
                name = f"quantising to {name}"
                beside = f"{times['compile'] / times['ours']:.2f} (torch.compile)"
            else:
                beside = "-"
            lines.append(f"| {name} | {share:.0%} of the copy rate | {beside} |")
        elif name in FP8_LAYERS:
            lines.append(
                f"| {name} | {times['ours'] / times['products']:.2f} times its three products in "
                "bf16 | - |"
            )
    for name, row in load("layers-h200.json")["rows"].items():
        times = {arm: statistics.median(samples) for arm, samples in row["milliseconds"].items()}
        lines.append(
            f"| {name}, adapters of rank 16 | {times['ours'] / times['products']:.3f} times the "
            "frozen layers | - |"
        )
    return lines


def low_bits() -> list[str]:
    """Kernels of 4-bit weights and 8-bit optimizer states beside bitsandbytes', and of
    distillation beside Liger's.
    """
    four = load("low-bits-h100.json")
    more = load("objectives-h200.json")
    cards = " and ".join(
        f"{result['card'].removeprefix('NVIDIA ')}, {_commits(result)}" for result in (four, more)
    )
    lines = [
        "",
        "4-bit weights of 8192 x 8192, whose codes and values are bitsandbytes' bit by bit, 8-bit "
        "states, and the heads of a "
        f"student and its teacher ({cards}); bitsandbytes 0.50.2 and Liger 0.8.5 in the same run. "
        "Moments in 8 bits of weights "
        "without masters take a quarter less in the first sample (94 %, `benchmarks/NOTES.md`):",
        "",
        "| kernel | | times as fast |",
        "|---|---|---|",
    ]
    for result, kinds in ((four, ("nf4", "adamw_8bit")), (more, ("linear_distillation",))):
        for name, row in result["rows"].items():
            if name.startswith(kinds):
                times = {
                    arm: statistics.median(samples) for arm, samples in row["milliseconds"].items()
                }
                peers = [peer for peer in ("bitsandbytes", "unsloth", "liger") if peer in times]
                beside = [f"{times[peer] / times['ours']:.2f} ({peer})" for peer in peers]
                lines.append(
                    f"| {name} | {_of_its_floor(row, times, result)} | {', '.join(beside) or '-'} |"
                )
    return lines


def _commits(result: dict) -> str:
    """Those at which its rows were measured."""
    found = dict.fromkeys(row.get("commit", result["commit"]) for row in result["rows"].values())
    return ", ".join(f"`{commit}`" for commit in found)


def _of_its_floor(row: dict, times: dict[str, float], result: dict) -> str:
    """How near a kernel comes to the bytes that it must move, or to its products."""
    if "products" in times:
        return f"{times['ours'] / times['products']:.2f} times its products"
    return (
        f"{row['bytes'] / (times['ours'] * 1e-3) / result['copy_bytes_per_second']:.0%} of the "
        "copy rate"
    )


def saves() -> list[str]:
    """How long a save holds training."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("save-stall-*.json")):
        result = json.loads(path.read_text())
        staged = result["staged"]
        card = result["card"].removeprefix("NVIDIA ")
        commit = staged.get("commit", result.get("commit"))
        lines += [
            "",
            f"{card}, `{commit}`, {result['layers']} layers of {result['shape']}, "
            f"{staged['seconds_a_step']:.3f} s "
            f"a step: a checkpoint of {staged['checkpoint_gb']:.1f} GB holds training for "
            f"{staged['stall']:.2f} s "
            f"({', '.join(f'{stall:.2f}' for stall in staged['stalls'])}; bar {result['bar']} s).",
        ]
    return lines


def data() -> list[str]:
    rates = load("data-rates-cpu.json")
    plan = rates["plans"][0]
    assembly = rates["assembly"][0]
    lines = [
        "",
        f"The data path on {rates['machine']['cores']} CPU cores; tokenising beside the bare "
        "tokenizer's `encode_batch` over "
        "the same texts and beside `datasets`, each from the file to Arrow:",
        "",
        "| | |",
        "|---|---|",
        f"| plan of packs, {plan['strategy']}, {plan['sequences']:,} documents at "
        f"{plan['max_seq_length']} "
        f"| {plan['sequences_per_second']['median'] / 1e6:.1f} million/s, "
        f"{plan['fill']['lowest']:.2%} full |",
        f"| assembly of Batches, one thread | {assembly['bytes_per_second']['median'] / 1e9:.1f} "
        "GB/s |",
    ]
    return (
        lines
        + token_stores(load("token-store-cpu.json"))
        + token_stores(load("token-store-16-cores.json"))
    )


def token_stores(stores: dict) -> list[str]:
    """A row each rate, and each whole store."""
    lines = []
    cores = stores["machine"]["cores"]
    for kind, arms in stores["rates"].items():
        ours = arms["ours"]
        compared = stores["samples"][kind]["ours"][0]["rows"]
        lines.append(
            f"| store of {compared:,} {kind}, {cores} cores | {ours:,.0f} rows/s: "
            f"{ours / arms['encode_batch']:.2f} of `encode_batch`, "
            f"{ours / arms['datasets.map']:.2f} times `datasets.map` |"
        )
    for kind, run in stores["whole"].items():
        lines.append(
            f"| {run['rows']:,} {kind}, {cores} cores | {run['seconds']:.0f} s, "
            f"{run['peak_anonymous_mib']:,.0f} MiB beside "
            f"the page cache, opened again in {run['reopened_seconds']:.2f} s |"
        )
    return lines


def startups() -> list[str]:
    """Seconds from the command to the first step and from the last to the end."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("startup-*.json")):
        result = json.loads(path.read_text())
        card = result["card"].removeprefix("NVIDIA ")
        note = f"{result['note']}; " if "note" in result else ""
        lines += [
            "",
            f"{card}, torch {result['versions']['torch']}, `{result['commit']}`, the "
            f"{result['shape']} shape, "
            f"{result['mode']}, {result['steps']} steps; cold: without any cache; {note}seconds "
            "in the median:",
            "",
            "| | caches | runs | to the first step | imports | model | data | patching | first "
            "step | after the last step |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for arm, cache in dict.fromkeys((run["arm"], run["cache"]) for run in result["runs"]):
            runs = [
                run["seconds"]
                for run in result["runs"]
                if (run["arm"], run["cache"]) == (arm, cache) and "seconds" in run
            ]
            names = (
                "to first step",
                "imports",
                "model",
                "data",
                "patching",
                "first step",
                "after last step",
            )
            cells = (
                [f"{statistics.median(run[name] for run in runs):.1f}" for name in names]
                if runs
                else ["failed"]
            )
            lines.append(f"| {arm} | {cache} | {len(runs)} | {' | '.join(cells)} |")
    return ["", "## Start-up", *lines] if lines else []


def objectives() -> list[str]:
    """What each objective lifts on a small task, the range over seeds."""
    result = load("objectives-learn.json")
    seeds = result["seeds"]
    untuned = result["untuned"]
    lines = [
        "",
        f"`benchmarks/objectives_learn.py`, {result['steps']} steps on one CPU core, {seeds} "
        "seeds: a small model learns to "
        f"answer briefly. Before, {untuned['ended']:.0%} of its answers ended, with "
        f"{untuned['words']:.1f} words in the mean. "
        "Held-out pairs are answers of the untuned model, ordered by the log-probability over "
        "that before (a reward model: by "
        "its score).",
        "",
        "| objective | held-out pairs ordered rightly | answers shorter than before | words |",
        "|---|---|---|---|",
    ]
    for name, runs in result["preference"].items():
        wins, words = ([run[key] for run in runs if key in run] for key in ("win_rate", "words"))
        shown_wins, shown_words = (
            over(values, form) if values else "" for values, form in ((wins, ".0%"), (words, ".1f"))
        )
        lines.append(
            f"| `{name}` | {over([run['accuracy'] for run in runs], '.0%')} | {shown_wins} | "
            f"{shown_words} |"
        )
    lines += [
        "",
        "A student of half the width, by as many steps from the teacher (`distill`) and from the "
        "tokens alone (`sft`):",
        "",
        "| trained on | held-out KL from the teacher | held-out cross-entropy |",
        "|---|---|---|",
    ]
    for name, runs in {
        "nothing": result["distillation"]["teacher"],
        **result["distillation"],
    }.items():
        found = [run["before" if name == "nothing" else "after"] for run in runs]
        cells = [
            over([side[key] for side in found], ".2f") for key in ("forward_kl", "cross_entropy")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [
        *lines,
        "",
        f"![accuracies, win rates and students, a point a seed]({shown('objectives-learn.png')})",
    ]


def exports() -> list[str]:
    """How far each artefact's client is from torch with the weights of the file, a row a family."""
    result = load("export-matrix.json")
    kinds = result["kinds"]
    lines = [
        "",
        f"llama-cpp-python {result['llama-cpp-python']}, gguf {result['gguf']}, "
        f"`{result['commit']}`, "
        "`benchmarks/export_matrix.py`: small random models, the largest relative error of logits "
        "of the artefact's client "
        "(llama.cpp, else transformers) beside torch with the weights of the file; of merged "
        "models beside the trained one. "
        "llama.cpp computes over quantised files with activations in 8 bits, which Gemma 3's six "
        "layers with random norms "
        "amplify; Gemma's GELU is a table there.",
        "",
        f"| | {' | '.join(kinds)} |",
        f"|---|{'---|' * len(kinds)}",
    ]
    for name, found in result["models"].items():
        errors = [
            "refused" if "refused" in found[kind] else format(found[kind]["error"], ".1e")
            for kind in kinds
        ]
        lines.append(f"| {name} | {' | '.join(errors)} |")
    return lines + exported_quickstart()


def exported_quickstart() -> list[str]:
    """The quickstart's model in llama.cpp, a row a type."""
    result = load("export-quickstart.json")
    lines = [
        "",
        f"The quickstart's model (`benchmarks/export_quickstart.py`, `{result['commit']}`): "
        "greedy answers of llama.cpp to "
        f"{len(result['questions'])} held-out questions that are word for word the trained "
        "model's, and held-out losses.",
        "",
        "| | same answers | logits beside torch with the file's weights | loss, trained | loss, "
        "exported |",
        "|---|---|---|---|---|",
    ]
    for kind, found in result["kinds"].items():
        checks = found["checks"]
        error = checks["logits beside torch with the file's weights"]
        losses = [
            format(checks[f"loss on the data, {side}"], ".3f") for side in ("trained", "exported")
        ]
        lines.append(
            f"| {kind} | {found['same']} of {len(result['questions'])} | {error:.1e} | "
            f"{' | '.join(losses)} |"
        )
    return lines


def over(values: list[float], form: str) -> str:
    """The range."""
    low = format(min(values), form)
    high = format(max(values), form)
    return low if low == high else f"{low} to {high}"


def long_documents() -> list[str]:
    """Peak memory of steps on one long document beside what the run expected."""
    measured = json.loads((RESULTS / "long-documents-h200.json").read_text())
    lines = [
        "Layers of the Llama-3.1-8B shape in NF4 with adapters of rank 32, one document a step "
        f"({measured['card']}, torch "
        f"{measured['torch']}, transformers {measured['transformers']}, `{measured['commit']}`).",
        "",
        "| tokens | layers | memory | expected | held | |",
        "|---|---|---|---|---|---|",
    ]
    for row in measured["rows"]:
        fields = {
            **row["fields"],
            "memory": ", ".join(row["fields"].get("memory", ["as the run decides"])),
        }
        chunk = (
            f", logits_chunk_size={fields['logits_chunk_size']}"
            if "logits_chunk_size" in fields
            else ""
        )
        off = row["expected_gib"] / row["held_gib"] - 1
        sizes = f"{row['expected_gib']:.1f} GiB | {row['held_gib']:.1f} GiB | {off:+.1%}"
        lines.append(
            f"| {row['length']:,} | {row['layers']} | {fields['memory']}{chunk} | {sizes} |"
        )
    return lines


def figures() -> str:
    """What stands in docs/measured.md: everything."""
    sections = {
        "## Preference": preferences(),
        "## Memory": frontiers(),
        "## Long documents": long_documents(),
        "## FP8": proofs(),
        "## Patched models of transformers": patched_step(),
        "## Kernels": [*kernels(), *low_bits(), *experts()],
        "## Objectives": objectives(),
        "## Export": exports(),
        "## Several cards": several_cards(),
        "## Saving": saves(),
        "## Data": data(),
    }
    titled = [line for title, lines in sections.items() if lines for line in ("", title, *lines)]
    return "\n".join([*arms(), *overview(), *startups(), *ladders(), *titled]) + "\n"


def with_figures(text: str, made: str, mark: str = "figures") -> str:
    """Return ``text`` with new content between ``<!-- mark -->`` and ``<!-- /mark -->``."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
    before, rest = text.split(begin)
    return before + begin + made + end + rest.split(end)[1]


PAGES = {
    "README.md": {"promise": promise, "figures": summary},
    "docs/measured.md": {"figures": figures},
}


def written(name: str) -> str:
    """Return a page of ``PAGES`` with all its figures made from the results."""
    text = (ROOT / name).read_text()
    for mark, make in PAGES[name].items():
        text = with_figures(text, make(), mark)
    return laid_out(text)


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(written(page))
    plots.draw_all()
