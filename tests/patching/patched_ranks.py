"""One of two processes that train a patched model as other libraries let them: the program of
``test_patched_ranks.py``.

``python patched_ranks.py FOLDER CASE …``: the first rank writes what each case returns to
``CASE.pt``.
"""

import copy
import sys
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType

import families
from chronicals import patch_model

STEPS = 3
RATE = 0.1


def rows() -> torch.Tensor:
    """The same on every rank; each takes its half where ranks have rows of their own."""
    return torch.arange(1, 37).view(4, 9) % families.VOCABULARY


def built(family: str, adapters: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    model = families.build(family)
    if adapters:
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False
        )
        model = peft.get_peft_model(model, config).train()
    return model


def trained_alone(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Losses and weights of the plain model on all rows."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=rows(), labels=rows()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {
        "losses": torch.stack(losses),
        **{name: p.detach() for name, p in model.named_parameters()},
    }


def trained(
    model: torch.nn.Module,
    own: torch.Tensor,
    accelerator: Accelerator | None = None,
    wrapped_first: bool = False,
) -> dict[str, torch.Tensor]:
    """The same of a model that is patched before ``accelerator`` prepares it, or afterwards."""
    losses = []
    counts = {}
    inner = model
    if not wrapped_first:
        counts = patch_model(model).counts()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    if wrapped_first:
        counts = patch_model(model).counts()
    for _ in range(STEPS):
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(loss))
        if accelerator is not None:
            dist.all_reduce(losses[-1])
            losses[-1] /= dist.get_world_size()
    found = {name.replace("module.", ""): whole(p) for name, p in inner.named_parameters()}
    return {"losses": torch.stack(losses), "replaced": torch.tensor(sum(counts.values())), **found}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def own_half() -> torch.Tensor:
    return rows().chunk(2)[dist.get_rank()]


def ddp(family: str, adapters: bool = False) -> dict[str, torch.Tensor]:
    return trained(built(family, adapters), own_half(), Accelerator(cpu=True))


def fsdp2(
    family: str, wrapped_first: bool = False, adapters: bool = False
) -> dict[str, torch.Tensor]:
    """Prepared by accelerate, which takes FSDP for something of cards alone unless it is told
    otherwise.
    """
    model = built(family, adapters)
    layer = type(
        model.get_decoder().layers[0]
        if not adapters
        else model.base_model.model.get_decoder().layers[0]
    ).__name__
    accelerator = Accelerator(cpu=True)
    before = accelerator.state.distributed_type
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[layer],
    )
    try:
        return trained(model, own_half(), accelerator, wrapped_first)
    finally:
        accelerator.state.distributed_type = before


def tensor_parallel(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """By transformers' own plan; each rank has some columns and heads, and all rows."""
    place = folder / f"tp-{family}"
    plain = built(family)
    if dist.get_rank() == 0:
        plain.save_pretrained(place)
    dist.barrier()
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)
    )
    return trained(
        type(plain).from_pretrained(place, tp_plan="auto", device_mesh=mesh).train(), rows()
    )


CASES = {
    "ddp llama": lambda _: ddp("llama"),
    "ddp gemma2": lambda _: ddp("gemma2"),
    "ddp llama adapters": lambda _: ddp("llama", adapters=True),
    "fsdp2 llama": lambda _: fsdp2("llama"),
    "fsdp2 qwen3": lambda _: fsdp2("qwen3"),
    "fsdp2 phi3": lambda _: fsdp2("phi3"),
    "fsdp2 llama patched last": lambda _: fsdp2("llama", wrapped_first=True),
    "fsdp2 llama adapters": lambda _: fsdp2("llama", adapters=True),
    "tp llama": lambda folder: tensor_parallel("llama", folder),
    "tp qwen3": lambda folder: tensor_parallel("qwen3", folder),
}


def alone(case: str) -> dict[str, torch.Tensor]:
    """What a case must return, of one process and the plain model."""
    return trained_alone(copy.deepcopy(built(case.split()[1], "adapters" in case)))


def main() -> None:
    folder, *cases = sys.argv[1:]
    dist.init_process_group("gloo")
    for case in cases:
        found = CASES[case](Path(folder))
        if dist.get_rank() == 0:
            torch.save(found, Path(folder) / f"{case}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
