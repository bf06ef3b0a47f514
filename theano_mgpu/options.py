"""The options by which a function over a batch is compiled and run: the user's, the flags', and the package's own."""
from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Sequence

import theano

from .config import SLICED_SHARDS, check_together
from .errors import GraphError
from .parsing import ratio

UPDATE_ON = 'device', 'sharded', 'host'  # where new values are computed
AUTO, EQUAL = 'auto', 'equal'
OF_FLAG: Any = None                      # the default of an option that has a flag of the same name


@dataclass(frozen=True)
class Flags:
    """The package's own flags that functions follow, by their names without ``mgpu.``, at one moment."""

    executor: str
    data: str
    gpus_per_process: int
    update_on: str
    collectives: str
    overlap: bool | str
    micro_batches: int | str
    shares: str
    logical_shards: int
    recompute: bool
    tf32: bool
    verify: bool
    ledger: str
    ledger_every: int
    check: int

    @classmethod
    def now(cls) -> Flags:
        """Return the present values; raise a GraphError for one that a flag cannot have, or not beside another one."""
        values = {each.name: present_flag('mgpu.' + each.name) for each in fields(cls)}
        check_together(present_flag)
        if str(values['micro_batches']).isdigit():
            values['micro_batches'] = int(values['micro_batches'])
        if values['shares'] == AUTO and theano.config.deterministic == 'more':
            values['shares'] = EQUAL  # shares that follow measured times round otherwise in each run
        if values['overlap'] == AUTO and theano.config.deterministic == 'more':
            values['overlap'] = False  # and so may a step in pieces
        if values['shares'] not in (AUTO, EQUAL) and ratio(values['shares']) is None:
            raise GraphError('mgpu.shares is auto, equal, or numbers such as 3:1, not %r' % values['shares'])
        return cls(**{name: value == 'True' if value in ('True', 'False') else value for name, value in values.items()})

    @property
    def divides_always(self) -> bool:
        """Return whether each batch is divided, whatever is faster, and however few devices there are."""
        return self.logical_shards > 0

    @property
    def in_rounds(self) -> bool:
        """Return whether a replica computes its part of each batch piece by piece: micro-batches or logical shards."""
        return self.micro_batches not in (AUTO, 1) or self.divides_always

    def is_sharded(self, n_ranks: int) -> bool:
        """Return whether there are several processes, each with samples of its own."""
        return n_ranks > 1 and self.data == 'sharded'


@dataclass(frozen=True)
class Strategy:
    """The ways to compute a function that are taken once something was seen in its steps: results are the same.

    All but the last one need less memory, as a device had too little.
    """

    data_sets_on_host: bool = False  # slices of data sets are taken there, and sent
    update_on: str = ''              # 'sharded' or 'host'
    recompute: bool = False
    spread: bool = False             # the parameters are placed over the contexts: one cannot hold all of them
    in_slices: bool = False          # it is divided although there is one replica, which computes slices
    exchange: int = 0                # percent of a step, a reason to exchange while the next gradients are computed


@dataclass(frozen=True)
class Options:
    """The keywords that `mgpu.function` and `mgpu.training_function` share, which are documented there, and others.

    `executor`, `micro_batches`, `recompute` and `update_on` are never None: by default they are the flags'.

    >>> Options(micro_batches=2).in_rounds
    True
    """

    samples: Any = None
    broadcast: Sequence[Any] = ()
    givens: Any = None
    no_default_updates: bool = False
    contexts: Any = None
    executor: str = OF_FLAG
    mode: Any = None
    name: str | None = None
    allow_input_downcast: bool | None = None
    profile: bool | None = None
    micro_batches: int | str = OF_FLAG
    least_samples: int = 1
    sharded: bool | None = None
    update_on: str = OF_FLAG
    recompute: bool = OF_FLAG
    flags: Flags = field(default_factory=Flags.now)  # as they are when a function is made
    # Facts about the function that the package itself adds.
    example: Sequence[Any] | None = None  # the arguments of its first call, if they are known
    length: int | None = None             # the number of samples in them
    must_divide: bool = False             # it is an error that the function cannot be divided
    wanted: Any = None                    # a predicate: it is an error that it returns False for the program
    batch_of_rank_0: bool = False         # every process takes the arguments of rank 0; else others are an error
    whole: bool = False                   # it has no batch: one replica computes it as it is
    params: Sequence[Any] = ()            # trained
    strategy: Strategy = Strategy()

    def __post_init__(self):
        for name in ('executor', 'micro_batches', 'recompute', 'update_on'):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.flags, name))
        if self.micro_batches != AUTO and (not isinstance(self.micro_batches, int) or self.micro_batches < 1):
            raise GraphError("micro_batches is a number of slices, at least 1, or 'auto', not %r"
                             % (self.micro_batches,))
        if self.slices > 1 and self.flags.logical_shards:
            raise GraphError(SLICED_SHARDS % ('micro_batches=%d' % self.micro_batches, self.flags.logical_shards))
        if self.update_on not in (AUTO,) + UPDATE_ON:
            raise GraphError("update_on is 'auto', 'device', 'sharded' or 'host', not %r" % (self.update_on,))

    @property
    def slices(self) -> int:
        """The slices that a batch is computed in, unless a device has too little memory."""
        return self.micro_batches if isinstance(self.micro_batches, int) else 1

    @property
    def recomputes(self) -> bool:
        """Return whether the backward pass of each place of a placed model computes its forward pass again."""
        return self.recompute or self.strategy.recompute

    @property
    def in_rounds(self) -> bool:
        """Return whether a replica computes its part of each batch piece by piece: micro-batches or logical shards."""
        return self.slices > 1 or self.flags.divides_always

    def updates_on(self, contexts: Sequence[Any]) -> tuple[str, str]:
        """Return where new values are computed, one of `UPDATE_ON`, and the reason."""
        if self.update_on != AUTO:
            return self.update_on, 'update_on=%s, as it was asked for' % self.update_on
        if self.strategy.update_on:
            return self.strategy.update_on, 'a device had too little memory'
        if all(context.kind == 'cpu' for context in contexts):
            return 'host', 'the contexts are on the CPU, and share arrays without a copy'
        return 'device', 'each device updates its own copies'

    def is_sharded(self, n_ranks: int) -> bool:
        """Return whether there are several processes, each with samples of its own."""
        return self.flags.is_sharded(n_ranks) if self.sharded is None else n_ranks > 1 and self.sharded


def present_flag(name: str) -> Any:
    """Return the present value of one flag of theano_mgpu's own, which a script may have set, as Theano has it."""
    return getattr(theano.config.mgpu, name.partition('.')[2])
