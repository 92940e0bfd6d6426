"""What tests of distillation share; the teacher's folder is a fixture of
``objectives/conftest.py``.
"""

import pytest
import torch

import runs
import tiny
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.objectives import build_objective

SETTINGS = {"divergence": "jsd", "beta": 0.3, "temperature": 2.0, "alpha": 0.8}


def sharp(model, factor=4.0):
    """The model with logits so far apart that distributions differ."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(factor)
    return model


def fields(teacher, **settings):
    return {
        "objective": "distill",
        "distill": {"teacher": str(teacher), "teacher_precision": "fp32", **settings},
    }


def train(folder, teacher, settings=None, **changes):
    return runs.train(
        folder, model=sharp(tiny.llama()), **fields(teacher, **(settings or {})), **changes
    )


def refused(**settings):
    with pytest.raises(ConfigurationError) as error:
        build_objective(ChronicalsConfig(objective="distill", distill=settings))
    return str(error.value)
