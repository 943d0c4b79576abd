"""Quick values are the frozen dataclasses that they were declared to be."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any

import pytest

from sentinel.core.quick import quick


@dataclass(frozen=True, slots=True)
class Plain:
    a: int
    b: float = 2.0
    c: tuple[int, ...] = field(default_factory=lambda: (1, 2), compare=False)


@quick
@dataclass(frozen=True, slots=True)
class Value:
    a: int
    b: float = 2.0
    c: tuple[int, ...] = field(default_factory=lambda: (1, 2), compare=False)


def values(one: Any) -> list[Any]:
    return [getattr(one, f.name) for f in fields(one)]


@pytest.mark.parametrize("given", [((1,), {}), ((1, 3.0), {"c": (4,)}), ((), {"b": 0.5, "a": 7})])
def test_it_is_made_like_any_dataclass(given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    places, names = given
    made = Value(*places, **names)
    assert type(made) is Value
    assert values(made) == values(Plain(*places, **names))
    assert repr(made) == repr(Plain(*places, **names)).replace("Plain", "Value")
    assert list(inspect.signature(Value).parameters) == list(inspect.signature(Plain).parameters)


@pytest.mark.parametrize("places", [(), (1, 2.0, (), 4)])
def test_too_few_and_too_many_values_are_refused(places: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"Value\.__init__\(\)"):
        Value(*places)


def test_no_field_can_be_set_or_deleted_and_no_other_added() -> None:
    made = Value(1)
    with pytest.raises(FrozenInstanceError):
        made.a = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del made.a  # type: ignore[misc]
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        made.other = 2  # type: ignore[attr-defined]
    assert not hasattr(made, "__dict__")


def test_it_compares_hashes_copies_and_pickles_as_before() -> None:
    made = Value(1, c=(9,))
    assert made == Value(1)  # c is not compared
    assert hash(made) == hash(Value(1))
    assert made != Value(2)
    assert replace(made, a=5) == Value(5)
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(again) is Value
        assert values(again) == values(made)


def test_a_default_is_made_anew_each_time() -> None:
    @quick
    @dataclass(frozen=True, slots=True)
    class Listing:
        names: list[str] = field(default_factory=list)

    assert Listing().names is not Listing().names


def test_what_it_cannot_make_is_refused_when_it_is_declared() -> None:
    with pytest.raises(TypeError, match="must be a frozen dataclass with slots"):
        quick(dataclass(slots=True)(type("Open", (), {})))
    with pytest.raises(TypeError, match="must be a frozen dataclass with slots"):
        quick(dataclass(frozen=True)(type("Wide", (), {})))

    @dataclass(frozen=True, slots=True)
    class Checked:
        a: int

        def __post_init__(self) -> None:
            raise AssertionError

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Named:
        a: int

    for kind in (Checked, Named):
        with pytest.raises(TypeError, match="must take its fields by place"):
            quick(kind)
