"""Every architecture in transformers' causal-LM mapping, patched: what was replaced, and whether
anything changed.
"""

import contextlib
import math
import signal
from dataclasses import dataclass, field

import torch

from chronicals import PatchReport, patch_model
from chronicals.models import Packability, packability
from chronicals.models.twin import FIRST_TOKEN, build_twin, plain_surroundings, twin_config
from chronicals.patching.experts import FUSED_EXPERTS
from chronicals.patching.patch import KEPT_EXPERTS
from chronicals.patching.plan import agree, run

SECONDS = 20
"""What one architecture may take to be built and run; some reference implementations loop over
every token.
"""

TOLERANCE = 1e-5
ROLES = {
    "norm": ("fused_rmsnorm", "fused_layernorm"),
    "MLP": ("fused_swiglu", "fused_geglu"),
    "experts": (FUSED_EXPERTS,),
    "rotary": ("fused_qk_rope",),
    "attention": ("document_attention",),
    "loss": ("linear_cross_entropy",),
}
UNSET = {"num_experts_per_tok": 2, "n_routed_experts": 4}
"""Of configurations that have these fields and no number in them."""


@dataclass
class Line:
    """One architecture.

    Attributes:
        reason: why it could not be built or run from a tiny configuration; empty where it could.
        report: what was patched.
        worst: largest difference in fp32 of the loss and of the gradients, each relative to its
            norm, or to a thousandth of the mean norm where that is larger.
        beyond: the same for the gradients whose difference is more than the unpatched class's own
            rounding, which is its gradient in fp32 less that in fp64; the gradient of a key's bias
            is nothing but rounding.
        exact: the first in fp64, where a rounding that turns a ReLU around is not seen.
        generation: whether greedy generation gave the same tokens; None where the class cannot
            generate unpatched.
        roles: whether something is replaced; None where the model has no experts, or has them in
            place of MLPs.
        packs: what its twin showed of packed documents.
    """

    name: str
    reason: str = ""
    report: PatchReport | None = None
    worst: float = 0.0
    beyond: float = 0.0
    exact: float = 0.0
    generation: bool | None = None
    roles: dict[str, bool | None] = field(default_factory=dict)
    packs: Packability | None = None

    @property
    def equal(self) -> bool:
        return (
            min(self.worst, self.beyond, self.exact) <= TOLERANCE and self.generation is not False
        )

    @property
    def left(self) -> dict[str, str]:
        """Class of each part that stayed, and why."""
        return {entry.part: entry.reason for entry in self.report.left} if self.report else {}

    @property
    def whole(self) -> bool:
        """Whether norms, MLP or experts, rotary embedding, attention and loss are all replaced."""
        return all(done is not False for done in self.roles.values()) and not self.left


def architectures() -> dict[str, tuple[type, type]]:
    """Configuration and model class by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as mapping

    found = {}
    for config in mapping.keys():  # noqa: SIM118  a lazy mapping, whose items load every model
        found[config.__name__.removesuffix("Config")] = (config, mapping)
    return found


@contextlib.contextmanager
def at_most(seconds: int):
    def stop(*_: object) -> None:
        raise TimeoutError(f"takes longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def class_and_configuration(name: str):
    config, mapping = architectures()[name]
    cls = mapping[config]
    cls = cls[0] if isinstance(cls, tuple) else cls
    given = config()
    for field_name, value in UNSET.items():
        if getattr(given, field_name, value) is None:
            setattr(given, field_name, value)
    return cls, twin_config(given)


def built(name: str):
    """A small random model in training mode, its loss and gradients, and those in fp64."""
    model = build_twin(*class_and_configuration(name)).train()
    expected = run(model)
    if not math.isfinite(expected[0]) or not agree(expected, run(model)):
        raise ValueError("its loss is not finite, or not the same twice")
    exact = run(model.double())
    return model.float(), expected, exact


def generated(model) -> torch.Tensor | None:
    """Greedy tokens, or None where the class cannot."""
    model.eval()
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(FIRST_TOKEN, size, (2, 5), generator=torch.Generator().manual_seed(8))
    try:
        with torch.no_grad():
            return model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False
            )
    except Exception:  # unpatched, a class that cannot generate says so in its own way
        return None


def prove_packs(name: str) -> Packability:
    """What the twin of an architecture shows of packed documents."""
    with plain_surroundings():
        return packability._prove(*class_and_configuration(name))


def cover(name: str) -> Line:
    """Build, patch and compare; the difference is measured, whatever it is."""
    line = Line(name)
    with plain_surroundings():
        try:
            with at_most(SECONDS):
                model, expected, exact = built(name)
        except (
            Exception
        ) as error:  # a class that does not come from a tiny configuration: its own reason is kept
            line.reason = (
                f"{type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"
            )
            return line
        before = generated(model)
        line.report = patch_model(model)
        model.train()
        got = run(model)
        line.worst = difference(expected, got)
        line.beyond = difference(expected, got, exact)
        line.exact = difference(exact, run(model.double()))
        model.float()
        if before is not None:
            after = generated(model)
            line.generation = after is not None and torch.equal(before, after)
    by = [entry.by for entry in line.report.replaced]
    line.roles = {role: any(name.startswith(words) for name in by) for role, words in ROLES.items()}
    has_experts = line.roles["experts"] or KEPT_EXPERTS in line.left.values()
    line.roles["experts"] = line.roles["experts"] if has_experts else None
    line.roles["MLP"] = line.roles["MLP"] or (None if has_experts else False)
    return line


ROUNDINGS = 10
"""A gradient in fp32 may be so many times its own rounding away from another; a fault does a
hundred times more.
"""


def difference(expected, got, exact=None) -> float:
    """‖Δg‖ / max(‖g‖, a thousandth of the mean norm), the largest of all tensors, and the loss's
    relative difference.

    With ``exact``, tensors that differ by no more than roundings count for nothing.
    """
    (loss, gradients) = expected
    (other, others) = got
    mean = torch.stack([g.norm() for g in gradients.values()]).mean().item()
    if gradients.keys() != others.keys():
        return float("inf")
    worst = abs(loss - other) / abs(loss)
    for name, gradient in gradients.items():
        scale = max(gradient.norm().item(), 1e-3 * mean)
        apart = (gradient - others[name]).norm().item()
        if exact is None or apart > ROUNDINGS * (gradient - exact[1][name]).norm().item():
            worst = max(worst, apart / scale)
    return worst
