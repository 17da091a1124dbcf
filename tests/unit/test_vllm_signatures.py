"""The newest vLLM that the connector accepts has no CPU build, and engines of it run only in an environment of their
own (`make test-vllm`). What it passes to our overrides and what it takes from our calls is compared in every one with a
list that `tools/vllm_signatures.py` made from its wheel: names and parameters of every object of vLLM that `connector/`
uses.
"""
# ruff: noqa: ARG002 - overrides that are planted to be found

import ast
import importlib
import inspect
import json
from collections.abc import Iterator, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from connector.compat import NEWEST
from tools.vllm_signatures import connector_uses

LIST = Path(__file__).parents[1] / "data" / "vllm-0.33.0-signatures.json"
VERSION, OBJECTS = json.loads(LIST.read_text()).values()
USES = connector_uses()
OURS = {name: bases for used in USES for name, bases in used.bases.items()}
NOT_OVERRIDES = {"_abc_impl"}


def signature(text: str) -> Signature:
    """Of "a, b=, *, c=, **rest"."""
    parameters: list[Parameter] = []
    kind = Parameter.POSITIONAL_OR_KEYWORD
    for word in filter(None, text.split(", ")):
        if word == "/":
            parameters = [parameter.replace(kind=Parameter.POSITIONAL_ONLY) for parameter in parameters]
        elif word.startswith("**"):
            parameters.append(Parameter(word[2:], Parameter.VAR_KEYWORD))
        elif word.startswith("*"):
            kind = Parameter.KEYWORD_ONLY
            if len(word) > 1:
                parameters.append(Parameter(word[1:], Parameter.VAR_POSITIONAL))
        else:
            default = None if word.endswith("=") else Parameter.empty
            parameters.append(Parameter(word.rstrip("="), kind, default=default))
    return Signature(parameters)


def calls(theirs: Signature) -> Iterator[tuple[list[str], list[str]]]:
    """The ways in which a method of this signature can be called: positional arguments, and names of the others."""
    by_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    for named in ([p for p in theirs.parameters.values() if p.default is Parameter.empty], theirs.parameters.values()):
        positional = [p.name for p in named if p.kind in by_position]
        by_name = [p.name for p in named if p.kind is Parameter.KEYWORD_ONLY]
        yield positional, by_name
        only = [p.name for p in named if p.kind is Parameter.POSITIONAL_ONLY]
        yield only, [name for name in positional if name not in only] + by_name


def problems(ours: type, methods: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What would go wrong if a class with these methods were the base of `ours`."""
    for name in sorted(getattr(ours, "__abstractmethods__", ())):
        yield f"{name} is not implemented"
    for name, entry in methods.items():
        decorators = entry.get("decorators", ())
        if "abstractmethod" in decorators and not hasattr(ours, name):
            yield f"{name} is not implemented"
        if name not in vars(ours):
            continue
        override = vars(ours)[name]
        for kind, decorator in ((property, "property"), (classmethod, "classmethod"), (staticmethod, "staticmethod")):
            if isinstance(override, kind) != (decorator in decorators):
                yield f"{name} is a {decorator} on one side only"
        if isinstance(override, property):
            continue
        accepted = inspect.signature(getattr(override, "__func__", override))
        if not isinstance(override, staticmethod):
            accepted = accepted.replace(parameters=list(accepted.parameters.values())[1:])
        for positional, by_name in calls(signature(entry["parameters"])):
            try:
                accepted.bind(*positional, **dict.fromkeys(by_name))
            except TypeError as error:
                yield f"{name}({entry['parameters']}) is called, and ours is {name}{accepted}: {error}"
                break
    for name in vars(ours):
        dunder = name.startswith("__") and name.endswith("__")
        if name in methods or dunder or name in NOT_OVERRIDES:
            continue
        if any(name in vars(base) for base in ours.__mro__[1:] if base.__module__.startswith("vllm.")):
            yield f"{name} overrides a method that is not there any more"


def our_class(name: str) -> type:
    for module in ("plugin", "scheduler", "worker", "spec", "messages"):
        found = getattr(importlib.import_module(f"connector.{module}"), name, None)
        if found is not None and found.__module__.startswith("connector."):
            return found
    raise LookupError(name)


def of_an_object(name: str) -> bool:
    """An attribute of an instance (`current_platform.device_type`), whose class nobody names."""
    return OBJECTS.get(name.rpartition(".")[0], {}).get("kind") == "value"


def bind(call: ast.Call, parameters: str) -> None:
    assert not any(isinstance(argument, ast.Starred) for argument in call.args), ast.unparse(call)
    signature(parameters).bind(
        *call.args, **{keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    )


def test_the_list_is_of_the_newest_version_the_connector_accepts():
    assert VERSION.startswith(".".join(map(str, NEWEST)) + ".")


def test_everything_the_connector_imports_is_still_there():
    names = {name for used in USES for name in (*used.imported.values(), *used.read) if not of_an_object(name)}
    assert len(names) > 30
    assert names - set(OBJECTS) == set()


def test_all_classes_that_vllm_calls_are_examined():
    halves = {"KVStoreConnector", "SchedulerHalf", "WorkerHalf", "KVStoreSpec"}
    assert set(OURS) >= halves | {"ChunkSpec", "WorkerOutcomes"}


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_override_accepts_what_the_newest_version_passes(name):
    methods = {}
    for base in OURS[name]:
        methods |= OBJECTS[base]["methods"]
    assert list(problems(our_class(name), methods)) == []


def test_calls_of_vllms_functions_and_classes_fit_their_parameters():
    bound = 0
    for used in USES:
        for name, call in used.called:
            if not of_an_object(name) and "parameters" in OBJECTS[name]:
                bind(call, OBJECTS[name]["parameters"])
                bound += 1
        for ours, method, call in used.called_on_super:
            parameters = [
                OBJECTS[base]["methods"][method]["parameters"]
                for base in used.bases[ours]
                if method in OBJECTS[base]["methods"]
            ]
            for text in parameters:
                bind(call, text)
                bound += 1
            assert parameters, f"{ours} calls {method} of a base that has none"
    assert bound > 15


# ---- the comparison itself can fail


class Base:
    def submit_load(self, job_id, src_spec, dst_spec):
        raise NotImplementedError

    def gone(self):
        raise NotImplementedError


Base.__module__ = "vllm.planted"
METHODS = {
    "submit_load": {"parameters": "job_id, src_spec, dst_spec, expedited=", "decorators": ["abstractmethod"]},
    "lock": {"parameters": "", "decorators": ["property"]},
}


def test_an_override_that_lacks_a_parameter_is_found():
    class Lacking(Base):
        def submit_load(self, job_id, src_spec, dst_spec):
            return True

    assert [line.split(":")[-1] for line in problems(Lacking, METHODS)] == [" too many positional arguments"]


def test_an_override_that_has_it_passes():
    class Whole(Base):
        def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
            return True

    assert list(problems(Whole, METHODS)) == []


def test_a_parameter_of_another_name_is_found():
    class Renamed(Base):
        def submit_load(self, job_id, source, dst_spec, expedited=False):
            return True

    assert "src_spec" in next(problems(Renamed, METHODS))


def test_an_override_that_demands_what_is_not_passed_is_found():
    class Demanding(Base):
        def submit_load(self, job_id, src_spec, dst_spec, expedited):
            return True

    assert "expedited" in next(problems(Demanding, METHODS))


def test_a_method_where_a_property_is_read_an_override_of_nothing_and_a_missing_one_are_found():
    class Odd:
        def lock(self):
            return None

    class Late(Base):
        def gone(self):
            return None

    assert list(problems(Odd, METHODS)) == [
        "submit_load is not implemented",
        "lock is a property on one side only",
    ]
    assert list(problems(Late, METHODS)) == ["gone overrides a method that is not there any more"]
