"""What every configuration is made of: typed options with help texts, classes that nest, one-line errors.

    class EngineConfig(Options):
        group = "engine"
        max_num_seqs: int = option(256, "sequences that decode together")

    class GRPOConfig(Options):
        engine: EngineConfig = nested(EngineConfig, without=("seed",), gpu_memory_utilization=0.5)

    GRPOConfig(max_num_seqs=8).engine.max_num_seqs      # one declaration, flat for the user

A subclass of `Options` is a dataclass with keyword arguments only. Its constructor checks the type of each value, then
calls `__post_init__` for the rest. `config.given` holds the flat names that were passed, also those passed with the
default's value.
"""

import dataclasses
import difflib
import logging
import math
import numbers
import os
import types
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field
from typing import Any, ClassVar, get_args, get_origin

LARGEST_SEED = 2**64 - 1  # draws are keyed by 64 bits
WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a JSON object"}
WANTED_MANY = {int: "whole numbers", float: "numbers", str: "texts"}
_said: set[str] = set()


@dataclass(frozen=True)
class Option:
    """One option as the user sees it: its flat name, its type, where its value lives."""

    name: str
    type: Any
    default: Any  # MISSING: it must be given; a list is copied
    help: str
    choices: tuple[str, ...]
    group: str
    owner: str | None  # the nested field that holds it; None: the class itself
    bools: tuple[str, str] | None = None  # the choices that false and true stand for
    is_place: bool = False

    @property
    def kind(self) -> Any:
        """X of `X | None`."""
        return without_none(self.type)

    @property
    def optional(self) -> bool:
        return isinstance(self.type, types.UnionType) and types.NoneType in get_args(self.type)


def option(
    default: Any = MISSING,
    help: str = "",
    choices: tuple[str, ...] | None = None,
    group: str | None = None,
    bools: tuple[str, str] | None = None,
    is_place: bool = False,
) -> Any:
    """A field with the text, the allowed words and the group (default: its class's) that the command line shows.

    bools: the choices that false and true stand for, of an option that was a truth value once or is one in TRL.
    is_place: its text is the place of a folder, a file or a function, so that the text `none` is none.
    """
    metadata = {"help": help, "choices": choices or (), "group": group, "bools": bools, "is_place": is_place}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def nested(cls: type["Options"], without: tuple[str, ...] = (), **defaults: Any) -> Any:
    """A field that holds another options class. Its options (but `without`) become options of this class.

    `defaults` replace those of `cls` here. A name that the class has already is an error at import.
    """
    for name in [*without, *defaults]:
        if name not in cls.options():
            raise TypeError(f"nested({cls.__name__}): it has no option {name!r}")
    return field(metadata={"nested": cls, "without": without, "defaults": defaults})


class Options:
    """The base of every configuration; see the module's docstring.

    A subclass may set `group` (the heading of its options in help), `exclusive` (sets of options of which the one given
    later wins) and `way_out` (the end of the error about unknown names), and override `respelled`, `__post_init__`,
    `merged` and `ruled_out`.
    """

    group: ClassVar[str] = "other"
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = ()
    way_out: ClassVar[str] = ""
    given: frozenset[str]
    _options: ClassVar[dict[str, Option]] = {}
    _nested: ClassVar[dict[str, dataclasses.Field]] = {}

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        dataclass(init=False)(cls)
        cls._options = _collect(cls)
        cls._nested = {item.name: item for item in _fields(cls) if "nested" in item.metadata}
        cls.__signature__ = _signature(cls)  # type: ignore[attr-defined]

    def __init__(self, **values: Any) -> None:
        cls = type(self)
        holders = {name: values.pop(name) for name in cls._nested if name in values}  # whole, as replace() passes them
        values = cls.respelled(values)
        if unknown := [name for name in values if name not in cls._options]:
            if len(unknown) > 1:
                raise ValueError(f"{cls.__name__} has no options {', '.join(map(repr, unknown))}{cls.way_out}")
            hint = nearest(unknown[0], cls._options) or cls.way_out
            raise ValueError(f"{cls.__name__} has no option {unknown[0]!r}{hint}")
        given = set(values)
        for name, item in cls._nested.items():
            mine = {key: values[key] for key in values if cls._options[key].owner == name}
            whole = given_values(holders[name]) if name in holders else {}
            given |= whole.keys() & cls._options.keys()
            held = item.metadata["nested"](**(item.metadata["defaults"] | whole | mine))
            object.__setattr__(held, "given", frozenset(whole | mine))
            object.__setattr__(self, name, held)
        for name, own in cls._options.items():
            if own.owner is None:
                if name not in values and own.default is MISSING:
                    raise ValueError(f"{cls.__name__} needs {name}: {own.help}")
                object.__setattr__(self, name, typed(own, values[name]) if name in values else _copy(own.default))
        object.__setattr__(self, "given", frozenset(given))
        self.__post_init__()
        object.__setattr__(self, "given", frozenset(given))  # what __post_init__ made long was not given

    def __post_init__(self) -> None:
        """Checks beyond types, and short forms made long."""
        return None

    @classmethod
    def merged(cls, earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
        """The values of two sources (YAML and command line): of options that exclude each other the later ones stay.

        An option that is only switched off (None, false, -1) pushes none out.
        """
        out = set()
        for names in cls.exclusive:
            if any(name in later and later[name] not in (None, -1) and later[name] is not False for name in names):
                out |= set(names) - later.keys()
        return {name: value for name, value in earlier.items() if name not in out} | later

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Flat name -> option, nested ones included."""
        return cls._options

    @classmethod
    def respelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The values with other libraries' spellings replaced by this class's; called before types are checked."""
        return values

    def ruled_out(self) -> set[str]:
        """Options that others make void here (num_train_epochs where max_steps counts)."""
        return set()

    def __getattr__(self, name: str) -> Any:
        option = type(self)._options.get(name)
        if option is None or option.owner is None:
            raise AttributeError(f"{type(self).__name__} has no option {name!r}{nearest(name, type(self)._options)}")
        return getattr(object.__getattribute__(self, option.owner), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Change one option after construction. Its type is checked; what depends on several options is not."""
        option = type(self)._options.get(name)
        if option is None:
            raise AttributeError(f"{type(self).__name__} has no option {name!r}{nearest(name, type(self)._options)}")
        if option.owner is None:
            object.__setattr__(self, name, typed(option, value))
        else:
            setattr(getattr(self, option.owner), name, value)
        object.__setattr__(self, "given", self.given | {name})


def flat_values(config: Options) -> dict[str, Any]:
    """Every option's value by its flat name; an option that others rule out is left out.

    `type(config)(**flat_values(config))` behaves as config does.
    """
    out = config.ruled_out()
    return {name: getattr(config, name) for name in config.options() if name not in out}


def stated_values(config: Options) -> dict[str, Any]:
    """flat_values for a file that is read again: what is None is left out unless the default is another value."""
    options = config.options()
    values = flat_values(config).items()
    return {name: value for name, value in values if value is not None or options[name].default is not None}


def given_values(config: Options) -> dict[str, Any]:
    """The values that were given, by their flat names: `type(config)(**given_values(config)) == config`."""
    return {name: getattr(config, name) for name in config.options() if name in config.given}


def changed(config: Any, **changes: Any) -> Any:
    """A copy with these options given otherwise, checked as a new one. What was not given stays not given."""
    return type(config)(**(given_values(config) | changes))


# ---- types -----------------------------------------------------------------------------------------------------------


def typed(item: Option, value: Any) -> Any:
    """The value as the option's type, or a one-line ValueError that names option, value and what is wanted.

    A whole number is a number too, a bool is none; NumPy's scalars count as Python's, a path as text, one value as a
    list of one. A bool stands for a choice that is spelled so (exact=True, and YAML's bare `no`).
    """
    if value is None and item.optional:
        return None
    if type(value) is item.type:
        return value
    kind = item.kind
    try:
        if item.bools and isinstance(value, bool):
            value = item.bools[value]
        elif item.choices and isinstance(value, bool):
            words = (str(value).lower(), "yes" if value else "no")
            value = next((word for word in words if word in item.choices), value)
        return _typed(kind, value)
    except (TypeError, OverflowError):
        wanted = WANTED.get(kind) or f"a list of {WANTED_MANY[get_args(kind)[0]]}"
        wanted += ", each name in it a text" if isinstance(value, dict) and kind is dict else ""
        raise ValueError(f"{item.name} must be {wanted}, got {value!r:.100}") from None


def _typed(kind: Any, value: Any) -> Any:
    if get_origin(kind) is list:
        (part,) = get_args(kind)
        many = list(value) if isinstance(value, (list, tuple)) or _is_array(value) else [value]
        return [_typed(part, one) for one in many]
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()
    if kind is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if kind in (bool, str, dict) and isinstance(value, kind):
        if isinstance(value, dict) and not all(isinstance(name, str) for name in value):
            raise TypeError  # YAML's {1: 2}
        return value
    raise TypeError


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and getattr(value, "ndim", 0) == 1


def without_none(kind: Any) -> Any:
    """X of `X | None`."""
    if isinstance(kind, types.UnionType):
        return next(part for part in get_args(kind) if part is not types.NoneType)
    return kind


# ---- checks ----------------------------------------------------------------------------------------------------------


def require(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_range(config: Options, name: str, low: float, high: float | None = None, open_low: bool = False) -> None:
    """Check low <= value <= high (low < value if open_low); None passes, NaN and infinity never do."""
    value = getattr(config, name)
    if value is None:
        return
    finite = isinstance(value, int) or math.isfinite(value)  # isfinite() of a huge int overflows
    if not (finite and (value > low if open_low else value >= low) and (high is None or value <= high)):
        limits = f"{'above' if open_low else 'at least'} {low:g}" + ("" if high is None else f" and at most {high}")
        raise ValueError(f"{name} must be {limits}, got {value!r}")


def check_choices(config: Options) -> None:
    for name, item in config.options().items():
        value = getattr(config, name)
        if item.choices and not (value is None and item.optional):
            require(value in item.choices, f"{name} must be one of {', '.join(item.choices)}, got {value!r}")


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """The nearest known name as the end of an error message, or nothing."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {prefix}{found[0]}?" if found else ""


def say_once(logger: logging.Logger, text: str) -> None:
    """A warning that is given once a process."""
    if text not in _said:
        _said.add(text)
        logger.warning(text)


# ---- the class's tables ----------------------------------------------------------------------------------------------


def _fields(cls: Any) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(cls)


def _collect(cls: type[Options]) -> dict[str, Option]:
    """Flat name -> Option, in the order of the declarations; TypeError for a name that two have."""
    found: dict[str, Option] = {}

    def add(item: Option) -> None:
        if item.name in found or item.name == "given" or hasattr(Options, item.name):
            raise TypeError(f"{cls.__name__}: two things are named {item.name!r}; leave one out by nested(without=…)")
        found[item.name] = item

    for declared in _fields(cls):
        meta = declared.metadata
        if inner := meta.get("nested"):
            for item in inner.options().values():
                if item.name not in meta["without"]:
                    default = meta["defaults"].get(item.name, item.default)
                    add(dataclasses.replace(item, default=default, owner=declared.name))
        elif "help" in meta:
            made: Any = declared.default_factory
            own = declared.default if made is MISSING else made()
            group = meta["group"] or _group_of(cls, declared.name)
            words = {key: meta[key] for key in ("help", "choices", "bools", "is_place")}
            add(Option(declared.name, declared.type, own, group=group, owner=None, **words))
        else:
            raise TypeError(f"{cls.__name__}.{declared.name}: declare it by option(…) or nested(…)")
    return found


def _group_of(cls: type[Options], name: str) -> str:
    """The group of the class that declared the option."""
    return next(base.group for base in cls.__mro__ if name in base.__dict__.get("__annotations__", {}))  # type: ignore


def _copy(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _signature(cls: type[Options]) -> Any:
    """The constructor's keywords, for help() and editors."""
    import inspect

    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter(
                item.name,
                keyword,
                default=inspect.Parameter.empty if item.default is MISSING else item.default,
                annotation=item.type,
            )
            for item in cls._options.values()
        ]
    )
