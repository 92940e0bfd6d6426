"""Several adapters on one base, beside the real PEFT."""

import copy

import pytest
from adapted import changed, close, llama, logits, randomise, tokens, train_on

from chronicals.lora import (
    LoRAConfig,
    adapters,
    apply_lora,
    load_adapter,
    save_adapter,
    without_adapters,
)
from chronicals.lora.several import (
    adapter_names,
    add_adapter,
    add_weighted_adapter,
    delete_adapter,
    set_adapter,
)
from comparison import equal

peft = pytest.importorskip("peft")

SHAPES = {
    "first": {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"]},
    "second": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
    "third": {"r": 7, "lora_alpha": 50, "target_modules": ["q_proj"], "use_rslora": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Adapters that PEFT wrote, and PEFT's model with all of them."""
    place = tmp_path_factory.mktemp("adapters")
    for name, shape in SHAPES.items():
        model = peft.get_peft_model(llama(), peft.LoraConfig(**shape))
        randomise(model)
        model.save_pretrained(place / name)
    return {name: place / name for name in SHAPES}


def ours(folders):
    model = llama()
    for name, folder in folders.items():
        add_adapter(model, name, folder)
    return model


def theirs(folders):
    first, *others = folders
    model = peft.PeftModel.from_pretrained(llama(), folders[first], adapter_name=first)
    for name in others:
        model.load_adapter(folders[name], adapter_name=name)
    return model.eval()


def test_each_is_switched_on_and_off(folders):
    model = ours(folders)
    other = theirs(folders)
    ids = tokens()
    bare = logits(model, ids)
    assert equal(bare, logits(llama(), ids)) and adapter_names(model) == list(SHAPES)
    for name in ("first", "third", "second", "first"):
        set_adapter(model, name).eval()
        other.set_adapter(name)
        assert changed(logits(model, ids), bare) and close(
            logits(model, ids), logits(other, ids)
        ), name
        with without_adapters(model), other.disable_adapter():
            assert equal(logits(model, ids), bare)


@pytest.mark.parametrize("weights", [(0.7, 0.4, 1.5), (1.0, -0.5, 0.25)])
@pytest.mark.parametrize(
    "kind, names", [("cat", ["first", "second", "third"]), ("linear", ["first", "second"])]
)
def test_weighted_as_peft_does(folders, tmp_path, kind, names, weights):
    model = ours(folders)
    other = theirs(folders)
    ids = tokens()
    add_weighted_adapter(model, names, weights[: len(names)], "sum", kind)
    other.add_weighted_adapter(names, list(weights[: len(names)]), "sum", combination_type=kind)
    other.set_adapter("sum")
    set_adapter(model, "sum").eval()
    expected = logits(other, ids)
    assert changed(expected, logits(llama(), ids)) and close(logits(model, ids), expected)
    save_adapter(model, tmp_path)  # it is an adapter as any other
    assert close(logits(peft.PeftModel.from_pretrained(llama(), tmp_path).eval(), ids), expected)
    assert close(logits(load_adapter(llama(), tmp_path).eval(), ids), expected)


def test_what_was_trained_is_kept(folders):
    model = ours(folders)
    ids = tokens()
    set_adapter(model, "second").eval()
    before = logits(model, ids)
    after = train_on(model, ids)
    assert changed(after, before)
    set_adapter(model, "third")
    set_adapter(model, "second")
    assert equal(logits(model.eval(), ids), after)


def test_one_that_was_attached_is_the_default(folders):
    model = apply_lora(llama(), LoRAConfig(3, 6, 0.0, ["o_proj"])).eval()
    ids = tokens()
    randomise(model)
    own = logits(model, ids)
    add_adapter(model, "first", folders["first"])
    assert adapter_names(model) == ["default", "first"] and equal(logits(model, ids), own)
    set_adapter(model, "first")
    assert {path.rpartition(".")[2] for path, _ in adapters(model)} == {"q_proj", "down_proj"}
    assert equal(logits(set_adapter(model, "default").eval(), ids), own)
    twin = copy.deepcopy(model)
    assert equal(
        logits(set_adapter(twin, "first").eval(), ids),
        logits(set_adapter(model, "first").eval(), ids),
    )


REFUSED = {
    "an unknown name": (
        lambda m, f: set_adapter(m, "forth"),
        "'forth': the model has no adapter .* first, second, third",
    ),
    "a taken name": (
        lambda m, f: add_adapter(m, "first", f["second"]),
        "'first': the model has an adapter of this name",
    ),
    "different ranks": (
        lambda m, f: add_weighted_adapter(m, ["first", "third"], [1, 1], "new", "linear"),
        "have different ranks; take 'cat'",
    ),
    "another kind": (
        lambda m, f: add_weighted_adapter(m, ["first"], [1], "new", "ties"),
        "takes cat or linear",
    ),
    "too few weights": (
        lambda m, f: add_weighted_adapter(m, ["first", "second"], [1], "new"),
        "one weight for each name",
    ),
    "the attached one": (
        lambda m, f: delete_adapter(set_adapter(m, "first"), "first"),
        "'first': is attached",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_says_why(folders, case):
    act, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        act(ours(folders), folders)


def test_a_deleted_adapter_is_gone(folders):
    model = ours(folders)
    delete_adapter(model, "second")
    assert adapter_names(model) == ["first", "third"]


def test_an_adapter_of_another_model_is_refused(folders):
    with pytest.raises(ValueError, match="does not fit the model"):
        add_adapter(llama(hidden_size=32), "first", folders["first"])


@pytest.mark.parametrize("fields", [{"use_dora": True}, {"init": "pissa"}], ids=str)
def test_adapters_that_are_more_than_a_and_b_are_not_switched(folders, fields):
    model = apply_lora(llama(), LoRAConfig(3, 6, 0.0, ["o_proj"], **fields))
    with pytest.raises(ValueError, match="cannot be switched"):
        add_adapter(model, "first", folders["first"])
