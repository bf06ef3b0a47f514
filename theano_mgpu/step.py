"""One step over sub-batches: scatter, run, fetch, put together; all of it, on every rank, or nothing."""
import functools
import time

import numpy as np

from . import job
from .collectives import all_reduce, bucket_ranges
from .compat import watcher_of
from .contexts import check_process
from .exchange import added, meet_for_batch
from .executors import ADD
from .parallel_graph import Transaction
from .scatter_gather import gather
from .statistics import partial
from .timeline import span
from .transfers import FlatBuffers, describe, fetch, wait


class Step:
    """One call of a `Forward`: what raises in it, on any rank, leaves everything as it was on all of them.

    With several processes, each runs its own part of the batch, and at least one sample: where it has none of its
    own, what comes of that has no weight.

    Parameters
    ----------
    forward : Forward
    arguments : (args, kwargs) or None
        Of the call; None where this rank's data has ended, and it only helps the others.

    Attributes
    ----------
    length : int
        Samples in the batch, over all ranks; 0 where none has any left.
    averages : list of ndarray or pygpu.gpuarray.GpuArray
        The outputs that are reduced into buffers; of one replica alone, as it computed them.
    """

    def __init__(self, forward, arguments):
        self.forward = forward
        self.transaction = Transaction()
        self.averages = []
        self._arguments = arguments
        self._ahead = None      # what was prepared of this batch
        self._pieces = []       # (replica, (start, stop), outputs), in the order in which they ran

    def run(self, compute):
        """Do the step.

        Parameters
        ----------
        compute : callable
            ``compute(step)`` runs the replicas and stores new values by the step's transaction. It is not called
            where no rank has samples left.

        Returns
        -------
        object
            What `compute` returned.
        """
        if self.forward.on_devices:
            check_process()
        # On one line, since Ctrl-C may raise between any two: before the lock is taken, or where `with` frees it.
        with self.forward.lock: return self._run(compute)  # noqa: E701

    def _run(self, compute):
        forward = self.forward
        with forward.ranks.one_thread():
            self.began = time.perf_counter()
            with forward.timings.span('scatter'):
                own = self._convert()
            with forward.timings.span('wait'):
                self.lengths = meet_for_batch(forward, own, self.values or [])
            self.length = forward.samples = sum(self.lengths) if forward.sharded else own
            forward.calls += 1
            forward.timings.calls += 1
            return self._all_or_nothing(own, compute) if self.length else None

    def _all_or_nothing(self, own, compute):
        """Compute new values, and make them current once every rank has its own; else put the old ones back."""
        forward = self.forward
        try:
            self._scatter(own)
            results = compute(self)
            with forward.timings.span('wait'):
                forward.ranks.agree()
            with forward.timings.span('update'):
                self.transaction.commit()
        except BaseException as error:
            self.transaction.roll_back()
            forward.ranks.give_up(error)
            raise
        job.note_step()
        return results

    def _convert(self):
        """Arguments and rows of states; returns the number of samples."""
        forward = self.forward
        self.values, self.row_values = None, []
        if self._arguments is None:
            return 0
        self._ahead = forward.take_prepared(*self._arguments)
        if self._ahead:
            self.values = self._ahead.values
            return self._ahead.length
        self.values = forward.arguments(*self._arguments)
        self.row_values = forward.state_rows()
        return forward.length(self.values, self.row_values)

    def _scatter(self, own):
        forward = self.forward
        with forward.timings.span('scatter'):
            if forward.sharded:
                self.values = forward.example(self.values, self.lengths)
            self.rounds = self._ahead.rounds if self._ahead else forward.rounds(own)
            self.idle = not self.rounds
            # What one replica alone has computed in one go stays on its device, where the update needs it.
            self.stays = forward.reduced and forward.ranks.size == len(forward.contexts) == len(self.rounds) == 1
            if self.idle:
                self.rounds = [[(0, 1)]]
            forward.refresh()

    def run_all(self):
        """Run every round, and average the outputs that are reduced into buffers."""
        for number, samples in enumerate(self.rounds):
            results = self._run_round(number, samples)
            if self.forward.reduced:
                self._average(number, results, samples)
        if self.forward.reduced and self.forward.ranks.size > 1:
            self._add_over_ranks()

    def _run_round(self, number, samples):
        forward = self.forward
        contexts = forward.contexts[:len(samples)]
        ahead = self._ahead.sent if self._ahead and number == 0 else None
        arguments = ahead or forward.send(self.values, self.row_values, samples, self.length)
        launch = 'launch' if forward.on_devices else 'run'
        with forward.timings.span(launch):
            tasks = [functools.partial(forward.graph.run, replica, given) for replica, given in enumerate(arguments)]
            results = forward.each(launch, tasks, contexts, samples)
        for replica, (outputs, new_streams) in enumerate(results):
            self._pieces.append((replica, samples[replica], outputs[forward.reduced:]))
            if not self.idle:
                self._advance_streams(replica, new_streams)
        reduced = [outputs[:forward.reduced] for outputs, _ in results]
        if number == len(self.rounds) - 1:
            forward.prepare_next()
        if forward.on_devices and (not self.stays or forward.timings.waits()):
            with forward.timings.span('run'):
                forward.each('run', [functools.partial(wait, outputs) for outputs, _ in results], contexts, samples)
        return reduced

    def _advance_streams(self, replica, new_streams):
        """Each replica's random streams go on from piece to piece."""
        context = self.forward.contexts[replica]
        for variable, value in zip(self.forward.graph.updated, new_streams):
            self.transaction.replace(variable.copies[context], value)

    def _average(self, number, results, samples):
        """Fetch one round's reduced outputs and add them, weighted, to their averages.

        Large ones are added on another thread, while the next ones come from the devices.
        """
        forward = self.forward
        if self.stays:
            self.averages = results[0]
            return
        weights = [self._weight(how=forward.reductions[0], span=span) for span in samples]
        self.averages = self._targets(number, results[0])
        sizes = [array.size * array.itemsize for array in self.averages]
        buckets = list(bucket_ranges(sizes)) if forward.on_devices else [(0, len(sizes))]
        underway = []
        try:
            for bucket in buckets[:-1]:
                add = self._add_task(results, bucket, samples, weights, number > 0)
                underway.append(forward.reducer.submit(add))
            add = self._add_task(results, buckets[-1], samples, weights, number > 0, alone=len(buckets) == 1)
            with forward.timings.span('all_reduce'):
                add()
        finally:
            with forward.timings.span('all_reduce'):
                for future in underway:
                    future.result()

    def _add_task(self, results, bucket, samples, weights, accumulate, alone=False):
        """Fetch a bucket of the outputs from each replica; returns the task that adds it to the averages."""
        forward = self.forward
        with forward.timings.span('device_to_host'):
            fetchers = [forward.fetcher(replica, bucket) for replica in range(len(results))]
            tasks = [functools.partial(fetcher.fetch, outputs[slice(*bucket)])
                     for fetcher, outputs in zip(fetchers, results)]
            fetched = forward.each('device_to_host', tasks, forward.contexts[:len(samples)], samples)
        targets = self.averages[slice(*bucket)]
        if alone and all(fetcher.flat for fetcher in fetchers):  # many small ones are added as one
            fetched, targets = [fetcher.flat for fetcher in fetchers], forward.sums.flat

        def add():
            with span('all_reduce', 'all_reduce'):
                for parts, out in zip(zip(*fetched), targets):
                    all_reduce(parts, weights, out, accumulate)
        return add

    def _targets(self, number, like):
        """Where the averages go: arrays of the replicas' memory order, or what is copied, or added over ranks, at once.
        """
        forward = self.forward
        if forward.ranks.size == 1 and not forward.on_devices:
            return [forward.buffers.get(i, part) for i, part in enumerate(like)]
        if forward.sums is None or (number == 0 and forward.sums.like != describe(like)):
            forward.sums = FlatBuffers(describe(like))
        return forward.sums.views

    def _add_over_ranks(self):
        sums = self.forward.sums
        if self.idle:
            for flat in sums.flat:
                flat[...] = 0
        with self.forward.timings.span('wait'):
            self.forward.ranks.meet((ADD,))
        with self.forward.timings.span('exchange'):
            self.forward.ranks.add(sums.flat)

    def _weight(self, how, span):
        """A piece's share of the batch; 1 for a sum."""
        if self.idle:
            return 0.0
        return 1.0 if how == 'sum' else (span[1] - span[0]) / self.length

    def _put_together(self):
        """What is not reduced into buffers: outputs, states with a row a sample, statistics."""
        forward = self.forward
        pieces = sorted(self._pieces, key=lambda piece: piece[1])  # by sample: rounds interleave replicas
        spans = [span for _, span, _ in pieces]
        hows = forward.reductions[forward.reduced:] + ['gather'] * len(forward.rows) + forward.updates.reductions
        names = forward.output_names[forward.reduced:] + list(map(str, forward.rows))
        with forward.timings.span('device_to_host'):
            columns = list(zip(*(outputs for _, _, outputs in pieces)))
            small = [i for i, how in enumerate(hows) if how != 'gather']
            results = {i: self._gathered(columns[i], spans, names[i]) for i in range(len(hows)) if i not in small}
            partials = [self._partial(columns[i], spans, hows[i]) for i in small]
        with forward.timings.span('exchange'):
            sums = added(forward.ranks, partials)
        results.update((i, np.array(total, columns[i][0].dtype)) for i, total in zip(small, sums))
        return [results[i] for i in range(len(hows))]

    def _gathered(self, parts, spans, name):
        """The rows of the whole batch; of this rank's part where each has its own data."""
        forward = self.forward
        if forward.ranks.size == len(forward.contexts) == len(parts) == 1:
            return np.asarray(parts[0])  # the whole batch, computed in one go: there is nothing to put together
        rows = gather(parts, [stop - start for start, stop in spans], name)
        if self.idle:
            rows = rows[:0]
        if forward.sharded or forward.ranks.size == 1:
            return rows
        return forward.ranks.gather(rows, forward.lengths_of_ranks(self.length))

    def _partial(self, parts, spans, how):
        if how == 'first':
            weights = [float(self.forward.ranks.rank == 0)] * len(spans)
        else:
            weights = [self._weight('mean', span) for span in spans]
        return partial([fetch(part) for part in parts], how, weights)

    def commit(self):
        """Store new values: the streams', and those that are made from the batch. Returns the outputs."""
        forward = self.forward
        results = self._put_together()
        n_outputs = len(forward.reductions) - forward.reduced
        outputs, statistics = results[:n_outputs], results[n_outputs + len(forward.rows):]
        with forward.timings.span('update'):
            new = list(zip(forward.rows, results[n_outputs:]))
            if forward.updates.updates:
                new += zip(forward.updates.updates, forward.updates.new_values(statistics))
            for variable in forward.graph.updated:
                self.transaction.then(variable.commit, [] if self.idle else forward.contexts[:len(self.rounds[0])])
            for variable, value in new:
                self._store(getattr(variable.tag, 'stands_for', variable), value)
        return outputs

    def _store(self, variable, value):
        self.transaction.convert(variable, value)
        watcher = watcher_of(variable)
        if watcher is not None:
            self.transaction.then(_written_by_step, watcher)


def _written_by_step(watcher):
    watcher.after_write()
    watcher.touched = False  # the same on every rank: made from what they have added
