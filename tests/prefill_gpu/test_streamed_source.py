"""Streamed weights on torch's CPU device: the same numbers whatever the ring, in any order."""

from __future__ import annotations

import functools
import gc
import itertools
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from oracle_formats import to_bf16
from oracles import SMALL_ORACLE, oracle_folder
from stored_models import FOLDERS, bind, native_weights

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from moechat.errors import BadParameter, DoesNotFit  # noqa: E402
from moechat.gpu_weights.weight import Fp8Matrix, Weight  # noqa: E402
from moechat.models.spec import BoundTensor  # noqa: E402
from moechat.prefill.gpu import parcel as parcel_module  # noqa: E402
from moechat.prefill.gpu import ring as ring_module  # noqa: E402
from moechat.prefill.gpu.parcel import Parcel, Slot  # noqa: E402
from moechat.prefill.gpu.plan import StreamSettings  # noqa: E402
from moechat.prefill.gpu.streamed_source import StreamedSource  # noqa: E402
from moechat.prefill.gpu.transfer import CpuTransfer  # noqa: E402

# One expert a slot of one; a ragged last group; all in one, and nothing stays.
SETTINGS = (
    StreamSettings(group_bytes=1, num_slots=1),
    StreamSettings(group_bytes=1, num_slots=3, resident_bytes=0),
    StreamSettings(group_bytes=100_000, num_slots=2, resident_bytes=60_000),
    StreamSettings(),
)
Values = dict[str, np.ndarray]


def floats(weight: Weight) -> np.ndarray:
    """A copy, float32."""
    if isinstance(weight, Fp8Matrix):
        return weight.to_dense(torch.float32).numpy()
    return weight.float().numpy().copy()


def collected(source: StreamedSource, layer: int, roles: list[str]) -> Values:
    """All matrices and experts of a layer, as one pass sees them: float32."""
    found = {}
    source.begin(layer)
    for role in roles:
        matrix = source.matrix(role)
        assert matrix is not None
        found[role] = floats(matrix)
    if layer in source._plan.groups:
        for group in source.expert_groups(layer):
            for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"):
                tensor = getattr(group, name)
                for number in range(len(group.gate)):
                    if tensor is not None:
                        role = f"layers.{layer}.experts.{group.first + number}.{name}"
                        found[role] = floats(tensor[number])
    source.release(layer)
    return found


def rounded(role: str, values: np.ndarray, compute: str, name: str) -> np.ndarray:
    exact = compute == "exact" or values.ndim == 1 or "fp8" in name
    if exact or role.endswith(("router", "shared_gate")):
        return values
    return (to_bf16(values).astype(np.uint32) << 16).view(np.float32)


@functools.cache
def expected_layers(name: str, compute: str) -> list[Values]:
    """Of each layer of a folder all that a pass sees, float32."""
    layers: list[Values] = [{} for _ in bind(oracle_folder(name))[0].layers]
    for role, values in native_weights(oracle_folder(name)).items():
        words = role.split(".")
        if words[0] == "layers" and (values.ndim == 2 or "experts" in words):
            layers[int(words[1])][role] = rounded(role, values, compute, name)
    return layers


def check(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for role, values in expected.items():
        assert (found[role] == values).all(), role


def roles_of(expected: Values) -> list[str]:
    return [role for role in expected if ".experts." not in role]


@pytest.mark.parametrize("settings", SETTINGS, ids=("ones", "nothing stays", "some stay", "all"))
@pytest.mark.parametrize(
    "name,compute", [*((name, "bf16") for name in FOLDERS), (SMALL_ORACLE, "exact")]
)
def test_two_passes_give_the_native_weights(
    name: str, settings: StreamSettings, compute: str
) -> None:
    spec, tensors = bind(oracle_folder(name))
    expected = expected_layers(name, compute)
    source = StreamedSource(spec, tensors, device="cpu", compute=compute, settings=settings)
    for _ in range(2):
        for layer in range(spec.num_layers):
            check(collected(source, layer, roles_of(expected[layer])), expected[layer])
    source.close()


def test_vectors_head_and_embedding() -> None:
    spec, tensors = bind(oracle_folder(SMALL_ORACLE))
    native = native_weights(oracle_folder(SMALL_ORACLE))
    source = StreamedSource(spec, tensors, device="cpu")
    vectors = [role for role, values in native.items() if values.ndim == 1]
    assert vectors
    for role in vectors:
        vector = source.vector(role)
        assert vector is not None and vector.dtype == torch.float32
        assert (vector.numpy() == native[role]).all()
    assert source.vector("layers.0.sinks") is None and source.matrix("layers.0.sinks") is None
    for role in ("embedding", "head"):
        matrix = source.matrix(role)
        assert matrix is not None
        assert (matrix.float().numpy() == rounded(role, native[role], "bf16", SMALL_ORACLE)).all()
    numbers = np.array([5, 0, 5, spec.vocab_size - 1])
    rows = source.rows("embedding", numbers)
    assert rows is not None and (rows.numpy() == native["embedding"][numbers]).all()
    with pytest.raises(IndexError):
        source.rows("embedding", np.array([spec.vocab_size]))
    assert source.rows("nothing", numbers) is None
    source.close()


def test_a_router_stays_float32() -> None:
    spec, tensors = bind(oracle_folder(SMALL_ORACLE))
    source = StreamedSource(spec, tensors, device="cpu")
    layer = next(i for i, each in enumerate(spec.layers) if each.moe)
    router, query = source.matrix(f"layers.{layer}.router"), source.matrix(f"layers.{layer}.o")
    assert router is not None and router.dtype == torch.float32
    assert isinstance(query, Fp8Matrix)
    source.close()


@pytest.mark.parametrize("settings", SETTINGS[:3], ids=("ones", "nothing stays", "some stay"))
def test_passes_that_are_given_up_and_layers_in_any_order(settings: StreamSettings) -> None:
    spec, tensors = bind(oracle_folder("deepseek_v3_fp8_256"))
    expected = expected_layers("deepseek_v3_fp8_256", "bf16")
    source = StreamedSource(spec, tensors, device="cpu", settings=settings)
    moe = [i for i, each in enumerate(spec.layers) if each.moe]
    kept = []
    for given_up in [*range(spec.num_layers), *moe, moe[-1]]:
        for layer in range(given_up):
            check(collected(source, layer, roles_of(expected[layer])), expected[layer])
        source.begin(given_up)
        source.matrix(roles_of(expected[given_up])[0])  # held, and never released
        if given_up in moe:
            groups = source.expert_groups(given_up)
            next(groups)
            kept.append(groups)  # as a traceback would keep it
    for layer in (spec.num_layers - 1, 0, moe[0], moe[-1], moe[0]):
        check(collected(source, layer, roles_of(expected[layer])), expected[layer])
    source.close()


def test_it_runs_ahead_as_far_as_slots_go() -> None:
    spec, tensors = bind(oracle_folder("olmoe"))
    source = StreamedSource(
        spec, tensors, device="cpu", settings=StreamSettings(group_bytes=1, num_slots=3)
    )
    linears = [source._plan.linears[i].parcel.stored_bytes for i in range(spec.num_layers)]
    experts = [g.item.parcel.stored_bytes for g in source._plan.groups[0]]
    assert len(experts) > 6

    def settles_at(expected_bytes: int) -> None:
        until = time.monotonic() + 5
        while source.statistics().copied_bytes < expected_bytes and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.02)
        assert source.statistics().copied_bytes == expected_bytes

    source.begin(0)
    settles_at(linears[0] + sum(experts[:3]))
    source.matrix("layers.0.q")
    groups = source.expert_groups(0)
    next(groups)  # views of its slot: nothing is free before the next one is asked for
    settles_at(linears[0] + sum(experts[:3]))
    next(groups)
    settles_at(linears[0] + sum(experts[:4]))
    for _ in groups:
        pass
    # Into the next layer: its linears stay on the device, its first experts fill the ring.
    following = [g.item.parcel.stored_bytes for g in source._plan.groups[1]]
    settles_at(linears[0] + sum(experts) + linears[1] + sum(following[:3]))
    source.close()


def test_statistics_count_every_byte_once_a_pass() -> None:
    spec, tensors = bind(oracle_folder(SMALL_ORACLE))
    stored = sum(
        part.array.nbytes
        for tensor in tensors
        for part in (tensor.data, tensor.scale)
        if part is not None and len(tensor.spec.shape) > 1 and tensor.spec.role.startswith("layers")
    )
    source = StreamedSource(
        spec, tensors, device="cpu", settings=StreamSettings(group_bytes=1, resident_bytes=0)
    )
    expected = expected_layers(SMALL_ORACLE, "bf16")
    for layer in range(spec.num_layers):
        collected(source, layer, roles_of(expected[layer]))
    statistics = source.statistics()
    assert statistics.copied_bytes == stored
    assert statistics.copy_seconds > 0 and statistics.stall_seconds > 0
    assert statistics.staged_bytes == statistics.page_locked_bytes == 0
    source.close()


def test_a_copy_that_fails_is_the_askers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, tensors = bind(oracle_folder(SMALL_ORACLE))
    source = StreamedSource(spec, tensors, device="cpu")
    fill = parcel_module.Parcel.fill

    def fail(*arguments: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(parcel_module.Parcel, "fill", fail)
    source.begin(0)
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            source.matrix("layers.0.o")
    monkeypatch.setattr(parcel_module.Parcel, "fill", fill)
    assert source.matrix("layers.0.o") is not None  # at the same place
    source.close()


@pytest.mark.parametrize("number", [0, 1, 4])  # of the copies; the later ones run ahead
@pytest.mark.parametrize("error", [OSError("gone"), torch.OutOfMemoryError("full")])
def test_a_pass_goes_well_after_one_that_failed(
    number: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the copy that failed was: what is asked for next is a new start."""
    spec, tensors = bind(oracle_folder("olmoe"))
    expected = expected_layers("olmoe", "bf16")
    count, copy = itertools.count(), ring_module.Feeder._copy

    def fail_once(feeder: ring_module.Feeder, parcel: Parcel, slot: Slot) -> None:
        if next(count) == number:
            raise error
        copy(feeder, parcel, slot)

    monkeypatch.setattr(ring_module.Feeder, "_copy", fail_once)
    source = StreamedSource(
        spec, tensors, device="cpu", settings=StreamSettings(group_bytes=1, num_slots=4)
    )
    source.begin(0)
    wait_for(lambda: source._feeder._error is not None)
    with pytest.raises((OSError, DoesNotFit)):
        source.matrix("layers.0.o")
    source.release(0)
    for layer in range(spec.num_layers):
        check(collected(source, layer, roles_of(expected[layer])), expected[layer])
    source.close()


def test_an_error_of_copies_ahead_is_forgotten_by_the_next_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those at opening: nobody had asked for anything yet."""
    spec, tensors = bind(oracle_folder("olmoe"))
    enter = CpuTransfer.enter_thread

    def fail(self: CpuTransfer) -> None:
        raise RuntimeError("the device is busy")

    monkeypatch.setattr(CpuTransfer, "enter_thread", fail)
    source = StreamedSource(spec, tensors, device="cpu")
    source.begin(0)
    wait_for(lambda: source._feeder._error is not None)
    monkeypatch.setattr(CpuTransfer, "enter_thread", enter)
    source.begin(0)
    assert source.matrix("layers.0.o") is not None
    source.close()


def wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 5
    while not true() and time.monotonic() < until:
        time.sleep(0.001)
    assert true()


def test_close_ends_the_thread_while_slots_are_full_and_twice() -> None:
    spec, tensors = bind(oracle_folder(SMALL_ORACLE))
    source = StreamedSource(
        spec, tensors, device="cpu", settings=StreamSettings(group_bytes=1, num_slots=1)
    )
    source.begin(0)
    source.close()
    assert not source._feeder._thread.is_alive()
    source.close()


@pytest.mark.parametrize("settings", SETTINGS[1:], ids=("nothing stays", "some stay", "all"))
def test_close_lets_go_of_slots_and_mappings(
    settings: StreamSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, get = [], ring_module.Ring.get

    def counted(ring: ring_module.Ring) -> Slot:
        slot = get(ring)
        slots.append(weakref.ref(slot.memory))
        return slot

    monkeypatch.setattr(ring_module.Ring, "get", counted)
    spec, tensors = bind(oracle_folder("olmoe"))
    mappings = {id(t.data.file_content): weakref.ref(t.data.file_content) for t in tensors}
    source = StreamedSource(spec, tensors, device="cpu", settings=settings)
    source.begin(0)
    source.matrix("layers.0.o")
    next(source.expert_groups(0))
    source.close()
    del tensors
    gc.collect()
    assert slots and not [slot for slot in slots if slot() is not None]
    assert mappings and not [content for content in mappings.values() if content() is not None]


def test_inputs_of_eight_bits_need_a_gpu_that_multiplies_codes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An older one would decode all weights to float32 for each product."""
    spec, tensors = bind(oracle_folder(SMALL_ORACLE))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(BadParameter, match="w8a8"):
        StreamedSource(spec, tensors, device="cuda:0", compute="w8a8")


@pytest.mark.parametrize("format_", ["awq", "gptq", "q4_k"])
def test_other_formats_are_refused_with_a_name(format_: str) -> None:
    spec, tensors = bind(oracle_folder(SMALL_ORACLE))
    other = next(t for t in tensors if t.spec.role == "layers.0.o")
    changed = BoundTensor(spec=other.spec, format=format_, data=other.data)
    with pytest.raises(BadParameter, match=r"layers\.0\.o cannot be streamed"):
        StreamedSource(spec, [changed], device="cpu")
