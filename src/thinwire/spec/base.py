"""The base of every specification: frozen, validated, TOML in and out, and *all* problems at once.

pydantic collects what is wrong with fields. Cross-field rules then apply as far as the fields that they need are right,
so that one :class:`~thinwire.errors.SpecError` says everything. A person then fixes a file once, not once per mistake.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

import pydantic
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from thinwire import units
from thinwire.errors import SpecError
from thinwire.spec import io, renames

LARGEST = 2**63 - 1
"""Largest number of a specification: what 64 bits hold, as in most readers of TOML and JSON."""

Count = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
"""A whole number of at least 1; ``true`` and ``"3"`` are not numbers."""

Modules = Annotated[int, Field(strict=True, ge=1, le=100_000)]
"""A number of modules, each of which is looked at."""

Depth = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
"""A whole number of at least 0."""

Flag = Annotated[bool, Field(strict=True)]
"""``true`` or ``false``."""

Positive = Annotated[float, Field(strict=True, gt=0, le=LARGEST, allow_inf_nan=False)]
"""A finite number above 0."""

Share = Annotated[float, Field(strict=True, ge=0, le=1)]
"""A number from 0 to 1."""

Bytes = Annotated[int, BeforeValidator(units.parse_bytes), Field(ge=1, le=LARGEST)]
"""A size in bytes; text such as ``"25MiB"`` is understood."""

Budget = Annotated[int, BeforeValidator(units.parse_bytes), Field(ge=0, le=LARGEST)]
"""A size in bytes that may be 0; text such as ``"25MiB"`` is understood."""

Bandwidth = Annotated[float, BeforeValidator(units.parse_bandwidth), Field(ge=1, le=LARGEST)]
"""Bits per second, at least 1; text such as ``"200mbit"`` is understood."""

Seconds = Annotated[float, BeforeValidator(units.parse_duration), Field(ge=0, le=1e9)]
"""A duration in seconds, at most 30 years; text such as ``"5us"`` is understood."""


class Problem(NamedTuple):
    """One broken rule: the dotted key to blame and what is wrong with it."""

    key: str
    why: str

    def __str__(self) -> str:
        return f"{self.key} {self.why}" if self.key else self.why


Check = Callable[[Any], Iterable[Problem]]
_CheckT = TypeVar("_CheckT", bound=Check)
_SpecT = TypeVar("_SpecT", bound="Spec")
_RULE = "thinwire_rules"


def rule(*needs: str) -> Callable[[_CheckT], _CheckT]:
    """Marks a method of a :class:`Spec` that yields a :class:`Problem` per violation.

    Args:
        needs: the fields it reads. It is skipped when one of them is itself invalid.
    """

    def mark(check: _CheckT) -> _CheckT:
        check._needs = needs  # type: ignore[attr-defined]
        return check

    return mark


class Spec(BaseModel):
    """A frozen, validated specification.

    Construction from keywords, :meth:`parse` from a dictionary and :meth:`load` from TOML all apply the same
    rules and raise one :class:`~thinwire.errors.SpecError` that lists every problem.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    toml_inline: ClassVar[bool] = False
    """Whether TOML shows this specification on one line inside its parent."""

    one_value: ClassVar[bool] = False
    """Whether its keys belong together, so that a change of its parent replaces all of them."""

    file_keys: ClassVar[Mapping[str, str]] = {}
    """How files spell the fields that stand in another table there; see :mod:`thinwire.spec.renames`."""

    former_keys: ClassVar[Mapping[str, str]] = {}
    """Keys of earlier releases, and the key that says the same now; empty text where none does, as nobody read it."""

    shorthands: ClassVar[tuple[str, ...]] = ()
    """Keys that stand for others: a value has those others, and none of these."""

    # Type checkers keep the keyword signature that pydantic derives from the fields.
    if not TYPE_CHECKING:

        def __init__(self, /, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise SpecError(type(self).__name__, _sentences(error)) from None

        # pydantic's own marker: nested specifications are then validated in place by the parent, whose
        # error already covers them, instead of through this constructor.
        __init__.__pydantic_base_init__ = True

        def __getattr__(self, name: str) -> Any:
            """The value of a former key, for code that was written before release 0.3."""
            new = type(self).former_keys.get(name)
            return getattr(self, new) if new else super().__getattr__(name)

    @classmethod
    def prepare(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Expands shorthand between keys before validation; the identity unless a specification has some."""
        return data

    @classmethod
    def renewed(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same keys without :attr:`former_keys`; where both are given, the present one counts."""
        former = {old: data[old] for old in cls.former_keys.keys() & data.keys()}
        renamed = {new: value for old, value in former.items() if value is not None and (new := cls.former_keys[old])}
        return renamed | {key: value for key, value in data.items() if key not in former} if former else data

    @classmethod
    def from_text(cls, text: str) -> Mapping[str, Any] | None:
        """The fields that a string stands for, or ``None`` where a string is no shorthand for this."""
        del text
        return None

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _checked(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, cls):
            return data
        data, problems = _expanded(cls, data), list[Problem]()
        valid: Set[str] = cls.model_fields.keys()
        try:
            made = handler(data)
        except ValidationError as error:
            details = error.errors(include_url=False)
            details.sort(key=lambda detail: detail["type"] != "extra_forbidden")  # unknown keys first
            problems = [_problem(cls, detail) for detail in details]
            made, valid = _valid_part(cls, data, error)
        for check in rules(cls):
            if valid >= {*check._needs}:  # type: ignore[attr-defined]
                problems += check(made)
        if problems:
            raise ValidationError.from_exception_data(cls.__name__, [_spelled(cls, problem) for problem in problems])
        return made

    @classmethod
    def parse(cls, data: Mapping[str, Any], what: str | None = None) -> Self:
        """Validates a dictionary.

        Args:
            data: values by key, as TOML gives them.
            what: what is being read, for the error message; the class's name by default.

        Raises:
            SpecError: naming every problem.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise SpecError(what or cls.__name__, _sentences(error)) from None

    @classmethod
    def from_toml(cls, text: str, what: str | None = None) -> Self:
        """Reads TOML text; see :meth:`parse`."""
        what = what or f"{cls.__name__} text"
        return cls.parse(io.read_toml(text, what), what)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a TOML file; see :meth:`parse`."""
        table = io.read_toml_file(path)
        renames.hint(str(path), cls.old_spellings(table))
        return cls.parse(table, str(path))

    @classmethod
    def old_spellings(cls, table: Mapping[str, Any]) -> dict[str, str]:
        """The new spelling of every key of a file that has an old one, in nested tables, too."""
        renamed = dict(cls.file_keys) | {old: cls.file_keys.get(new, new) for old, new in cls.former_keys.items()}
        found = {old: new for old, new in renamed.items() if new and old in table}
        for name, field in cls.model_fields.items():
            spec, inside = nested(field.annotation), table.get(name)
            if spec is not None and isinstance(inside, Mapping):
                found |= {f"{name}.{old}": f"{name}.{new}" for old, new in spec.old_spellings(inside).items()}
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers; :meth:`parse` reads them back to an equal value."""
        table = {name: _plain(getattr(self, name)) for name in type(self).model_fields}
        return io.Inline(table) if self.toml_inline else table

    def to_file(self, *, full: bool = True) -> dict[str, Any]:
        """Plain dictionaries with the keys of files.

        Args:
            full: every key; without it, those that differ from the defaults.
        """
        every = full or self.toml_inline
        fields = {
            name: _plain(getattr(self, name), full=full)
            for name, field in type(self).model_fields.items()
            if every or field.is_required() or getattr(self, name) != field.get_default()
        }
        return io.Inline(fields) if self.toml_inline else renames.to_file(fields, self.file_keys)

    def to_toml(self) -> str:
        """TOML text with every key written out, except those that are unset (``None``)."""
        return io.write_toml(self.to_file())

    def save(self, path: str | Path) -> None:
        """Writes :meth:`to_toml` to ``path``."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    def with_(self, **changes: Any) -> Self:
        """A validated copy with ``changes``; a dictionary changes the named keys of a nested table only.

        Raises:
            SpecError: naming every problem of the result.
        """
        return type(self).parse(self._merged(changes))

    def trusted(self, **changes: Any) -> Self:
        """A copy with changes of whole fields that are known to be valid, and are not checked: a search makes thousands
        of copies, and checks would be most of its time."""
        return self.model_copy(update=changes)

    def _merged(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        changes = self.renewed(changes)
        merged = {name: getattr(self, name) for name in type(self).model_fields}
        for name, value in changes.items():
            current = merged.get(name)
            partial = isinstance(current, Spec) and not current.one_value and isinstance(value, Mapping)
            merged[name] = current._merged(value) if partial else value  # type: ignore[union-attr]
        return merged

    def _fingerprint(self, exclude: Iterable[str] = ()) -> str:
        content = {key: value for key, value in self.to_dict().items() if key not in exclude}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that are equal for equal content, on every machine and Python version."""
        return self._fingerprint()


def nested(annotation: Any) -> type[Spec] | None:
    """The specification inside an annotation such as ``Factor | None`` or ``tuple[UnitOverride, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return annotation
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType, tuple):
        return None
    found = (nested(argument) for argument in typing.get_args(annotation))
    return next((spec for spec in found if spec is not None), None)


@functools.cache
def rules(cls: type[Spec]) -> tuple[Check, ...]:
    """The cross-field rules of a specification; the docstring of each states it for people."""
    members = {name: member for base in reversed(cls.__mro__) for name, member in vars(base).items()}
    return tuple(member for member in members.values() if hasattr(member, "_needs"))


def _expanded(cls: type[Spec], data: Any) -> Any:
    if isinstance(data, str):
        shorthand = cls.from_text(data)
        data = data if shorthand is None else shorthand
    return cls.prepare(cls.renewed(renames.to_fields(data, cls.file_keys))) if isinstance(data, Mapping) else data


def _plain(value: Any, *, full: bool | None = None) -> Any:
    """A value in plain types: with the keys of files if ``full`` says how many of them, else with those of fields."""
    if isinstance(value, Spec):
        return value.to_dict() if full is None else value.to_file(full=full)
    if isinstance(value, list | tuple):
        return [_plain(item, full=full) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item, full=full) for key, item in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _sentences(error: ValidationError) -> list[str]:
    return [
        str(Problem(".".join(map(str, detail["loc"])), detail["msg"])) for detail in error.errors(include_url=False)
    ]


def _valid_part(cls: type[_SpecT], data: Any, error: ValidationError) -> tuple[_SpecT, Set[str]]:
    """What rules may still look at where some fields are invalid, and the names of the fields that are not."""
    wrong = {detail["loc"][0] for detail in error.errors(include_url=False) if detail["loc"]}
    valid: dict[str, Any] = {}
    for name, field in cls.model_fields.items() if isinstance(data, Mapping) else ():
        if name in data and name not in wrong:
            valid[name] = _adapter(field).validate_python(data[name])
        elif name not in data and not field.is_required():
            valid[name] = field.get_default(call_default_factory=True)
    return cls.model_construct(**valid), valid.keys()


def _problem(cls: type[Spec], detail: ErrorDetails) -> Problem:
    """What pydantic says of a field, or has been told by the specification in it, in our words."""
    kind, value = detail["type"], detail["input"]
    first, *rest = detail["loc"] or ("",)
    key = ".".join(filter(None, map(str, (first, *rest))))
    if kind == _RULE:
        return Problem(key, detail["msg"])
    if kind == "extra_forbidden":
        return Problem(key, f"= {value!r} is not a key of {cls.__name__}{_suggestion(key, cls)}")
    field = cls.model_fields.get(str(first))
    if field is None:
        return Problem("", f"= {value!r} should be a table with the keys {', '.join(cls.model_fields)}")
    if kind == "missing":
        return Problem(key, f"is missing: {field.description or 'it is required'}")
    spec = nested(field.annotation)
    if spec is not None and not rest:
        keys = ", ".join(spec.model_fields)
        return Problem(key, f"= {value!r} should be a list of tables with the keys {keys}")
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, SpecError):
        return Problem(key, f"= {'; '.join(cause.problems)}")  # which begin with the value
    if kind in ("tuple_type", "list_type"):
        example = field.default if isinstance(field.default, tuple) and not rest else ()  # it may need several items
        return Problem(key, f"= {value!r} should be a list, for example {json.dumps(example or [value], default=str)}")
    says = detail["msg"].removeprefix("Input ")
    return Problem(key, f"= {value!r}: it {says[:1].lower()}{says[1:]}")


def _adapter(field: FieldInfo) -> TypeAdapter[Any]:
    annotation: Any = field.annotation
    return TypeAdapter(Annotated[annotation, *field.metadata] if field.metadata else annotation)


def _suggestion(key: str, cls: type[Spec]) -> str:
    keys = [cls.file_keys.get(name, name) for name in cls.model_fields]
    nearest = difflib.get_close_matches(key, [*cls.model_fields, *keys], n=1, cutoff=0.5)
    hint = f"; did you mean {cls.file_keys.get(nearest[0], nearest[0])}?" if nearest else ";"
    return f"{hint} Valid keys: {', '.join(keys)}"


def _spelled(cls: type[Spec], problem: Problem) -> InitErrorDetails:
    """A problem as pydantic hands it on to the specification around this one, with the key as files have it."""
    key = cls.file_keys.get(problem.key, problem.key)
    why = PydanticCustomError(_RULE, "{why}", {"why": problem.why})
    return InitErrorDetails(type=why, loc=(key,) if key else (), input=None)
