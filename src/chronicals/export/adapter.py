"""An adapter by itself: in PEFT's files, or as a GGUF file for llama.cpp.

llama.cpp adds the file to a base in GGUF when it loads that, and multiplies ``B A`` by one alpha
over the rank of each pair. rsLoRA's scale, and alphas that differ between layers, are therefore
written partly in B.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from chronicals.export import llama_cpp, vllm
from chronicals.export.artefact import ArtefactFormat
from chronicals.export.base_files import folder_of
from chronicals.export.gguf import (
    GGUF_READER,
    LOGIT_BOUNDS,
    GGUFModel,
    llama_cpp_bound,
    prove_epsilon,
)
from chronicals.export.proof import Proof, largest_error, relative_error
from chronicals.export.source import SourceModel, logits_of, on_device, probe_ids
from chronicals.export.whole import make_compatible
from chronicals.formats.gguf.families import family_of
from chronicals.formats.gguf.reader import GGUFFile, NotExpressible, gguf_of, require_gguf
from chronicals.formats.gguf.tensors import TensorPiece
from chronicals.formats.gguf.writer import plan_gguf
from chronicals.formats.tensor_names import language_name
from chronicals.lora.loading import describe_adapter, described_config
from chronicals.lora.peft_format import ADAPTER_PREFIX, CONFIG_FILE, WEIGHTS_FILE
from chronicals.models import load_model, load_tokenizer
from chronicals.models.saved_tokenizer import save_tokenizer
from chronicals.saving import MANIFEST

PEFT_LOGIT_BOUND = 1e-4
"""Bound on the error of logits in fp32 beside the trained model's."""

PRODUCT_ERROR = 1e-6
"""Bound on the relative error of ``B A`` with its scale, in a GGUF file."""

ADAPTED_LOGIT_BOUND = 1e-4
"""Bound on the error of llama.cpp's logits over a base in fp32 beside the trained model's."""

SMALLEST_CHANGE = 1e-6
"""An adapter that changes logits by less, relatively, was not applied."""

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for ``--max-lora-rank``."""


class AdapterFolder(ArtefactFormat):
    """The folder of an adapter, which PEFT and servers load over its base."""

    def size(self, source: SourceModel) -> int:
        """Return the bytes of the adapter's files."""
        folder = Path(source.saved.place)
        if not folder.is_dir():
            return 0
        return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())

    def write(self, source: SourceModel, aside: Path) -> None:
        """Copy the folder; raise ValueError if the model has no adapter."""
        if not source.saved.adapted:
            raise ValueError(
                f"{source.saved.place}: was trained whole and has no adapter; export it merged "
                "(--to merged)"
            )
        not_copied = shutil.ignore_patterns(MANIFEST, "chronicals.json")
        shutil.copytree(source.saved.place, aside, ignore=not_copied)
        save_tokenizer(source.tokenizer, aside, source.config)
        make_compatible(aside, [])
        (aside / "generation_config.json").unlink(missing_ok=True)

    def prove(self, source: SourceModel, aside: Path, proof: Proof) -> None:
        """Load the adapter by PEFT over its base, and compare logits with and without it."""
        tokenizer = load_tokenizer(aside)
        template = source.tokenizer.chat_template
        proof.equal("chat template", "transformers", template, tokenizer.chat_template)
        proof.equal("ids of texts", "transformers", source.documents, probe_ids(tokenizer))
        if importlib.util.find_spec("peft") is None:
            proof.not_run("logits", "PEFT", "peft is not installed: pip install peft")
            return
        from peft import PeftModel

        assert source.saved.base is not None
        base = load_model(source.saved.base, source.dtype, quantization=None)
        if source.saved.about.get("base"):
            reason = "the base was in 4 bits; PEFT over it is compared by chronicals verify"
            proof.not_run("logits", "PEFT", reason)
            return
        rows = len(tokenizer)
        if rows > base.get_input_embeddings().weight.shape[0]:
            base.resize_token_embeddings(rows)
        theirs = on_device(PeftModel.from_pretrained(base, aside))
        adapted = logits_of(theirs, source.documents)
        expected = logits_of(source.trained(), source.documents)
        with theirs.disable_adapter():
            without = logits_of(theirs, source.documents)
        error = largest_error(adapted, expected)
        bound = source.at_least(PEFT_LOGIT_BOUND)
        proof.bounded("logits beside the trained model's", "PEFT", error, bound)
        change = largest_error(adapted, without)
        proof.equal("the adapter changes logits", "PEFT", True, change > SMALLEST_CHANGE)
        rank = _rank_for_vllm(aside)
        if rank is None:
            reason = "it serves no DoRA and no saved modules; export it merged"
            proof.not_run("log-probabilities", vllm.VLLM, reason)
            return
        vllm.prove_log_probabilities(source, source.saved.base, source.trained, proof, aside, rank)

    def command(self, source: SourceModel, artefact: Path) -> str | None:
        """Return vLLM's command for the adapter over its base; None if it takes no such adapter."""
        rank = _rank_for_vllm(artefact)
        if rank is None:
            return None
        name = shlex.quote(artefact.name)
        return (
            f"vllm serve {shlex.quote(str(source.saved.base))} --enable-lora --max-lora-rank "
            f"{rank} --lora-modules {name}={shlex.quote(str(artefact))}"
        )


def _rank_for_vllm(folder: Path) -> int | None:
    """Return the largest rank that vLLM is told for an adapter.

    None if it takes no such adapter: DoRA, trained biases, modules that are saved whole.
    """
    described = json.loads((folder / CONFIG_FILE).read_text())
    rank = max([described["r"], *(described.get("rank_pattern") or {}).values()])
    unsupported = ("use_dora", "modules_to_save", "lora_bias")
    if rank > VLLM_RANKS[-1] or any(described.get(field) for field in unsupported):
        return None
    return next(size for size in VLLM_RANKS if size >= rank)


@dataclass(frozen=True)
class LoraPair:
    """The matrices that adapt a layer, and the layer's weight in the file of its base.

    Attributes:
        a: ``[r, in]``, fp32.
        b: ``[out, r]``, fp32.
        scale: of their product.
    """

    piece: TensorPiece
    a: Tensor
    b: Tensor
    scale: float


class GGUFAdapter(ArtefactFormat):
    """A file in GGUF that holds an adapter."""

    extension = ".gguf"
    served_by = "llama-server -m BASE.gguf --lora {artefact}"

    def size(self, source: SourceModel) -> int:
        """Return the bytes of the file's tensors."""
        return sum(pair.a.nbytes + pair.b.nbytes for pair in _read_pairs(source).values())

    def write(self, source: SourceModel, aside: Path) -> None:
        """Write the file.

        Raises:
            NotExpressible: the adapter does more than add ``B A`` to linear layers.
            ValueError: the model is no adapter, or the package gguf is missing.
        """
        require_gguf()
        from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFType, GGUFWriter, Keys

        pairs = _read_pairs(source).values()
        alpha = max(pair.scale * len(pair.a) for pair in pairs)
        architecture = MODEL_ARCH[family_of(source.text_config).architecture]
        writer = GGUFWriter(aside, MODEL_ARCH_NAMES[architecture])
        writer.add_type(GGUFType.ADAPTER)
        writer.add_string(Keys.Adapter.TYPE, "lora")
        writer.add_float32(Keys.Adapter.LORA_ALPHA, alpha)
        for pair in pairs:
            # llama.cpp scales by alpha / rank; the rest of a pair's scale goes into B.
            b = pair.piece.forward([pair.b * (pair.scale * len(pair.a) / alpha)])
            writer.add_tensor(f"{pair.piece.name}.lora_a", pair.a.contiguous().numpy())
            writer.add_tensor(f"{pair.piece.name}.lora_b", b.contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def prove(self, source: SourceModel, aside: Path, proof: Proof) -> None:
        """Read the file back; and run it by llama.cpp over the base, if llama.cpp is installed."""
        pairs = _read_pairs(source)
        written = GGUFFile(aside)
        alpha = written.value("adapter.lora.alpha")
        proof.equal("every pair is there", GGUF_READER, 2 * len(pairs), len(written.tensors))
        errors = {}
        for path, pair in pairs.items():
            a = written.read(f"{pair.piece.name}.lora_a")
            ((_, _, b),) = pair.piece.backward(written.read(f"{pair.piece.name}.lora_b"))
            errors[path] = relative_error((alpha / len(a)) * b @ a, pair.scale * pair.b @ pair.a)
        worst = max(errors, key=lambda path: errors[path])
        proof.bounded("what is added", GGUF_READER, errors[worst], PRODUCT_ERROR, worst)
        reason = None
        if not llama_cpp.is_there():
            reason = llama_cpp.NOT_INSTALLED
        elif source.saved.about.get("base"):
            reason = "the base was in 4 bits, which no file in GGUF holds exactly"
        if reason is not None:
            proof.not_run("logits", "llama.cpp", reason)
            return
        # Compared over the GGUF file that the adapter was trained over, or over the base in fp32.
        assert source.saved.base is not None
        trained_over = gguf_of(source.saved.base)
        with tempfile.TemporaryDirectory(dir=aside.parent) as place:
            base = trained_over
            if base is None:
                base = Path(place) / "base.gguf"
                whole = SourceModel(source.saved, folder_of(source.saved.base))
                GGUFModel("f32").write(whole, base)
            tokens = max(map(len, source.documents)) + 1
            adapted = llama_cpp.LlamaCpp(base, tokens, adapter=aside)
            plain = llama_cpp.LlamaCpp(base, tokens, adapter=None)
            theirs = [torch.from_numpy(adapted.logits(ids)) for ids in source.documents]
            unadapted = [torch.from_numpy(plain.logits(ids)) for ids in source.documents]
        model = source.trained()
        expected = logits_of(model, source.documents)
        # The kind of the file's weights, by which llama.cpp rounds what they multiply.
        kind = "f32"
        if trained_over is not None:
            base_file = GGUFFile(trained_over)
            types = {base_file.type_of(name) for name in base_file.tensors}
            if types - {"F32", "F16", "BF16"}:
                kind = "quantised"
            elif "BF16" in types:
                kind = "bf16"
            elif "F16" in types:
                kind = "f16"
        error = prove_epsilon(source, model, theirs, largest_error(theirs, expected), proof)
        bounds = LOGIT_BOUNDS | {"f32": ADAPTED_LOGIT_BOUND}
        bound = llama_cpp_bound(source, model, kind, expected, bounds)
        proof.bounded("logits beside the trained model's", "llama.cpp", error, bound)
        change = largest_error(theirs, unadapted)
        proof.equal("the adapter changes logits", "llama.cpp", True, change > SMALLEST_CHANGE)


def _read_pairs(source: SourceModel) -> dict[str, LoraPair]:
    """Read the matrices of an adapter, by the paths of the layers.

    Raises:
        NotExpressible: the adapter has something else than pairs of matrices.
        ValueError: the model has no adapter.
    """
    if not source.saved.adapted:
        raise ValueError(
            f"{source.saved.place}: was trained whole and has no adapter; export it whole (--to "
            "gguf-f16)"
        )
    folder = Path(source.saved.place)
    described = describe_adapter(folder)
    shape = described_config(described, described["target_modules"])
    unsupported = {
        "DoRA": shape.use_dora,
        "modules_to_save": shape.modules_to_save,
        "another start": shape.takes_from_weights,
    }
    for name, is_used in unsupported.items():
        if is_used:
            raise NotExpressible(
                f"{folder}: {name}: GGUF has no place for it in an adapter; export it merged "
                "(--to gguf-f16)"
            )
    planned = plan_gguf(source.text_config, source.language, "f32")
    pieces = {piece.sources[0]: piece for piece in planned.pieces if len(piece.sources) == 1}
    ends = (".lora_A.weight", ".lora_B.weight")
    pairs = {}
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        names = list(file.keys())
        others = [name for name in names if not name.endswith(ends)]
        if others:
            raise NotExpressible(
                f"{folder}: {others[0]} is no pair of matrices of a layer; export it merged (--to "
                "gguf-f16)"
            )
        for name in names:
            if not name.endswith(ends[0]):
                continue
            path = name.removeprefix(ADAPTER_PREFIX).removesuffix(ends[0])
            piece = pieces.get(language_name(f"{path}.weight") or "")
            if piece is None:
                raise NotExpressible(
                    f"{folder}: {path} is no weight of its own in GGUF; export it merged (--to "
                    "gguf-f16)"
                )
            a, b = (file.get_tensor(f"{ADAPTER_PREFIX}{path}{end}").float() for end in ends)
            pairs[path] = LoraPair(piece, a, b, shape.at(path).scale)
    return pairs
