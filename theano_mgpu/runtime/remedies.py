"""The remedies for a device with too little memory: they need less of it, and leave the results as they are."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Sequence

from ..comm.collectives import all_gather_int
from ..comm.communicator import Communicator
from ..comm.failures import common_error, raise_error
from ..devices.context_map import describe
from ..errors import ReplicaError, noted
from ..graph.graph import bytes_of_all, shared_variables
from ..graph.repeatable import unrepeatable_in
from ..options import AUTO, Options
from ..plan.record import note_change
from ..utils.tables import bytes_text
from .building import Built, Divided

FLAG = '(mgpu.micro_batches=auto)'
LESS = .98  # more slices help if they lower the peak of the memory by this factor
NOTES = {'data sets': 'slices of data sets are taken on the host, and sent to the devices with each batch',
         'recompute': 'the backward pass of each device computes its forward pass again',
         'sharded': 'each device updates a part of the parameters, and alone has the state of their updates',
         'host': 'the parameters are updated on the host, which has the state of the updates',
         'spread': 'each device has a part of the parameters, and computes this part of the model'}


class Remedies:
    """The remedies of one function for too little memory, and the ways to compute a batch that were `tried`.

    Data sets that need more memory than all other variables leave the devices first, others last. More slices come
    early where a device lacks memory for samples, and late where it lacks memory for parameters, their new values, or
    the state of the optimizer.
    """

    def __init__(self, name: str | None, ranks: Communicator) -> None:
        self._name, self._ranks = name or 'a function', ranks
        self.tried: list[str] = []
        self._full: dict[tuple[int, ...], str] = {}  # contexts with too little memory, of steps that are repeated

    def for_step(self, lengths: Sequence[int], error: BaseException, built: Built, options: Options) -> Options | None:
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
        Options or None
            Those to build the function with again; None if the step can be computed again at once. The error of all
            ranks is raised if it is not for lack of memory, or no remedy is left.
        """
        common, key = self._common(error, options), built.splitter.key(lengths)
        unknown = unrepeatable_in(built.definition.whole)
        if unknown:
            raise_error(noted(common, 'not computed again: that would call %s twice' % type(unknown).__name__), error)
        self.tried.append(_way(key, built, options) + _bytes_needed(common, key, built))
        slices_help = self._slices_help(common, key, built)
        of_samples = slices_help and common.samples is not None
        new = self._without_data_sets(common, options, built, large=True) or \
            (None if of_samples else self._for_state(common, options, built)) or \
            (self._in_slices(options, built) if slices_help else None)
        if new is None and not (slices_help and self._in_more_slices(common, key, built)):
            new = self._computed_again(common, options, built) or self._for_state(common, options, built) or \
                self._without_data_sets(common, options, built)
            if new is None and not self._in_more_slices(common, key, built):  # the estimate may be wrong
                self._give_up(common, error)
        return new

    def for_build(self, error: BaseException, divided: Divided, options: Options) -> Options:
        """Choose a remedy for an error while the function is built, as `for_step`."""
        common = self._common(error, options)
        return self._without_data_sets(common, options, divided, large=True) or \
            self._for_state(common, options, divided) or \
            self._without_data_sets(common, options, divided) or self._give_up(common, error)

    def note(self, lengths: Sequence[int], built: Built) -> None:
        """Say in how many slices a batch was computed, if it had to be repeated."""
        splitter, key = built.splitter, built.splitter.key(lengths)
        context = self._full.pop(key, None)
        if not self._full:
            self.tried = []
        if context is not None:
            note_change('%s: batches of %d samples are computed in %d slices, because %s has too little memory %s'
                        % (self._name, sum(key), splitter.slices[key], context, FLAG))

    def _common(self, error: BaseException, options: Options) -> ReplicaError:
        """Return the error of all ranks; raise it unless it is for lack of memory, and there may be a remedy."""
        common = common_error(self._ranks, error, of_step=True)
        if not (isinstance(common, ReplicaError) and common.out_of_memory and options.micro_batches == AUTO):
            raise_error(common, error)
        return common

    def _give_up(self, common: ReplicaError, error: BaseException) -> Options:
        tried, self.tried, self._full = self.tried, [], {}
        if len(tried) > 1:
            noted(common, 'these ways were tried %s: %s' % (FLAG, '; '.join(dict.fromkeys(tried))))
        raise_error(common, error)

    # --- the remedies: each returns other options, or None where it does not apply

    def _without_data_sets(self, common: ReplicaError, options: Options, divided: Divided,
                           large: bool = False) -> Options | None:
        """Have slices of data sets taken on the host; with `large`, only if all other variables need less memory."""
        data_sets = divided.inputs.slices.data_sets()
        if options.slices_on_host or not data_sets:
            return None
        definition = divided.definition
        others = set(shared_variables([*definition.whole, *definition.updates])).difference(data_sets)
        # Ranks with samples of their own have data sets of other sizes.
        excess = max(all_gather_int(self._ranks, bytes_of_all(data_sets) - bytes_of_all(others)))
        if large and excess <= 0:
            return None
        return self._changed(common, options, 'data sets', slices_on_host=True)

    def _in_slices(self, options: Options, built: Built) -> Options | None:
        """Have a graph of one replica, which is computed whole, divided so that it can be computed in slices."""
        if built.executable.plan.shares.is_divided or built.refusal or options.whole or options.in_slices:
            return None
        return replace(options, in_slices=True)

    def _slices_help(self, common: ReplicaError, key: tuple[int, ...], built: Built) -> bool:
        """Return whether more slices lower the peak of the device that has failed, as far as the estimate knows."""
        helps = common.context in built.mesh.contexts  # else another rank knows
        if helps and built.executable.plan.shares.is_divided:
            number, most = _slices(key, built)
            peaks = [_peak(common, key, built, number)]
            while number < most and None not in peaks:
                number = min(2 * number, most)
                peaks.append(_peak(common, key, built, number))
            helps = None in peaks or min(peaks) < LESS * peaks[0]
        return any(all_gather_int(self._ranks, helps))

    def _in_more_slices(self, common: ReplicaError, key: tuple[int, ...], built: Built) -> bool:
        """Compute batches of some lengths in twice as many slices; return whether they can be.

        Logical shards are slices already: their values wait on the host from now on.
        """
        now, most = _slices(key, built)
        if now < most:
            built.splitter.slice(key, most if built.splitter.shares.logical_shards else min(2 * now, most))
            self._full[key] = describe([common.context])
        return now < most

    def _computed_again(self, common: ReplicaError, options: Options, built: Built) -> Options | None:
        if len(built.mesh.places) == 1 or options.recompute:
            return None
        return self._changed(common, options, 'recompute', recompute=True)

    def _for_state(self, common: ReplicaError, options: Options, divided: Divided) -> Options | None:
        if not divided.program.updated or options.update_on != AUTO:  # a way that was asked for stays
            return None
        return self._updated_elsewhere(common, options, divided) or self._spread(common, options, divided)

    def _updated_elsewhere(self, common: ReplicaError, options: Options, divided: Divided) -> Options | None:
        """Divide the update among the devices of one process, or else have it computed on the host.

        Several ranks that divide it have to read its state at the same place, which a script may not do.
        """
        before = options.update_for_memory
        if before == 'host':
            return None
        where = 'host' if before or len(divided.mesh.replicas) == 1 or self._ranks.size > 1 else 'sharded'
        return self._changed(common, options, where, update_for_memory=where)

    def _spread(self, common: ReplicaError, options: Options, divided: Divided) -> Options | None:
        """Place the parameters over the contexts of this process."""
        if options.spread or self._ranks.size > 1 or len(divided.mesh.places) > 1 or \
                min(len(options.params), len(divided.mesh.replicas)) < 2:
            return None
        return self._changed(common, options, 'spread', spread=True, update_for_memory='')

    def _changed(self, common: ReplicaError, options: Options, remedy: str, **changes: Any) -> Options:
        """Return options with some changes, and tell the user."""
        note_change('%s: %s, because %s has too little memory %s'
                    % (self._name, NOTES[remedy], describe([common.context]), FLAG))
        return replace(options, **changes)


def _slices(key: tuple[int, ...], built: Built) -> tuple[int, int]:
    """Return the number of slices of batches with a key, and the largest number that changes anything."""
    splitter = built.splitter
    return splitter.slices.get(key, splitter.shares.micro_batches), splitter.shares.most_slices(key)


def _way(key: tuple[int, ...], built: Built, options: Options) -> str:
    """Return the way in which a batch is computed, for a message."""
    slices, _ = _slices(key, built)
    ways = ['%d slices' % slices if slices > 1 else 'whole'] + ['recompute=True'] * bool(options.recompute)
    ways += ['placed over the contexts'] * options.spread
    where = options.update_for_memory
    ways += ['data sets on the host'] * options.slices_on_host + ['update_on=' + where] * bool(where)
    return ', '.join(ways)


def _peak(common: ReplicaError, key: tuple[int, ...], built: Built, slices: int) -> Any:
    """Return the bytes that a step takes on the device that has failed; None if that is not known here."""
    peaks = built.dry_step.peaks(sum(key), slices if slices > 1 else None) if built.splitter.shapes else None
    return peaks and peaks.get(common.context)


def _bytes_needed(common: ReplicaError, key: tuple[int, ...], built: Built) -> str:
    """Return about how much memory a step takes on the device that has failed, for a message; maybe nothing."""
    peak = _peak(common, key, built, _slices(key, built)[0])
    return ' (about %s on %s)' % (bytes_text(peak), common.context.name) if peak else ''
