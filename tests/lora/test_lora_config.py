import dataclasses

import pytest

from chronicals.lora import LoRAConfig


def test_defaults():
    config = LoRAConfig()
    assert dataclasses.asdict(config) == {
        "rank": 64,
        "alpha": 16,
        "dropout": 0.05,
        "target_modules": None,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers": None,
        "init": "default",
        "modules_to_save": None,
        "trainable_token_indices": None,
        "target_parameters": None,
    }


@pytest.mark.parametrize(
    "rank, alpha, plain, rslora",
    [(64, 16, 0.25, 2.0), (16, 32, 2.0, 8.0), (1, 1, 1.0, 1.0), (4, 3, 0.75, 1.5)],
)
def test_scale(rank, alpha, plain, rslora):
    assert LoRAConfig(rank, alpha).scale == pytest.approx(plain)
    assert LoRAConfig(rank, alpha, use_rslora=True).scale == pytest.approx(rslora)


@pytest.mark.parametrize(
    "field, value",
    [("rank", 0), ("rank", -4), ("alpha", 0), ("alpha", -1.0), ("dropout", -0.1), ("dropout", 1.0)],
)
def test_values_out_of_range_name_the_field(field, value):
    with pytest.raises(ValueError, match=f"^{field}={value}: must be"):
        LoRAConfig(**{field: value})


def test_it_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LoRAConfig().rank = 3
