"""A source with every format and kind, and jobs on it."""

import pytest
from quantize_reference import (
    Tensors,
    fp8_block,
    fp8_channel,
    int4,
    normal,
    plain,
    write_checkpoint,
)

from moechat.quantize.job import Job


@pytest.fixture(scope="session")
def mixed_tensors() -> Tensors:
    layer = "model.layers.0."
    experts = layer + "mlp.experts."
    return {
        "model.embed_tokens.weight": plain(normal(1, 50, 96)),
        layer + "input_layernorm.weight": plain(normal(2, 96), "F32"),
        **fp8_block(layer + "self_attn.q_proj.weight", 3, 200, 96),
        layer + "self_attn.q_proj.bias": plain(normal(4, 200)),
        **fp8_channel(layer + "self_attn.o_proj.weight", 5, 96, 200),  # 200 is no multiple of 32
        layer + "mlp.gate.weight": plain(normal(6, 4, 96), "F32"),
        experts + "0.gate_proj.weight": plain(normal(7, 160, 96), "F32"),
        experts + "0.up_proj.weight": plain(normal(8, 160, 96), "F16"),
        experts + "0.down_proj.weight": plain(normal(9, 96, 160)),
        **int4(experts + "1.gate_proj.weight", 10, 160, 96),
        **int4(experts + "1.up_proj.weight", 11, 160, 96, group=96),
        layer + "mlp.shared_experts.down_proj.weight": plain(normal(12, 96, 1)),
        "model.layers.1.eh_proj.weight": plain(normal(13, 96, 192)),
        "model.layers.1.self_attn.q_proj.weight": plain(normal(14, 130, 96)),
        "model.norm.weight": plain(normal(15, 96)),
        "lm_head.weight": plain(normal(16, 50, 96)),
    }


@pytest.fixture
def source(tmp_path, mixed_tensors):
    folder = write_checkpoint(
        tmp_path / "source",
        mixed_tensors,
        {
            "architectures": ["Any"],
            "torch_dtype": "float32",
            "quantization_config": {"quant_method": "fp8"},
            "name": "Zürich",
        },
        files=3,
    )
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "LICENSE").write_text("yours")
    (folder / "chat_template.jinja").write_text("{{ bos_token }}")
    return folder


@pytest.fixture
def convert():
    """Runs a job to its end; the report. Three files and a part of a fourth at 60,000 bytes."""

    def convert_(source, target, to, shard_bytes=60_000):
        return Job(source, target, to, shard_bytes=shard_bytes).run(lambda progress: None)

    return convert_
