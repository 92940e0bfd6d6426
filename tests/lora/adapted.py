"""Tiny models and fresh adapters for the tests of this folder."""

from typing import Any

import torch

import tiny


def gpt2(seed: int = 0) -> Any:
    """A GPT-2, whose linear layers are Conv1D, in fp32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 300, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = GPT2Config(
            **sizes, bos_token_id=0, eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
        )
        return GPT2LMHeadModel(config).eval()


def llama(seed: int = 0, **changes: Any) -> Any:
    return tiny.llama(seed, **changes).eval()


MODELS = {"llama": llama, "gpt2": gpt2}
TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_fc"]}


def tokens() -> torch.Tensor:
    return torch.randint(0, 300, (2, 11))


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the model's logits in host memory; a model that was trained may lie on a card."""
    return model(input_ids=ids.to(model.get_input_embeddings().weight.device)).logits.cpu()


@torch.no_grad()
def randomise(model: Any) -> None:
    """Give every adapter values as if it had been trained: B is zero at first."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_(std=0.05)


def train_on(model: Any, ids: torch.Tensor, steps: int = 3) -> torch.Tensor:
    """Logits after a few steps of torch's AdamW over whatever is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)
    ids = ids.to(trained[0].device)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return logits(model, ids)


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    expected = expected.to(got.device)
    return bool((got - expected).abs().max() <= tolerance * expected.abs().max())


def changed(got: torch.Tensor, bare: torch.Tensor) -> bool:
    """By far more than rounding."""
    bare = bare.to(got.device)
    return bool((got - bare).abs().max() > 0.02 * bare.abs().max())
