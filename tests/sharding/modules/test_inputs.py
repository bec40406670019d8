"""Inputs of units: cast without a change of class, and the tensors by which backward leaves."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from thinwire.sharding.modules.inputs import cast_inputs, gradient_sources

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Open:
    hidden: torch.Tensor
    number: int = 3


@dataclass(frozen=True, slots=True)
class Frozen:
    hidden: torch.Tensor
    derived: int = field(init=False, default=7)


class Shared(dict[str, torch.Tensor]):
    """A store that units write to."""


class Store:
    def __init__(self, *held: torch.Tensor) -> None:
        self.held = list(held)


def cast(value: Any) -> Any:
    """The value as a module would get it in bf16."""
    changed = cast_inputs(torch.bfloat16)(nn.Identity(), (value,), {})
    return value if changed is None else changed[0][0]


def model_output(x: torch.Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=x, hidden_states=(x, x.long()))


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: x, lambda form: form),
        (lambda x: [1, (x, "text")], lambda form: form[1][0]),
        (lambda x: Pair(x, None), lambda form: form.left),
        (lambda x: OrderedDict(a={"b": x}), lambda form: form["a"]["b"]),
        (lambda x: Shared(a=x), lambda form: form["a"]),
        (Open, lambda form: form.hidden),
        (Frozen, lambda form: form.hidden),
        (lambda x: Open(Frozen(x)), lambda form: form.hidden.hidden),
        (lambda x: nn.utils.rnn.pack_sequence([x]), lambda form: form.data),
        (model_output, lambda form: form[0]),
        (model_output, lambda form: form.hidden_states[0]),
        (model_output, lambda form: form["last_hidden_state"]),
    ],
)
def test_a_copy_of_the_same_class_is_cast_and_what_is_cast_already_is_passed_on(wrap: Any, unwrap: Any) -> None:
    x = torch.randn(3)
    form = wrap(x)
    got = cast(form)
    assert type(got) is type(form)
    assert unwrap(got).dtype is torch.bfloat16
    assert unwrap(form).dtype is torch.float32, "the caller's own was changed"
    torch.testing.assert_close(unwrap(got), x.bfloat16())
    assert cast(got) is got


@pytest.mark.parametrize(
    "value", [None, 3, "text", torch.arange(3), [torch.arange(3)], Store(torch.randn(3)), nn.Identity()]
)
def test_inputs_without_tensors_to_cast_stay_the_same_object(value: Any) -> None:
    assert cast(value) is value


def test_frozen_fields_are_copied_as_they_are() -> None:
    value = Frozen(torch.randn(2))
    object.__setattr__(value, "derived", 11)
    assert cast(value).derived == 11


def test_of_a_store_only_the_newest_tensor_is_a_source() -> None:
    leaf = torch.randn(3, requires_grad=True)
    first, second, plain = leaf * 1, leaf * 2, torch.randn(3)
    store = Store(second, plain, first)
    assert gradient_sources((plain, [first]), {"cache": store}) == [first, second]
    assert gradient_sources((Open(first),), {"a": second}) == [first, second]
    store.held.append(leaf)
    assert gradient_sources((store,), {}) == [leaf, second]
