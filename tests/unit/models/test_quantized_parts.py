import numpy as np
import pytest
from fake_checkpoint import FakeCheckpoint, checkpoint_of, config_of

from moechat.errors import ArchitectureUnsupported, CheckpointDamaged
from moechat.models.architectures import bind_tensors, read_spec
from moechat.models.quantization import Quantization
from moechat.models.quantized_parts import StoredParts, bind_tensor
from moechat.models.spec import TensorSpec

LINEAR = TensorSpec(name="x.weight", shape=(48, 256), role="x", matrix=True)
STACKED = TensorSpec(
    name="x", shape=(4, 64, 96), role="x.*.up", matrix=True, stacked=True, transposed=True
)
PLAIN = Quantization()
FP8 = Quantization(method="fp8", fp8_block=(128, 128))
INT4 = Quantization(method="compressed-tensors", group_sizes=(32, 128))
CHANNEL = Quantization(method="compressed-tensors")
AWQ = Quantization(method="awq", group_sizes=(64,))
GPTQ = Quantization(method="gptq", group_sizes=(64,))
ACT_ORDER = Quantization(method="gptq", group_sizes=(64,), act_order=True)
MXFP4 = Quantization(method="mxfp4")


def bind(checkpoint, quantization=PLAIN, spec=LINEAR):
    """The bound tensor, and the names that were missing; every stored part must be taken."""
    parts = StoredParts(checkpoint.tensors)
    bound = bind_tensor(spec, parts, quantization)
    assert (bound is None) == bool(parts.missing)
    if bound is not None:
        assert parts.taken == set(checkpoint.tensors)
    return bound, parts.missing


def fp8(scale="x.weight_scale_inv", shape=(1, 2), dtype="F32"):
    return FakeCheckpoint().add("x.weight", "F8_E4M3", 48, 256).add(scale, dtype, *shape)


def int4(shape=(48, 8)):
    checkpoint = FakeCheckpoint().add("x.weight_packed", "I32", 48, 32)
    return checkpoint.add("x.weight_scale", "BF16", *shape)


def awq():
    checkpoint = FakeCheckpoint().add("x.qweight", "I32", 256, 6)
    return checkpoint.add("x.qzeros", "I32", 4, 6).add("x.scales", "F16", 4, 48)


def gptq(group_index=None, groups=4):
    checkpoint = FakeCheckpoint().add("x.qweight", "I32", 32, 48)
    checkpoint.add("x.qzeros", "I32", groups, 6).add("x.scales", "F16", groups, 48)
    values = np.arange(256, dtype=np.int32) // 64 if group_index is None else group_index
    return checkpoint.add("x.g_idx", "I32", 256, values=values)


def mxfp4():
    checkpoint = FakeCheckpoint().add("x_blocks", "U8", 4, 96, 2, 16)
    return checkpoint.add("x_scales", "U8", 4, 96, 2)


@pytest.mark.parametrize(("dtype", "name"), [("F32", "f32"), ("F16", "f16"), ("BF16", "bf16")])
def test_plain_weights_need_no_config(dtype, name):
    bound, _ = bind(FakeCheckpoint().add("x.weight", dtype, 48, 256))
    assert (bound.format, bound.scale, bound.transposed) == (name, None, False)


def test_plain_weights_stay_plain_whatever_the_config_says():
    for quantization in (FP8, INT4, AWQ, GPTQ):
        bound, _ = bind(FakeCheckpoint().add("x.weight", "BF16", 48, 256), quantization)
        assert bound.format == "bf16"


def test_stacked_plain_weights_keep_their_orientation():
    bound, _ = bind(FakeCheckpoint().add("x", "BF16", 4, 64, 96), spec=STACKED)
    assert (bound.format, bound.transposed, bound.data.shape) == ("bf16", True, (4, 64, 96))


@pytest.mark.parametrize(
    ("checkpoint", "quantization", "block"),
    [
        (fp8(), FP8, (128, 128)),
        (fp8(dtype="BF16"), FP8, (128, 128)),
        (fp8(shape=(3, 4)), Quantization(method="fp8", fp8_block=(16, 64)), (16, 64)),
        (fp8(shape=(4, 3)), Quantization(method="fp8", fp8_block=(15, 100)), (15, 100)),
        (fp8(shape=(1,)), Quantization(method="fp8"), (48, 256)),
        (fp8("x.weight_scale", (48, 1), "BF16"), CHANNEL, (1, 256)),
        (fp8("x.weight_scale", (1,)), CHANNEL, (48, 256)),
        (fp8("x.weight_scale", ()), CHANNEL, (48, 256)),
        (fp8("x.weight_scale", (1, 2)), FP8, (128, 128)),
        (fp8("x.weight_scale", (48, 1)), FP8, (1, 256)),
    ],
)
def test_fp8(checkpoint, quantization, block):
    bound, _ = bind(checkpoint, quantization)
    assert (bound.format, bound.block) == ("fp8", block)
    assert bound.scale.name.startswith("x.weight_scale")


@pytest.mark.parametrize(("shape", "block"), [((48, 8), (1, 32)), ((48, 2), (1, 128))])
def test_int4_takes_the_declared_group_that_fits(shape, block):
    bound, _ = bind(int4(shape), INT4)
    assert (bound.format, bound.block, bound.transposed) == ("int4", block, False)
    assert (bound.data.name, bound.scale.name) == ("x.weight_packed", "x.weight_scale")


def test_awq_is_stored_inputs_first():
    bound, _ = bind(awq(), AWQ)
    assert (bound.format, bound.block, bound.transposed) == ("awq", (64, 1), True)
    assert (bound.zeros.name, bound.scale.name) == ("x.qzeros", "x.scales")
    assert bound.group_index is None


def test_gptq():
    bound, _ = bind(gptq(), GPTQ)
    assert (bound.format, bound.block, bound.transposed) == ("gptq", (64, 1), True)
    assert (bound.zeros.name, bound.scale.name) == ("x.qzeros", "x.scales")
    assert bound.group_index is None


def test_gptq_with_one_group_for_all_inputs():
    checkpoint = gptq(np.zeros(256, np.int32), groups=1)
    bound, _ = bind(checkpoint, Quantization(method="gptq", group_sizes=(0,)))
    assert bound.block == (256, 1)


@pytest.mark.parametrize("quantization", [GPTQ, ACT_ORDER])
def test_gptqs_index_is_given_when_inputs_are_out_of_order_whatever_desc_act_says(quantization):
    assert bind(gptq(), quantization)[0].group_index is None
    shuffled = np.random.default_rng(0).permutation(256).astype(np.int32) // 64
    bound, _ = bind(gptq(shuffled), quantization)
    assert bound.group_index.name == "x.g_idx"


def test_gptqs_index_may_lack_only_without_act_order():
    without = gptq()
    del without.tensors["x.g_idx"]
    assert bind(without, GPTQ)[0].group_index is None
    assert bind(without, ACT_ORDER)[1] == ["x.g_idx"]


@pytest.mark.parametrize("quantization", [GPTQ, ACT_ORDER])
@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1])
def test_an_index_out_of_range_never_reaches_a_kernel(bad, quantization):
    index = np.arange(256, dtype=np.int32) // 64
    index[17] = bad
    with pytest.raises(CheckpointDamaged, match="a group that does not exist"):
        bind(gptq(index), quantization)


@pytest.mark.parametrize("dtype", ["U8", "F8_E8M0"])
def test_mxfp4_is_stored_outputs_first(dtype):
    checkpoint = mxfp4().add("x_scales", dtype, 4, 96, 2)
    bound, _ = bind(checkpoint, MXFP4, STACKED)
    assert (bound.format, bound.block, bound.transposed) == ("mxfp4", (1, 32), False)
    assert (bound.data.name, bound.scale.name) == ("x_blocks", "x_scales")


@pytest.mark.parametrize(
    ("checkpoint", "quantization", "lost"),
    [
        (fp8(), FP8, "x.weight_scale_inv"),
        (fp8("x.weight_scale", (48, 1)), CHANNEL, "x.weight_scale"),
        (int4(), INT4, "x.weight_scale"),
        (awq(), AWQ, "x.qzeros"),
        (awq(), AWQ, "x.scales"),
        (gptq(), GPTQ, "x.qzeros"),
        (gptq(), GPTQ, "x.scales"),
        (mxfp4(), MXFP4, "x_scales"),
    ],
)
def test_lost_parts_are_missing_by_name(checkpoint, quantization, lost):
    del checkpoint.tensors[lost]
    spec = STACKED if quantization is MXFP4 else LINEAR
    assert bind(checkpoint, quantization, spec)[1] == [lost]


def test_nothing_stored_is_missing_the_plain_weight():
    for quantization in (Quantization(), FP8, INT4, AWQ, GPTQ):
        assert bind(FakeCheckpoint(), quantization)[1] == ["x.weight"]


@pytest.mark.parametrize(
    ("checkpoint", "quantization"),
    [
        (FakeCheckpoint().add("x.weight", "BF16", 256, 48), FP8),
        (FakeCheckpoint().add("x.weight", "BF16", 48, 256, 1), FP8),
        (FakeCheckpoint().add("x.weight", "F8_E4M3", 256, 48), FP8),
        (fp8(shape=(1, 1)), FP8),
        (fp8(shape=(2,)), FP8),
        (fp8(shape=(1,)), FP8),
        (fp8("x.weight_scale", (48,)), CHANNEL),
        (fp8("x.weight_scale", (1, 256)), CHANNEL),
        (int4((48, 4)), INT4),
        (int4((8, 48)), INT4),
        (int4().add("x.weight_packed", "I32", 48, 256), INT4),
        (awq().add("x.qweight", "I32", 32, 48), AWQ),
        (awq().add("x.qzeros", "I32", 4, 48), AWQ),
        (awq().add("x.scales", "F16", 2, 48), AWQ),
        (gptq().add("x.qweight", "I32", 256, 6), GPTQ),
        (gptq().add("x.g_idx", "I32", 32), ACT_ORDER),
        (gptq().add("x.g_idx", "I32", 32), GPTQ),
        (gptq(groups=2), GPTQ),
        (mxfp4().add("x_blocks", "U8", 4, 64, 3, 16), MXFP4),
        (mxfp4().add("x_scales", "U8", 4, 96), MXFP4),
    ],
)
def test_shapes_that_do_not_fit_are_damage(checkpoint, quantization):
    spec = STACKED if quantization is MXFP4 else LINEAR
    with pytest.raises(CheckpointDamaged, match=r"has shape .* and should have "):
        bind(checkpoint, quantization, spec)


@pytest.mark.parametrize(
    ("checkpoint", "quantization"),
    [
        (FakeCheckpoint().add("x.weight", "F8_E5M2", 48, 256), FP8),
        (FakeCheckpoint().add("x.weight", "I8", 48, 256), CHANNEL),
        (fp8(dtype="F64"), FP8),
        (int4().add("x.weight_packed", "U32", 48, 32), INT4),
        (int4().add("x.weight_scale", "F8_E4M3", 48, 8), INT4),
        (awq().add("x.scales", "F64", 4, 48), AWQ),
        (gptq().add("x.g_idx", "I64", 256), ACT_ORDER),
        (gptq().add("x.g_idx", "I64", 256), GPTQ),
        (mxfp4().add("x_blocks", "I8", 4, 96, 2, 16), MXFP4),
    ],
)
def test_types_without_a_kernel_are_named(checkpoint, quantization):
    spec = STACKED if quantization is MXFP4 else LINEAR
    with pytest.raises(ArchitectureUnsupported, match="moechat computes with "):
        bind(checkpoint, quantization, spec)


@pytest.mark.parametrize(
    ("checkpoint", "quantization"),
    [
        (fp8(), Quantization()),
        (int4(), Quantization()),
        (int4(), FP8),
        (int4(), CHANNEL),
        (awq(), Quantization()),
        (awq(), INT4),
        (mxfp4(), Quantization()),
    ],
)
def test_quantised_parts_need_a_config_that_describes_them(checkpoint, quantization):
    spec = STACKED if "x_blocks" in checkpoint.tensors else LINEAR
    with pytest.raises(ArchitectureUnsupported, match="does not say how"):
        bind(checkpoint, quantization, spec)


@pytest.mark.parametrize(
    ("checkpoint", "quantization", "shape"),
    [
        (FakeCheckpoint().add("x.weight_packed", "I32", 48, 33), INT4, (48, 260)),
        (FakeCheckpoint().add("x.qweight", "I32", 256, 7), AWQ, (52, 256)),
        (FakeCheckpoint().add("x.qweight", "I32", 33, 48), GPTQ, (48, 260)),
    ],
)
def test_sizes_that_do_not_fill_words_are_refused(checkpoint, quantization, shape):
    spec = TensorSpec(name="x.weight", shape=shape, role="x", matrix=True)
    with pytest.raises(ArchitectureUnsupported, match="multiples of 8"):
        bind(checkpoint, quantization, spec)


@pytest.mark.parametrize("checkpoint", [fp8(), int4(), awq(), gptq()])
def test_what_is_no_linear_layer_is_never_quantised(checkpoint):
    spec = TensorSpec(name="x.weight", shape=(48, 256), role="router")
    try:
        assert bind(checkpoint, FP8, spec)[1] == ["x.weight"]
    except ArchitectureUnsupported as error:
        assert "as F8_E4M3" in error.message


def test_only_routed_experts_may_be_quantised():
    """As Kimi-K2-Thinking: INT4 experts, everything else BF16; hints of calibration beside."""
    config = config_of("qwen3_moe")
    weights = {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights | {"group_size": 32}}},
    }
    config["moe_intermediate_size"] = 64
    checkpoint = checkpoint_of("qwen3_moe")
    for name in [name for name in checkpoint.tensors if ".experts." in name]:
        rows, cols = checkpoint.tensors.pop(name).shape
        rows, cols = (64, cols) if rows == 48 else (rows, 64)
        checkpoint.add(name + "_packed", "I32", rows, cols // 8)
        checkpoint.add(name + "_scale", "BF16", rows, cols // 32)
        checkpoint.add(name + "_shape", "I32", 2)
    bound = bind_tensors(read_spec(config, {}), checkpoint, config)
    formats = {(".experts." in tensor.spec.role, tensor.format) for tensor in bound}
    assert formats == {(True, "int4"), (False, "bf16")}


@pytest.mark.parametrize("value", [0, 1])
def test_gptqs_zero_biases_are_skipped_and_others_are_not(value):
    config = config_of("llama") | {
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}
    }
    checkpoint = checkpoint_of("llama")
    name = "model.layers.0.self_attn.o_proj."
    checkpoint.tensors.pop(name + "weight")
    checkpoint.add(name + "qweight", "I32", 16, 128).add(name + "qzeros", "I32", 4, 16)
    checkpoint.add(name + "scales", "F16", 4, 128).add(name + "g_idx", "I32", 128)
    checkpoint.add(name + "bias", "F16", 128, values=np.full(128, value, np.uint16))
    spec = read_spec(config, {})
    if value:
        with pytest.raises(CheckpointDamaged, match=r"1 not expected: .*o_proj\.bias"):
            bind_tensors(spec, checkpoint, config)
    else:
        assert {b.format for b in bind_tensors(spec, checkpoint, config)} == {"bf16", "gptq"}
