import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import runs
import tiny
from chronicals.config.config import laid_over
from chronicals.data import TokenStore
from chronicals.data.reading.sources import source_fingerprint
from chronicals.saving import check_folder, folders, manifest_entry, write_folder
from chronicals.training import CheckpointError
from chronicals.training.run import checkpoint as module
from chronicals.training.run.callbacks import Callback, read_metrics
from chronicals.training.run.checkpoint import (
    checkpoints,
    newest_valid,
    random_states,
    restore_random_states,
)
from comparison import equal


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    runs.train(folder, save_steps=2, save_total_limit=3)
    return folder


@pytest.fixture
def run_folder(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_only_safetensors_and_json(finished):
    for folder in checkpoints(finished / "run"):
        names = {path.suffix for path in folder.rglob("*") if path.is_file()}
        assert names <= {".safetensors", ".json", ".jinja"}, names


def test_keeps_the_newest(finished):
    assert [path.name for path in checkpoints(finished / "run")] == [
        "step-00000006",
        "step-00000004",
        "step-00000002",
    ]


UNREADABLE = ("null", "[]", "{}", '{"state.json": 1}', '{"state.json": {"size": 1}}')
"""Manifests of another shape."""


@pytest.mark.parametrize("manifest", UNREADABLE)
def test_a_manifest_of_another_shape_is_damage(run_folder, caplog, manifest):
    newest, before, _ = checkpoints(run_folder / "run")
    (newest / "manifest.json").write_text(manifest)
    if manifest == "{}":
        (newest / "optimizer.safetensors").unlink()
    assert newest_valid(run_folder / "run") == before
    assert str(newest) in caplog.text


def test_what_cannot_be_read_is_damage(run_folder, caplog, monkeypatch):
    newest, before, _ = checkpoints(run_folder / "run")
    hashed = module._hash

    def bad_sector(path):
        if path == newest / "optimizer.safetensors":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return hashed(path)

    monkeypatch.setattr(module, "_hash", bad_sector)
    assert newest_valid(run_folder / "run") == before
    assert "optimizer.safetensors cannot be read" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("dangling", [False, True])
def test_checkpoints_that_are_links(run_folder, tmp_path_factory, dangling):
    """The newest is read where it is whole, and replaced where it is not there; older ones are
    removed as links.
    """
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for folder in checkpoints(run_folder / "run")[: 1 if dangling else 2]:
        shutil.move(folder, elsewhere / folder.name)
        folder.symlink_to(elsewhere / folder.name)
    if dangling:
        shutil.rmtree(elsewhere / "step-00000006")
    result = runs.train(run_folder, save_steps=2, save_total_limit=2, max_steps=8, resume=True)
    assert result.steps == 8
    assert [(path.name, path.is_symlink()) for path in checkpoints(run_folder / "run")] == [
        ("step-00000008", False),
        ("step-00000006", not dangling),
    ]
    assert dangling or check_folder(elsewhere / "step-00000004") is None


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_damage_is_named_and_the_one_before_is_used(run_folder, caplog, damage):
    newest, before, _ = checkpoints(run_folder / "run")
    victim = newest / ("manifest.json" if damage == "manifest" else "optimizer.safetensors")
    if damage == "remove":
        victim.unlink()
    elif damage == "flip":
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    else:
        victim.write_bytes(victim.read_bytes()[:-3])
    with caplog.at_level(logging.ERROR):
        assert newest_valid(run_folder / "run") == before
    assert victim.name in caplog.text
    assert str(newest) in caplog.text


@pytest.mark.slow
def test_resume_from_the_one_before_gives_the_same_end(run_folder, finished):
    (checkpoints(run_folder / "run")[0] / "state.json").write_text("{")
    shutil.rmtree(run_folder / "run" / "model")
    runs.train(run_folder, save_steps=2, save_total_limit=3, resume=True)
    assert runs.trajectory(run_folder) == runs.trajectory(finished)
    left = runs.weights(run_folder)
    right = runs.weights(finished)
    assert all(equal(left[name], right[name]) for name in right)


@pytest.mark.slow
def test_metrics_are_cut_back_to_the_checkpoint(run_folder):
    for folder in checkpoints(run_folder / "run")[:2]:
        shutil.rmtree(folder)
    with (run_folder / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0, "gra')
    runs.train(run_folder, save_steps=2, resume=True)
    assert [step for step, _, _ in runs.trajectory(run_folder)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_full_disk_leaves_the_old_checkpoint(run_folder, let_raise):
    folder = run_folder / "run"
    before = {path.name: check_folder(path) for path in checkpoints(folder)}

    let_raise(folders, _sync=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(CheckpointError, match="disk is full.*intact"):
        runs.train(run_folder, max_steps=9, save_steps=2, resume=True)
    assert {path.name: check_folder(path) for path in checkpoints(folder)} == before
    assert not list((folder / "checkpoints").glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "message"),
    [(28, "disk is full"), (122, "disk is full"), (27, "cannot be written.*File too large")],
)
def test_what_safetensors_says_of_the_disk_is_told(tmp_path, let_raise, number, message):
    said = f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})"
    let_raise(module, save_file=SafetensorError(said))
    with pytest.raises(CheckpointError, match=message):
        runs.train(tmp_path, max_steps=1)


@pytest.mark.slow
def test_full_disk_for_real(tmp_path):
    """On a file system of half a megabyte."""
    small = tmp_path / "small"
    small.mkdir()
    if (
        os.geteuid() != 0
        or os.system(f"mount -t tmpfs -o size=512k tmpfs {small} 2>/dev/null") != 0
    ):
        pytest.skip("cannot mount a small file system here")
    try:
        write_folder(small / "first", lambda aside: (aside / "file").write_bytes(b"x" * 1000))
        with pytest.raises(CheckpointError, match="disk is full"):
            runs.train(tmp_path, output_dir=small / "run")
        assert check_folder(small / "first") is None
    finally:
        os.system(f"umount {small}")


@pytest.mark.slow
def test_damaged_checkpoints_take_no_place_of_whole_ones(run_folder):
    """Both that are left are damaged: the run begins anew, and what it saves stays."""
    folder = run_folder / "run"
    for checkpoint in checkpoints(folder):
        (checkpoint / "state.json").write_text("{")
    shutil.rmtree(folder / "model")
    (folder / "checkpoints" / "step-best").mkdir()
    runs.train(run_folder, max_steps=3, save_steps=1, save_total_limit=2, resume=True)
    assert newest_valid(folder).name == "step-00000003"
    whole = [path.name for path in checkpoints(folder) if check_folder(path) is None]
    assert (
        whole == ["step-00000003", "step-00000002"]
        and (folder / "checkpoints" / "step-best").exists()
    )


def test_each_rank_has_its_random_numbers_back(tmp_path, caplog):
    """Of two: what the second drew is not what the first did."""

    class Two:
        def gather(self, state):
            other = torch.Generator().manual_seed(1).get_state()
            return [state, other if len(state) == len(other) else state.clone()]

    torch.manual_seed(0)
    save_file(random_states(Two()), tmp_path / "states")
    stored = load_file(tmp_path / "states")
    for rank in (0, 1):
        restore_random_states(stored, rank, tmp_path)
        assert equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(rank))), (
            rank
        )
    restore_random_states(stored, 2, tmp_path)
    assert "written by fewer processes, that of rank 2 draws its random numbers anew" in caplog.text


def wrapped(seed=0, names=("default",), **changes):
    """A model with adapters of PEFT, of which the last is active."""
    peft = pytest.importorskip("peft")
    made = tiny.llama()
    torch.manual_seed(seed)
    options = {
        "r": 4,
        "target_modules": "all-linear",
        "lora_dropout": 0.0,
        "task_type": "CAUSAL_LM",
        **changes,
    }
    made = peft.get_peft_model(made, peft.LoraConfig(**options), adapter_name=names[0])
    for name in names[1:]:
        made.add_adapter(name, peft.LoraConfig(**options))
    made.set_adapter(names[-1])
    return made


@pytest.mark.slow
@pytest.mark.parametrize("names", [("default",), ("mine",), ("default", "second")], ids=str)
def test_adapters_of_peft_come_back(tmp_path, names):
    """Whatever a fresh wrapping had in their place."""

    def model(seed):
        return wrapped(seed, names)

    options = {"lr_scheduler": "constant", "warmup_steps": 0, "save_steps": 3}
    runs.train(tmp_path / "whole", model=model(1), max_steps=6, **options)
    runs.train(tmp_path / "parts", model=model(1), max_steps=3, **options)
    runs.train(tmp_path / "parts", model=model(2), max_steps=6, resume=True, **options)
    assert runs.trajectory(tmp_path / "whole") == runs.trajectory(tmp_path / "parts")
    with pytest.raises(CheckpointError, match="does not belong to this model"):
        runs.train(tmp_path / "parts", model=tiny.llama(), max_steps=9, resume=True, **options)


@pytest.mark.slow
def test_weights_of_several_types_come_back_bit_by_bit(tmp_path):
    """Frozen embeddings in fp16 before layers that fp16 would round."""

    def model():
        made = tiny.llama(tie_word_embeddings=False)
        made.get_input_embeddings().requires_grad_(False).half()
        return made

    options = {"mixed_precision": "fp16", "save_steps": 2}
    runs.train(tmp_path, model=model(), **options)
    before = runs.weights(tmp_path)
    shutil.rmtree(tmp_path / "run" / "model")
    runs.train(tmp_path, model=model(), resume=True, **options)
    assert all(equal(before[name], weight) for name, weight in runs.weights(tmp_path).items())


def test_a_run_is_not_overwritten(run_folder):
    with pytest.raises(CheckpointError, match=r"output_dir.*resume=True.*another output_dir"):
        runs.train(run_folder)


def rewrite_state(folder, **changes):
    """Of a checkpoint, with a manifest that agrees."""
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | changes))
    described = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(
        json.dumps(described | {"state.json": manifest_entry(folder / "state.json")})
    )


def key_of_format_7(rows, folder):
    """As it was made before ``completions_as_chat`` and format 8."""
    inner = tiny.tokenizer()
    vocabulary = inner.backend_tokenizer.to_str().partition('"added_tokens":')[2]
    described = [inner.chat_template, inner.special_tokens_map, False, "sft", ["assistant"], "all"]
    tokenizer = hashlib.sha256(
        f"{vocabulary}{json.dumps(described, default=str, sort_keys=True)}".encode()
    ).hexdigest()
    made_of = [7, 128, None, tokenizer, source_fingerprint(rows, folder / "tokens", 42)]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_is_gone_on_from(run_folder):
    rows = tiny.chat_rows()
    for folder in checkpoints(run_folder / "run"):
        rewrite_state(folder, data=key_of_format_7(rows, run_folder))
    assert runs.train(run_folder, rows, resume=True, max_steps=8).steps == 8


def test_rows_that_an_earlier_version_tokenised_otherwise_are_named(run_folder):
    rows = tiny.chat_rows()
    for folder in checkpoints(run_folder / "run"):
        rewrite_state(folder, data=key_of_format_7(rows, run_folder), order="another")
    with pytest.raises(CheckpointError, match="this version tokenises the data otherwise"):
        runs.train(run_folder, rows, resume=True)


def test_other_data_is_refused_on_resume(run_folder):
    with pytest.raises(CheckpointError, match="other data"):
        runs.train(run_folder, rows=tiny.chat_rows(7), resume=True, max_steps=9)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, r"seed=1 \(before: 42\)"),
        ({"use_sequence_packing": False}, r"use_sequence_packing=False \(before: True\)"),
        ({"packing_strategy": "in-order"}, r"packing_strategy='in-order' \(before: 'best-fit'\)"),
        ({"max_documents": 1}, r"max_documents=1 \(before: None\)"),
        ({"validation_split": 0.2}, r"validation_split=0.2 \(before: 0.0\)"),
    ],
)
def test_another_order_is_refused_on_resume(run_folder, changes, named):
    """What the run's position counts would be other documents."""
    with pytest.raises(
        CheckpointError,
        match=f"another order than before.*{named}.*resume with what the run began with",
    ):
        runs.train(run_folder, resume=True, **{"max_steps": 9, **changes})


@pytest.mark.slow
def test_other_rows_held_out_are_refused_on_resume(tmp_path):
    """The same rows, but what was held out of them is now given beside them."""
    runs.train(tmp_path, validation_split=0.2, max_steps=2)
    with pytest.raises(
        CheckpointError, match=r"another order than before.*validation_split=0.0 \(before: 0.2\)"
    ):
        runs.train(tmp_path, eval_rows=tiny.chat_rows(65)[60:], max_steps=4, resume=True)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({}, {"batch_size": 1}),
        ({}, {"batch_size": 3}),
        ({}, {"gradient_accumulation_steps": 5}),
        ({"num_epochs": 1}, {}),
        ({"max_steps": 7}, {}),
    ],
)
def test_every_epoch_is_whole_in_whatever_steps_it_goes_on(tmp_path, first, then):
    """38 packs are no whole number of steps; all targets are three times those of one epoch,
    however steps are cut.
    """
    rows = tiny.chat_rows(38)
    settings = {"num_epochs": 3, "use_sequence_packing": False, "save_steps": 2}

    class Stop(Callback):
        def step_done(self, metrics):
            if not first and metrics.step == 17:
                raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        runs.train(tmp_path, rows, callbacks=[Stop()], **laid_over(settings, first))
    runs.train(tmp_path, rows, resume=True, **laid_over(settings, then))
    steps = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    store = TokenStore.open(*(tmp_path / "tokens").glob("*.arrow"))
    assert sum(step["targets"] for step in steps) == 3 * store.targets.sum()
    assert steps[-1]["targets"] > 0
    assert steps[-1]["epoch"] == 3.0
    assert steps[-1]["learning_rate"] < 0.2 * steps[len(steps) // 2]["learning_rate"]


@pytest.mark.slow
def test_resumed_at_its_end_a_run_has_the_same_result(tmp_path):
    """As where a script is started again that always resumes."""
    first = runs.train(tmp_path, validation_split=0.2)
    page = first.report.read_text()
    second = runs.train(tmp_path, validation_split=0.2, resume=True)
    assert (second.steps, second.loss, second.evaluation) == (
        first.steps,
        first.loss,
        first.evaluation,
    )
    assert (
        f"{first.evaluation.loss:.4f}" in page and "held-out loss</th>" in second.report.read_text()
    )


@pytest.mark.slow
def test_changed_settings_are_told_on_resume(run_folder, caplog):
    with caplog.at_level(logging.WARNING):
        runs.train(run_folder, max_steps=7, learning_rate=1e-3, save_steps=None, resume=True)
    assert (
        "learning_rate=0.001 (before: 0.003), max_steps=7 (before: 6), output_dir=" in caplog.text
    )


@pytest.mark.slow
def test_another_model_under_an_adapter_is_told_on_resume(tmp_path, caplog):
    """Its shapes are the same, so that nothing else would show."""

    def model(name):
        made = tiny.llama()
        made.config._name_or_path = name
        return made

    runs.train(tmp_path, model=model("one"), use_lora=True, lora_rank=4, max_steps=1)
    with caplog.at_level(logging.WARNING):
        runs.train(
            tmp_path, model=model("other"), use_lora=True, lora_rank=4, max_steps=1, resume=True
        )
    assert "resuming with model='other' (before: 'one')" in caplog.text


@pytest.mark.slow
def test_adapters_are_not_whole_weights(tmp_path):
    """And nothing is asked of the network for them."""
    runs.train(tmp_path, use_lora=True, lora_rank=4, max_steps=1)
    with pytest.raises(
        CheckpointError, match="holds adapters, and the model has none; set use_lora"
    ):
        runs.train(tmp_path, max_steps=2, resume=True)


@pytest.mark.slow
def test_another_model_is_refused_on_resume(run_folder):
    with pytest.raises(CheckpointError, match="does not belong to this model"):
        runs.train(run_folder, model=tiny.llama(num_hidden_layers=3), resume=True, max_steps=9)


def test_state_holds_what_was_consumed_not_prefetched(finished):
    for folder in checkpoints(finished / "run"):
        state = json.loads((folder / "state.json").read_text())
        assert state["position"] == state["step"] * 2 * 2


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"lora_alpha": 99}, {"r": 8}], ids=str)
def test_other_adapters_of_peft_are_not_gone_on_with(tmp_path, changes):
    runs.train(tmp_path, model=wrapped(), max_steps=1)
    with pytest.raises(CheckpointError, match=f"has {next(iter(changes))}="):
        runs.train(tmp_path, model=wrapped(**changes), max_steps=2, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "message"),
    [({"num_hidden_layers": 1}, "are not in both"), ({"hidden_size": 32}, "there and .* here")],
    ids=str,
)
def test_another_architecture_is_not_gone_on_with(tmp_path, shape, message):
    runs.train(tmp_path, max_steps=1)
    other = tiny.llama(**shape)
    before = {name: p.clone() for name, p in other.named_parameters()}
    with pytest.raises(CheckpointError, match=message):
        runs.train(tmp_path, model=other, max_steps=2, resume=True)
    assert all(equal(p.cpu(), before[name]) for name, p in other.named_parameters())


@pytest.mark.slow
def test_how_to_resume_can_be_pasted(tmp_path):
    runs.train(tmp_path, max_steps=1, output_dir=tmp_path / "my run")
    with pytest.raises(
        CheckpointError, match=f"train\\(..., resume=True\\) and output_dir='{tmp_path}/my run'"
    ):
        runs.train(tmp_path, max_steps=1, output_dir=tmp_path / "my run")


@pytest.mark.slow
def test_adapters_of_peft_are_as_they_were_where_others_do_not_fit(tmp_path):
    peft = pytest.importorskip("peft")
    made = (
        peft.LoraConfig(r=4, target_modules=names) for names in (["q_proj"], ["q_proj", "k_proj"])
    )
    model, other = (peft.get_peft_model(tiny.llama(), config) for config in made)
    other.save_pretrained(tmp_path / "model")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="the model has no"):
        module.load_checkpoint_weights(tmp_path, model)
    assert all(equal(tensor, before[name]) for name, tensor in model.state_dict().items())
