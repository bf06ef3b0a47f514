"""The ladder of strategies: the next way to compute a step that has failed, with the results of one device."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, NamedTuple, Sequence, cast

from ..comm.collectives import all_gather_int
from ..comm.communicator import Communicator
from ..comm.rank_errors import common_error, raise_error
from ..devices import memory_meter, nccl
from ..devices.context_map import describe
from ..errors import ExchangeError, ReplicaError, noted
from ..graph.graph import bytes_of_all, shared_variables
from ..graph.repeatable import unrepeatable_in
from ..options import AUTO, Options, Strategy
from ..plan.largest_batch import fixed_bytes
from ..plan.record import note_change
from .building import Built, Divided

FLAG = '(mgpu.micro_batches=auto)'


class Case(NamedTuple):
    """A failure for lack of memory, while a function is built, or in a step on batches with a `key`."""

    error: ReplicaError  # of all ranks
    options: Options
    divided: Divided     # a Built, in a step
    ranks: Communicator
    key: tuple[int, ...] | None

    @property
    def strategy(self) -> Strategy:
        """The strategy that has failed."""
        return self.options.strategy


class Rung(NamedTuple):
    """A way to need less memory: ``next(case)`` returns the next strategy, or None where the way does not apply.

    The note tells the user; more slices are told of once they suffice.
    """

    next: Callable[[Case], Strategy | None]
    note: str = ''


class Remedies:
    """The remedies of one function for errors of its steps, and the ways to compute a batch that were `tried`."""

    def __init__(self, name: str | None, ranks: Communicator) -> None:
        self._name, self._ranks = name or 'a function', ranks
        self.tried: list[str] = []
        self._full: dict[tuple[int, ...], str] = {}  # contexts with too little memory, of steps that are repeated

    def for_step(self, lengths: Sequence[int], error: BaseException, built: Built, options: Options) -> Options:
        """Choose a remedy for an error of a step. Every rank calls it: the error of one is announced to all.

        Parameters
        ----------
        lengths : list of int
            Samples that each rank was given: of its own, or the whole batch.
        error : BaseException
            The exception that is being handled.
        built : Built
            The function. Its splitter gets a new number of slices.
        options : Options
            Those that the function was built with.

        Returns
        -------
        Options
            Those to build the function with again; the same object if the step can be computed again at once. The error
            of all ranks is raised where no remedy is left, or none is known for it.
        """
        common, key = common_error(self._ranks, error, of_step=True), built.splitter.key(lengths)
        shortage = _shortage(common, options)
        of_nccl = isinstance(common, ExchangeError) and options.flags.collectives == AUTO
        unknown = unrepeatable_in(built.definition.whole)
        if unknown and (shortage or of_nccl):
            noted(common, 'not computed again: that would call %s twice' % type(unknown).__name__)
        elif of_nccl:
            nccl.give_up(common, note_change)  # on each rank: then all of them build the function without NCCL
            return replace(options)
        elif shortage:
            self.tried.append(_way(key, built, options))
            new = self._climbed(Case(shortage, options, built, self._ranks, key), error)
            if new is options:
                self._full[key] = describe([shortage.context])
            return new
        raise_error(common, error)

    def for_build(self, error: BaseException, divided: Divided, options: Options) -> Options:
        """Choose a remedy for an error while the function is built, as `for_step`."""
        common = common_error(self._ranks, error, of_step=True)
        shortage = _shortage(common, options) or raise_error(common, error)
        return self._climbed(Case(shortage, options, divided, self._ranks, None), error)

    def note(self, lengths: Sequence[int], built: Built) -> None:
        """Say in how many slices a batch was computed, if it had to be repeated."""
        splitter, key = built.splitter, built.splitter.key(lengths)
        context = self._full.pop(key, None)
        if not self._full:
            self.tried = []
        if context is not None:
            note_change('%s: batches of %d samples are computed in %d slices, because %s has too little memory %s'
                        % (self._name, sum(key), splitter.slices[key], context, FLAG))

    def _climbed(self, case: Case, error: BaseException) -> Options:
        """Return options with the next strategy; raise the error of all ranks at the end of the ladder."""
        for rung in OF_SAMPLES if _lacks_room_for_samples(case) else OF_STATE:
            strategy = rung.next(case)
            if strategy is case.strategy:
                return case.options
            if strategy is not None:
                if rung.note:
                    note_change('%s: %s, because %s has too little memory %s'
                                % (self._name, rung.note, describe([case.error.context]), FLAG))
                return replace(case.options, strategy=strategy)
        tried, self.tried, self._full = self.tried, [], {}
        if len(tried) > 1:
            noted(case.error, 'these ways were tried %s: %s' % (FLAG, '; '.join(dict.fromkeys(tried))))
        raise_error(case.error, error)


def _shortage(common: BaseException, options: Options) -> ReplicaError | None:
    """Return an error for lack of memory where the user leaves open how a batch is computed."""
    is_one = isinstance(common, ReplicaError) and common.out_of_memory and options.micro_batches == AUTO
    return cast(ReplicaError, common) if is_one else None


def _lacks_room_for_samples(case: Case) -> bool:
    """Return whether fewer samples at a time may be of use: a device has room for all that a step takes without any."""
    built, context = case.divided, case.error.context
    if case.error.samples is None or not isinstance(built, Built):
        return False
    is_full = context in built.mesh.contexts and \
        fixed_bytes(built.executable.plan, context) > memory_meter.total(context)
    return not any(all_gather_int(case.ranks, is_full))  # one rank has the device


# --- the rungs: each returns the next strategy, the same one to compute the step again at once, or None


def _data_sets(case: Case) -> Strategy | None:
    """Have slices of data sets taken on the host."""
    if case.strategy.data_sets_on_host or not case.divided.inputs.slices.data_sets():
        return None
    return replace(case.strategy, data_sets_on_host=True)


def _large_data_sets(case: Case) -> Strategy | None:
    """Have them taken there if all other variables need less memory."""
    data_sets, definition = case.divided.inputs.slices.data_sets(), case.divided.definition
    others = set(shared_variables([*definition.whole, *definition.updates])).difference(data_sets)
    # Ranks with samples of their own have data sets of other sizes.
    if not data_sets or max(all_gather_int(case.ranks, bytes_of_all(data_sets) - bytes_of_all(others))) <= 0:
        return None
    return _data_sets(case)


def _more_slices(case: Case) -> Strategy | None:
    """Have batches of the length computed in twice as many slices.

    A graph of one replica, which is computed whole, is first divided. Logical shards are slices already: their values
    wait on the host from now on.
    """
    built, options, strategy = case.divided, case.options, case.strategy
    if case.key is None or not isinstance(built, Built):
        return None
    shares = built.executable.plan.shares
    if not (shares.is_divided or built.refusal or options.whole or strategy.in_slices):
        return replace(strategy, in_slices=True)
    now, most = _slices(case.key, built)
    if now >= most:
        return None
    built.splitter.slice(case.key, most if shares.logical_shards else min(2 * now, most))
    return strategy


def _computed_again(case: Case) -> Strategy | None:
    """Have the backward pass of each device of a placed model compute its forward pass again."""
    if case.key is None or len(case.divided.mesh.places) == 1 or case.options.recomputes:
        return None
    return replace(case.strategy, recompute=True)


def _sharded_update(case: Case) -> Strategy | None:
    """Have the update divided among the devices of one process.

    Several ranks that divide it have to read its state at the same place, which a script may not do.
    """
    if not _may_move_update(case) or case.strategy.update_on or case.ranks.size > 1 or \
            len(case.divided.mesh.replicas) == 1:
        return None
    return replace(case.strategy, update_on='sharded')


def _update_on_host(case: Case) -> Strategy | None:
    if not _may_move_update(case) or case.strategy.update_on == 'host':
        return None
    return replace(case.strategy, update_on='host')


def _spread(case: Case) -> Strategy | None:
    """Have the parameters placed over the contexts of this process."""
    divided = case.divided
    if not _may_move_update(case) or case.strategy.spread or case.ranks.size > 1 or len(divided.mesh.places) > 1 or \
            min(len(case.options.params), len(divided.mesh.replicas)) < 2:
        return None
    return replace(case.strategy, spread=True, update_on='')


def _may_move_update(case: Case) -> bool:
    """Return whether there is an update, and the user leaves open where it is computed."""
    return bool(case.divided.program.updated) and case.options.update_on == AUTO


_DATA_SETS = 'slices of data sets are taken on the host, and sent to the devices with each batch'
_SLICES = Rung(_more_slices), Rung(_computed_again, 'the backward pass of each device computes its forward pass again')
_STATE = (
    Rung(_sharded_update, 'each device updates a part of the parameters, and alone has the state of their updates'),
    Rung(_update_on_host, 'the parameters are updated on the host, which has the state of the updates'),
    Rung(_spread, 'each device has a part of the parameters, and computes this part of the model'))
# Where a device lacks memory for samples, and where it lacks memory for parameters, new values or state.
OF_SAMPLES = (Rung(_large_data_sets, _DATA_SETS), *_SLICES, *_STATE, Rung(_data_sets, _DATA_SETS))
OF_STATE = (Rung(_large_data_sets, _DATA_SETS), *_STATE, *_SLICES, Rung(_data_sets, _DATA_SETS))


def _slices(key: tuple[int, ...], built: Built) -> tuple[int, int]:
    """Return the number of slices of batches with a key, and the largest number that changes anything."""
    splitter = built.splitter
    return splitter.slices.get(key, splitter.shares.micro_batches), splitter.shares.most_slices(key)


def _way(key: tuple[int, ...], built: Built, options: Options) -> str:
    """Return the way in which a batch is computed, for a message."""
    (slices, _), strategy = _slices(key, built), options.strategy
    ways: list[Any] = ['%d slices' % slices if slices > 1 else 'whole', options.recomputes and 'recompute=True',
                       strategy.spread and 'placed over the contexts',
                       strategy.data_sets_on_host and 'data sets on the host',
                       strategy.update_on and 'update_on=' + strategy.update_on]
    return ', '.join(filter(None, ways))
