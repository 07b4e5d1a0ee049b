"""What regimes are made of is there."""

from typing import get_args

from plugin_regimes import plugin_regimes
from verdict_models import SHAPES
from verdict_parts import ModelName
from verdict_regimes import regimes


def test_every_model_of_a_regime_has_a_name_that_can_be_made():
    names = set(get_args(ModelName))
    assert names == {"smollm2", *SHAPES}
    asked = {
        each.model
        for regime in (*regimes(), *plugin_regimes())
        for each in (regime, *regime.arms)
        if each.model is not None
    }
    assert asked <= names
