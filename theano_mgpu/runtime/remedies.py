"""The remedies for a device with too little memory: they need less of it, and leave the results as they are."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Sequence

from ..comm.communicator import Communicator
from ..comm.failures import common_error, raise_error
from ..devices.choice import resolve_contexts
from ..devices.context_map import describe
from ..errors import ReplicaError, noted
from ..options import AUTO, Options
from ..plan.explain import bytes_text
from ..plan.record import note_change
from .building import Built

FLAG = '(mgpu.micro_batches=auto)'
NOTES = {'recompute': 'the backward pass of each device computes its forward pass again',
         'sharded': 'each device updates a part of the parameters, and alone has the state of their updates',
         'host': 'the parameters are updated on the host, which has the state of the updates'}


class Remedies:
    """The remedies of one function for too little memory, and the ways to compute a batch that were tried.

    More slices come first where a device lacks memory for samples. They come last where it lacks memory for
    parameters, their new values, or the state of the optimizer.

    Parameters
    ----------
    name : str or None
        The function's.
    ranks : Communicator
    """

    def __init__(self, name: str | None, ranks: Communicator) -> None:
        self._name, self._ranks = name or 'a function', ranks
        self._tried: list[str] = []  # ways to compute a batch, with the memory that they take
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
            Those to build the function with again; None if the step can be computed again at once.

        Raises
        ------
        BaseException
            The error of all ranks, if it is not for lack of memory, or no remedy is left.
        """
        common, key = self._common(error, options), tuple(lengths)
        self._tried.append(_way(key, built, options) + _bytes_needed(common, key, built))
        of_state = common.samples is None
        new = self._for_state(common, options, built) if of_state else None
        new = new or self._in_slices(options, built)
        if new is None and self._in_more_slices(key, built):
            self._full[key] = describe([common.context])
            return None
        new = new or self._computed_again(common, options, built)
        new = new or (None if of_state else self._for_state(common, options, built))
        if new is None:
            self._full.pop(key, None)
            self._give_up(common, error)
        return new

    def for_build(self, error: BaseException, options: Options) -> Options:
        """Choose a remedy for an error while the function is built, as `for_step`."""
        common = self._common(error, options)
        n = self._ranks.size * len(resolve_contexts(options.contexts))
        return self._updated_elsewhere(common, options, n) or self._give_up(common, error)

    def note(self, lengths: Sequence[int], built: Built) -> None:
        """Say in how many slices a batch was computed, if it had to be repeated."""
        key, splitter = tuple(lengths), built.splitter
        context, self._tried = self._full.pop(key, None), []
        if context is not None:
            samples = sum(lengths) if splitter.shares.is_sharded else lengths[0]
            note_change('%s: batches of %d samples are computed in %d slices, because %s has too little memory %s'
                        % (self._name, samples, splitter.slices[key], context, FLAG))

    def _common(self, error: BaseException, options: Options) -> ReplicaError:
        """Return the error of all ranks; raise it unless it is for lack of memory, and there may be a remedy."""
        common = common_error(self._ranks, error, of_step=True)
        if not (isinstance(common, ReplicaError) and common.out_of_memory and options.micro_batches == AUTO):
            raise_error(common, error)
        return common

    def _give_up(self, common: ReplicaError, error: BaseException) -> Options:
        tried, self._tried = self._tried, []
        if len(tried) > 1:
            noted(common, 'these ways were tried %s: %s' % (FLAG, '; '.join(dict.fromkeys(tried))))
        raise_error(common, error)

    # --- the remedies: each returns other options, or None where it does not apply

    def _in_slices(self, options: Options, built: Built) -> Options | None:
        """Have a graph of one replica, which is computed whole, divided so that it can be computed in slices."""
        internal = options.internal
        if built.executable.plan.shares.is_divided or built.refusal or internal.whole or internal.in_slices:
            return None
        return replace(options, internal=replace(internal, in_slices=True))

    def _in_more_slices(self, key: tuple[int, ...], built: Built) -> bool:
        """Compute batches of some lengths in twice as many slices; return whether they can be."""
        splitter = built.splitter
        now, most = splitter.slices.get(key, splitter.shares.micro_batches), splitter.shares.most_slices(key)
        if now >= most:
            return False
        splitter.slice(key, min(2 * now, most))
        return True

    def _computed_again(self, common: ReplicaError, options: Options, built: Built) -> Options | None:
        if len(built.mesh.places) == 1 or options.recompute:
            return None
        return self._changed(common, options, 'recompute', recompute=True)

    def _for_state(self, common: ReplicaError, options: Options, built: Built) -> Options | None:
        return self._updated_elsewhere(common, options, built.executable.plan.shares.n_replicas) \
            if built.program.updated else None

    def _updated_elsewhere(self, common: ReplicaError, options: Options, n_replicas: int) -> Options | None:
        """Divide the update among the devices of one process, or else have it computed on the host.

        Several ranks that divide it have to read its state at the same place, which a script may not do.
        """
        before = options.internal.update_for_memory
        if options.update_on != AUTO or before == 'host':
            return None
        where = 'host' if before or n_replicas == 1 or self._ranks.size > 1 else 'sharded'
        return self._changed(common, options, where,
                             internal=replace(options.internal, update_for_memory=where))

    def _changed(self, common: ReplicaError, options: Options, remedy: str, **changes: Any) -> Options:
        """Return options with some changes, and tell the user."""
        note_change('%s: %s, because %s has too little memory %s'
                    % (self._name, NOTES[remedy], describe([common.context]), FLAG))
        return replace(options, **changes)


def _way(lengths: tuple[int, ...], built: Built, options: Options) -> str:
    """Return the way in which a batch is computed, for a message."""
    slices = built.splitter.slices.get(lengths, 1)
    ways = ['%d slices' % slices if slices > 1 else 'whole'] + ['recompute=True'] * bool(options.recompute)
    where = options.internal.update_for_memory
    return ', '.join(ways + ['update_on=' + where] * bool(where))


def _bytes_needed(common: ReplicaError, lengths: tuple[int, ...], built: Built) -> str:
    """Return about how much memory a step takes on the device that has too little, for a message; maybe nothing."""
    splitter = built.splitter
    samples = sum(lengths) if splitter.shares.is_sharded else lengths[0]
    peaks = built.dry_step.peaks(samples, splitter.slices.get(lengths)) if splitter.shapes else None
    if not peaks or common.context not in peaks:  # the device of another rank
        return ''
    return ' (about %s on %s)' % (bytes_text(peaks[common.context]), common.context.name)
