"""Packed, padded or alone: a document's logits and the gradients of all parameters are the same."""

import dataclasses

import pytest
import torch

import tiny
from chronicals.batch import IGNORED
from chronicals.models import present
from chronicals.models.presentation import PresentedModel
from comparison import equal
from families import (
    PACKABLE,
    PADDED,
    VOCABULARY,
    build,
    configuration,
    distance,
    documents,
    gradients,
    hand_made_batch,
    loaded_batches,
    random_rows,
)

TOLERANCE = 1e-5


def presented_as(model, packing):
    """``model`` in the way that its class takes, or always in padded rows."""
    presented = present(model)
    return dataclasses.replace(presented, packed=presented.packed and packing)


@pytest.mark.parametrize("packing", [True, False], ids=["packing", "no packing"])
@pytest.mark.parametrize("family", PACKABLE + PADDED)
def test_documents_of_a_batch_are_as_if_alone(family, packing, tmp_path):
    """Logits and parameter gradients, from Batches as training gets them, with filler documents
    among them.
    """
    model = build(family)
    rows = random_rows()
    if (
        family != "gemma2"
    ):  # whose eager attention, padded, masks with the least fp64 in a softmax of fp32: nan
        model.double()  # in fp32 the gradient of a bias is largely rounding
    batches = loaded_batches(rows, tmp_path)
    found = [batch.input_ids[span].tolist() for batch in batches for span in documents(batch)]
    assert sorted(found) == sorted(row["input_ids"] for row in rows)
    bounds = [batch.cu_seqlens.unique().numel() - 1 for batch in batches]
    assert sum(bounds) > len(rows), "there is no filler, so nothing is shown of it"

    presented = presented_as(model, packing)
    assert presented.packed == (packing and family in PACKABLE)
    upstream = [torch.randn(len(batch), model.config.vocab_size) for batch in batches]
    together = []
    alone = []

    def run_together():
        total = 0.0
        with presented.attending_documents():
            for batch, up in zip(batches, upstream, strict=True):
                logits = presented.logits(batch)
                assert logits.shape == up.shape
                for span in documents(batch):
                    together.append(logits[span])
                    total = total + (logits[span] * up[span]).sum()
        return total

    def run_alone():
        total = 0.0
        for batch, up in zip(batches, upstream, strict=True):
            for span in documents(batch):
                alone.append(
                    model(input_ids=batch.input_ids[None, span], use_cache=False).logits[0]
                )
                total = total + (alone[-1] * up[span]).sum()
        return total

    got = gradients(model, run_together)
    expected = gradients(model, run_alone)
    assert len(together) == len(alone) == len(rows)
    assert distance(torch.cat(together), torch.cat(alone)) <= TOLERANCE
    assert set(got) == set(expected)
    for name in expected:
        assert expected[name].any(), name
        assert distance(got[name], expected[name]) <= TOLERANCE, name


PEFT = {
    "plain": ({"lora_dropout": 0.0}, True),
    "dora": ({"use_dora": True}, True),
    "rows of the embedding": ({"trainable_token_indices": [5, 6]}, True),
    "active after some tokens": ({"alora_invocation_tokens": [5, 6]}, False),
}


@pytest.mark.parametrize("kind", PEFT)
def test_pefts_wrapping_is_looked_through_where_its_adapters_take_every_token_by_itself(kind):
    """Packed, then, as the class in it is: the same states and gradients of the adapters as from
    padded rows.
    """
    peft = pytest.importorskip("peft")
    options, looked_through = PEFT[kind]
    inner = build("llama")
    model = peft.get_peft_model(
        inner,
        peft.LoraConfig(
            r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **options
        ),
    )
    presented = present(model)
    assert (presented.model is inner) == presented.packed == looked_through
    if not looked_through:
        return
    model.double()  # adapters as large as weights add up to much rounding in fp32
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    batch = hand_made_batch(
        [torch.randint(1, 61, (7,)), torch.tensor([5, 6]), torch.randint(1, 61, (11,))]
    )
    batch = dataclasses.replace(batch, targets=batch.input_ids)
    upstream = torch.randn(len(batch), 32, dtype=torch.float64)
    trained = [p for p in model.parameters() if p.requires_grad]
    found = []
    for way in (presented, presented_as(model, False)):
        with way.attending_documents():
            states = way.hidden_states(batch)
        found.append([states, *torch.autograd.grad((states * upstream).sum(), trained)])
    for got, expected in zip(*found, strict=True):
        assert expected.any() and distance(got, expected) <= TOLERANCE


def test_pefts_prompts_are_not_looked_through():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        build("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    presented = present(model)
    assert presented.model is model and not presented.packed


@pytest.mark.parametrize("family", PACKABLE + PADDED)
def test_permuting_documents_changes_nothing(family):
    model = build(
        family
    ).double()  # a key's bias has almost no gradient: in fp32 it is all rounding
    pieces = [torch.randint(1, 61, (length,)) for length in (7, 2, 19, 11, 3)]
    upstream = [torch.randn(len(piece), model.config.vocab_size) for piece in pieces]
    presented = present(model)

    def run(order):
        batch = hand_made_batch([pieces[n] for n in order])
        logits = presented.logits(batch).split([len(pieces[n]) for n in order])
        states = presented.hidden_states(batch).split([len(pieces[n]) for n in order])
        back = [order.index(n) for n in range(len(pieces))]
        return [logits[n] for n in back], [states[n] for n in back]

    def loss(order, keep):
        logits, states = run(order)
        keep.append(torch.cat(logits))
        keep.append(torch.cat(states))
        return sum((x * up).sum() for x, up in zip(logits, upstream, strict=True))

    first = []
    second = []
    with presented.attending_documents():
        here = gradients(model, lambda: loss([0, 1, 2, 3, 4], first))
        there = gradients(model, lambda: loss([3, 0, 4, 2, 1], second))
    for a, b in zip(first, second, strict=True):
        assert distance(b, a) <= TOLERANCE
    for name in here:
        assert distance(there[name], here[name]) <= TOLERANCE, name


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_other_tokens_elsewhere_change_no_bit(family):
    """On the CPU every document is computed by itself."""
    model = build(family).eval()
    pieces = [torch.randint(1, 61, (length,)) for length in (7, 19, 11)]
    other = [torch.randint(1, 61, (7,)), pieces[1], torch.randint(1, 61, (11,))]
    presented = present(model)
    with torch.no_grad(), presented.attending_documents():
        here, there = (presented.hidden_states(hand_made_batch(x)) for x in (pieces, other))
    assert equal(here[7:26], there[7:26]) and not equal(here[:7], there[:7])


@pytest.mark.parametrize("packing", [True, False], ids=["packing", "no packing"])
def test_hidden_states_are_what_the_head_takes(packing, tmp_path):
    model = build("llama")
    presented = presented_as(model, packing)
    with torch.no_grad(), presented.attending_documents():
        for batch in loaded_batches(random_rows(), tmp_path):
            states = presented.hidden_states(batch)
            logits = presented.logits(batch)
            assert states.shape == (len(batch), 32)
            for span in documents(batch):
                assert distance(model.lm_head(states[span]), logits[span]) <= TOLERANCE


def test_padded_rows_leave_filler_at_zero(tmp_path):
    model = build("llama")
    presented = presented_as(model, False)
    lengths = torch.randint(25, 41, (8,)).tolist()  # of which no two fit into a pack of 48
    rows = [{"input_ids": torch.randint(1, VOCABULARY, (length,)).tolist()} for length in lengths]
    seen = 0
    for batch in loaded_batches(rows, tmp_path, width=48):
        filler = torch.ones(len(batch), dtype=torch.bool)
        for span in documents(batch):
            filler[span] = False
        states = presented.hidden_states(batch)
        assert not states[filler].any() and states[~filler].any(-1).all()
        seen += int(filler.sum())
    assert seen > 0


def test_a_batch_without_any_target(tmp_path):
    """Only filler, as past the end of the data: finite, of the right shape, and it can be
    differentiated.
    """
    for packing in (True, False):
        model = build("llama")
        batch = hand_made_batch(
            [torch.zeros(9, dtype=torch.long), torch.zeros(3, dtype=torch.long)]
        )
        batch.targets.fill_(IGNORED)
        presented = presented_as(model, packing)
        with presented.attending_documents():
            states = presented.hidden_states(batch)
        assert states.shape == (12, 32) and torch.isfinite(states).all()
        (states.sum() * 0).backward()
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


# --- the model is left as it was
# -----------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_forwards_come_back_and_the_name_of_attention_stays(implementation, fails):
    """Whoever makes a model of its configuration meanwhile gets one that attends as the name
    says.
    """
    model = tiny.llama(attn_implementation=implementation)
    presented = present(model)
    kept = [set(vars(module)) for module in model.modules()]
    try:
        with presented.attending_documents() as same:
            assert same is presented
            assert {
                module.config._attn_implementation
                for module in model.modules()
                if hasattr(module, "config")
            } == {implementation}
            other = type(model)(model.config)
            rows = {"input_ids": torch.randint(1, 61, (2, 9))}
            rows["attention_mask"] = torch.ones_like(rows["input_ids"])
            rows["attention_mask"][1, 5:] = 0
            other.load_state_dict(model.state_dict())
            got = other(**rows).logits
            with presented.attending_as_before():
                assert equal(model(**rows).logits, got)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert [set(vars(module)) for module in model.modules()] == kept
    assert equal(model(**rows).logits, got)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mamba"])
def test_generation_works_afterwards(family):
    model = build(family).eval()
    ids = torch.randint(1, 61, (2, 5))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    before = model.generate(input_ids=ids, **options)
    presented = present(model)
    with torch.no_grad(), presented.attending_documents():
        presented.logits(hand_made_batch([ids[0], ids[1]]))
    after = model.generate(input_ids=ids, **options)
    assert after.shape == (2, 11) and equal(before, after)


def test_outside_the_context_the_model_takes_padded_rows_again():
    model = build("llama").eval()
    ids = torch.randint(1, 61, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    with torch.no_grad():
        before = model(input_ids=ids, attention_mask=mask).logits
        with present(model).attending_documents():
            pass
        assert equal(model(input_ids=ids, attention_mask=mask).logits, before)


def test_the_attention_of_other_towers_is_left_alone():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sees = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    config = Gemma3Config(
        text_config=configuration("gemma3").to_dict(),
        vision_config={**sees, "image_size": 28, "patch_size": 14},
    )
    model = Gemma3ForConditionalGeneration(config)

    def changed():
        return {type(module).__name__ for module in model.modules() if "forward" in vars(module)}

    for names in (("eager", "sdpa"), ("sdpa", "eager")):
        model.set_attn_implementation(dict(zip(("text_config", "vision_config"), names)))
        with PresentedModel(
            model, packed=True, head_is_read=False
        ).attending_documents() as presented:
            assert changed() == {"Gemma3Model", "Gemma3TextModel", "Gemma3Attention"}
            assert (
                config.text_config._attn_implementation,
                config.vision_config._attn_implementation,
            ) == names
            with presented.attending_as_before():
                assert not changed()
            assert changed()
        assert not changed()


def test_bounds_that_are_missing_are_not_guessed():
    model = build("llama")
    with (
        present(model).attending_documents(),
        pytest.raises(ValueError, match="does not pass document bounds"),
    ):
        model(input_ids=torch.randint(1, 61, (1, 9)))


def test_attention_dropout_is_refused_by_name_where_it_came_later():
    model = build("llama")
    presented = present(model)
    batch = hand_made_batch([torch.randint(1, 61, (9,))])
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with presented.attending_documents():
        with pytest.raises(
            ValueError, match=r"attention dropout 0\.1 is not supported; set attention_dropout=0"
        ):
            presented.logits(batch)
        model.eval()
        assert torch.isfinite(presented.logits(batch)).all()


@pytest.mark.parametrize("fused_head", [True, False])
def test_what_was_not_permitted_is_not_used(fused_head, caplog):
    presented = present(build("llama"), fused_head=fused_head)
    assert presented.packed and (presented.head is not None) == fused_head
    assert not [record for record in caplog.records if record.name.startswith("chronicals")]
