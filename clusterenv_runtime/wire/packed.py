"""What a value is on the wire: a tree of the structs below, which msgspec checks when it decodes a
header.

`codec` makes it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_DIMENSIONS = 64  # of an array, as NumPy has it
DTYPE = r"[<>|][biufcSUmM]\d{1,9}(\[\w+\])?"  # plain data of a fixed size
_Index = Annotated[int, msgspec.Meta(ge=0, le=2**48)]


class _Node(
    msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=lambda name: name.lower()
):
    """Base of what a packed value is made of; on the wire a list that begins with the name."""


class Array(_Node):
    """Where the data of an array is, and what it means."""

    frame: _Index
    offset: _Index  # in bytes
    dtype: Annotated[
        str, msgspec.Meta(pattern=f"^{DTYPE}$")
    ]  # of an object, NumPy would take the data for pointers
    shape: Annotated[list[_Index], msgspec.Meta(max_length=MAX_DIMENSIONS)]


class Scalar(Array):
    """A scalar of NumPy."""


class Bytes(Array):
    """Bytes, as an array of them."""


class List(_Node):
    """A list."""

    items: list[Packed]


class Tuple(List):
    """A tuple."""


class Graph(List):
    """A GraphInstance of Gymnasium."""


class Dict(_Node):
    """A dict, as pairs of key and value."""

    items: list[tuple[Packed, Packed]]


class Int(_Node):
    """An integer of more than 64 bits."""

    digits: Annotated[str, msgspec.Meta(pattern="^-?0x[0-9a-f]+$")]


class Generator(_Node):
    """A generator of NumPy, with a PCG64, as Gymnasium's are."""

    state: Packed


Packed = (
    None
    | bool
    | int
    | float
    | str
    | Array
    | Scalar
    | List
    | Tuple
    | Graph
    | Dict
    | Int
    | Bytes
    | Generator
)
