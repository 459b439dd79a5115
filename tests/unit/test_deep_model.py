"""Tests of deep_model, which measurements lean on."""

import numpy as np
from deep_model import deepened

from moechat import Engine


def test_layers_come_again() -> None:
    with Engine.open("mini") as plain, deepened(9):
        spec = plain.spec
        with Engine.open("mini") as deep:
            assert deep.spec.num_layers == 9 > spec.num_layers
            dense = sum(not layer.moe for layer in spec.layers)
            assert [layer.moe for layer in deep.spec.layers[dense:]] == [True] * (9 - dense)
            logits = deep.session().extend([5, 6, 7], logits="last")
    assert logits is not None
    assert np.isfinite(logits).all()
