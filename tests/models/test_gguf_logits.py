"""Oracle folders as GGUF files, written by tests/gguf_convert.py with the converter's traps."""

from __future__ import annotations

import numpy as np
import pytest
from gguf_convert import convert_folder
from oracles import ORACLE_NAMES, expected, oracle_folder

from moechat import SamplingParams

EXACT_BOUND = 1e-3
# FP8 has no GGUF type; its values are converted as they are.
NAMES = [name for name in ORACLE_NAMES if "fp8" not in name]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")

    def file(name: str, dtype: str):
        path = folder / f"{name}-{dtype}.gguf"
        if not path.exists():
            path.write_bytes(convert_folder(oracle_folder(name), dtype))
        return path

    return file


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("name", NAMES)
def test_exact_logits_and_greedy_tokens(files, open_engine, name, dtype):
    engine = open_engine(files(name, dtype), compute="exact")
    want = expected(oracle_folder(name))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_end=True)
    for prompt in range(3):
        ids = want[f"prompt_{prompt}_ids"].tolist()
        logits = engine.session().extend(ids)
        assert np.abs(logits[-1] - want[f"prompt_{prompt}_last_logits"]).max() <= EXACT_BOUND
        if prompt == 1:
            assert np.abs(logits - want["all_logits"]).max() <= EXACT_BOUND
        events = engine.session().generate(ids, params)
        tokens = [event.token_id for event in events if event.token_id is not None]
        assert tokens == want[f"prompt_{prompt}_greedy"].tolist()
