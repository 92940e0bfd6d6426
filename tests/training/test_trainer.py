import contextlib
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import runs
import tiny
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import DataError
from chronicals.distributed import Mesh
from chronicals.lora import LoRAConfig, adapters, apply_lora, load_adapter, save_adapter
from chronicals.objectives import NextToken
from chronicals.objectives.terms import Term
from chronicals.optimizers import FusedAdamW
from chronicals.training import (
    Callback,
    ChronicalsTrainer,
    Evaluation,
    TrainingError,
    preparation,
    session,
)
from chronicals.training.run import loop
from chronicals.training.step import audit, in_backward
from comparison import equal


@pytest.fixture(autouse=True)
def nothing_compiled_beforehand(let_return):
    """Objectives of these tests count their calls, of which compiling kernels beforehand would
    be one on a card.
    """
    let_return(session, compile_micro_step=None)


@pytest.mark.slow
def test_loss_falls_and_everything_is_written(tmp_path):
    result = runs.train(tmp_path, max_steps=30, validation_split=0.2, eval_steps=10)
    steps = runs.trajectory(tmp_path)
    assert [step for step, _, _ in steps] == list(range(1, 31))
    assert steps[-1][1] < 0.6 * steps[0][1]
    assert result.evaluation.loss < steps[0][1]
    assert math.isclose(result.evaluation.perplexity, math.exp(result.evaluation.loss))
    assert result.coverage.share == 1.0
    page = result.report.read_text()
    assert "data:image/svg+xml" in page and "held-out loss" in page
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines if "eval_loss" in line] == [10, 20, 30]
    for line in lines:
        if "loss" in line:
            assert (
                line["tokens"] < 2 * 2 * 128
                and line["tokens_per_second"] > 0
                and 0 < line["fill"] <= 1
            )


@pytest.mark.slow
def test_the_model_can_be_loaded_by_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tiny.llama()
    result = runs.train(tmp_path, model=model)
    loaded = AutoModelForCausalLM.from_pretrained(result.model_dir)
    ids = torch.tensor([[5, 9, 200]])
    assert equal(loaded(ids).logits, model.cpu()(ids).logits)
    assert (
        AutoTokenizer.from_pretrained(result.model_dir).chat_template
        == tiny.tokenizer().chat_template
    )


@pytest.mark.slow
def test_lora_is_written_for_peft_and_the_base_is_untouched(tmp_path):
    peft = pytest.importorskip("peft")
    model = tiny.llama()
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = runs.train(tmp_path, model=model, use_lora=True, lora_rank=4, max_steps=10)
    assert 0 < result.coverage.share < 0.5
    loaded = peft.PeftModel.from_pretrained(tiny.llama(), result.model_dir)
    ids = torch.tensor([[5, 9, 200, 31]])
    model.cpu()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(tiny.llama()(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)
    for name, tensor in tiny.llama().state_dict().items():
        assert equal(tensor, base[name])


@pytest.mark.slow
def test_a_model_in_pefts_wrapping_trains_in_packs(tmp_path, caplog):
    """As the model in it does; adapters of ours on top are refused."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    with caplog.at_level("INFO"):
        runs.train(tmp_path, model=peft.get_peft_model(tiny.llama(), config), max_steps=2)
    assert (
        "sequence packing (documents do not affect each other)" in caplog.text
        and "loss without whole" in caplog.text
    )
    assert "follow in step 2" in caplog.text and "got no gradient" not in caplog.text
    with pytest.raises(ValueError, match="leave use_lora out"):
        runs.train(
            tmp_path / "both", model=peft.get_peft_model(tiny.llama(), config), use_lora=True
        )


def deepseek():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    latent = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    }
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 300,
        "max_position_embeddings": 512,
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **latent, **experts))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["adapters", "full"])
def test_what_a_class_keeps_in_fp32_stays_so(tmp_path, lora):
    """A router whose weights were rounded would send tokens to other experts."""
    model = deepseek()
    model._keep_in_fp32_modules_strict = {
        "gate.weight"
    }  # transformers 5.17 has it not in the class, 5.24 has
    gate = model.model.layers[1].mlp.gate.weight
    torch.nn.init.normal_(gate, std=0.3)
    before = gate.detach().clone()
    options = (
        {"use_lora": True, "lora_target_modules": ["o_proj"]} if lora else {"learning_rate": 1e-9}
    )
    runs.train(tmp_path, model=model, mixed_precision="bf16", max_steps=1, **options)
    assert (
        gate.dtype == torch.float32
        and model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    )
    torch.testing.assert_close(gate.detach().cpu(), before, rtol=0, atol=1e-8)


def test_a_shell_of_the_compilers_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model\.compile\(\) compiles in place"):
        ChronicalsTrainer(
            torch.compile(tiny.llama(), backend="eager"), tiny.tokenizer(), runs.config(tmp_path)
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_steps": 2}, "eval_steps=2: nothing is held out"),
        ({"num_epochs": 1, "warmup_steps": 1000}, "warmup_steps=1000 exceeds the"),
    ],
)
def test_what_could_never_happen_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        runs.train(tmp_path, **changes)


class Leaving(Callback):
    """Leaves the model in evaluation."""

    def __init__(self, model):
        self.model = model

    def step_done(self, metrics):
        self.model.eval()


@pytest.mark.slow
def test_a_callback_that_leaves_the_model_in_evaluation_changes_nothing(tmp_path):
    same = {
        "max_steps": 4,
        "use_lora": True,
        "lora_rank": 4,
        "lora_dropout": 0.5,
        "learning_rate": 1e-2,
    }
    quiet = runs.train(tmp_path / "quiet", model=tiny.llama(), **same)
    model = tiny.llama()
    assert (
        runs.train(tmp_path / "leaving", model=model, callbacks=[Leaving(model)], **same).loss
        == quiet.loss
    )


def test_adapters_of_peft_learn_by_lora_plus_where_it_is_asked_for(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    for asked in (False, True):
        chosen = ChronicalsConfig(
            **({"use_lora_plus": True, "lora_plus_ratio": 8.0} if asked else {}),
            mixed_precision="fp32",
        )
        model = peft.get_peft_model(tiny.llama(), config)
        optimizer = session.build_optimizer(model, chosen)
        rates = sorted({group["lr"] for group in optimizer.param_groups})
        assert rates == pytest.approx([2e-4, 1.6e-3] if asked else [2e-4])


def adapted_beside_its_head():
    model = apply_lora(tiny.llama(), LoRAConfig(rank=4))
    model.lm_head.weight.requires_grad_(True)
    return model


def wrapped_beside_its_norm():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny.llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    model.base_model.model.model.norm.weight.requires_grad_(True)
    return model


@pytest.mark.parametrize(
    ("made", "lost"), [(adapted_beside_its_head, "lm_head"), (wrapped_beside_its_norm, "norm")]
)
def test_what_would_be_trained_and_not_saved_is_refused(tmp_path, made, lost):
    with pytest.raises(
        ValueError,
        match=rf"{lost}\.weight: would be trained beside adapters, which alone are saved",
    ):
        runs.train(tmp_path, model=made())


@pytest.mark.slow
def test_what_peft_saves_beside_adapters_is_trained(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["norm"], bias="all", task_type="CAUSAL_LM"
    )
    result = runs.train(tmp_path, model=peft.get_peft_model(tiny.llama(), config), max_steps=1)
    saved = load_file(result.model_dir / "adapter_model.safetensors")
    norms = [weight for name, weight in saved.items() if name.endswith("model.norm.weight")]
    assert len(norms) == 1 and (norms[0] != 1).any(), "a norm begins as ones, and is trained"


def test_prompts_of_peft_are_refused_by_name(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny.llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    with pytest.raises(ValueError, match="'default' learns a prompt"):
        runs.train(tmp_path, model=model)


@pytest.mark.slow
def test_settings_of_generation_that_could_not_be_saved_are_settled_before(tmp_path, caplog):
    model = tiny.llama()
    model.generation_config.temperature = 0.6
    with caplog.at_level(logging.WARNING):
        result = runs.train(tmp_path, model=model, max_steps=1)
    saved = json.loads((result.model_dir / "generation_config.json").read_text())
    assert (
        saved["do_sample"] is True
        and saved["temperature"] == 0.6
        and "do_sample is set" in caplog.text
    )
    model.generation_config = None
    runs.train(tmp_path / "none", model=model, max_steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_mixed_precision_learns(tmp_path, mode):
    model = tiny.llama()
    runs.train(tmp_path, model=model, mixed_precision=mode, max_steps=15)
    steps = runs.trajectory(tmp_path)
    assert steps[-1][1] < 0.85 * steps[0][1]
    assert {p.dtype for p in model.parameters()} == {
        torch.bfloat16 if mode == "bf16" else torch.float32
    }


def overflowing(step_to_break, value=float("inf")):
    """An objective whose loss overflows in one micro-batch of one step."""

    class Overflowing(NextToken):
        calls = 0

        def __call__(self, model, batch):
            terms = super().__call__(model, batch)
            Overflowing.calls += 1
            broken = (Overflowing.calls - 1) // 2 + 1 == step_to_break
            return (
                {name: Term(term.sum * value) for name, term in terms.items()} if broken else terms
            )

    return Overflowing()


@pytest.mark.slow
def test_fp16_overflow_skips_the_step_and_goes_on(tmp_path, caplog):
    trainer = ChronicalsTrainer(
        tiny.llama(), tiny.tokenizer(), runs.config(tmp_path, mixed_precision="fp16")
    )
    trainer.objective = overflowing(3)
    with caplog.at_level(logging.WARNING):
        trainer.train(tiny.chat_rows())
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["skipped"] for line in lines] == [False, False, True, False, False, False]
    assert "loss scale halved" in caplog.text
    state = json.loads(next((tmp_path / "run" / "checkpoints").glob("*/state.json")).read_text())
    assert state["precision"]["scale"] == 2.0**15
    # The skipped step changed nothing: the next loss on like data is where the one before left off.
    assert abs(lines[3]["loss"] - lines[1]["loss"]) < 0.35 * lines[1]["loss"]


@pytest.mark.slow
def test_the_audit_waits_for_a_step_that_is_applied(tmp_path):
    trainer = ChronicalsTrainer(
        tiny.llama(), tiny.tokenizer(), runs.config(tmp_path, mixed_precision="fp16")
    )
    trainer.objective = overflowing(1)
    coverage = trainer.train(tiny.chat_rows()).coverage
    assert coverage.moved == coverage.asked == coverage.total


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path, mode):
    model = tiny.llama()
    trainer = ChronicalsTrainer(
        model, tiny.tokenizer(), runs.config(tmp_path, mixed_precision=mode)
    )
    trainer.objective = overflowing(3, float("nan"))
    with pytest.raises(TrainingError, match=r"step 3.*not finite.*learning_rate"):
        trainer.train(tiny.chat_rows())
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.slow
def test_zero_gradients_stop_the_run(tmp_path):
    trainer = ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), runs.config(tmp_path))
    trainer.objective = overflowing(1, 0.0)
    with pytest.raises(TrainingError, match="Every gradient is zero"):
        trainer.train(tiny.chat_rows())


@pytest.mark.slow
def test_zero_gradients_later_stop_the_run(tmp_path):
    trainer = ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), runs.config(tmp_path))
    trainer.objective = overflowing(4, 0.0)
    with pytest.raises(TrainingError, match="step 4: every gradient is zero"):
        trainer.train(tiny.chat_rows())


def test_nothing_to_train_is_an_error(tmp_path):
    model = tiny.llama().requires_grad_(False)
    with pytest.raises(ConfigurationError, match="requires a gradient"):
        runs.train(tmp_path, model=model)


@pytest.mark.slow
def test_an_idle_tensor_is_named(tmp_path, caplog):
    model = tiny.llama()
    model.model.layers[1].mlp.idle = torch.nn.Linear(3, 3)
    with caplog.at_level(logging.WARNING):
        result = runs.train(tmp_path, model=model)
    assert "model.layers.1.mlp.idle.weight" in result.coverage.idle
    assert "model.layers.1.mlp.idle" in caplog.text
    assert result.coverage.with_gradient == result.coverage.asked - 12


def test_all_masked_data_is_an_error_before_the_first_step(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "hello"}]}] * 4
    with pytest.raises(DataError, match="nothing to train on in any of 4 rows"):
        runs.train(tmp_path, rows=rows)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["train_dataset.json"]


def test_masked_after_truncation_is_named_by_cause(tmp_path):
    long = [
        {
            "messages": [
                {"role": "user", "content": "x " * 400},
                {"role": "assistant", "content": "yes"},
            ]
        }
    ] * 3
    with pytest.raises(DataError, match="masked_by_cut: 3 rows"):
        runs.train(tmp_path, rows=long)


def test_token_outside_the_embedding(tmp_path):
    with pytest.raises(DataError, match="id_out_of_range: 1 .*token id 300 of 300"):
        runs.train(tmp_path, rows=[{"input_ids": [1, 2, 300]}])


def test_what_is_held_out_is_said_once(tmp_path):
    with pytest.raises(ConfigurationError, match="validation_split=0.5: eval_dataset is given too"):
        runs.train(tmp_path, eval_rows=tiny.chat_rows(4), validation_split=0.5)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_early_stop(tmp_path):
    result = runs.train(
        tmp_path,
        max_steps=200,
        learning_rate=1e-1,
        validation_split=0.2,
        eval_steps=5,
        early_stopping_patience=2,
    )
    assert result.steps < 200
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_an_early_stop_is_saved_and_lasts(tmp_path, monkeypatch):
    """Resumed, such a run is over, unless it is to be more patient."""
    losses = iter([3.0, 4.0, 4.0, 4.0])
    monkeypatch.setattr(loop, "evaluate", lambda *_: Evaluation(next(losses), 1.0, 0.0, 1))
    options = {"validation_split": 0.2, "eval_steps": 1, "save_steps": None}
    assert runs.train(tmp_path, early_stopping_patience=2, **options).steps == 3
    before = runs.weights(tmp_path)
    assert runs.train(tmp_path, early_stopping_patience=2, resume=True, **options).steps == 3
    assert all(equal(before[name], weight) for name, weight in runs.weights(tmp_path).items())
    assert runs.train(tmp_path, early_stopping_patience=3, resume=True, **options).steps == 4


@pytest.mark.slow
def test_epochs(tmp_path):
    from chronicals.data import create_dataloader

    config = runs.config(tmp_path, num_epochs=3)
    result = runs.train(tmp_path, tiny.chat_rows(), num_epochs=3)
    packs = len(create_dataloader(tiny.chat_rows(), tiny.tokenizer(), config).plan)
    assert result.steps == math.ceil(3 * packs / 4)
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    tokens = create_dataloader(tiny.chat_rows(), tiny.tokenizer(), config).plan.tokens
    assert sum(line["tokens"] for line in lines) == 3 * tokens


@pytest.mark.parametrize(
    "field", ["use_flash_attention", "use_torch_compile", "activation_offload"]
)
def test_a_switch_that_was_set_and_cannot_be_honoured_raises(tmp_path, field):
    if torch.cuda.is_available():
        pytest.skip("can be honoured on a card")
    with pytest.raises(ConfigurationError, match=field):
        runs.train(tmp_path, **{field: True})


@pytest.mark.slow
def test_a_memory_policy_that_cannot_be_honoured_raises(tmp_path):
    from transformers import BloomConfig, BloomForCausalLM

    if not torch.cuda.is_available():
        with pytest.raises(
            ConfigurationError, match=r"recompute_elementwise'\]: needs fused decoder layers"
        ):
            runs.train(tmp_path, memory=["recompute_elementwise"])
    bloom = BloomForCausalLM(BloomConfig(vocab_size=300, hidden_size=64, n_layer=2, n_head=4))
    with pytest.raises(
        ConfigurationError, match="tiled_mlp'\\]: needs gated MLPs, BloomForCausalLM has none"
    ):
        runs.train(tmp_path, model=bloom, memory=["tiled_mlp"])


@pytest.mark.parametrize("held", [1, 1 << 26], ids=["one by one", "all"])
def test_in_the_backward_pass_nothing_follows_a_gradient_that_is_no_number(
    tmp_path, held, set_constants
):
    """The head's gradient comes first; what lies before it in the model is not touched."""
    set_constants(in_backward, HELD=held)
    model = tiny.llama(tie_word_embeddings=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.lm_head.weight.register_hook(lambda gradient: gradient * float("nan"))
    changes = {
        "max_grad_norm": float("inf"),
        "gradient_accumulation_steps": 1,
        "memory": ["optimizer_in_backward"],
    }
    with pytest.raises(TrainingError, match="not finite. The step was in part applied"):
        runs.train(tmp_path, model=model, **changes)
    assert all(equal(p.cpu(), before[name]) for name, p in model.named_parameters())
    x = model.lm_head.weight.sum()
    x.backward()
    assert model.lm_head.weight.grad is not None  # the run is over, and updates nothing any more


@pytest.mark.slow
def test_few_gradients_are_there_at_a_time(tmp_path, monkeypatch, set_constants):
    """As many as make ``HELD`` bytes, and one more; each weight is updated once a step."""
    updated = []
    usual = in_backward.UpdatesInBackward._update

    def update(self):
        updated.append([(parameter, parameter.grad.nbytes) for parameter in self.waiting])
        usual(self)
        assert all(
            parameter.grad is None
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        )

    set_constants(in_backward, HELD=100_000)
    monkeypatch.setattr(in_backward.UpdatesInBackward, "_update", update)
    model = tiny.llama()
    changes = {
        "max_grad_norm": float("inf"),
        "gradient_accumulation_steps": 1,
        "memory": ["optimizer_in_backward"],
    }
    runs.train(tmp_path, model=model, max_steps=1, **changes)
    assert sorted(id(p) for group in updated for p, _ in group) == sorted(
        id(p) for p in model.parameters()
    )
    assert 1 < len(updated) < len(list(model.parameters()))
    assert all(sum(size for _, size in group[:-1]) < 100_000 for group in updated)


@pytest.mark.slow
def test_what_runs_is_said_first(tmp_path, caplog):
    with caplog.at_level(logging.DEBUG):
        runs.train(tmp_path)
    for field in (
        "use_flash_attention",
        "use_fused_kernels",
        "use_sequence_packing",
        "use_gradient_checkpointing",
    ):
        assert f"{field}: o" in caplog.text
    assert "trainable 1" in caplog.text


@pytest.mark.slow
def test_a_usual_run_says_little_before_its_first_step(tmp_path, caplog):
    """What runs, and of what does not run nothing that was not asked for."""
    with caplog.at_level(logging.INFO):
        runs.train(tmp_path, use_lora=True)
    lines = [record.message for record in caplog.records]
    (first,) = [number for number, line in enumerate(lines) if line.startswith("step 1/")]
    assert first <= 15 and any(line.startswith("training: 6 steps, ") for line in lines[:first])
    assert any(line.startswith("in use: ") and "sequence packing" in line for line in lines)
    assert not [
        line
        for line in lines[:first]
        if ": off" in line or "not asked for" in line or "CUDA graphs" in line
    ]


@pytest.mark.slow
def test_callbacks_see_the_run(tmp_path):
    class Log(Callback):
        def __init__(self):
            self.seen = []

        def run_began(self, run):
            self.seen.append(("began", run.total_steps))

        def step_done(self, metrics):
            self.seen.append(("step", metrics.step))

        def evaluated(self, step, evaluation):
            self.seen.append(("evaluated", step))

        def run_ended(self, run):
            self.seen.append(("ended", run.step))

    log = Log()
    runs.train(tmp_path, max_steps=2, validation_split=0.1, callbacks=[log])
    assert log.seen == [("began", 2), ("step", 1), ("step", 2), ("evaluated", 2), ("ended", 2)]


@pytest.mark.slow
def test_every_callback_is_ended(tmp_path):
    """Also where one of them fails in that."""
    ended = []

    class Ends(Callback):
        def run_ended(self, run):
            ended.append(self)
            raise OSError("no room for my notes")

    both = [Ends(), Ends()]
    with pytest.raises(OSError, match="no room"):
        runs.train(tmp_path, max_steps=1, callbacks=both)
    assert ended == both


@pytest.mark.slow
def test_a_callback_may_generate(tmp_path):
    """What the model says by then, and the run goes on as if it had not been asked."""
    asked = []
    model = tiny.llama()

    class Asks(Callback):
        def ask(self, *_):
            ids = torch.tensor([[5, 6, 7], [0, 8, 9]])
            plain = tiny.llama()
            plain.load_state_dict(model.state_dict())
            options = {
                "attention_mask": (ids > 0).long(),
                "max_new_tokens": 4,
                "do_sample": False,
                "pad_token_id": 0,
            }
            said = model.eval().generate(ids, **options)
            asked.append(equal(said, plain.eval().generate(ids, **options)))
            model.train()

        run_began = step_done = evaluated = run_ended = ask

    same = {"max_steps": 2, "validation_split": 0.1}
    talking = runs.train(tmp_path / "talking", model=model, callbacks=[Asks()], **same)
    assert asked == [True] * 5
    assert talking.loss == runs.train(tmp_path / "silent", **same).loss


@pytest.mark.slow
def test_tensorboard_has_the_curves(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs.train(tmp_path, max_steps=3)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(
        [loss for _, loss, _ in runs.trajectory(tmp_path)]
    )


@pytest.mark.slow
def test_a_model_that_cannot_be_packed_trains_in_padded_rows(tmp_path, caplog):
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=300, hidden_size=64, n_layer=2, n_head=4))
    with caplog.at_level(logging.WARNING):
        runs.train(tmp_path, model=model, max_steps=15)
    assert caplog.text.count("takes padded rows") == 1
    steps = runs.trajectory(tmp_path)
    assert steps[-1][1] < 0.9 * steps[0][1]


@pytest.mark.slow
def test_golden_losses(tmp_path):
    """A refactor that is no computation must not move a bit of these (1e-6 on another torch or
    processor).
    """
    import platform

    recorded = json.loads((Path(__file__).parent / "golden.json").read_text())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs.train(tmp_path, max_steps=5)
    finally:
        torch.set_num_threads(threads)
    same = recorded["torch"] == torch.__version__ and recorded["processor"] == processor(platform)
    got = [[loss, norm] for _, loss, norm in runs.trajectory(tmp_path)]
    if same:
        assert got == recorded["trajectory"]
    else:
        assert torch.allclose(torch.tensor(got), torch.tensor(recorded["trajectory"]), rtol=5e-6)


def processor(platform):
    """Name, family and model: several kinds share a name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return ", ".join(
        line.split(":")[1].strip()
        for line in lines
        if line.startswith(("model name", "cpu family", "model\t"))
    )


@pytest.mark.gpu
def test_compiled_layers_train_as_uncompiled_ones(tmp_path):
    for compiled in (False, True):
        runs.train(
            tmp_path / str(compiled),
            use_torch_compile=compiled,
            mixed_precision="bf16",
            max_steps=3,
        )
    losses = [
        [line[1] for line in runs.trajectory(tmp_path / str(compiled))]
        for compiled in (False, True)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [False, True])
def test_kernels_train_as_their_references_do(tmp_path, lora):
    for fused in (False, True):
        runs.train(
            tmp_path / str(fused),
            use_fused_kernels=fused,
            use_lora=lora,
            lora_dropout=0.0,
            max_steps=6,
        )
    plain, ours = (runs.trajectory(tmp_path / str(fused)) for fused in (False, True))
    for (_, loss, norm), (_, our_loss, our_norm) in zip(plain, ours, strict=True):
        assert our_loss == pytest.approx(loss, rel=1e-3) and our_norm == pytest.approx(
            norm, rel=1e-2
        )


@pytest.mark.parametrize("where", ["weight", "low"])
def test_large_weights_are_watched_to_their_last_bit(where, set_constants):
    set_constants(audit, SMALL=8, _SUMMED_ELEMENTS=7)
    model = torch.nn.Linear(5, 6, bias=False).bfloat16()
    optimizer = FusedAdamW(model.parameters(), lr=0.0)
    optimizer.set_master(model.weight, torch.randn(6, 5))
    watching = audit.FirstStepAudit(model, optimizer)
    assert watching.coverage().moved == 0
    changed = model.weight.data if where == "weight" else optimizer.state[model.weight]["low"]
    changed.view(torch.int16).view(-1)[-1] += 1
    assert watching.coverage().moved == 30


def test_settings_of_adapters_that_are_not_asked_for_are_told(caplog):
    told = "lora_rank, lora_alpha: set, but use_lora is off"
    for changes in ({}, {"use_lora": True, "lora_rank": 4}, {"lora_rank": 4, "lora_alpha": 8}):
        with caplog.at_level(logging.WARNING):
            session.prepare_session(tiny.llama(), ChronicalsConfig(**changes), NextToken())
        assert (told in caplog.text) == ("lora_alpha" in changes)


def other_classes():
    import transformers

    shape = tiny.llama().config
    sizes = {
        "d_model": 64,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
        "d_kv": 16,
        "vocab_size": 300,
    }
    yield (
        transformers.LlamaModel(shape),
        "LlamaModel has no head that predicts tokens; load it with AutoModelForCausalLM",
    )
    scored = (
        "LlamaForSequenceClassification has no head .*; load it with "
        "chronicals.models.load_scored, to train its score"
    )
    yield transformers.LlamaForSequenceClassification(shape), scored
    yield (
        transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)),
        "has an encoder beside its decoder",
    )


@pytest.mark.parametrize(("model", "reason"), other_classes())
def test_another_kind_of_model_is_refused(tmp_path, model, reason):
    with pytest.raises(ValueError, match=reason):
        runs.train(tmp_path, model=model)


@pytest.mark.slow
@pytest.mark.parametrize("adapt", [None, "ours", "peft"])
def test_quantised_weights_are_trained_through_adapters_alone(tmp_path, adapt):
    """As transformers marks a model whose weights a quantiser packed; norms and embeddings would
    be trained in silence.
    """
    peft = pytest.importorskip("peft")
    model = tiny.llama()
    model.is_quantized = True
    if adapt == "peft":
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with (
        pytest.raises(ConfigurationError, match="quantised and cannot be.*use_lora=True")
        if not adapt
        else contextlib.nullcontext()
    ):
        runs.train(tmp_path, model=model, max_steps=1, use_lora=adapt == "ours")


@pytest.mark.slow
def test_attention_dropout_is_honoured_in_padded_rows(tmp_path, caplog):
    """As GPT-2 has it."""
    first, again, none = (
        runs.train(tmp_path / name, model=tiny.llama(attention_dropout=share), max_steps=1)
        for name, share in (("first", 0.4), ("again", 0.4), ("none", 0.0))
    )
    assert (
        "takes padded rows, not packs: it has attention dropout (attention_dropout=0.4; with 0"
        in caplog.text
    )
    assert first.loss == again.loss != none.loss


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"lora_rank": 4, "lora_alpha": 8, "use_rslora": False}, None),
        ({"lora_rank": 8}, "lora_rank=8: the model has adapters already, with 4"),
        ({"lora_alpha": 16}, "lora_alpha=16"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"lora_target_modules": None}, None),
        ({"lora_target_modules": ["self_attn.q_proj", "v_proj"]}, None),
        ({"lora_target_modules": r".*\.(v|q)_proj"}, None),
        ({"lora_target_modules": ["q_proj"]}, "lora_target_modules=.*, with .*v_proj"),
        ({"lora_target_modules": ["q_proj", "k_proj", "v_proj"]}, "lora_target_modules"),
        ({"lora_target_modules": "all-linear"}, "lora_target_modules='all-linear'"),
    ],
)
@pytest.mark.parametrize("use_lora", [True, False])
def test_adapters_that_are_there_are_as_asked_for(changes, named, use_lora):
    model = apply_lora(
        tiny.llama(), LoRAConfig(rank=4, alpha=8, dropout=0.2, target_modules=["v_proj", "q_proj"])
    )
    config = ChronicalsConfig(use_lora=use_lora, **changes)
    with pytest.raises(ConfigurationError, match=named) if named else contextlib.nullcontext():
        session.prepare_session(model, config, NextToken())
    assert {layer.dropout for _, layer in adapters(model)} == {0.2}


def test_of_many_adapted_layers_an_error_tells_some(tmp_path):
    """As a saved adapter names them, each by its whole path."""
    save_adapter(apply_lora(tiny.llama(), LoRAConfig(rank=4)), tmp_path)
    model = load_adapter(tiny.llama(), tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"with model\.layers\.0\S+(, \S+){3} and 10 others; leave"
    ):
        session.prepare_session(
            model, ChronicalsConfig(lora_target_modules=["q_proj"]), NextToken()
        )


@pytest.mark.slow
def test_adapters_that_are_there_drop_what_is_asked_for(tmp_path):
    model = apply_lora(tiny.llama(), LoRAConfig(rank=4, dropout=0.2))
    runs.train(tmp_path, model=model, max_steps=1, lora_dropout=0.3)
    assert {layer.dropout for _, layer in adapters(model)} == {0.3}
    assert (
        json.loads((tmp_path / "run" / "model" / "adapter_config.json").read_text())["lora_dropout"]
        == 0.3
    )


def test_the_models_card_becomes_the_current_one(monkeypatch, let_return):
    """Kernels are launched on that, wherever their tensors are."""
    current = []
    let_return(preparation, input_device=torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    preparation.one_device(tiny.llama(), Mesh())
    assert current == [torch.device("cuda", 1)]


def test_a_model_in_8_bits_is_not_moved():
    """bitsandbytes would multiply by codes that stay where they were."""
    model = tiny.llama()
    model.is_loaded_in_8bit = True
    card = SimpleNamespace(count=1, device=torch.device("cuda", 0))
    with pytest.raises(ConfigurationError, match=r'8 bits lie on cpu, .*device_map=\{"": 0\}'):
        preparation.one_device(model, card)
