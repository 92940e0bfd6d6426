"""patch_model on whole models: the same loss, gradients, logits and generation; reported;
undone.
"""

import copy

import pytest
import torch
from transformers.models.qwen2 import modeling_qwen2

import families
from chronicals import patch_model, unpatch_model
from chronicals.patching import patch_parts
from chronicals.patching.lazy_logits import LazyLogits

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "cohere", "granite", "gpt2", "phi", "gpt_oss"]


def batch(rows=2, length=9):
    ids = torch.randint(1, families.VOCABULARY, (rows, length))
    labels = ids.clone()
    labels[0, : length // 2] = -100
    return {"input_ids": ids, "labels": labels}


def loss_and_gradients(model, **arguments):
    model.zero_grad()
    out = model(**arguments)
    out.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return out.loss.detach(), found


def assert_same(expected, got, tolerance=1e-5):
    """‖Δg‖ relative to the larger of ‖g‖ and a thousandth of the mean norm."""
    torch.testing.assert_close(got[0].double(), expected[0].double(), rtol=1e-5, atol=1e-6)
    assert expected[1].keys() == got[1].keys()
    mean = torch.stack([g.norm() for g in expected[1].values()]).mean().item()
    for name, g in expected[1].items():
        scale = max(g.norm().item(), 1e-3 * mean)
        assert (g - got[1][name]).norm().item() <= tolerance * scale, name


def pair(family="llama", **changes):
    """A model, and a patched copy of it."""
    plain = families.build(family, **changes)
    patched = copy.deepcopy(plain)
    report = patch_model(patched)
    return plain, patched, report


@pytest.mark.parametrize("family", FAMILIES)
def test_same_loss_and_gradients(family):
    plain, patched, report = pair(family)
    plain, patched = (
        plain.double(),
        patched.double(),
    )  # a key's bias has a gradient of rounding only
    assert report.counts().get("linear_cross_entropy") == 1
    inputs = batch()
    assert_same(loss_and_gradients(plain, **inputs), loss_and_gradients(patched, **inputs))


@pytest.mark.parametrize("family", FAMILIES)
def test_same_logits_and_generation(family):
    plain, patched, _ = pair(family)
    inputs = batch()
    torch.testing.assert_close(
        patched(**inputs).logits * 1.0, plain(**inputs).logits, rtol=1e-4, atol=1e-4
    )
    plain.eval(), patched.eval()
    ids = inputs["input_ids"]
    assert torch.equal(
        *(
            m.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
            for m in (plain, patched)
        )
    )


def test_every_part_of_a_llama():
    _, patched, report = pair("llama")
    assert report.counts() == {
        "fused_qk_rope": 2,
        "fused_swiglu": 2,
        "fused_rmsnorm": 5,
        "linear_cross_entropy": 1,
        "document_attention": 1,
    }
    assert report.left == []
    assert {entry.path for entry in report.replaced if entry.by == "fused_swiglu"} == {
        "model.layers.0.mlp",
        "model.layers.1.mlp",
    }
    text = str(report)
    assert "LlamaForCausalLM" in text and "fused_rmsnorm" in text and "5" in text
    assert str(patch_model(patched)) == text, "a second call changed something"


def test_the_parts_first_and_the_seams_later():
    """What the trainer does, and a user afterwards; undone together."""
    plain = families.build("llama")
    patched = families.build("llama")
    patched.load_state_dict(plain.state_dict())
    report = patch_parts(patched)
    assert report.counts() and not report.mentions("loss") and not report.mentions("attention")
    parts = set(report.counts())
    assert patch_parts(patched) is report and set(report.counts()) == parts
    assert patch_model(patched) is report and set(report.counts()) == parts | {
        "linear_cross_entropy",
        "document_attention",
    }
    ids = torch.randint(1, families.VOCABULARY, (2, 9))
    torch.testing.assert_close(
        patched(input_ids=ids, labels=ids).loss, plain(input_ids=ids, labels=ids).loss
    )
    unpatch_model(patched)
    assert not any("forward" in vars(module) for module in patched.modules())


def test_left_alone_and_why():
    """A norm that something else already replaced, and an MLP that has no gate."""
    model = families.build("phi")
    norm = model.model.layers[0].input_layernorm
    norm.forward = lambda x: torch.nn.LayerNorm.forward(norm, x)
    report = patch_model(model)
    reasons = {entry.path: entry.reason for entry in report.left}
    assert "replaced by something else" in reasons["model.layers.0.input_layernorm"]
    assert "computes nothing that a kernel does" in reasons["model.layers.0.mlp"]
    assert "as it was" in str(report)


@pytest.mark.parametrize(
    "set_first", [True, False], ids=["patched with dropout", "dropout set since"]
)
def test_an_mlp_with_dropout_drops(set_first):
    """A gated MLP with dropout before its last product; its twin has none."""
    from transformers import ModernBertDecoderConfig, ModernBertDecoderForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 61,
    }
    plain = families.randomise(
        ModernBertDecoderForCausalLM(
            ModernBertDecoderConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        ).train()
    )
    patched = copy.deepcopy(plain)

    def set_dropout(model):
        for layer in model.model.layers:
            layer.mlp.drop.p = 0.5

    set_dropout(plain)
    if set_first:
        set_dropout(patched)
    report = patch_model(patched)
    left = {entry.path: entry.reason for entry in report.left}
    assert (left.get("model.layers.0.mlp") == "has dropout") == set_first, str(report)
    set_dropout(patched)
    inputs = batch()
    found = []
    for model in (plain, patched):
        torch.manual_seed(3)
        found.append(loss_and_gradients(model, **inputs))
    assert_same(*found, tolerance=3e-5)


def test_unpatched_is_as_before():
    plain, patched, _ = pair("llama")
    unpatch_model(patched)
    for a, b in zip(plain.modules(), patched.modules()):
        assert vars(a).keys() == vars(b).keys(), type(a)
        assert not a._forward_hooks and not b._forward_hooks and not b._forward_pre_hooks
    inputs = batch()
    assert torch.equal(plain(**inputs).loss, patched(**inputs).loss)
    assert not isinstance(patched(**inputs).logits, LazyLogits)
    assert patch_model(patched).counts()["fused_rmsnorm"] == 5


def test_wrapped_models_are_refused():
    model = families.build("llama")
    for wrapped, reason in (
        (torch.compile(model), "compiled already"),
        (torch.nn.DataParallel(model), "wrapped by DataParallel"),
    ):
        with pytest.raises(ValueError, match=reason):
            patch_model(wrapped)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_copy_for_another_card_does_not_compute_with_the_first_cards_weights():
    """As torch.nn.parallel.replicate makes it."""
    model = families.build("llama")
    patch_model(model)
    with pytest.raises(RuntimeError, match="cannot run under DataParallel"):
        model._replicate_for_data_parallel()(**batch())


def with_peft(**fields):
    def change(model):
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=2, **fields))

    return change


def mean_of_logits(logits, labels, **_):
    return logits.float().mean()


HEADS_CHANGED = {
    "resized": lambda model: model.resize_token_embeddings(
        families.VOCABULARY + 3, mean_resizing=False
    ),
    "another head": lambda model: model.set_output_embeddings(
        torch.nn.Linear(32, families.VOCABULARY, bias=False)
    ),
    "an adapter on the head": with_peft(target_modules=["lm_head"]),
    "a head that is saved": with_peft(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "a loss of the user's": lambda model: setattr(model, "loss_function", mean_of_logits),
}


@pytest.mark.parametrize("change", HEADS_CHANGED)
def test_a_model_whose_head_was_changed_since_can_be_unpatched(change):
    model = families.build("llama")
    patch_model(model)
    returned = HEADS_CHANGED[change](model)
    changed = returned if hasattr(returned, "config") else model
    unpatch_model(changed)
    for module in changed.modules():
        assert (
            "forward" not in vars(module)
            and not module._forward_hooks
            and not module._forward_pre_hooks
        )
        assert not any(name.startswith("_chronicals") for name in vars(module))
    assert (model.loss_function is mean_of_logits) == (change == "a loss of the user's")
    assert not isinstance(changed(**batch()).logits, LazyLogits)


WRITES = {
    "mul_": lambda logits: logits.mul_(2.0),
    "div_ twice": lambda logits: logits.div_(2.0).div_(2),
    "looked at before": lambda logits: (logits.sum(), logits.mul_(2.0)),
    "clamp_": lambda logits: logits.clamp_(-0.3, 0.3),
    "a part": lambda logits: logits[:, :-1].div_(2.0),
    "an item": lambda logits: logits.__setitem__((..., 0), -9.0),
    "a cast that is none": lambda logits: logits.float().mul_(2.0),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("records", [True, False])
def test_logits_that_are_written_to_are_written_to(write, records):
    plain, patched, _ = pair("llama")
    inputs = batch()
    found = []
    for model in (plain, patched):
        with torch.set_grad_enabled(records):
            logits = model(**inputs).logits
            WRITES[write](logits)
            found.append([logits + 0, logits / 0.7, logits.bfloat16()])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("write", WRITES)
def test_a_loss_is_of_logits_as_a_hook_left_them(write):
    plain, patched, _ = pair("llama")
    inputs = batch()
    found = []
    for model in (plain, patched):
        model.lm_head.register_forward_hook(
            lambda _module, _inputs, logits: (WRITES[write](logits), logits)[1]
        )
        found.append(loss_and_gradients(model, **inputs))
    assert_same(*found)


@pytest.mark.parametrize("patch", [patch_model, patch_parts])
def test_a_patched_model_is_not_written_to_a_file_that_cannot_be_read(patch, tmp_path):
    model = families.build("llama")
    patch(model)
    with pytest.raises(
        TypeError, match=r"state_dict\(\) or use save_pretrained, or call unpatch_model"
    ):
        torch.save(copy.deepcopy(model), tmp_path / "model.pt")
    unpatch_model(model)
    torch.save(model, tmp_path / "model.pt")
    inputs = batch()
    assert torch.equal(
        torch.load(tmp_path / "model.pt", weights_only=False)(**inputs).loss, model(**inputs).loss
    )


def test_a_copy_of_a_patched_model_stands_alone():
    _, patched, _ = pair("llama")
    twin = copy.deepcopy(patched)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    inputs = batch()
    assert patched(**inputs).loss != twin(**inputs).loss
    assert twin(**inputs).loss.item() == pytest.approx(
        torch.tensor(families.VOCABULARY).log().item(), rel=1e-5
    )
    unpatch_model(twin)
    assert isinstance(patched(**inputs).logits, LazyLogits)


@pytest.mark.parametrize(
    "kind", ["labels", "shift_labels", "num_items", "num_items tensor", "logits_to_keep", "padding"]
)
def test_what_the_loss_is_given(kind):
    plain, patched, _ = pair("llama")
    inputs = batch()
    if kind == "shift_labels":
        inputs["shift_labels"] = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[
            :, 1:
        ].roll(1, 0)
    elif kind == "num_items":
        inputs["num_items_in_batch"] = 7
    elif kind == "num_items tensor":
        inputs["num_items_in_batch"] = torch.tensor(7)
    elif kind == "logits_to_keep":
        inputs["logits_to_keep"], inputs["labels"] = 4, inputs["labels"][:, -4:]
    elif kind == "padding":
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][1, 6:] = 0
        inputs["labels"][1, 6:] = -100
    assert_same(
        loss_and_gradients(plain, **inputs), loss_and_gradients(patched, **inputs), tolerance=2e-5
    )


def test_nothing_to_train_on_is_not_a_number():
    plain, patched, _ = pair("llama")
    inputs = batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    assert torch.isnan(plain(**inputs).loss) and torch.isnan(patched(**inputs).loss)


def test_logits_are_made_only_for_whoever_looks(record_calls):
    _, patched, _ = pair("gemma2")
    calls = record_calls(torch.nn.functional, "linear")
    out = patched(**batch())
    head = patched.get_output_embeddings()
    out.loss.backward()
    seen = [1 for _ in calls]
    assert out.logits.shape == (2, 9, families.VOCABULARY) and out.logits.dtype == torch.float32
    assert len(calls) == len(seen), "looking at the shape made the logits"
    assert type(out.logits[..., :2, :]) is torch.Tensor
    assert len(calls) == len(seen) + 1
    assert out["logits"].argmax(-1).shape == (2, 9) and out[1].sum().requires_grad
    assert len(calls) == len(seen) + 1, "the logits were made twice"
    assert head.weight.grad is not None


@pytest.mark.slow
def test_logits_after_the_weights_changed_are_refused():
    _, patched, _ = pair("llama")
    out = patched(**batch())
    with torch.no_grad():
        patched.get_output_embeddings().weight.mul_(2)
    with pytest.raises(RuntimeError, match="after the weights changed"):
        out.logits.sum()


@pytest.mark.slow
def test_gradients_through_the_logits():
    """A loss of one's own on the logits, beside the model's."""
    plain, patched, _ = pair("gemma2")
    inputs = batch()
    found = []
    for model in (plain, patched):
        out = model(**inputs)
        (out.loss + out.logits.float().square().mean()).backward()
        found.append((out.loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    assert_same(*found, tolerance=2e-5)


class Squares(torch.autograd.Function):
    """A mean of squares that torch's own hooks of Python do not see."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        return upstream * 2 * x / x.numel()


class Through(torch.autograd.Function):
    """Hands tensors on, as DistributedDataParallel does where it looks for unused parameters."""

    @staticmethod
    def forward(ctx, *tensors):
        return tensors

    @staticmethod
    def backward(ctx, *upstream):
        return upstream


def inside(function):
    return lambda logits: torch.utils.checkpoint.checkpoint(function, logits, use_reentrant=True)


def looked_at_in_inference(logits):
    with torch.inference_mode():
        logits.argmax(-1)
    return logits.logsumexp(-1).square().mean()


OWN_LOSSES = {
    "a function": Squares.apply,
    "of what was handed on": lambda logits: Through.apply(logits)[0].float().square().mean(),
    "made again": inside(lambda logits: logits.square().mean()),
    "after a look in inference mode": looked_at_in_inference,
    "of the rows of a part": lambda logits: torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), torch.ones(16).long()
    ),
}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("own", OWN_LOSSES)
def test_gradients_through_logits_that_somebody_takes(own, family):
    plain, patched, _ = pair(family)
    inputs = batch()
    found = []
    for model in (plain, patched):
        out = model(**inputs)
        loss = OWN_LOSSES[own](out.logits)
        loss.backward()
        found.append(
            (
                loss.detach(),
                {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
            )
        )
    assert_same(*found, tolerance=2e-5)


def test_logits_that_are_handed_on_are_not_made():
    _, patched, _ = pair("llama")
    out = patched(**batch())
    (logits,) = Through.apply(out.logits)
    assert (
        isinstance(logits, LazyLogits)
        and logits.grad_fn is not None
        and logits.promise.result is None
    )
    seen = []
    logits.grad_fn.register_hook(lambda *_: seen.append(1))
    (logits.float() * 2).sum().backward()
    assert seen, "the gradient took another way"


def test_a_hook_of_the_heads_gradient_is_called():
    plain, patched, _ = pair("llama")
    inputs = batch()
    found = []
    seen = []
    for model in (plain, patched):
        model.lm_head.register_full_backward_hook(
            lambda _module, _inputs, upstream: seen.append(upstream[0])
        )
        found.append(loss_and_gradients(model, **inputs))
    assert_same(*found, tolerance=2e-5)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-6)


def test_a_batch_without_a_label_leaves_the_weights_alone():
    for model in pair("llama")[:2]:
        inputs = batch()
        out = model(input_ids=inputs["input_ids"], labels=torch.full_like(inputs["labels"], -100))
        out.loss.backward()
        assert out.loss.isnan() and all(
            not p.grad.any() for p in model.parameters() if p.grad is not None
        )


def in_place(model):
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-1.0)


CHANGES_OF_WEIGHTS = {
    "data": in_place,
    "other data": lambda model: setattr(
        model.lm_head.weight, "data", model.lm_head.weight.data * 2
    ),
    "another type": lambda model: model.double(),
}


@pytest.mark.parametrize("change", CHANGES_OF_WEIGHTS)
def test_logits_after_a_change_that_no_version_tells_are_refused(change):
    _, patched, _ = pair("llama")
    out = patched(**batch())
    out.loss.backward()
    CHANGES_OF_WEIGHTS[change](patched)
    with pytest.raises(RuntimeError, match="after the weights changed"):
        out.logits.sum()


STEPS = {
    "AdamW": lambda parameters: torch.optim.AdamW(
        parameters, lr=0.1, eps=0.01
    ),  # so that no rounding decides a sign
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, eps=0.01, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows", [2, 5], ids=["fewer tokens than columns", "more tokens than columns"]
)
@pytest.mark.parametrize("optimizer", STEPS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"])
def test_logits_that_are_kept_across_a_step(optimizer, family, rows, caplog):
    """As loops do that log at their end; gradients through them are not to be had then, as
    unpatched.
    """
    plain, patched, _ = pair(family)
    inputs = batch(rows)
    found = []
    for model in (plain, patched):
        stepping = STEPS[optimizer](model.parameters())
        kept = []
        for _ in range(2):
            out = model(**inputs)
            out.loss.backward()
            stepping.step()
            stepping.zero_grad()
            kept.append(out.logits)
        found.append([logits.detach() + 0 for logits in kept])
        with pytest.raises(RuntimeError):
            kept[0].square().sum().backward()
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)
    assert caplog.text.count("let go of it before") == 1


@pytest.mark.slow
def test_a_step_makes_no_logits_that_nobody_holds(record_calls):
    """Nor any of weights that it does not change."""
    _, patched, _ = pair("llama")
    other = torch.nn.Linear(3, 3)
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)
    calls = record_calls(torch.nn.functional, "linear")

    def step(parameters, holds):
        out = patched(**batch())
        out.loss.backward()
        logits = out.logits if holds else None
        del out
        calls.clear()
        torch.optim.SGD(parameters, lr=0.1).step()
        patched.zero_grad()
        return len(calls), logits

    assert [step(patched.parameters(), holds)[0] for holds in (False, True)] == [0, 1]
    assert step(other.parameters(), True)[0] == 0
    patched.lm_head.weight.requires_grad_(False)
    frozen, logits = step(patched.model.parameters(), True)
    assert frozen == 0 and torch.isfinite(logits.sum())


@pytest.mark.slow
def test_outputs_that_are_alive_at_a_step_share_a_copy_of_the_head(monkeypatch):
    """No logits are made for the step, and the host does not wait for the device."""
    plain, patched, _ = pair("llama")
    inputs = batch(rows=5)
    outputs = [patched(**inputs) for _ in range(2)]
    sum(out.loss for out in outputs).backward()
    expected = plain(**inputs).logits

    def fail(*_):
        raise AssertionError("computed, or waited for, at a step")

    with monkeypatch.context() as within:
        within.setattr("chronicals.patching.lazy_logits.F.linear", fail)
        within.setattr(torch, "equal", fail)
        torch.optim.SGD(patched.parameters(), lr=0.1).step()
    kept = [out.logits.promise.copies["weight"] for out in outputs]
    assert kept[0] is kept[1] and kept[0].shape == patched.lm_head.weight.shape
    for out in outputs:
        torch.testing.assert_close(out.logits * 1, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [2, 5])
def test_logits_after_a_change_and_then_a_step_are_refused(rows):
    _, patched, _ = pair("llama")
    out = patched(**batch(rows))
    out.loss.backward()
    in_place(patched)
    torch.optim.SGD(patched.parameters(), lr=0.1).step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="after the weights changed, by something else"):
            out.logits.sum()


@pytest.mark.parametrize("rows", [2, 5])
def test_no_memory_at_a_step_is_told_when_somebody_looks(rows, monkeypatch):
    _, patched, _ = pair("llama")
    out = patched(**batch(rows))
    out.loss.backward()

    def full(*_, **__):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as within:
        within.setattr("chronicals.patching.lazy_logits.F.linear", full)
        within.setattr(torch.Tensor, "clone", full)
        torch.optim.SGD(patched.parameters(), lr=0.1).step()
    with pytest.raises(
        RuntimeError,
        match="no memory for a copy of the head's weights; look at them before the step",
    ):
        out.logits.sum()


def test_logits_are_of_the_weights_that_the_call_was_given():
    plain, patched, _ = pair("llama")
    inputs = batch()
    found = []
    for model in (plain, patched):
        given = {name: 2 * p.detach() for name, p in model.named_parameters()}
        found.append(torch.func.functional_call(model, given, kwargs=inputs).logits * 1)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_a_banned_word_makes_no_loss_infinite():
    plain, _, _ = pair("llama")
    plain.lm_head.bias = torch.nn.Parameter(torch.zeros(families.VOCABULARY))
    with torch.no_grad():
        plain.lm_head.bias[0] = float("-inf")
    patched = copy.deepcopy(plain)
    patch_model(patched)
    inputs = batch()
    assert_same(
        loss_and_gradients(plain, **inputs), loss_and_gradients(patched, **inputs), tolerance=2e-5
    )


@pytest.mark.parametrize("order", ["before", "after"])
def test_under_peft(order):
    from peft import LoraConfig, get_peft_model

    found = []
    for patch in (False, True):
        torch.manual_seed(0)
        model = families.build("llama")
        if patch and order == "before":
            patch_model(model)
        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=["q_proj", "gate_proj", "down_proj"])
        )
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_()
        if patch and order == "after":
            report = patch_model(model)
            assert (
                report.counts()["fused_swiglu"] == 2
                and report.counts()["linear_cross_entropy"] == 1
            )
        torch.manual_seed(2)
        inputs = batch()
        found.append(loss_and_gradients(model, **inputs))
    assert found[0][1] and all("lora" in name for name in found[0][1])
    assert_same(*found, tolerance=2e-5)


def test_with_gradient_checkpointing():
    plain, patched, _ = pair("llama")
    inputs = batch()
    expected = loss_and_gradients(plain, **inputs)
    patched.gradient_checkpointing_enable()
    assert_same(expected, loss_and_gradients(patched, **inputs), tolerance=2e-5)


@pytest.mark.slow
def test_compiled():
    plain, patched, _ = pair("llama")
    inputs = batch()
    expected = loss_and_gradients(plain, **inputs)
    compiled = torch.compile(patched, backend="aot_eager")
    compiled(**inputs).loss.backward()
    got = {name: p.grad for name, p in patched.named_parameters()}
    assert_same(expected, (expected[0], got), tolerance=2e-5)


@pytest.mark.slow
def test_saved_and_loaded_it_is_the_same_model(tmp_path):
    """Same names, same bytes."""
    from transformers import AutoModelForCausalLM

    plain, patched, _ = pair("llama")
    for model, name in ((plain, "plain"), (patched, "patched")):
        model.save_pretrained(tmp_path / name)
    files = [
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}
        for name in ("plain", "patched")
    ]
    assert files[0].keys() == files[1].keys()
    assert files[0]["model.safetensors"] == files[1]["model.safetensors"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    patch_model(again)
    inputs = batch()
    torch.testing.assert_close(again(**inputs).loss, plain(**inputs).loss)


@pytest.mark.slow
def test_generation_after_training_steps():
    plain, patched, _ = pair("qwen3")
    inputs = batch()
    for model in (plain, patched):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
    ids = inputs["input_ids"][:, :4]
    assert torch.equal(
        *(
            m.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
            for m in (plain, patched)
        )
    )


def test_on_the_meta_device_nothing_is_touched():
    """The twin is what is proved on, never the user's tensors."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(families.configuration("llama"))
    report = patch_model(model)
    assert report.counts().get("fused_rmsnorm") == 5, str(report)
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_anything_but_a_model_is_refused():
    with pytest.raises(ValueError, match="expected a model of transformers"):
        patch_model(torch.nn.Linear(2, 2))


def halved_mlp(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 0.5


def turned_twice(q, k, cos, sin, *rest, **options):
    q, k = rotate(q, k, cos, sin, *rest, **options)
    return 2 * q, k


def turned_back(q, k, cos, sin, *rest, **options):
    return rotate(q, k, cos, -sin, *rest, **options)


def attends_to_less(module, query, *given, **options):
    out, weights = attend(module, query, *given, **options)
    return 0.5 * out, weights


REPLACED = {
    "a forward": (modeling_qwen2.Qwen2MLP, "forward", halved_mlp),
    "a function": (modeling_qwen2, "apply_rotary_pos_emb", turned_twice),
    "a rotation by another": (modeling_qwen2, "apply_rotary_pos_emb", turned_back),
    "another function": (modeling_qwen2, "eager_attention_forward", attends_to_less),
}
rotate = modeling_qwen2.apply_rotary_pos_emb
attend = modeling_qwen2.eager_attention_forward


@pytest.mark.slow
@pytest.mark.parametrize("what", REPLACED)
def test_what_was_replaced_in_a_class_since_is_what_is_patched(what, monkeypatch):
    """After a model of the class and configuration was patched already. In fp64: gradients of
    key biases nearly cancel.
    """
    plain, patched = (
        families.build("qwen2", attn_implementation="eager").double() for _ in range(2)
    )
    patched.load_state_dict(plain.state_dict())
    inputs = batch()
    patch_model(patched)
    before = loss_and_gradients(patched, **inputs)
    unpatch_model(patched)
    monkeypatch.setattr(*REPLACED[what])
    patch_model(patched)
    expected = loss_and_gradients(plain, **inputs)
    assert not torch.equal(before[0], expected[0])
    assert_same(expected, loss_and_gradients(patched, **inputs), tolerance=2e-5)
