"""The ``isa`` fixture: every instruction set, forced for one test and put back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moechat import _native

ALL_INSTRUCTION_SETS = ("ref", "avx2", "avx512", "avx512bf16", "amx")


@pytest.fixture(params=ALL_INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.param
    if name not in _native.supported_instruction_sets():
        pytest.skip(f"this CPU does not run {name}")
    before = _native.active_instruction_set()
    _native.force_instruction_set(name)
    assert _native.active_instruction_set() == name
    yield name
    assert _native.active_instruction_set() == name, "something else changed it during the test"
    _native.force_instruction_set(before)
