"""The instructions of a step, over numbered slots: values that do not change.

A slot holds one value: of a shard (the part of a batch that a replica works on at a time), or of all shards. An
interpreter carries each out by a method of the name of its class, in small letters.
"""
from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple

import theano
from theano.compile.sharedvalue import SharedVariable

from ..devices.context_map import Context
from .parts import Part, SumGroup

Slots = Tuple[int, ...]
Shards = Tuple[Optional[int], ...]  # numbers of shards


class PartOnContext(NamedTuple):
    """A part on one context.

    Attributes
    ----------
    place : int
        The number of the context, among the part's.
    shard : int or None
        The number of the shard that it works on; None in the update.
    given, made : tuple of int
        Slots of the values that it takes, and of the values that it makes: the outputs, then the new values.
    function : object or None
        Its ``mgpu_call(*values)`` computes the part, where that is compiled,
    results : tuple of int
        and returns the values of these slots: all slots of `made`, in the function's order.
    """

    part: Part
    place: int
    context: Context
    shard: Optional[int]
    given: Slots
    made: Slots
    function: Any
    results: Slots


class Move(NamedTuple):
    """A value that goes to a context, into memory that is used again for each value of `variable`."""

    source: int
    target: int
    variable: theano.Variable
    context: Context


class New(NamedTuple):
    """The new values of variables that a part has made: all slots on the first context, then on the next one.

    Values that devices broadcast are not among them. Where the part is compiled, `storages` are the places where the
    values go.
    """

    part: Part
    contexts: Tuple[Context, ...]
    slots: Slots
    storages: Any


class Send(NamedTuple):
    """Values go to the contexts where parts take them: for each of `contexts` and `shards` some moves."""

    moves: Tuple[Tuple[Move, ...], ...]
    contexts: Tuple[Context, ...]
    shards: Shards
    phase: str


class Launch(NamedTuple):
    """Parts are started, each on a shard; in the update on none. Devices may still compute them afterwards."""

    works: Tuple[PartOnContext, ...]
    contexts: Tuple[Context, ...]
    shards: Shards
    phase: str


class Wait(NamedTuple):
    """The host waits for devices; for `others` only to measure how long each phase takes."""

    works: Tuple[PartOnContext, ...]
    others: Tuple[PartOnContext, ...]


class Add(NamedTuple):
    """The parts of sums that the shards of a round have, a row of slots each, are added up on the host or by devices.
    """

    group: SumGroup
    round: int
    contexts: Tuple[Context, ...]
    parts: Tuple[Slots, ...]


class Finish(NamedTuple):
    """The ranks add up sums, whose slots are the `targets`."""

    groups: Tuple[SumGroup, ...]
    targets: Slots


class Gather(NamedTuple):
    """Values that are no sums are put together on the host: each has a row of slots in `parts`, one for each shard.

    With `own`, they are of this process alone.
    """

    variables: Tuple[theano.Variable, ...]
    reductions: Tuple[Any, ...]
    parts: Tuple[Slots, ...]
    targets: Slots
    own: bool


class Save(NamedTuple):
    """The values of shards, given by their numbers, wait on the host while devices compute others."""

    shards: Slots
    slots: Slots


class Store(NamedTuple):
    """The copies of variables, on other contexts and ranks, too, get their new values, and states their `rows`.

    The `broadcast` ones were made on one device alone, which sends them to all.
    """

    news: Tuple[New, ...]
    broadcast: Tuple[Tuple[SharedVariable, int], ...]
    rows: Tuple[Tuple[SharedVariable, int], ...]


class Fetch(NamedTuple):
    """Results come to the host."""

    variables: Tuple[theano.Variable, ...]
    sources: Slots
    targets: Slots
