"""What is public, as tools that ask for annotations see it."""

import functools
import importlib
import inspect
import pkgutil
import runpy
import sys
import types
import typing

import pytest

import vpmm
from vpmm import _typing


def public_modules():
    for module in pkgutil.walk_packages(vpmm.__path__, "vpmm."):
        if not any(part.startswith("_") for part in module.name.split(".")):
            yield module.name


MODULES = ["vpmm", *public_modules()]


def public_names(owner):
    return getattr(owner, "__all__", None) or [name for name in vars(owner) if not name.startswith("_")]


def functions_of(kind):
    """What a class of the package's has of its own: methods, and what properties are made of."""
    for name, member in vars(kind).items():
        if name.startswith("_") and not name.startswith("__"):
            continue
        if isinstance(member, classmethod | staticmethod):
            member = member.__func__
        elif isinstance(member, property):
            member = member.fget
        elif isinstance(member, functools.cached_property):
            member = member.func
        if isinstance(member, types.FunctionType) and member.__module__.startswith("vpmm"):
            yield member


@pytest.mark.parametrize("name", MODULES)
def test_annotations_are_of_names_that_are_there(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} needs {error.name}")
    asked = 0
    for public in public_names(module):
        member = getattr(module, public)
        if not (inspect.isclass(member) or inspect.isroutine(member)):
            continue
        if not (member.__module__ or "").startswith("vpmm"):
            continue
        for one in (member, *(functions_of(member) if inspect.isclass(member) else ())):
            typing.get_type_hints(one, include_extras=True)
            asked += 1
    assert asked > 0


def test_a_pool_s_options_are_seen_through_its_annotations():
    for maker in (vpmm.Pool.__init__, vpmm.configure, vpmm.mr.PoolMemoryResource.__init__):
        hint = typing.get_type_hints(maker)["options"]
        assert hint == _typing.Unpack[vpmm.PoolOptions]


def test_older_pythons_have_something_in_its_place(monkeypatch):
    # Of 3.10, for which nothing is installed that has it.
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    older = runpy.run_path(_typing.__file__)
    assert older["Unpack"][vpmm.PoolOptions] is vpmm.PoolOptions
