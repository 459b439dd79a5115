"""Files of snapshots: what is damaged, foreign or hostile is refused by name."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import struct
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle_formats import Stored, write_safetensors
from oracle_variants import float_tensors
from oracles import ORACLES, SMALL_ORACLE, oracle_folder

from moechat import SamplingParams
from moechat.engine.snapshot import KVSnapshot
from moechat.errors import DoesNotFit, MoechatError, PacketRefused, Usage

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_end=True)
START = struct.Struct("<8sII")


def tokens_of(handle):
    return [event.token_id for event in handle if event.token_id is not None]


def talk(engine, ids=(3, 4, 5)):
    session = engine.session()
    session.extend(ids, logits=None)
    return session


@pytest.fixture
def engine(open_engine):
    return open_engine(oracle_folder(SMALL_ORACLE), speculate=True)


@pytest.fixture
def path(engine, tmp_path):
    """The file of a talk of three tokens."""
    path = tmp_path / "talk.kv"
    talk(engine).snapshot().save(path)
    return path


def resume(engine, path):
    return engine.session(KVSnapshot.load(path))


def with_header(content, change):
    """The file with ``change`` made to its header, and the header's checksum right again."""
    magic, length, _ = START.unpack_from(content)
    header = json.loads(content[START.size : START.size + length])
    change(header)
    new = json.dumps(header).encode()
    return START.pack(magic, len(new), zlib.crc32(new)) + new + content[START.size + length :]


def test_every_changed_byte_is_noticed(engine, path):
    content = path.read_bytes()
    want = tokens_of(resume(engine, path).generate([6], GREEDY))
    assert len(want) == 4
    for i in range(len(content)):
        damaged = bytearray(content)
        damaged[i] ^= 1 << i % 8
        path.write_bytes(damaged)
        with pytest.raises(PacketRefused):
            KVSnapshot.load(path)
    path.write_bytes(content)
    assert tokens_of(resume(engine, path).generate([6], GREEDY)) == want


def test_every_cut_is_noticed(path):
    content = path.read_bytes()
    for length in range(len(content)):
        os.truncate(path, len(content) - length - 1)
        with pytest.raises(PacketRefused):
            KVSnapshot.load(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(PacketRefused, match="longer than"):
        KVSnapshot.load(path)


def test_other_models_and_compute_types_are_refused(engine, path, open_engine, tmp_path):
    others = {
        "another model": open_engine(oracle_folder("deepseek_v3_bf16")),
        "compute type bf16, not exact": open_engine(oracle_folder(SMALL_ORACLE), compute="exact"),
    }
    for why, other in others.items():
        with pytest.raises(PacketRefused, match=why):
            resume(other, path)
    copy = shutil.copytree(oracle_folder(SMALL_ORACLE), tmp_path / "elsewhere")
    assert len(resume(open_engine(copy), path)) == 3


def test_models_that_differ_in_values_only_are_told_apart(open_engine, tmp_path):
    """A base model and its chat model have the same sizes, names and headers."""
    values = {name: tensor.array for name, tensor in float_tensors("llama").items()}
    for label in ("base", "chat"):
        (tmp_path / label).mkdir()
        config = json.loads((ORACLES / "llama" / "config.json").read_text())
        config["torch_dtype"] = "float32"
        (tmp_path / label / "config.json").write_text(json.dumps(config))
        tensors = {name: Stored("F32", array) for name, array in values.items()}
        write_safetensors(tmp_path / label / "model.safetensors", tensors)
        values = {name: array * np.float32(1.01) for name, array in values.items()}
    base, chat = (open_engine(tmp_path / label) for label in ("base", "chat"))
    with pytest.raises(PacketRefused, match="another model"):
        chat.session(talk(base).snapshot())


def set_all(draft_end=2, **values):
    def change(header):
        for layer in header["layers"]:
            layer.update(values)
        header["draft"].update(end=draft_end)

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda header: header.update(format=2), "another version"),
        (lambda header: header.update(packets=-1), "another version"),
        (lambda header: header.update(compute="int8"), "makes no sense"),
        (lambda header: header.update(compute=["bf16"]), "makes no sense"),
        (lambda header: header.update(compute="exact"), "cut, or longer"),
        (lambda header: header["parts"][0].update(width=7), "makes no sense"),  # a gap follows
        (lambda header: header["parts"][-1].update(width=8), "cut, or longer"),
        (lambda header: header["parts"][-1].update(width=2**40), "makes no sense"),
        (lambda header: header["parts"][-1].update(kind="value"), "another layout"),
        (lambda header: header["parts"][-1].update(kind="spam"), "makes no sense"),
        (lambda header: header.update(windows=[0, 16]), "another layout"),
        (lambda header: header.update(windows=[0]), "makes no sense"),
        (lambda header: header.update(ids=2**31), "makes no sense"),
        (lambda header: header.update(ids=2**31 - 1), "cut, or longer"),
        (lambda header: header.update(marked=-1), "makes no sense"),
        (lambda header: header.update(marked=True), "makes no sense"),
        (lambda header: header["layers"][0].update(slots=-3), "makes no sense"),
        (lambda header: header["layers"][0].update(end=2), "do not belong together"),
        (set_all(end=4), "do not belong together"),
        (set_all(end=2, draft_end=1), "positions do not belong"),
        (set_all(first_slot=64), "numbered wrongly"),
        (set_all(first_slot=2**31 - 64), "numbered wrongly"),
        (set_all(draft_end=3), "ahead"),
        (set_all(draft_end=1), "positions do not belong"),
        (lambda header: header.update(layers=header["layers"][:1], windows=[0]), "cut, or longer"),
        (lambda header: header.pop("model"), "makes no sense"),
    ],
)
def test_headers_that_lie_are_refused(change, why, engine, path):
    path.write_bytes(with_header(path.read_bytes(), change))
    with pytest.raises(PacketRefused, match=why):
        resume(engine, path)


def aside(**values):
    def change(header):
        header["layers"][0]["aside"].update(values)

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda header: header["layers"][0].update(begin=900), "positions do not belong"),
        (lambda header: header["layers"][0].update(first_slot=2**20), "numbered wrongly"),
        (lambda header: header["layers"][0].update(first_slot=0), "numbered wrongly"),
        (aside(first_slot=640), "numbered wrongly"),
        (aside(first_slot=32), "numbered wrongly"),
        (aside(begin=250), "positions do not belong"),
        (aside(end=250), "positions do not belong"),
        (aside(slots=3), "cut, or longer"),
        (aside(aside={}), "makes no sense"),
        (lambda header: header["layers"][0].update(aside=[1]), "makes no sense"),
        (lambda header: header["layers"][0].pop("begin"), "makes no sense"),
        (lambda header: header.update(draft=header["layers"][0]), "cut, or longer"),
    ],
)
def test_windows_that_lie_are_refused(change, why, open_engine, tmp_path):
    engine = open_engine(oracle_folder("mistral_swa"))
    session, path = engine.session(), tmp_path / "talk.kv"
    long = SamplingParams(temperature=0, max_tokens=700, ignore_end=True)
    tokens_of(session.generate([5] * 250, long))
    snapshot = session.snapshot()
    assert snapshot.layers[0].aside is not None
    snapshot.save(path)
    assert len(resume(engine, path)) == 950
    path.write_bytes(with_header(path.read_bytes(), change))
    with pytest.raises(PacketRefused, match=why):
        resume(engine, path)


def test_a_token_outside_the_vocabulary_is_refused(engine, path):
    ids = np.array([3, 4, engine.spec.vocab_size], "<i4").tobytes()
    before = np.array([3, 4, 5], "<i4").tobytes()
    content = with_header(
        path.read_bytes(), lambda header: header.update(ids_checksum=zlib.crc32(ids))
    )
    at = START.size + START.unpack_from(content)[1]
    assert content[at : at + 12] == before
    path.write_bytes(content[:at] + ids + content[at + 12 :])
    with pytest.raises(PacketRefused, match="outside the vocabulary"):
        resume(engine, path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_header_is_used_or_refused(engine, path, data):
    if not hasattr(engine, "whole"):
        engine.whole = path.read_bytes()

    def change(header):
        place = header
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
            if (
                not isinstance(place[key], dict | list)
                or not place[key]
                or data.draw(st.booleans())
            ):
                place[key] = data.draw(json_values)
                return
            place = place[key]

    path.write_bytes(with_header(engine.whole, change))
    try:
        session = resume(engine, path)
    except PacketRefused:
        return
    assert len(tokens_of(session.generate([6], GREEDY))) == 4


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 100, START.pack(b"moechkv\0", 2**32 - 1, 0), b'{"format": 1}',
     *(START.pack(b"moechkv\0", len(json_), zlib.crc32(json_)) + json_
       for json_ in (b"null", b"[" * 100_000, b"\xff", b"9" * 5000, b"{}"))],
)  # fmt: skip
def test_what_is_no_snapshot_is_refused(content, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(PacketRefused, match="snapshot cannot be used"):
        KVSnapshot.load(tmp_path / "x")


def test_what_cannot_be_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none", tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(Usage, match="no such file"):
            KVSnapshot.load(path)


def test_a_full_disk_leaves_the_older_file(engine, path):
    before, snapshot = path.read_bytes(), talk(engine, [7] * 200).snapshot()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        with pytest.raises(DoesNotFit, match="cannot be written"):
            snapshot.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]
    snapshot.save(path)
    assert len(KVSnapshot.load(path).ids) == 200


def test_a_failure_while_writing_leaves_nothing(engine, path, monkeypatch):
    def fail(file):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", fail)
    before, snapshot = path.read_bytes(), talk(engine, [8]).snapshot()
    with pytest.raises(MoechatError, match="broken"):
        snapshot.save(path)
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]
    with pytest.raises(MoechatError, match="cannot be written"):
        snapshot.save(path.parent / "none" / "talk.kv")
