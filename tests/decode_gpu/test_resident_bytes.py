"""What decode's weights are said to take of a GPU is what they take."""

from __future__ import annotations

import pytest
from oracles import MINI, oracle_folder
from stored_models import bind

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from moechat.decode.gpu.resident_weights import ResidentWeights, resident_bytes  # noqa: E402

# Tied and own heads, FP8 in blocks, matrices whose outputs alternate, MXFP4, routers.
FOLDERS = ["deepseek_v3_fp8_256", "gpt_oss_mxfp4", "qwen2_moe", "gemma2", "mini"]


@pytest.mark.parametrize("compute", ["bf16", "exact"])
@pytest.mark.parametrize("name", FOLDERS)
def test_the_size_is_known_before(name: str, compute: str) -> None:
    spec, tensors = bind(MINI if name == "mini" else oracle_folder(name))
    weights = ResidentWeights(spec, tensors, device=torch.device("cpu"), compute=compute)
    assert resident_bytes(weights.stored, compute) == weights.num_bytes
