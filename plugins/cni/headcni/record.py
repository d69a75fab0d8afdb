"""`dataclass`, `field`, `replace`, `NamedTuple` and `TYPE_CHECKING` that are cheap to import.

A process without the daemon imports its modules for each pod. `dataclasses` took a quarter of that
time: it imports `inspect`, and compiles six methods for each class. `typing` and its NamedTuple
took another fifth. This module compiles constructors only, and only those that are called often.
For mypy these are the originals, and records work with the functions of `dataclasses`. No class
inherits from a record.
"""

from __future__ import annotations

TYPE_CHECKING = False  # mypy takes it for true

__all__ = ["TYPE_CHECKING", "NamedTuple", "dataclass", "field", "replace"]

if TYPE_CHECKING:
    from dataclasses import dataclass, field, replace
    from typing import NamedTuple
else:
    from _collections import _tuplegetter
    from _operator import attrgetter

    _new = tuple.__new__
    _set = object.__setattr__
    # A constructor is compiled when it is called for this time. A process without the daemon ends
    # before that, and compiling takes longer than twenty calls of a constructor that is not.
    _COMPILED_AT = 20

    class field:
        """A default that is created for each object."""

        def __init__(self, *, default_factory, compare=True):
            self.default_factory, self.compare = default_factory, compare

    def dataclass(cls=None, *, frozen=False, order=False, eq=True):
        def made(cls):
            names = cls.__match_args__ = tuple(cls.__annotations__)
            compared = [one for one in names if getattr(cls.__dict__.get(one), "compare", True)]
            cls.__init__ = _initializer(cls, names, frozen)
            cls.__dataclass_fields__ = _Fields(names)
            if "__repr__" not in cls.__dict__:
                cls.__repr__ = _shown
            if eq:
                _compare(cls, compared, frozen, order)
            if frozen:
                cls.__setattr__ = cls.__delattr__ = _refuse
            return cls

        return made if cls is None else made(cls)

    def replace(record, **changes):
        values = {name: getattr(record, name) for name in record.__match_args__}
        return type(record)(**{**values, **changes})

    class _TupleType(type):
        def __new__(cls, name, bases, scope):
            if tuple not in bases and NamedTuple in bases:  # not a class that inherits from one
                names = tuple(scope.get("__annotations__", ()))
                defaults = {one: scope[one] for one in names if one in scope}
                scope.update((one, _tuplegetter(place, "")) for place, one in enumerate(names))
                scope["__slots__"] = ()
                scope["_fields"] = scope["__match_args__"] = names
                scope["_field_defaults"] = defaults
                scope["__new__"] = _tuple_maker(names, defaults)
            return type.__new__(cls, name, bases, scope)

    class NamedTuple(tuple, metaclass=_TupleType):
        __slots__ = ()

        @classmethod
        def _make(cls, values):
            made = _new(cls, values)
            if len(made) != len(cls._fields):
                raise TypeError(f"expected {len(cls._fields)} arguments, got {len(made)}")
            return made

        def _replace(self, **changes):
            made = self._make(map(changes.pop, self._fields, self))
            if changes:
                raise ValueError(f"got unexpected field names: {list(changes)!r}")
            return made

        def _asdict(self):
            return dict(zip(self._fields, self))

        def __repr__(self):
            values = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self))
            return f"{type(self).__name__}({values})"

        def __getnewargs__(self):
            return tuple(self)

    def _tuple_maker(names, defaults):
        count, left = len(names), _COMPILED_AT

        def __new__(cls, *values, **named):
            nonlocal left
            left -= 1
            if left > 0:
                if len(values) == count and not named:
                    return _new(cls, values)
                bound = _bound(names, defaults, values, named)
                if bound is not None:
                    return _new(cls, bound)
            cls.__new__ = staticmethod(_compiled_tuple_maker(names, defaults))
            return cls.__new__(cls, *values, **named)

        return __new__

    def _compiled_tuple_maker(names, defaults):
        scope = {f"default_{name}": value for name, value in defaults.items()}
        scope["new_"] = _new
        given = [f"{name}=default_{name}" if name in defaults else name for name in names]
        values = "".join(f"{name}," for name in names)
        code = f"def __new__(cls_,{','.join(given)}):\n return new_(cls_,({values}))"
        exec(code, scope)  # noqa: S102
        return scope["__new__"]

    def _initializer(cls, names, frozen):
        defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
        for name, default in defaults.items():
            if isinstance(default, field):
                delattr(cls, name)
        left = _COMPILED_AT

        def __init__(self, *values, **named):
            nonlocal left
            left -= 1
            bound = _bound(names, defaults, values, named) if left > 0 else None
            if bound is not None:
                for name, value in zip(names, bound):
                    _set(self, name, value.default_factory() if isinstance(value, field) else value)
                return
            cls.__init__ = _compiled_initializer(names, defaults, frozen)
            cls.__init__(self, *values, **named)

        return __init__

    def _compiled_initializer(names, defaults, frozen):
        scope, parameters, lines = {"set_": _set}, ["self"], []
        for name in names:
            value = name
            if name not in defaults:
                parameters.append(name)
            elif isinstance(defaults[name], field):
                scope[f"make_{name}"] = defaults[name].default_factory
                parameters.append(f"{name}=set_")
                value = f"make_{name}() if {name} is set_ else {name}"
            else:
                scope[f"default_{name}"] = defaults[name]
                parameters.append(f"{name}=default_{name}")
            lines.append(f"set_(self,'{name}',{value})" if frozen else f"self.{name}={value}")
        exec(f"def __init__({','.join(parameters)}):\n " + "\n ".join(lines), scope)  # noqa: S102
        return scope["__init__"]

    def _bound(names, defaults, values, named):
        """A value for each name. None if there is none for some name, or no name for some value:
        Python itself then says so, of the compiled constructor."""
        if len(values) > len(names):
            return None
        bound, used = list(values), 0
        for name in names[len(values) :]:
            if name in named:
                bound.append(named[name])
                used += 1
            elif name in defaults:
                bound.append(defaults[name])
            else:
                return None
        return bound if used == len(named) else None

    def _compare(cls, names, frozen, order):
        values = attrgetter(*names)

        def __eq__(self, other):
            return values(self) == values(other) if other.__class__ is cls else NotImplemented

        def __lt__(self, other):
            return values(self) < values(other) if other.__class__ is cls else NotImplemented

        def __hash__(self):
            return hash(values(self))

        cls.__eq__ = __eq__
        cls.__hash__ = __hash__ if frozen else None
        if order:
            cls.__lt__ = __lt__  # sorting needs nothing else

    def _shown(self):
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__match_args__)
        return f"{type(self).__qualname__}({values})"

    def _refuse(_self, name, *_value):
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot change field {name!r}")

    class _Fields:
        """The attribute that `dataclasses.fields`, `replace` and `asdict` use."""

        def __init__(self, names):
            self._names = names

        def __get__(self, _instance, owner):
            import dataclasses

            made = dataclasses.make_dataclass(owner.__name__, self._names)
            owner.__dataclass_fields__ = made.__dataclass_fields__
            return owner.__dataclass_fields__
