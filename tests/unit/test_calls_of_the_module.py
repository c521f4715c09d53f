"""`ftcomm.allreduce` is `Group.allreduce`, on the default group."""

from __future__ import annotations

import inspect

import ftcomm


def test_it_has_the_signature_and_the_documentation_of_the_method() -> None:
    method = inspect.signature(ftcomm.Group.allreduce).parameters
    function = inspect.signature(ftcomm.allreduce).parameters
    assert [repr(each) for each in list(function.values())[:-1]] == [repr(each) for each in list(method.values())[1:]]
    assert list(function)[-1] == "group"
    documented = inspect.getdoc(ftcomm.allreduce) or ""
    assert (inspect.getdoc(ftcomm.Group.allreduce) or "?").splitlines()[-1] in documented.splitlines()
