"""Finds which object inside another one keeps it from being pickled, for the error that says so."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, cast

_MAX_STEPS = 50
"""Objects looked into before the search is content with the one that it has reached."""


def find_fault(obj: object, can_pickle: Callable[[object], bool]) -> str:
    """Return how the object leads to the innermost part that cannot be pickled.

    For example `the function 'f', which closes over 'lock' (a _thread.lock)`; just the object where
    it is itself what cannot be pickled.
    """
    trail = _find_trail(obj, can_pickle, {id(obj)}) or []
    steps = (f", which {relation} ({describe(part)})" for relation, part in trail)
    return describe(obj) + "".join(steps)


def _find_trail(
    obj: object, can_pickle: Callable[[object], bool], seen: set[int]
) -> list[tuple[str, object]] | None:
    """Return the steps to a part without faulty parts; None where all lead back in circles."""
    is_innermost = True
    for relation, part in _parts(obj):
        if id(part) in seen:
            is_innermost = is_innermost and can_pickle(part)
        elif not can_pickle(part):
            is_innermost = False
            seen.add(id(part))
            rest = [] if len(seen) > _MAX_STEPS else _find_trail(part, can_pickle, seen)
            if rest is not None:
                return [(relation, part), *rest]
    return [] if is_innermost else None


def describe(obj: object) -> str:
    """Return what an object is in a few words, never by its own `repr`."""
    if isinstance(obj, (FunctionType, MethodType, BuiltinFunctionType)):
        return f"the function {obj.__qualname__!r}"
    if isinstance(obj, type):
        return f"the class {obj.__qualname__!r}"
    kind = type(obj)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    name = f"{module}{kind.__qualname__}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _parts(obj: object) -> Iterator[tuple[str, object]]:
    """Yield what an object refers to when it is pickled by value, each with how it does."""
    match obj:
        case FunctionType():
            yield from _function_parts(obj)
        case MethodType():
            yield "is a method of", obj.__self__
            yield from _function_parts(cast(FunctionType, obj.__func__))
        case partial():
            bound = cast("partial[Any]", obj)
            yield "calls", bound.func
            yield from ((f"is given argument {i}", arg) for i, arg in enumerate(bound.args, 1))
            yield from ((f"is given {name!r}", arg) for name, arg in bound.keywords.items())
        case dict():
            items = cast("dict[object, object]", obj).items()
            yield from ((f"holds under {_key(key)}", value) for key, value in items)
        case list() | tuple() | set() | frozenset():
            yield from ((f"holds at {i}", item) for i, item in enumerate(cast("list[object]", obj)))
        case type():
            yield from _attributes(vars(obj))
        case _:
            yield from _attributes(_state(obj))


def _function_parts(function: FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"closes over {name!r}", cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    for name in dict.fromkeys(_global_names(function.__code__)):
        if name in function.__globals__:
            yield f"uses the global {name!r}", function.__globals__[name]
    for default in function.__defaults__ or ():
        yield "has a default argument", default
    for name, default in (function.__kwdefaults__ or {}).items():
        yield f"has a default for {name!r}", default
    yield from _attributes(vars(function))


def _global_names(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _state(obj: object) -> Mapping[str, object]:
    slots = (name for kind in type(obj).__mro__ for name in _slot_names(kind))
    state = {name: getattr(obj, name) for name in slots if hasattr(obj, name)}
    return state | getattr(obj, "__dict__", {})


def _slot_names(kind: type) -> tuple[str, ...]:
    slots: Any = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _attributes(namespace: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in namespace.items():
        if name not in ("__dict__", "__weakref__"):
            yield f"has the attribute {name!r}", value


def _key(key: object) -> str:
    return (
        repr(key) if isinstance(key, (str, int, float, bool)) else f"a key that is {describe(key)}"
    )
