"""Memory that is given to streamed weights, and what they take of it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from oracles import oracle_folder
from stored_models import bind

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from moechat.errors import DoesNotFit  # noqa: E402
from moechat.gpu_weights.stored import (  # noqa: E402
    ExpertStack,
    Layout,
    StoredMatrix,
    StoredWeights,
)
from moechat.gpu_weights.weight import Fp8Matrix  # noqa: E402
from moechat.models.spec import LatentAttention, LayerSpec, ModelSpec, MoeSpec, Rope  # noqa: E402
from moechat.prefill.gpu.activations import activation_bytes  # noqa: E402
from moechat.prefill.gpu.budget import MAX_SLOTS, fit_settings  # noqa: E402
from moechat.prefill.gpu.plan import StreamSettings  # noqa: E402
from moechat.prefill.gpu.stream_plan import plan_stream  # noqa: E402
from moechat.prefill.gpu.streamed_source import StreamedSource  # noqa: E402


def taken(folder: str, settings: StreamSettings) -> int:
    """Bytes of memory that a pass with all matrices asked for leaves behind or had at most."""
    spec, tensors = bind(oracle_folder(folder))
    source = StreamedSource(spec, tensors, device="cpu", settings=settings)
    most = 0
    for layer in range(spec.num_layers):
        source.begin(layer)
        roles = [r for r in source._stored.roles if r.startswith(f"layers.{layer}.")]
        matrices = [source.matrix(role) for role in roles]
        tensors_of_layer = [m.codes if isinstance(m, Fp8Matrix) else m for m in matrices]
        for _ in source.expert_groups(layer) if layer in source._plan.groups else ():
            pass
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                    for t in tensors_of_layer if t is not None}  # fmt: skip
        slots = [slot.memory for slot in source._layer_slots.values()]
        rings = {id(item.ring): item.ring for item in source._plan.items}
        slots += [slot.memory for ring in rings.values() for slot in ring._free]
        storages |= {slot.data_ptr(): len(slot) for slot in slots}
        storages |= {t.data_ptr(): t.nbytes for t in source._decoded.values()}
        most = max(most, sum(storages.values()))
        source.release(layer)
    head = source.matrix("head")
    source.close()
    return most + (head.nbytes if head is not None else 0)


@pytest.mark.parametrize("folder", ["deepseek_v3_fp8_256", "olmoe", "mistral_swa"])
def test_what_is_needed_at_least_is_told(folder: str) -> None:
    """Of all that may be taken, the prompt's share included; of models without experts, too."""
    spec, tensors = bind(oracle_folder(folder))

    def plan(memory_bytes: int) -> None:
        plan_stream(
            spec, tensors, ["cpu"],
            compute="bf16", memory_bytes=memory_bytes, context_tokens=512, chunk_tokens=64,
        )  # fmt: skip

    with pytest.raises(DoesNotFit) as caught:
        plan(100_000)
    text = r"(\S+) MB are needed, and 100 kB are there"
    found = re.fullmatch(text, caught.value.why)
    assert found is not None
    needed = float(found[1]) * 1e6  # three digits
    plan(int(needed * 1.01))
    with pytest.raises(DoesNotFit):
        plan(int(needed * 0.99))


@pytest.mark.parametrize("folder", ["deepseek_v3_fp8_256", "olmoe", "gpt_oss_mxfp4", "qwen3"])
def test_weights_stay_within_what_they_are_given(folder: str) -> None:
    spec, tensors = bind(oracle_folder(folder))
    weights = StoredWeights.of(tensors)
    chosen = []
    for memory_bytes in (1_000_000, 1_500_000, 2_500_000, 5_000_000, 1 << 30):
        try:
            settings = fit_settings(
                weights, torch.bfloat16, memory_bytes, num_layers=spec.num_layers
            )
        except DoesNotFit:
            continue
        assert taken(folder, settings) <= memory_bytes
        chosen.append(settings)
    stay = [settings.resident_bytes for settings in chosen]
    least = [float("inf") if each is None else each for each in stay]
    assert len(chosen) > 1 and least == sorted(least)
    if weights.experts:
        assert chosen[-1].num_slots == MAX_SLOTS and stay[-1] is None


def test_too_little_memory_is_said_with_its_size() -> None:
    spec, tensors = bind(oracle_folder("olmoe"))
    weights = StoredWeights.of(tensors)
    with pytest.raises(DoesNotFit, match="cannot be streamed") as caught:
        fit_settings(weights, torch.bfloat16, 10_000, num_layers=spec.num_layers)
    assert "and 10 kB are there" in caught.value.why and " 0 B" not in caught.value.why
    assert "--device cpu" in caught.value.next_step


def of_shape(rows: int, cols: int, format_: str = "fp8") -> StoredMatrix:
    """No bytes: one element that is seen as many."""

    def bytes_of(count: int) -> np.ndarray:
        return np.broadcast_to(np.zeros(1, np.uint8), (count,))

    if format_ == "bf16":
        return StoredMatrix(Layout("bf16", rows, cols), bytes_of(2 * rows * cols))
    grid = (-(-rows // 128), -(-cols // 128))
    layout = Layout("fp8", rows, cols, (128, 128), grid, "F32")
    return StoredMatrix(layout, bytes_of(rows * cols), bytes_of(4 * grid[0] * grid[1]))


def deepseek_v3() -> tuple[ModelSpec, StoredWeights]:
    """Sizes of the public config.json."""
    hidden, heads, experts, width = 7168, 128, 256, 2048
    spec = ModelSpec(
        architecture="deepseek_v3", hidden_size=hidden, vocab_size=129280, num_heads=heads,
        intermediate_size=18432,
        attention=LatentAttention(
            q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128,
            norm_eps=1e-6,
        ),
        layers=tuple(LayerSpec(moe=layer > 2) for layer in range(61)),
        ropes=(Rope(inverse_frequencies=(1.0,) * 32, interleaved=True),),
        softmax_scale=0.1, rms_norm_eps=1e-6, context_tokens=163840, end_ids=(1,),
        moe=MoeSpec(
            num_experts=experts, num_experts_per_token=8, intermediate_size=width,
            shared_intermediate_size=width,
        ),
    )  # fmt: skip
    weights = StoredWeights()
    for role in ("embedding", "head"):
        weights.matrices[role] = of_shape(129280, hidden, "bf16")
    for number, layer in enumerate(spec.layers):
        shapes = {
            "q_a": (1536, hidden), "q_b": (heads * 192, 1536), "kv_a": (576, hidden),
            "kv_b": (heads * 256, 512), "o": (hidden, heads * 128),
        }  # fmt: skip
        prefix, inner = ("shared.", width) if layer.moe else ("", 18432)
        parts = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        shapes |= {prefix + name: shape for name, shape in parts.items()}
        for name, shape in shapes.items():
            weights.matrices[f"layers.{number}.{name}"] = of_shape(*shape)
        if layer.moe:
            weights.matrices[f"layers.{number}.router"] = of_shape(experts, hidden, "bf16")
            each = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
            stack = {name: [of_shape(*shape)] * experts for name, shape in each.items()}
            weights.experts[number] = ExpertStack(stack)
    return spec, weights


def test_a_long_prompt_of_a_large_model_fits_consumer_cards() -> None:
    spec, weights = deepseek_v3()
    needed = activation_bytes(spec, 32_768, 8192)
    assert 3.5e9 < needed < 6e9
    slots = []
    for memory_bytes in (12e9, 24e9, 32e9):
        left = int(memory_bytes) - needed
        settings = fit_settings(weights, torch.bfloat16, left, num_layers=61)
        assert settings.num_slots >= 2
        assert settings.group_bytes * settings.num_slots + (settings.resident_bytes or 0) < left
        slots.append(settings.group_bytes * settings.num_slots)
    assert slots == sorted(slots) and slots[1] > 3e9
    with pytest.raises(DoesNotFit):
        fit_settings(weights, torch.bfloat16, int(8e9) - needed, num_layers=61)


def test_activations_grow_with_what_they_are_for() -> None:
    spec, _ = deepseek_v3()
    sizes = [activation_bytes(spec, tokens, 8192) for tokens in (1, 1000, 8192, 32_768, 131_072)]
    assert sizes == sorted(set(sizes))
    long = activation_bytes(spec, 32_768, 8192)
    assert activation_bytes(spec, 32_768, 8192, dtype=torch.float32) > long
    assert activation_bytes(spec, 32_768, 8192, prefix_tokens=131_072) > long
    assert activation_bytes(spec, 32_768, 2048) <= long
    for name in ("gpt_oss_mxfp4", "llama", "gemma2"):
        other = bind(oracle_folder(name))[0]
        assert activation_bytes(other, 1000, 8192) > 4 * 1000 * other.hidden_size
