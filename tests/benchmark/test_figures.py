"""Tables from several measurements of a row: the newest counts, with the range over all; a table
is of one commit.
"""

import copy
import json

import pytest
import scripts

ARM = {
    "status": "measured",
    "rounds": 3,
    "mfu": 0.45,
    "share_of_floor": 0.9,
    "settings": "bf16",
    "peak_gib": 5.0,
    "padding_share": 0.1,
    "first_loss": 7.0,
    "last_loss": 6.0,
    "grad_norms": [1.0],
    "trained_share": 1.0,
}


def result(date, commit, ours, liger, ratio):
    rates = {"ours": ours, "liger": liger}
    return {
        "date": date,
        "commit": commit,
        "machine": {"card": "NVIDIA H100 80GB HBM3"},
        "versions": {"torch": "2.11.0"},
        "arms": {
            name: {**copy.deepcopy(ARM), "tokens_per_second": {"median": rate}}
            for name, rate in rates.items()
        },
        "ratios": {"liger": {"median": ratio}},
        "floor": None,
        "notes": [],
    }


@pytest.fixture
def figures(tmp_path, set_constants):
    script = scripts.script("figures")
    set_constants(script.measured_rows, RESULTS=tmp_path)
    set_constants(script, RESULTS=tmp_path)
    files = {
        "row-0.5b-full-fixed-h100.json": result("2026-02-01", "abc", 2000.0, 1000.0, 2.0),
        "row-0.5b-full-fixed-h100-2.json": result("2026-03-01", "abc", 2200.0, 1100.0, 1.9),
        "row-0.5b-full-fixed-h200.json": result("2026-01-01", "abc", 2500.0, 1200.0, 2.1),
    }
    for name, made in files.items():
        (tmp_path / name).write_text(json.dumps(made))
    return script


def test_the_newest_counts_with_the_range_over_all(figures):
    *_, line = figures.speeds()
    assert line == (
        "| 0.5B full, fixed | 2,200 (2,000 to 2,500) | liger 1,100 (1,000 to 1,200) | 1.90 (1.90 "
        "to 2.10) | 45% "
        "| H100 80GB HBM3, torch 2.11.0, `abc` |"
    )


def test_of_measurements_without_a_date_that_without_a_number_is_the_newest(figures):
    for path in figures.RESULTS.glob("row-*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "date": ""}))
    (figures.RESULTS / "row-0.5b-full-fixed-h200.json").unlink()
    (row,) = figures.measured_rows.rows()
    assert row.rates("ours") == [2000.0, 2200.0]


def test_a_table_is_of_one_commit(figures):
    """The README's is of the newest. Files without a date are from before plain peers could take
    flash attention.
    """
    other = result("2026-01-01", "def", 7.0, 7.0, 1.0)
    (figures.RESULTS / "row-8b-full-fixed-h100.json").write_text(json.dumps(other))
    assert "At `def`:" in "\n".join(figures.arms())
    del other["date"]
    (figures.RESULTS / "row-8b-full-fixed-h100.json").write_text(json.dumps(other))
    (figures.RESULTS / "row-0.5b-full-fixed-h200-2.json").write_text(json.dumps(other))
    assert len(figures.speeds()) == 3 and "| 2,200 (2,000 to 2,500) |" in figures.speeds()[-1]
    first, second = "\n".join(figures.arms()).split("At `def`, before plain peers")
    assert "At `abc`:" in first and "8b full fixed" not in first
    assert (
        "| 8b full fixed: H100 80GB HBM3, torch 2.11.0, `def` | ours | 7 |" in second
        and "2,200" not in second
    )


def test_an_arm_without_a_speed_is_named_with_the_reason(figures):
    path = figures.RESULTS / "row-0.5b-full-fixed-h100-2.json"
    made = json.loads(path.read_text())
    made["arms"] |= {
        "trl": {"status": "failed", "reason": "no attention\nhere"},
        "unsloth": {"status": "absent", "reason": "x"},
    }
    path.write_text(json.dumps(made))
    assert figures.arms()[-1] == "- 0.5b full fixed, trl: failed: no attention here"


def test_a_peer_for_which_there_was_no_time_is_named(figures):
    path = figures.RESULTS / "row-0.5b-full-fixed-h100-2.json"
    late = ": not measured in the scouting, the time limit was reached"
    made = json.loads(path.read_text())
    path.write_text(
        json.dumps({**made, "notes": [f"unsloth{late}", f"ours memory=['x']{late}", "another"]})
    )
    assert figures.arms()[-1] == f"- 0.5b full fixed, unsloth{late}"
    assert "ours memory" not in "\n".join(figures.arms())


def test_a_row_that_was_only_scouted_has_the_ratios_of_what_it_was_scouted_with(figures):
    for path in figures.RESULTS.glob("row-*.json"):
        made = json.loads(path.read_text())
        path.write_text(json.dumps({**made, "ratios": {}}))
    (row,) = figures.measured_rows.rows()
    assert sorted(row.ratios("liger")) == [2.0, 2.0, 2500.0 / 1200.0] and row.ratios(
        "ours"
    ) == [] == row.ratios("trl")


def test_a_file_that_is_no_rows_is_named(figures):
    (figures.RESULTS / "row-0.5b-full.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"row-0.5b-full.json: expected row-NAME-CARD.json"):
        figures.measured_rows.rows()


def ours(rate, gib):
    return {
        **copy.deepcopy(ARM),
        "rounds": 0,
        "tokens_per_second": {"median": rate},
        "peak_gib": gib,
    }


@pytest.mark.parametrize("unlike", ["use_fp8=True", "max_grad_norm=inf"])
def test_least_memory_is_compared_with_its_like_and_says_its_settings(figures, unlike):
    path = figures.RESULTS / "row-0.5b-full-fixed-h100-2.json"
    made = json.loads(path.read_text())
    made["arms"] |= {"ours memory=['x', 'y']": ours(900.0, 3.0), f"ours {unlike}": ours(800.0, 1.0)}
    made["arms"]["liger"]["settings"] = "fused AdamW, weights and states bf16"
    path.write_text(json.dumps(made))
    *_, like, other = figures.memories()
    assert like == (
        "| 0.5B full, fixed | 5.0 GiB, 2,200 tokens/s | 3.0 GiB, 900 tokens/s | `x, y` "
        "| liger (weights and states bf16): 5.0 GiB, 1,100 tokens/s |"
    )
    assert (
        other
        == f"| 0.5B full, fixed | 5.0 GiB, 2,200 tokens/s | 1.0 GiB, 800 tokens/s | `{unlike}` | "
        "- |"
    )


def test_a_plain_peer_with_torchs_attention_is_said_to_have_it(figures):
    for path in figures.RESULTS.glob("row-*.json"):
        made = json.loads(path.read_text())
        made["arms"]["liger"]["settings"] = "fused linear cross-entropy, fused AdamW, sdpa"
        path.write_text(json.dumps(made))
    assert "liger 1,100 (1,000 to 1,200) (SDPA)" in "\n".join(figures.speeds())


def test_rows_over_pairs_have_a_table_of_their_own(figures):
    """And none where there are none; those over documents stay in theirs."""
    before = figures.speeds()
    assert figures.preferences() == []
    made = result("2026-04-01", "fed", 3000.0, 1500.0, 2.0)
    made["arms"] = {
        "ours": {**made["arms"]["ours"], "tokens_saved": 0.25},
        "trl": made["arms"]["liger"],
    }
    made |= {"ratios": {"trl": {"median": 2.0}}, "row": {"pairs_a_step": 20.0, "prompt_share": 0.5}}
    (figures.RESULTS / "row-0.5b-full-dpo-50-h200.json").write_text(json.dumps(made))
    lines = figures.preferences()
    assert figures.speeds() == before and [
        row.title for row in figures.measured_rows.preferences()
    ] == ["0.5b full dpo 50"]
    first = lines.index(
        "| row | prompts | arm | real tokens/s | ours, times as fast | peak GiB | saved | padding "
        "| loss | rounds |"
    )
    place = "0.5b full dpo 50: H100 80GB HBM3, torch 2.11.0, `fed`"
    assert lines[first + 2 : first + 4] == [
        f"| {place} | 50% | ours | 3,000 | - | 5.0 | 25% | 10% | 7.000 → 6.000 | 3 |",
        "|  |  | trl | 1,500 | 2.00 | 5.0 | - | 10% | 7.000 → 6.000 | 3 |",
    ]
    assert "- 0.5b full dpo 50, trl: bf16" in lines


@pytest.mark.parametrize(
    "row",
    [{"fields": {"quantization": "nf4"}}, {"model": "olmoe-1b-7b"}],
    ids=["in 4 bits", "mixture"],
)
def test_a_row_apart_from_the_tables_is_shown_at_its_own_newest_commit(figures, row):
    """Of two such rows at two commits both are; the row measured again is, once."""
    before = figures.speeds()
    measured = {
        "a-qlora-fixed-h100": "old",
        "b-qlora-fixed-h200": "mid",
        "a-qlora-fixed-h200": "new",
    }
    for day, (name, commit) in enumerate(measured.items(), start=1):
        made = result(f"2026-04-0{day}", commit, 3000.0, 1500.0, 2.0) | {"row": row}
        (figures.RESULTS / f"row-{name}.json").write_text(json.dumps(made))
    found = figures.measured_rows.with_peers(apart=True)
    assert figures.speeds() == before and ("in NF4" in figures.every_arm(found[0])) == (
        "fields" in row
    )
    assert sorted((row.title, row.commit) for row in found) == [
        ("a qlora fixed", "new"),
        ("b qlora fixed", "mid"),
    ]


def test_names_of_mixtures_are_their_makers(figures):
    row = figures.measured_rows.row_of(
        "olmoe 1b 7b full fixed", [result("2026-04-01", "new", 3000.0, 1500.0, 2.0)]
    )
    assert row.name == "OLMoE-1B-7B full, fixed"


def test_a_newer_row_without_peers_leaves_the_table_of_those_with_them(figures):
    before = figures.speeds()
    made = result("2026-04-01", "new", 3000.0, 1500.0, 2.0)
    made["arms"] = {"ours": made["arms"]["ours"], "ours use_dora=True": made["arms"]["liger"]}
    (figures.RESULTS / "row-8b-lora-dora-fixed-h200.json").write_text(
        json.dumps(made | {"ratios": {}})
    )
    assert figures.speeds() == before and "At `new`:" in figures.arms()
