"""Embedding and head in host memory: the same bits, the same parameters, and on the device again."""

import gc
import weakref

import pytest
import torch

import families
import tiny
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models import host_tables as module
from chronicals.models import input_device, read_head
from chronicals.models.host_tables import (
    head_in_host,
    host_tables,
    table_of,
    tables_in_host_memory,
    why_embedding_stays,
)
from interpreted import kernels_run
from mutants import mutant


@pytest.fixture(autouse=True)
def kernels():
    with kernels_run():
        yield


def adapted(device, **changes):
    model = tiny.llama(**changes)
    apply_lora(model, LoRAConfig(rank=4))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    return model.to(device)


def found(model, by_head):
    """Loss and adapters' gradients, by the head as it is read or by the model's own logits."""
    torch.manual_seed(3)
    ids = torch.randint(300, (1, 23), device=input_device(model))
    logits = model(ids).logits
    if by_head:
        logits = read_head(model).logits(model.get_decoder()(ids).last_hidden_state)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:])
    trained = [p for p in model.parameters() if p.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, trained)]


def compare(context, device, by_head=True, **changes):
    model = adapted(device, **changes)
    names = {name: p for name, p in model.named_parameters()}
    expected = found(model, by_head)
    with context(model):
        assert input_device(model).type == device.type
        moved = found(model, by_head)
    assert {name: p for name, p in model.named_parameters()} == names
    assert {p.device.type for p in names.values()} == {device.type}
    for ours, plain in zip((*moved, *found(model, by_head)), 2 * expected):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("by_head", [False, True], ids=["logits", "head"])
def test_losses_and_gradients_are_bit_equal(by_head, tied, device):
    compare(tables_in_host_memory, device, by_head, tie_word_embeddings=tied)


@pytest.mark.parametrize(("tied", "tables"), [(False, 2), (True, 1)])
def test_both_tables_move_and_one_that_is_both_once(tied, tables, device):
    model = adapted(device, tie_word_embeddings=tied)
    assert len(host_tables(model)) == tables
    with tables_in_host_memory(model):
        assert len(host_tables(model)) == tables  # as a plan between steps asks again
        assert all(table.device.type == "cpu" for table in host_tables(model))
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert (table_of(embedding) is table_of(head)) == tied


def test_the_heads_copy_is_shared_and_freed(device):
    model = adapted(device)
    with tables_in_host_memory(model):
        first = read_head(model).table
        assert read_head(model).table is first and first.device.type == device.type
        assert first.data_ptr() != model.lm_head.weight.data_ptr()
        gone = weakref.ref(first)
        del first
        gc.collect()
        assert gone() is None


def test_after_an_error_the_tables_are_back(device):
    model = adapted(device)
    with pytest.raises(RuntimeError, match="within"), tables_in_host_memory(model):
        raise RuntimeError("within")
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert table_of(layer) is None and "forward" not in vars(layer)


def test_what_is_trained_or_not_plain_stays():
    model = tiny.llama()
    assert "the input embedding is trained" in why_embedding_stays(model)
    model.requires_grad_(False)
    assert why_embedding_stays(model) is None and head_in_host(model) is model.lm_head
    model.lm_head.requires_grad_(True)
    assert head_in_host(model) is None and len(host_tables(model)) == 1
    model.get_input_embeddings().forward = lambda ids: None
    assert "is replaced" in why_embedding_stays(model)
    tied = tiny.llama(tie_word_embeddings=True).requires_grad_(False)
    assert why_embedding_stays(tied) is None
    tied.lm_head.forward = lambda x: None
    assert "the head has the weight of the input embedding" in why_embedding_stays(tied)
    scaled = families.build("gemma2" if "gemma2" in families.FAMILIES else "gemma3")
    scaled.requires_grad_(False)
    kind = type(scaled.get_input_embeddings())
    assert (why_embedding_stays(scaled) is None) == (kind is torch.nn.Embedding)


def test_a_row_that_is_not_finite_arrives(device):
    model = adapted(device)
    with torch.no_grad():
        model.get_input_embeddings().weight[0, 0] = torch.nan
    with tables_in_host_memory(model):
        first = model.get_input_embeddings()(torch.tensor([0], device=device))
    assert first[0, 0].isnan() and first[0, 1:].isfinite().all()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("host_rows(ids, self.weight.detach())", "host_rows(ids.flip(-1), self.weight.detach())"),
        ("weight.detach().clone()", "weight.detach().bfloat16().to(weight.dtype)"),
    ],
)
def test_planted_faults_are_found(old, new):
    broken = mutant(module, old, new)
    with pytest.raises((AssertionError, ValueError)):
        compare(broken.tables_in_host_memory, torch.device("cpu"), by_head=False)
