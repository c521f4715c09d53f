"""The digest of what the bits of a sum depend on: alike where they are, and different where they may not be."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ftcomm.kernels.host import arithmetic
from ftcomm.transport.connect import common_traits, here_is
from ftcomm.transport.segment import Segment

X86 = """processor\t: 0
cpu MHz\t\t: {mhz}
flags\t\t: fpu sse sse2 avx avx2 fma {more}
"""


def x86(more: str = "", mhz: str = "2000.0") -> str:
    return arithmetic.digest(X86.format(more=more, mhz=mhz), {})


def test_what_changes_no_bit_changes_no_digest() -> None:
    assert len(x86()) == 16
    assert x86() == x86(mhz="3100.2") == x86("smep ibrs arch_capabilities")
    assert arithmetic.digest(X86.format(more="", mhz=1) * 2, {"HOME": "/"}) == x86()  # two cores
    assert arithmetic.own() == arithmetic.digest() != x86()


@pytest.mark.parametrize("flag", ["avx512f", "f16c", "amx_bf16"])
def test_another_vector_unit_is_another_arithmetic(flag: str) -> None:
    assert x86(flag) != x86()


def test_other_libraries_and_choices_of_code_are_another_arithmetic(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = X86.format(more="", mhz=1)
    assert arithmetic.digest(text, {"NPY_DISABLE_CPU_FEATURES": "AVX2"}) != x86()
    assert arithmetic.digest(text, {"ATEN_CPU_CAPABILITY": "default"}) != x86()
    found = {x86()}
    monkeypatch.setattr(np, "__version__", "9.9")
    found.add(x86())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found.add(x86())
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    for commit in "ab":
        (tmp_path / "version.py").write_text(f"__version__ = '9.9'\ngit_version = '{commit}'\n")
        found.add(x86())
    assert len(found) == 5
    (tmp_path / "version.py").unlink()
    assert x86() == "", "what torch is here is not known"


def test_an_arm_processor_says_it_otherwise_and_one_that_says_nothing_is_like_no_other() -> None:
    assert arithmetic.digest("Features\t: fp asimd sve\n", {}) != arithmetic.digest("Features\t: fp asimd\n", {}) != ""
    assert arithmetic.digest("isa : rv64gc\n", {}) == ""


def test_members_are_alike_if_all_are() -> None:
    segment = Segment()
    one = here_is("127.0.0.1", 1, segment)
    assert one.arithmetic == arithmetic.own()
    far, other, unknown = (
        msgspec.structs.replace(one, **fields)
        for fields in ({"boot": "b"}, {"boot": "b", "arithmetic": "c"}, {"arithmetic": ""})
    )
    assert common_traits([one]) == common_traits([one, one]) == {"one_host": True, "alike": True}
    assert common_traits([one, far]) == {"one_host": False, "alike": True}
    assert common_traits([one, far, other]) == {"one_host": False, "alike": False}
    assert common_traits([unknown, unknown])["alike"] is False
