"""Carries functions and objects between the user's process and the workers, as bytes.

What lives in `__main__` (a function typed in a cell, a lambda, a class) travels by value, so that
a worker need not import the user's program; what lives in a module travels as its name.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from functools import partial
from typing import Any, cast

from llmrt.errors import RequestError
from llmrt.unpicklable import describe, find_fault

_CLASSES_ARE_COMPLETE = threading.RLock()
"""Held while replies are rebuilt: cloudpickle has one table of classes for the whole process, in
which a class that another thread has half rebuilt would look like one that was here before."""


def dumps(obj: object, what: str) -> bytes:
    """Return the object as bytes.

    Args:
        obj: What is sent.
        what: How an error names it, as `the result of 'f'`.

    Raises:
        RequestError: it cannot be pickled; the message names what inside it is the cause.
    """
    buffer = io.BytesIO()
    try:
        _pickle_into(buffer, obj)
    except Exception as error:
        raise RequestError(_refusal(obj, what, error)) from error
    return buffer.getvalue()


def dumps_call(
    function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> bytes:
    """Return `(function, args, kwargs)` as bytes.

    Raises:
        RequestError: a part cannot be pickled; the message names it and its cause.
    """
    kwargs = dict(kwargs or {})
    try:
        return dumps((function, tuple(args), kwargs), "the call")
    except RequestError as error:
        parts = {describe(function): function}
        parts |= {f"argument {i} of {describe(function)}": arg for i, arg in enumerate(args, 1)}
        parts |= {f"argument {name!r} of {describe(function)}": kwargs[name] for name in kwargs}
        for what, part in parts.items():
            if not _can_pickle(part):
                raise RequestError(_refusal(part, what, error.__cause__)) from error.__cause__
        raise


def loads(data: bytes, what: str = "the object") -> Any:
    """Return what the bytes hold.

    For a worker: a class that is sent again takes its new definition.

    Raises:
        RequestError: this process cannot rebuild it, for want of a module for example.
    """
    return _unpickled(pickle.Unpickler(io.BytesIO(data)), what)


def loads_reply(data: bytes, what: str = "the result") -> Any:
    """Return what the bytes of a worker hold. For the user's process: it is where its classes live.

    An instance of a class that this process sent is an instance of that very class, and the class
    stays as it is: the worker's copy of its methods and attributes is not written over it.

    Raises:
        RequestError: this process cannot rebuild it, for want of a module for example.
    """
    with _CLASSES_ARE_COMPLETE:
        return _unpickled(_ReplyUnpickler(io.BytesIO(data)), what)


class _ReplyUnpickler(pickle.Unpickler):
    """Leaves classes alone that this process had before.

    cloudpickle sends a class as a skeleton with an id, then its attributes. The receiver takes a
    class that it knows by that id instead of the skeleton, and sets the attributes on either.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._own_classes: list[object] = []

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = super().find_class(module_name, global_name)
        if not module_name.startswith("cloudpickle."):
            return found
        if global_name in ("_make_skeleton_class", "_make_skeleton_enum"):
            return partial(self._make_class, found)
        return partial(self._fill_class, found) if global_name == "_class_setstate" else found

    def _make_class(self, make_skeleton: Callable[..., object], *arguments: Any) -> object:
        was_known = arguments[-2] in _cloudpickle()._DYNAMIC_CLASS_TRACKER_BY_ID
        made = make_skeleton(*arguments)
        if was_known:
            self._own_classes.append(made)
        return made

    def _fill_class(self, set_state: Callable[..., object], made: Any, state: Any) -> object:
        is_own = any(made is own for own in self._own_classes)
        return made if is_own else set_state(made, state)


def _unpickled(unpickler: pickle.Unpickler, what: str) -> Any:
    try:
        return unpickler.load()
    except Exception as error:
        message = f"Cannot rebuild {what} in this process: {type(error).__name__}: {error}."
        if isinstance(error, (ImportError, AttributeError)):
            message += (
                " Make the module importable here too, or have its objects sent by value: "
                "cloudpickle.register_pickle_by_value(module)."
            )
        raise RequestError(message) from error


def _pickle_into(file: Any, obj: object) -> None:
    pickler: Any = _cloudpickle().Pickler

    class Pickler(pickler):
        """Keeps what cloudpickle loses of a class that is sent by value."""

        def reducer_override(self, obj: Any) -> Any:
            if obj is MISSING:  # dataclasses ask for its identity
                return "MISSING"
            return _with_slots(obj, pickler.reducer_override(self, obj))

    Pickler(file, protocol=5).dump(obj)


def _with_slots(obj: object, reduced: Any) -> Any:
    """Have a class made with its slots: cloudpickle names them on the finished class, too late."""
    slots = vars(obj).get("__slots__") if isinstance(obj, type) else None
    if not slots or not isinstance(reduced, tuple):
        return reduced
    make, arguments, *rest = cast("tuple[Any, ...]", reduced)
    if make.__name__ != "_make_skeleton_class":
        return cast(Any, reduced)
    *before, type_kwargs, class_id, extra = arguments
    type_kwargs = type_kwargs | {"__slots__": slots}
    return (make, (*before, type_kwargs, class_id, extra), *rest)


def _cloudpickle() -> Any:
    """Return cloudpickle, without types: it has none."""
    import cloudpickle.cloudpickle as untyped  # pyright: ignore[reportMissingTypeStubs]

    return cast(Any, untyped)


def _can_pickle(obj: object) -> bool:
    try:
        _pickle_into(_Nowhere(), obj)
    except Exception:
        return False
    return True


class _Nowhere:
    """A file that keeps nothing, so that a large object is tried without its bytes being held."""

    def write(self, data: bytes | memoryview) -> int:
        return len(data)


def _refusal(obj: object, what: str, error: BaseException | None) -> str:
    return (
        f"Cannot send {what} to another process: {find_fault(obj, _can_pickle)}, which cannot be "
        f"pickled ({type(error).__name__}: {error}). Make it in the process that needs it, inside "
        "the function, or send what it is made from."
    )
