"""``chronicals benchmark`` on the CPU, each arm in its own process; and how it prints."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from peers.names import chosen_peers
from typer.testing import CliRunner

import chronicals
from chronicals.benchmark import rounds
from chronicals.benchmark.plan import plan_work
from chronicals.benchmark.work import SIZE_FIELDS
from chronicals.cli import benchmark as command
from chronicals.cli.app import app
from chronicals.config import ConfigurationError, Recipe
from process_groups import wait_until

SOURCE = Path(__file__).parent.parent.parent / "src"


def run(folder, *arguments):
    """The command in its own process, on the tiny shape in fp32; its output and what it wrote."""
    given = [
        "--model",
        "tiny",
        "--mixed-precision",
        "fp32",
        "--warm-up",
        3,
        "--rounds",
        1,
        "--output",
        "row.json",
        *arguments,
    ]
    program = [
        sys.executable,
        "-c",
        "from chronicals.cli import main; main()",
        "benchmark",
        *map(str, given),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "COLUMNS": "160",
        "OMP_NUM_THREADS": "1",
    }
    ran = subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, timeout=400
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran, json.loads((folder / "row.json").read_text()), folder


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Ours, a variant of it whose learning rate is absurd, and transformers; a scouting round
    and a decisive one.
    """
    return run(
        tmp_path_factory.mktemp("benchmark"),
        "--data",
        "ragged",
        "--steps",
        2,
        "--commit",
        "abc",
        "--against",
        "transformers,unsloth",
        "--variant",
        "learning_rate=0.5",
    )


def test_ours_and_transformers_train_alike_in_their_own_processes(done):
    _, result, _ = done
    ours, plain = (result["arms"][name] for name in ("ours", "transformers"))
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert ours["grad_norms"] == pytest.approx(plain["grad_norms"], rel=1e-4)
    assert ours["parity"]["loss"]["largest_deviation"] < 1e-5
    assert ours["tokens_a_step"] == plain["tokens_a_step"]
    assert plain["padding_share"] > ours["padding_share"]
    assert ours["trained_share"] == plain["trained_share"] == 1.0


def test_the_reference_step_is_made_of_this_machines_rates(done):
    _, result, _ = done
    if result["floor"] is None:
        pytest.skip(
            "others use this machine: "
            + ", ".join(note for note in result["notes"] if "no reference step" in note)
        )
    parts = ("products", "attention", "elementwise", "loss", "optimizer")
    assert result["floor"]["seconds"] == pytest.approx(sum(result["floor"][part] for part in parts))
    assert all(result["floor"][part] > 0 for part in parts)
    assert result["rates"]["attention"]["backend"] == "per-document"


def test_an_arm_that_leaves_the_reference_has_no_speed(done):
    ran, result, _ = done
    arm = result["arms"]["ours learning_rate=0.5"]
    assert (
        arm["status"] == "refused" and "step 2" in arm["reason"] and "tokens_per_second" not in arm
    )
    assert "refused" in ran.stdout and "where the fp32 reference has" in ran.stdout


def test_a_decisive_round_goes_on_where_the_scouting_round_ended(done):
    _, result, _ = done
    assert result["orders"] == [["ours", "transformers"]]
    for name in ("ours", "transformers"):
        arm = result["arms"][name]
        assert [len(run["seconds"]) for run in arm["samples"]] == [2, 2] and arm["rounds"] == 1
        assert arm["samples"][0] != arm["samples"][1] and arm["last_loss"] is not None
    assert result["ratios"]["transformers"]["by_round"]


def test_what_is_printed(done):
    ran, result, folder = done
    rate = f"{result['arms']['ours']['tokens_per_second']['median']:,.0f}"
    assert rate in ran.stdout and "█" in ran.stdout
    without = result["floor"] is None  # others use this machine
    assert ("no reference step" if without else "not a bound") in ran.stdout
    assert "unsloth-recompute" in ran.stdout and "not installed: unsloth" in ran.stdout
    assert (folder / "row.png").exists() and result["commit"] == "abc"


def test_names_and_notes_are_printed_as_they_are(capsys):
    row = {"model": "[x] :100:", "mode": "full", "data": "fixed", "tokens_a_step": 128}
    result = {
        "row": row,
        "floor": None,
        "ratios": {},
        "needed_flops_a_token": None,
        "notes": ["no reference: [/x] :key:"],
        "arms": {"ours run_name=[y]": {"status": "failed", "reason": "none"}},
    }
    command._print(result, profile=False)
    said = capsys.readouterr().out
    assert (
        "[x] :100:, full, fixed" in said
        and "no reference: [/x] :key:" in said
        and said.count("ours run_name=[y]") == 2
    )


BENCHMARK = "-m", "chronicals.cli", "benchmark"
OF_TINY = [sys.executable, *BENCHMARK, "--model", "tiny", "--mixed-precision", "fp32"]


def environment_in(folder):
    """Of a command that keeps its temporary files in ``folder``, and one core busy."""
    ours = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    return {**os.environ, **ours}


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_killed_leaves_nothing_running(tmp_path, how):
    """While it prepares; SIGTERM also gives it the time to delete what it wrote."""
    ran = subprocess.Popen(
        OF_TINY,
        cwd=tmp_path,
        env=environment_in(tmp_path),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    assert wait_until(lambda: [*tmp_path.glob("chronicals-benchmark-*/*/logs/prepare.log")], 60)
    assert wait_until(lambda: running_in(tmp_path), 10)
    ran.send_signal(how)
    assert ran.wait(30) == (128 + how if how == signal.SIGTERM else -how)
    assert wait_until(lambda: not running_in(tmp_path), 5)
    assert how == signal.SIGKILL or not [*tmp_path.glob("chronicals-benchmark-*")]


@pytest.mark.slow
def test_the_time_limit_counts_from_the_start_and_ends_what_runs(tmp_path):
    ran = subprocess.run(
        [*OF_TINY, "--time-limit", "1"],
        cwd=tmp_path,
        env=environment_in(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1 and "--time-limit 1: it passed while" in ran.stderr
    assert not running_in(tmp_path) and not [*tmp_path.glob("chronicals-benchmark-*")]


def running_in(folder):
    """Processes whose working folder is below ``folder``, but not ``folder`` itself."""
    links = [
        os.path.realpath(path)
        for path in Path("/proc").glob("[0-9]*/cwd")
        if os.access(path, os.R_OK)
    ]
    return [link for link in links if str(link).startswith(f"{folder}/")]


@pytest.mark.long
def test_adapters_over_4_bits_train_alike_in_ours_and_in_peft_over_bitsandbytes(tmp_path):
    """With DoRA and a rank pattern, which peers have too; a variant with other adapters has a
    reference of its own.
    """
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    _, result, _ = run(
        tmp_path,
        "--load-in-4bit",
        "--lora-rank",
        8,
        "--lora-rank-pattern",
        "q_proj=3",
        "--use-dora",
        "--steps",
        2,
        "--against",
        "transformers,transformers-recompute",
        "--scouted-variant",
        "use_dora=false",
    )
    assert result["row"]["mode"] == "qlora" and result["floor"] is None
    for name in ("ours", "transformers", "transformers-recompute", "ours use_dora=False"):
        arm = result["arms"][name]
        assert arm["status"] == "measured", arm["reason"]
        assert (
            max(arm["parity"][what]["largest_deviation"] for what in ("loss", "grad_norm")) < 1e-4
        ), name
    ours, peer, plain = (
        result["arms"][name] for name in ("ours", "transformers", "ours use_dora=False")
    )
    assert (
        ours["trained_share"] == pytest.approx(peer["trained_share"])
        and ours["trained_share"] > plain["trained_share"]
    )
    assert ours["grad_norms"][0] > plain["grad_norms"][0], "lengths have gradients"
    assert "NF4" in ours["settings"] and "NF4" in peer["settings"]


@pytest.mark.long
def test_trl_and_torch_compile_train_alike_with_adapters(tmp_path):
    pytest.importorskip("trl")
    _, result, _ = run(tmp_path, "--mode", "lora", "--steps", 3, "--against", "torch-compile,trl")
    for name in ("ours", "torch-compile", "trl"):
        arm = result["arms"][name]
        assert arm["status"] == "measured", arm["reason"]
        assert arm["parity"]["loss"]["largest_deviation"] < 1e-4
        assert arm["trained_share"] == pytest.approx(
            result["row"]["trained_parameters"] / 212_000, rel=0.1
        )


def test_flags_that_are_wrong_are_named():
    with pytest.raises(ConfigurationError, match="against='ligr'"):
        chosen_peers(["ligr"], "fixed", lora=False)
    with pytest.raises(ConfigurationError, match="variant='dropout'"):
        command._changes("dropout")
    with pytest.raises(
        ConfigurationError, match=r"variant='memory=\[tiled_mlp': a value that is not YAML"
    ):
        command._changes("memory=[tiled_mlp")
    with pytest.raises(
        ConfigurationError,
        match="variant='use_fp8=true,batch_size=4': batch_size decides what a step holds",
    ):
        command._changes("use_fp8=true,batch_size=4")
    with pytest.raises(ConfigurationError, match="max_steps=50: a benchmark decides it itself"):
        command._recipe(None, {"max_steps": 50})
    with pytest.raises(
        ConfigurationError, match=r"trackers=\['wandb'\]: a benchmark decides it itself"
    ):
        command._recipe(None, {"trackers": ["wandb"]})
    with pytest.raises(
        ConfigurationError, match="trust_remote_code=True: a benchmark runs no code of a model"
    ):
        command._recipe(None, {"trust_remote_code": True})


@pytest.mark.parametrize("field", ["chat_template", "base_model"])
def test_fields_that_a_benchmark_does_not_take_are_refused(field, tmp_path):
    with pytest.raises(ConfigurationError, match=f"{field}='chatml': a benchmark"):
        command._recipe(None, {field: "chatml"})
    (tmp_path / "recipe.yaml").write_text(f"model: base\ndata: rows.jsonl\n{field}: chatml\n")
    with pytest.raises(ConfigurationError, match=f"{field}='chatml': a benchmark"):
        command._recipe(tmp_path / "recipe.yaml", {})


@pytest.mark.parametrize("option", ["--variant", "--scouted-variant"])
@pytest.mark.parametrize(
    "changes, message",
    [
        ("lora_droput=0.5", "did you mean 'lora_dropout'"),
        ("logits_chunk_size=0", "logits_chunk_size=0: Input should"),
    ],
)
def test_a_variant_that_is_no_configuration_is_named_before_anything_runs(
    tmp_path, must_not_call, option, changes, message
):
    must_not_call(rounds, "measure_row", "an arm would run")
    given = ["benchmark", "--model", "tiny", "--folder", str(tmp_path), option, changes]
    done = CliRunner().invoke(app, given)
    assert isinstance(done.exception, ConfigurationError) and message in str(done.exception)


def test_the_figures_are_not_written_where_the_bars_are(tmp_path, must_not_call):
    must_not_call(rounds, "measure_row", "an arm would run")
    done = CliRunner().invoke(
        app, ["benchmark", "--model", "tiny", "--output", str(tmp_path / "row.png")]
    )
    assert isinstance(done.exception, ConfigurationError) and "ends in .json" in str(done.exception)


def test_without_a_checkout_the_command_says_how_to_get_one(tmp_path, must_not_call, set_constants):
    must_not_call(rounds, "measure_row", "an arm would run")
    set_constants(command, PEERS_FOLDER=tmp_path)
    given = ["benchmark", "--model", "tiny", "--folder", str(tmp_path), "--against", "trl"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2 and not [*tmp_path.iterdir()]
    assert f"git clone --branch v{chronicals.__version__} " in done.output


def test_a_mode_that_contradicts_the_recipe_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="mode='full' contradicts use_lora=True"):
        plan_work(tmp_path, "tiny", "fixed", "full", {"use_lora": True}, None, 2)


def test_unsloth_stands_for_all_its_ways():
    """The fastest last: where it stands in the decisive rounds, it goes on."""
    assert chosen_peers(["liger", "unsloth"], "fixed", lora=True) == [
        "liger",
        "unsloth-recompute",
        "unsloth",
    ]
    assert chosen_peers(["unsloth"], "ragged", lora=False) == [
        "unsloth-recompute",
        "unsloth-padded",
        "unsloth",
    ]
    under_lora = ["unsloth-recompute", "unsloth-padded", "unsloth-compiled", "unsloth"]
    assert chosen_peers(["unsloth"], "ragged", lora=True) == under_lora
    assert chosen_peers(["unsloth-padded", "unsloth"], "ragged", lora=True) == [
        "unsloth-padded",
        "unsloth",
    ]
    assert chosen_peers(["trl", "unsloth-alone"], "pairs-30", lora=True, objective="dpo") == [
        "trl",
        "unsloth",
    ]


def test_a_variant_is_fields():
    assert command._changes("lora_dropout=0.05,use_fp8=true") == {
        "lora_dropout": 0.05,
        "use_fp8": True,
    }
    lists = command._changes("memory=[tiled_mlp,recompute_layers],max_steps=3,trackers=[]")
    assert lists == {"memory": ["tiled_mlp", "recompute_layers"], "max_steps": 3, "trackers": []}


def test_a_recipe_and_its_flags(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "model: base\ndata: rows.jsonl\nuse_lora: true\nlora_rank: 4\nmax_steps: 9\n"
    )
    model, data, fields, mode = command._recipe(tmp_path / "recipe.yaml", {"lora_rank": 8})
    assert (model, data, mode) == ("base", "rows.jsonl", "lora") and fields["lora_rank"] == 8
    trained = Recipe.from_yaml(tmp_path / "recipe.yaml", lora_rank=8).config()
    work = plan_work(tmp_path, "tiny", "fixed", "lora", fields, None, 2)
    assert all(getattr(work.config(), name) == getattr(trained, name) for name in SIZE_FIELDS)
    assert command._recipe(None, {})[:2] == ("qwen2.5-0.5b", "fixed")
