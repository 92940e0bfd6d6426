"""The base line on a card: the Qwen2.5-0.5B shape, random weights, real text, 8 packs of 2048, full
and LoRA r32.

    python benchmarks/baseline.py OUTPUT.json [--steps 200] [--commit HASH]

For each of the two: real tokens/s (median and spread of the steps after warm-up), peak memory, the
loss curve, and the first losses beside transformers' own loop in fp32 on the same documents: padded
rows, its own loss, torch's AdamW, PEFT. The text is the source of Python's standard library, a
document a top-level definition; the tokenizer is trained on it.
"""

import argparse
import ast
import json
import platform
import statistics
import sysconfig
import tempfile
from pathlib import Path

import torch
import transformers
import triton

from chronicals.config import ChronicalsConfig
from chronicals.data import BatchStream, Tokenizer, build_store
from chronicals.data.tokens.tokenizer_training import train_tokenizer
from chronicals.lora import adapters
from chronicals.models.presentation import PaddedRows
from chronicals.optimizers import learning_rate_factor
from chronicals.training import ChronicalsTrainer
from chronicals.training.run.callbacks import read_metrics

WARM_UP = 20
COMPARED = 20
ROWS = 4
SHAPE = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "use_cache": False,
}


def documents() -> list[dict]:
    rows = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        lines = text.split("\n")
        pieces = (
            "\n".join(lines[node.lineno - 1 : node.end_lineno])
            for node in tree.body
            if hasattr(node, "name")
        )
        rows += [{"text": piece} for piece in pieces if len(piece) > 80]
    return rows


def versions() -> dict:
    """The card and what runs on it."""
    return {
        "card": torch.cuda.get_device_name(0),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
        },
    }


def random_model(dtype: torch.dtype):
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SHAPE)
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def configuration(kind: str, steps: int, folder: Path, **changes) -> ChronicalsConfig:
    lora = {"use_lora": True, "lora_rank": 32, "lora_alpha": 32, "lora_dropout": 0.0}
    return ChronicalsConfig(
        **{
            "batch_size": 8,
            "gradient_accumulation_steps": 1,
            "max_seq_length": 2048,
            "max_steps": steps,
            "warmup_steps": 20,
            "learning_rate": 2e-4,
            "save_steps": None,
            "output_dir": folder / kind,
            "cache_dir": folder / "tokens",
            **(lora if kind.startswith("lora") else {}),
            **changes,
        }
    )


def ours(kind: str, rows: list[dict], tokenizer, steps: int, folder: Path, **changes) -> dict:
    config = configuration(kind, steps, folder, **changes)
    model = random_model(torch.float32)
    trainer = ChronicalsTrainer(model, tokenizer, config)
    torch.cuda.reset_peak_memory_stats()
    result = trainer.train(rows)
    lines = [line for line in read_metrics(config.output_dir / "metrics.jsonl") if "loss" in line]
    rates = [line["tokens_per_second"] for line in lines[WARM_UP:]]
    return {
        "tokens_per_second": {
            "median": statistics.median(rates),
            "lowest": min(rates),
            "highest": max(rates),
        },
        "first_step_seconds": lines[0]["tokens"] / lines[0]["tokens_per_second"],
        "peak_gib": max(line["memory_gib"] for line in lines),
        "fill": statistics.mean(line["fill"] for line in lines),
        "trainable_share": result.coverage.share,
        "losses": [line["loss"] for line in lines],
        "grad_norms": [line["grad_norm"] for line in lines],
        "tokens_per_second_samples": rates,
    }


def plain(kind: str, given: list[dict], tokenizer, steps: int, folder: Path) -> dict:
    """transformers' own loop, fp32, SDPA, ``ROWS`` padded documents at a time, on the same
    documents in the same steps.
    """
    config = configuration(kind, steps, folder)
    torch.backends.cuda.matmul.allow_tf32 = False
    store = build_store(given, Tokenizer(tokenizer), config.max_seq_length, config.cache_dir)
    stream = BatchStream(store, config, tokenizer.pad_token_id)
    model = random_model(torch.float32)
    if kind == "lora":
        model, parameters = with_peft(model, config)
    else:
        parameters = [{"params": list(model.parameters()), "lr": config.learning_rate}]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8)
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses = []
    norms = []
    for number, step in enumerate(stream.steps(count=COMPARED)):
        factor = learning_rate_factor("cosine", number, steps, 20)
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * factor
        rows = PaddedRows.of(step.batches[0])
        inputs = rows.inputs
        labels = torch.full_like(inputs["input_ids"], -100)
        mask = inputs["attention_mask"].bool()
        labels[mask] = step.batches[0].input_ids[rows.places]
        total = 0.0
        for start in range(0, len(labels), ROWS):
            part = {
                name: inputs[name][start : start + ROWS].cuda()
                for name in ("input_ids", "attention_mask")
            }
            width = int(part["attention_mask"].sum(1).max())
            part = {name: tensor[:, :width] for name, tensor in part.items()}
            out = model(
                **part,
                labels=labels[start : start + ROWS, :width].cuda(),
                num_items_in_batch=step.counts["targets"],
            )
            out.loss.backward()
            total += out.loss.item()
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm).item())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "grad_norms": norms}


def with_peft(model, config: ChronicalsConfig):
    """PEFT's LoRA with the A matrices ours start from."""
    import peft

    from chronicals.lora import LoRAConfig, apply_lora

    twin = random_model(torch.float32)
    torch.manual_seed(config.seed)
    apply_lora(twin, LoRAConfig(config.lora_rank, config.lora_alpha, 0.0))
    start = {path: layer.lora_A.detach() for path, layer in adapters(twin)}
    model = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            lora_dropout=0.0,
            target_modules=sorted(start),
        ),
    )
    fast = []
    slow = []
    for path in start:
        layer = model.base_model.model.get_submodule(path)
        layer.lora_A["default"].weight.data.copy_(start[path])
        slow.append(layer.lora_A["default"].weight)
        fast.append(layer.lora_B["default"].weight)
    ratio = config.lora_plus_ratio
    return model, [
        {"params": slow, "lr": config.learning_rate},
        {"params": fast, "lr": config.learning_rate * ratio},
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--commit", default="unknown")
    given = parser.parse_args()
    rows = documents()
    tokenizer = train_tokenizer((row["text"] for row in rows), 16384)
    results: dict = {
        **versions(),
        "commit": given.commit,
        "shape": SHAPE,
        "steps": given.steps,
        "documents": len(rows),
    }
    arms = {
        "full": {},
        "lora": {},
        "full-compiled": {"use_torch_compile": True},
        "lora-compiled": {"use_torch_compile": True},
    }
    with tempfile.TemporaryDirectory() as scratch:
        for kind, changes in arms.items():
            steps = given.steps if not changes else min(60, given.steps)
            results[kind] = ours(kind, rows, tokenizer, steps, Path(scratch), **changes)
            torch.cuda.empty_cache()
            given.output.write_text(json.dumps(results))
        for kind in ("full", "lora"):
            results[kind]["plain_fp32"] = plain(kind, rows, tokenizer, given.steps, Path(scratch))
            torch.cuda.empty_cache()
            given.output.write_text(json.dumps(results))
    print_table(results, arms)


def print_table(results: dict, arms: dict) -> None:
    columns = ("tokens/s", "lowest", "highest", "GiB", "fill", "trained", "grad norm", "loss")
    print(f"{'':12}", *(f"{column:>9}" for column in columns))
    for kind in arms:
        row = results[kind]
        rate = results[kind]["tokens_per_second"]
        rates = (f"{rate[name]:9,.0f}" for name in ("median", "lowest", "highest"))
        shares = (
            f"{row['peak_gib']:9.1f} {row['fill']:9.1%} {row['trainable_share']:9.2%} "
            f"{row['grad_norms'][-1]:9.3f}"
        )
        print(f"{kind:12}", *rates, shares, f"{row['losses'][0]:.3f} → {row['losses'][-1]:.3f}")
    for kind in ("full", "lora"):
        pairs = list(zip(results[kind]["losses"], results[kind]["plain_fp32"]["losses"]))
        print(kind, "loss ours / plain fp32:", *(f"{a:.4f}/{b:.4f}" for a, b in pairs))
        print(kind, "largest relative deviation:", f"{max(abs(a - b) / b for a, b in pairs):.2e}")


if __name__ == "__main__":
    main()
