"""The ladder of strategies: the next way to compute a step that has failed, with the results of one device."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Mapping, NamedTuple, Sequence, cast

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
    """A way to need less memory, where it `applies`: fields of the strategy with their next values.

    The note tells the user. More slices are no field of a strategy: `Remedies.note` tells of them once they suffice.
    """

    applies: Callable[[Case], bool]
    changes: Mapping[str, Any] = {}
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
            if rung.applies(case):
                if rung.note:
                    note_change('%s: %s, because %s has too little memory %s'
                                % (self._name, rung.note, describe([case.error.context]), FLAG))
                return case.options if not rung.changes else \
                    replace(case.options, strategy=replace(case.strategy, **rung.changes))
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


# --- the conditions of the rungs


def _may_take_on_host(case: Case) -> bool:
    """Return whether slices of data sets can be taken on the host."""
    return not case.strategy.data_sets_on_host and bool(case.divided.inputs.slices.data_sets())


def _has_large_data_sets(case: Case) -> bool:
    """Return whether they can, and all other variables need less memory."""
    data_sets, definition = case.divided.inputs.slices.data_sets(), case.divided.definition
    others = set(shared_variables([*definition.whole, *definition.updates])).difference(data_sets)
    # Ranks with samples of their own have data sets of other sizes.
    return _may_take_on_host(case) and \
        max(all_gather_int(case.ranks, bytes_of_all(data_sets) - bytes_of_all(others))) > 0


def _is_whole(case: Case) -> bool:
    """Return whether the only replica computes batches whole, and can compute them in slices once it is divided."""
    built = case.divided
    return isinstance(built, Built) and not (built.executable.plan.shares.is_divided or built.refusal or
                                             case.options.whole or case.strategy.in_slices)


def _takes_more_slices(case: Case) -> bool:
    """Have batches of the length computed in twice as many slices; return whether that changes anything.

    Logical shards are slices already: their values wait on the host from now on.
    """
    built = case.divided
    if case.key is None or not isinstance(built, Built):
        return False
    now, most = _slices(case.key, built)
    if now < most:
        built.splitter.slice(case.key, most if built.splitter.shares.logical_shards else min(2 * now, most))
    return now < most


def _may_compute_again(case: Case) -> bool:
    return case.key is not None and len(case.divided.mesh.places) > 1 and not case.options.recomputes


def _may_divide_update(case: Case) -> bool:
    """Return whether the update can be divided among the devices of one process.

    Several ranks that divide it have to read its state at the same place, which a script may not do.
    """
    return _may_move_update(case) and not case.strategy.update_on and case.ranks.size == 1 and \
        len(case.divided.mesh.replicas) > 1


def _may_update_on_host(case: Case) -> bool:
    return _may_move_update(case) and case.strategy.update_on != 'host'


def _may_spread(case: Case) -> bool:
    """Return whether the parameters can be placed over the contexts of this process."""
    mesh = case.divided.mesh
    return _may_move_update(case) and not case.strategy.spread and case.ranks.size == 1 and len(mesh.places) == 1 and \
        min(len(case.options.params), len(mesh.replicas)) > 1


def _may_move_update(case: Case) -> bool:
    """Return whether there is an update, and the user leaves open where it is computed."""
    return bool(case.divided.program.updated) and case.options.update_on == AUTO


_ON_HOST = ({'data_sets_on_host': True},
            'slices of data sets are taken on the host, and sent to the devices with each batch')
_SLICES = (
    Rung(_is_whole, {'in_slices': True}),
    Rung(_takes_more_slices),
    Rung(_may_compute_again, {'recompute': True}, 'the backward pass of each device computes its forward pass again'))
_STATE = (
    Rung(_may_divide_update, {'update_on': 'sharded'},
         'each device updates a part of the parameters, and alone has the state of their updates'),
    Rung(_may_update_on_host, {'update_on': 'host'},
         'the parameters are updated on the host, which has the state of the updates'),
    Rung(_may_spread, {'spread': True, 'update_on': ''},
         'each device has a part of the parameters, and computes this part of the model'))
# Where a device lacks memory for samples, and where it lacks memory for parameters, new values or state.
OF_SAMPLES = (Rung(_has_large_data_sets, *_ON_HOST), *_SLICES, *_STATE, Rung(_may_take_on_host, *_ON_HOST))
OF_STATE = (Rung(_has_large_data_sets, *_ON_HOST), *_STATE, *_SLICES, Rung(_may_take_on_host, *_ON_HOST))


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
