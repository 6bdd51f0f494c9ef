"""Functions and objects of `__main__` on their way to a fresh process and back."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmrt.by_value import dumps, dumps_call, loads, loads_reply
from llmrt.errors import RequestError
from tests.support.remote_caller import RemoteCaller

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run_main(tmp_path: Path) -> Callable[[str], None]:
    """Run a user's program, in which `remote` is another process; it fails by assert."""

    def run(program: str) -> None:
        script = tmp_path / "users_program.py"
        header = "from tests.support.remote_caller import RemoteCaller\nremote = RemoteCaller()\n"
        script.write_text(header + textwrap.dedent(program) + "\nremote.__exit__()\n")
        done = subprocess.run(
            [sys.executable, str(script)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr

    return run


def test_functions_of_main_run_elsewhere_without_their_program(
    run_main: Callable[[str], None],
) -> None:
    run_main("""
        factor, offset = 3, [1]

        def scale(x):
            return factor * x + offset[0]

        def make_adder(n):
            return lambda x: scale(x) + n

        def countdown(n):
            return [n, *countdown(n - 1)] if n else []

        assert remote.call(scale, 2) == 7
        assert remote.call(make_adder(10), 2) == 17
        assert remote.call(countdown, 3) == [3, 2, 1]
        assert remote.call(lambda *a, **k: (a, k), 1, two=2) == ((1,), {"two": 2})
        factor = 5
        assert remote.call(scale, 2) == 11
    """)


def test_a_result_is_an_instance_of_the_callers_own_class(
    run_main: Callable[[str], None],
) -> None:
    run_main("""
        import enum
        from dataclasses import dataclass, field
        from typing import NamedTuple

        @dataclass(frozen=True)
        class Point:
            x: int
            tags: list = field(default_factory=list)

        class Color(enum.Enum):
            RED = 1

            def shout(self):
                return self.name + "!"

        class Pair(NamedTuple):
            a: int
            b: int

        @dataclass(slots=True)
        class SlottedPoint:
            x: int = 1

        class Slotted:
            __slots__ = ("value",)

        def slotted():
            made = Slotted()
            made.value = 4
            return made

        assert remote.call(lambda: Point(3)) == Point(3)
        assert type(remote.call(lambda: Point(3))) is Point
        assert remote.call(lambda: Color.RED) is Color.RED
        assert remote.call(lambda: [Color.RED.shout()]) == ["RED!"]
        assert type(remote.call(lambda: Pair(1, 2))) is Pair
        assert remote.call(lambda: SlottedPoint(5)) == SlottedPoint(5)
        assert not remote.call(lambda: hasattr(SlottedPoint(5), "__dict__"))
        assert type(remote.call(slotted)) is Slotted
        assert remote.call(slotted).value == 4
    """)


def test_a_result_does_not_change_the_callers_class(run_main: Callable[[str], None]) -> None:
    """The copy that comes back would tie the methods to the globals of the moment it was sent."""
    run_main("""
        import enum
        answer = 1

        class Counter:
            made = 0

            def ask(self):
                return answer

        class Mode(enum.Enum):
            ON = 1

            def ask(self):
                return answer

        def count():
            Counter.made += 1
            return Counter()

        own = {cls: dict(vars(cls)) for cls in (Counter, Mode)}
        first, mode = remote.call(count), remote.call(lambda: Mode.ON)
        answer = 2
        assert Counter.made == 0
        assert first.ask() == 2
        assert mode.ask() == 2
        for cls, attributes in own.items():
            assert all(vars(cls)[name] is value for name, value in attributes.items())
    """)


def test_a_class_that_was_changed_is_sent_as_it_is_now(run_main: Callable[[str], None]) -> None:
    run_main("""
        class Greeter:
            def greet(self):
                return "old"

        assert remote.call(lambda: Greeter().greet()) == "old"
        Greeter.greet = lambda self: "new"
        assert remote.call(lambda: Greeter().greet()) == "new"
    """)


def test_a_class_that_was_defined_again_does_not_take_over_the_old_one(
    run_main: Callable[[str], None],
) -> None:
    """As when a cell of a notebook is run twice."""
    run_main("""
        class Point:
            version = 1

        old_class, old = Point, Point()

        class Point:
            version = 2

        assert type(remote.call(lambda: old)) is old_class
        assert type(remote.call(lambda: Point())) is Point
        assert remote.call(lambda: (old.version, Point.version)) == (1, 2)
    """)


def test_a_class_of_the_other_process_arrives_whole_and_once(
    run_main: Callable[[str], None],
) -> None:
    run_main("""
        def define():
            class Local:
                def answer(self):
                    return 42
            define.made = getattr(define, "made", Local)
            return Local()

        local = remote.call(define)
        assert local.answer() == 42

        def make_two():
            class Local:
                pass
            return Local(), Local()

        one, two = remote.call(make_two)
        assert type(one) is type(two)
    """)


def test_dataclasses_of_main_can_be_derived_from_and_replaced_elsewhere(
    run_main: Callable[[str], None],
) -> None:
    run_main("""
        import dataclasses
        from dataclasses import dataclass, field

        @dataclass
        class Base:
            x: int
            y: list = field(default_factory=list)

        def derive():
            @dataclass
            class Derived(Base):
                z: int = 3
            made = dataclasses.replace(Derived(1), x=2)
            no_default = dataclasses.fields(Base)[0].default is dataclasses.MISSING
            return dataclasses.asdict(made), no_default

        assert remote.call(derive) == ({"x": 2, "y": [], "z": 3}, True)
    """)


def test_functions_of_modules_travel_as_their_names() -> None:
    payload = dumps_call(textwrap.dedent, ("  x",))
    assert b"textwrap" in payload
    assert len(payload) < 100
    with RemoteCaller() as remote:
        assert remote.call(textwrap.dedent, "  x") == "x"


def test_exactly_what_was_given_comes_out() -> None:
    function, args, kwargs = loads(dumps_call(len, ([1, 2],), {"a": b"x"}))
    assert function is len
    assert args == ([1, 2],)
    assert kwargs == {"a": b"x"}
    assert loads(dumps(dataclasses.MISSING, "it")) is dataclasses.MISSING


# ---- what cannot cross ----


class Holder:
    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)

    def method(self) -> None: ...


LOCK = threading.Lock()


def closes_over_a_lock() -> Callable[[], None]:
    lock = threading.Lock()

    def guarded() -> None:
        with lock:
            pass

    return guarded


def in_main(function: Any) -> Any:
    """Make a function one of `__main__`, so that it travels by value."""
    function.__module__ = "__main__"
    return function


def has_default(lock: object = LOCK) -> None: ...


def has_keyword_default(*, lock: object = LOCK) -> None: ...


def nested_use() -> Callable[[], object]:
    return lambda: LOCK


@pytest.mark.parametrize(
    ("obj", "trail"),
    [
        (LOCK, "a _thread.lock, which cannot"),
        (
            closes_over_a_lock(),
            "the function 'closes_over_a_lock.<locals>.guarded', which closes over 'lock' "
            "(a _thread.lock), which cannot",
        ),
        (
            in_main(nested_use),
            "the function 'nested_use', which uses the global 'LOCK' (a _thread.lock)",
        ),
        (in_main(has_default), "which has a default argument (a _thread.lock)"),
        (in_main(has_keyword_default), "which has a default for 'lock' (a _thread.lock)"),
        (
            {"model": [1, Holder(lock=LOCK)]},
            "a dict, which holds under 'model' (a list), which holds at 1 (a "
            "tests.test_by_value.Holder), which has the attribute 'lock' (a _thread.lock)",
        ),
        (Holder(lock=LOCK).method, "which is a method of (a tests.test_by_value.Holder)"),
        ((i for i in range(3)), "a generator, which cannot"),
    ],
    ids=["itself", "closure", "global", "default", "keyword", "nested", "method", "generator"],
)
def test_the_error_names_what_inside_cannot_be_pickled(obj: object, trail: str) -> None:
    with pytest.raises(RequestError) as caught:
        dumps(obj, "the function given to collective_rpc")
    message = str(caught.value)
    assert message.startswith("Cannot send the function given to collective_rpc to another")
    assert trail in message
    assert "cannot pickle" in message
    assert caught.value.__cause__ is not None


def test_the_error_of_a_call_names_the_argument() -> None:
    with pytest.raises(RequestError, match="argument 2 of the function 'print'"):
        dumps_call(print, (1, LOCK))
    with pytest.raises(RequestError, match="argument 'file' of the function 'print'"):
        dumps_call(print, (1,), {"file": LOCK})
    with pytest.raises(RequestError, match="Cannot send the function 'closes_over"):
        dumps_call(closes_over_a_lock(), (1,))


def test_a_circle_of_objects_ends_the_search() -> None:
    circle: dict[str, Any] = {}
    circle |= {"self": [circle], "lock": LOCK}
    with pytest.raises(RequestError) as caught:
        dumps(circle, "it")
    assert "a dict, which holds under 'lock' (a _thread.lock), which cannot" in str(caught.value)


def test_the_search_ends_in_a_deep_structure() -> None:
    chain = Holder(lock=LOCK)
    for _ in range(100):
        chain = Holder(next=chain)
    with pytest.raises(RequestError, match="which has the attribute 'next'"):
        dumps(chain, "it")


def test_an_object_whose_repr_raises_is_still_named() -> None:
    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError

        def __reduce__(self) -> str:
            raise ValueError("never pickled")

    with pytest.raises(RequestError, match=r"Rude\), which cannot be pickled \(ValueError: never"):
        dumps([Rude()], "it")


def test_endless_nesting_is_an_error_and_not_a_crash() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(RequestError, match="recursion"):
        dumps(nested, "it")


def test_a_result_that_cannot_come_back_is_named_too(run_main: Callable[[str], None]) -> None:
    run_main("""
        import threading
        reply = remote.call(lambda: {"lock": threading.Lock()})
        assert "the result" in reply and "'lock'" in reply, reply
        assert remote.call(lambda: "still there") == "still there"
    """)


@pytest.fixture
def module_of_this_process() -> Iterator[ModuleType]:
    module = ModuleType("only_here")
    sys.modules["only_here"] = module
    exec("def function(): return 1", vars(module))
    yield module
    sys.modules.pop("only_here", None)


@pytest.mark.parametrize("load", [loads, loads_reply])
def test_a_module_that_the_receiver_lacks_is_named_with_the_way_out(
    load: Callable[[bytes, str], object], module_of_this_process: ModuleType
) -> None:
    payload = dumps(module_of_this_process.function, "it")
    del sys.modules["only_here"]
    with pytest.raises(RequestError, match=r"function 'f'.*'only_here'") as caught:
        load(payload, "the function 'f'")
    assert "cloudpickle.register_pickle_by_value" in str(caught.value)


def test_bytes_that_are_no_pickle_are_an_error() -> None:
    with pytest.raises(RequestError, match="Cannot rebuild the object"):
        loads(b"nonsense")


def test_a_reply_may_be_any_pickle() -> None:
    assert loads_reply(pickle.dumps({"a": (1, 2)})) == {"a": (1, 2)}
