"""patch_model where models are used: autocast, inference mode, transformers' Trainer, hooks of
accelerate, PEFT's head.
"""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

import families
from chronicals import patch_model, unpatch_model
from chronicals.models import PresentedModel, attention_seam
from chronicals.patching import decoder_layer, patch_parts
from chronicals.patching.lazy_logits import LazyLogits


def inputs():
    ids = torch.randint(1, families.VOCABULARY, (2, 9))
    return {"input_ids": ids, "labels": ids}


def pair(family="llama"):
    plain = families.build(family)
    patched = copy.deepcopy(plain)
    return plain, patched, patch_model(patched)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_logits_looked_at_after_autocast_has_ended(family):
    plain, patched, _ = pair(family)
    rows = inputs()
    found = []
    for model in (plain, patched):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(**rows)
        found.append((out.loss, out.logits))
    assert found[0][1].dtype == found[1][1].dtype
    torch.testing.assert_close(found[1][0], found[0][0], rtol=2e-2, atol=2e-2)
    assert (found[1][1] * 1 - found[0][1]).norm() <= 3e-2 * found[0][
        1
    ].norm()  # single logits round either way


def test_in_inference_mode():
    plain, patched, _ = pair()
    rows = inputs()
    with torch.inference_mode():
        expected = plain(**rows)
        got = patched(**rows)
        torch.testing.assert_close(got.loss, expected.loss)
        torch.testing.assert_close(got.logits * 1, expected.logits)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_in_bf16_it_is_as_near_to_fp32(family):
    plain, patched, _ = pair(family)
    rows = inputs()
    exact = plain(**rows).loss.item()
    own, ours = (abs(model.bfloat16()(**rows).loss.item() - exact) for model in (plain, patched))
    assert ours <= 2 * own + 5e-3


def trained(model, rows, folder):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=1,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        seed=1,
        disable_tqdm=True,
    )
    seen = []
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:3],
        data_collator=padded,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        compute_metrics=lambda found: seen.append(found.predictions) or {"accuracy": 0.0},
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"], seen[-1]


def padded(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": ids.masked_fill(ids == 0, -100),
    }


@pytest.mark.slow
def test_under_transformers_trainer(tmp_path):
    """The same losses step by step, the same evaluation."""
    plain, patched, _ = pair()
    rows = [
        {"input_ids": torch.randint(1, families.VOCABULARY, (n,)).tolist()}
        for n in (5, 9, 3, 12, 7, 8, 4, 10)
    ]
    (losses, evaluation, tokens), (ours, our_evaluation, our_tokens) = (
        trained(model, rows, tmp_path / str(n)) for n, model in enumerate((plain, patched))
    )
    assert len(losses) == 4 and ours == pytest.approx(losses, rel=1e-5)
    assert our_evaluation == pytest.approx(evaluation, rel=1e-5)
    real = [len(row["input_ids"]) for row in rows[:3]]
    assert all(
        (tokens[n, :length] == our_tokens[n, :length]).all() for n, length in enumerate(real)
    )


def test_modules_with_hooks_are_left_alone():
    from accelerate.hooks import ModelHook, add_hook_to_module

    plain = families.build("llama")
    patched = copy.deepcopy(plain)
    norm = patched.model.layers[0].input_layernorm
    head = patched.lm_head
    for module in (norm, head):
        add_hook_to_module(module, ModelHook())
    kept = norm.forward
    report = patch_model(patched)
    assert {entry.path for entry in report.left} >= {"model.layers.0.input_layernorm"}
    assert norm.forward is kept and "linear_cross_entropy" not in report.counts()
    rows = inputs()
    torch.testing.assert_close(patched(**rows).loss, plain(**rows).loss)
    unpatch_model(patched)
    assert norm.forward is kept


def counted_hooks(model):
    """Put hooks of accelerate on the modules that attend; how often they ran."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Counts(ModelHook):
        runs = 0

        def pre_forward(self, module, *args, **kwargs):
            self.runs += 1
            return args, kwargs

    hook = Counts()
    for layer in model.model.layers:
        add_hook_to_module(layer.self_attn, hook)
    return hook


def keeps_documents_apart(presented):
    """Whether the second document's states ignore the first, and the first's do not."""
    ids = torch.randint(1, families.VOCABULARY, (12,))
    other = torch.cat([ids[:5] % 7 + 20, ids[5:]])
    with torch.no_grad():
        here, there = (
            presented.hidden_states(families.hand_made_batch([x[:5], x[5:]])) for x in (ids, other)
        )
    return (here[5:] - there[5:]).abs().max() < 1e-6 < (here[:5] - there[:5]).abs().max()


def documents_keep_apart(model):
    """Within ``attending_documents``."""
    with PresentedModel(
        model.eval(), packed=True, head_is_read=False
    ).attending_documents() as presented:
        return keeps_documents_apart(presented)


def test_hooks_that_are_taken_off_while_patched():
    from accelerate.hooks import remove_hook_from_module

    plain = families.build("llama")
    patched = copy.deepcopy(plain)
    counted_hooks(patched)
    patch_model(patched)
    for layer in patched.model.layers:
        remove_hook_from_module(layer.self_attn)
    assert documents_keep_apart(patched)
    unpatch_model(patched)
    assert not any("_old_forward" in vars(module) for module in patched.modules())
    assert documents_keep_apart(patched)
    rows = inputs()
    assert torch.equal(patched(**rows).logits, plain.eval()(**rows).logits)


def test_an_old_forward_without_a_hook():
    """Whoever kept it there, the forward of the class is what runs."""
    model = families.build("llama")
    for layer in model.model.layers:
        layer.self_attn._old_forward = layer.self_attn.forward
    assert documents_keep_apart(model)


def test_hooks_that_come_while_patched():
    from accelerate.hooks import remove_hook_from_module

    plain = families.build("llama")
    patched = copy.deepcopy(plain)
    patch_model(patched)
    hook = counted_hooks(patched)
    layers = len(patched.model.layers)
    assert documents_keep_apart(patched) and hook.runs == 2 * layers
    patched(**inputs())
    assert hook.runs == 3 * layers
    unpatch_model(patched)
    rows = inputs()
    assert (
        torch.equal(patched(**rows).logits, plain.eval()(**rows).logits) and hook.runs == 4 * layers
    )
    assert documents_keep_apart(patched) and hook.runs == 6 * layers
    for layer in patched.model.layers:
        remove_hook_from_module(layer.self_attn)
    assert documents_keep_apart(patched) and hook.runs == 6 * layers


def wrapped(module):
    """Its forward replaced by a function that calls it."""
    inner = module.forward
    module.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    return module.forward


def test_a_forward_that_was_replaced_while_patched_is_left_and_named(caplog):
    _, patched, _ = pair()
    wrapping = wrapped(patched.model.layers[0].self_attn)
    assert documents_keep_apart(patched) and not caplog.text
    unpatch_model(patched)
    assert patched.model.layers[0].self_attn.forward is wrapping
    assert (
        "LlamaAttention.forward was replaced by something else, and is left as it is" in caplog.text
    )


def test_seams_within_each_other_where_a_forward_is_somebody_elses():
    model = families.build("llama")
    wrapped(model.model.layers[1].self_attn)
    with PresentedModel(
        model.eval(), packed=True, head_is_read=False
    ).attending_documents() as presented:
        assert documents_keep_apart(model)
        assert keeps_documents_apart(presented)
    assert {
        type(module.config).__name__ for module in model.modules() if hasattr(module, "config")
    } == {"LlamaConfig"}


def test_attention_that_would_take_no_documents_is_refused(monkeypatch):
    model = families.build("llama")
    install = attention_seam.install_seam

    def all_but_one(given, seam):
        install(given, seam)
        del vars(given.model.layers[1].self_attn)["forward"]

    monkeypatch.setattr(attention_seam, "install_seam", all_but_one)
    with pytest.raises(
        RuntimeError, match="attention of LlamaAttention cannot take document bounds"
    ):
        documents_keep_apart(model)


@pytest.fixture
def alone():
    """A process group of one."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def shard(model, mesh, apart=()):
    """Layers, those modules together and the rest."""
    from torch.distributed.fsdp import fully_shard

    for unit in filter(
        None, [*model.model.layers, [model.get_submodule(path) for path in apart], model]
    ):
        fully_shard(unit, mesh=mesh)


def test_logits_looked_at_after_the_head_is_sharded_again(alone):
    _, patched, _ = pair()
    shard(patched, alone)
    out = patched(**inputs())
    out.loss.backward()
    assert out.logits.promise.result is None, "they were made for nobody"
    out.logits.promise.weight.untyped_storage().resize_(0)  # as among several processes
    torch.optim.SGD(patched.parameters(), lr=0.0).step()
    with pytest.raises(RuntimeError, match="sharded again; look at them before the backward pass"):
        (out.logits * 2).sum()


@pytest.mark.slow
@pytest.mark.parametrize("fused_before", [False, True], ids=["", "fused before"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_sharded_weights_stay_where_they_are(alone, family, fused_before):
    """Moved from where FSDP gathers them, they would stay those of the first step. A product of
    one layer needs no move.
    """
    from torch.distributed.fsdp import fully_shard

    plain = families.build(family)
    sharded = copy.deepcopy(plain)
    batch = families.documents_batch()
    losses = []
    assert patch_parts(sharded, whole_layers=True).counts()[decoder_layer.FUSED_LAYER]
    if fused_before:
        families.states_and_gradients(sharded, batch)
    for unit in (*sharded.get_decoder().layers, sharded.get_decoder()):
        fully_shard(unit, mesh=alone)
    before = decoder_layer.runs[decoder_layer.FUSED_LAYER]
    for model in (plain, sharded):
        optimizer = torch.optim.SGD(model.get_decoder().parameters(), lr=0.05)
        for _ in range(3):
            with PresentedModel(
                model, packed=True, head_is_read=False
            ).attending_documents() as presented:
                loss = presented.hidden_states(batch).sin().sum() / 100
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-4) and losses[0] != pytest.approx(
        losses[2], rel=1e-2
    )
    assert decoder_layer.runs[decoder_layer.FUSED_LAYER] - before == (6 if family == "phi3" else 0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_what_fsdp_casts_is_not_made(implementation):
    """Neither the mask nor the logits; afterwards both are in the other dtype."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor

    plain = families.build("llama", attn_implementation=implementation)
    patched = copy.deepcopy(plain)
    patch_model(patched)
    masks = []
    given = []
    rows = inputs() | {"attention_mask": (torch.arange(9) < torch.tensor([[9], [6]])).long()}
    for model in (plain, patched):

        def cast(_layer, _args, kwargs):
            given.append(kwargs["attention_mask"])
            masks.append(_cast_fp_tensor(torch.bfloat16, kwargs["attention_mask"]))

        hook = model.model.layers[0].register_forward_pre_hook(cast, with_kwargs=True)
        out = model(**rows)
        hook.remove()
    logits = _cast_fp_tensor(torch.bfloat16, out.logits)
    torch.is_complex(masks[1]), torch.numel(masks[1]), torch.is_complex(logits), torch.numel(logits)
    for mask in (given[1], masks[1]):
        assert not mask.documents.tensor.cache_info().misses
    assert logits.promise.result is None and logits.dtype == torch.bfloat16
    assert torch.equal(masks[1] * 1, masks[0] * 1) and masks[1].dtype == masks[0].dtype
    torch.testing.assert_close(logits * 1, out.logits.bfloat16() * 1)


@pytest.mark.parametrize("apart", [[], ["lm_head"], ["model.norm", "lm_head"]], ids=str)
def test_sharded_after_patching(apart, alone):
    """A head that is sharded by itself has its weight while it is called, and not when the loss
    is computed.
    """
    plain, patched, _ = pair()
    shard(patched, alone, apart)
    rows = inputs()
    expected = plain(**rows)
    got = patched(**rows)
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(got.logits * 1, expected.logits, rtol=1e-4, atol=1e-4)
    for loss in (expected.loss, got.loss):
        loss.backward()
    for (name, own), sharded in zip(plain.named_parameters(), patched.parameters(), strict=True):
        assert families.distance(sharded.grad.full_tensor(), own.grad) <= 1e-5, name
    unpatch_model(patched)
    assert not any("forward" in vars(module) for module in patched.modules())
    torch.testing.assert_close(patched(**rows).loss, expected.loss)


def test_an_adapter_on_the_head():
    """The head is no plain linear layer any more, whether the adapter came first or last."""
    from peft import LoraConfig, get_peft_model

    rows = inputs()
    losses = []
    for order in ("none", "before", "after"):
        torch.manual_seed(0)
        model = families.build("llama")
        if order == "before":
            patch_model(model)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_()
        if order == "after":
            patch_model(model)
        out = model(**rows)
        out.loss.backward()
        losses.append(out.loss.item())
        assert not isinstance(out.logits, LazyLogits) or order != "after"
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-5)


SPREAD = {
    "model.embed_tokens": 0,
    "model.layers.0": 0,
    "model.layers.1": 1,
    "model.norm": 1,
    "model.rotary_emb": 0,
    "lm_head": 1,
}


@pytest.fixture
def saved(tmp_path):
    families.build("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_with_a_device_map_of_one_device(saved):
    """What ``device_map="auto"`` makes where one device is enough: nothing stands in the way."""
    one = "auto" if torch.cuda.device_count() < 2 else {"": 0}
    plain, mapped = (
        AutoModelForCausalLM.from_pretrained(saved, device_map=chosen) for chosen in (None, one)
    )
    report = patch_model(mapped)
    assert report.counts().keys() >= {"fused_rmsnorm", "fused_swiglu"} and not report.left
    rows = inputs()
    theirs = plain(**rows).loss
    ours = mapped(**{name: x.to(mapped.device) for name, x in rows.items()}).loss
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


@pytest.mark.slow
def test_with_layers_that_are_fetched_from_disk(saved, tmp_path):
    """Hooks move the weights of such layers: these are left alone, named, and compute what they
    did.
    """
    spread = {name: "disk" if device else "cpu" for name, device in SPREAD.items()}
    mapped = AutoModelForCausalLM.from_pretrained(
        saved, device_map=spread, offload_folder=tmp_path / "offload"
    )
    report = patch_model(mapped)
    assert any(
        entry.path == "model.layers.1.input_layernorm" and "offload" in entry.reason
        for entry in report.left
    )
    rows = inputs()
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(saved)(**rows).loss
        ours = mapped(**rows).loss
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_layers_on_two_cards_train(saved):
    plain, mapped = (
        AutoModelForCausalLM.from_pretrained(saved, device_map=chosen).train()
        for chosen in (None, SPREAD)
    )
    report = patch_model(mapped)
    assert any("several devices" in entry.reason for entry in report.left)
    rows = inputs()
    theirs = plain(**rows).loss
    ours = mapped(**{name: x.to("cuda:0") for name, x in rows.items()}).loss
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-4)
    for loss in (theirs, ours):
        loss.backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), mapped.named_parameters(), strict=True):
        torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=1e-3, atol=1e-5, msg=name)
