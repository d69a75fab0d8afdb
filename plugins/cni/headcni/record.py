"""`dataclass`, `field` and `replace` for modules that a process without the daemon imports.

Such a process imports them for each pod. `dataclasses` took a quarter of that time: it imports
`inspect`, and compiles six methods for each class. This module compiles only __init__. For mypy
these classes are dataclasses, and they work with the functions of `dataclasses`. No class inherits
from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["dataclass", "field", "replace"]

if TYPE_CHECKING:
    from dataclasses import dataclass, field, replace
else:
    from operator import attrgetter

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

    def _initializer(cls, names, frozen):
        scope, parameters, lines = {"set_": object.__setattr__}, ["self"], []
        for name in names:
            value = name
            if name not in cls.__dict__:
                parameters.append(name)
            elif isinstance(cls.__dict__[name], field):
                scope[f"make_{name}"] = cls.__dict__[name].default_factory
                delattr(cls, name)
                parameters.append(f"{name}=set_")
                value = f"make_{name}() if {name} is set_ else {name}"
            else:
                scope[f"default_{name}"] = cls.__dict__[name]
                parameters.append(f"{name}=default_{name}")
            lines.append(f"set_(self,'{name}',{value})" if frozen else f"self.{name}={value}")
        exec(f"def __init__({','.join(parameters)}):\n " + "\n ".join(lines), scope)  # noqa: S102
        return scope["__init__"]

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
