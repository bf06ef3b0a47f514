"""One step over sub-batches: scatter, run, fetch, put together; all of it or nothing."""
import numpy as np

from .collectives import all_reduce
from .compat import watcher_of
from .parallel_graph import Transaction, run_replicas
from .scatter_gather import fetch, gather
from .statistics import merged


class Step:
    """One call of a `Forward`: a context manager that leaves everything as it was if its block raises.

    Attributes
    ----------
    length : int
        Samples in the batch.
    averages : list of ndarray
        The outputs that are reduced into buffers.
    """

    def __init__(self, forward, args, kwargs):
        self.forward = forward
        self.transaction = Transaction()
        self.averages = []
        self._arguments = args, kwargs
        self._pieces = []       # (replica, (start, stop), outputs), in the order in which they ran

    def __enter__(self):
        forward = self.forward
        forward.lock.acquire()
        try:
            with forward.timings.span('scatter'):
                self.values = forward.arguments(*self._arguments)
                self.length, self.row_values, self.rounds = forward.scatter(self.values)
                forward.graph.refresh()
            forward.timings.calls += 1
        except BaseException:
            forward.lock.release()
            raise
        return self

    def __exit__(self, kind, error, traceback):
        try:
            if kind is not None:
                self.transaction.roll_back()
        finally:
            self.forward.lock.release()

    def run_all(self):
        """Run every round, and average the outputs that are reduced into buffers."""
        for number, samples in enumerate(self.rounds):
            results = self._run_round(samples)
            if self.forward.reduced:
                self._average(number, results, samples)

    def _run_round(self, samples):
        forward = self.forward
        contexts = forward.contexts[:len(samples)]
        with forward.timings.span('run'):
            tasks = [self._task(replica, span) for replica, span in enumerate(samples)]
            results = run_replicas(forward.executor, tasks, contexts, samples)
        for replica, (outputs, new_streams) in enumerate(results):
            self._pieces.append((replica, samples[replica], outputs[forward.reduced:]))
            self._advance_streams(replica, new_streams)
        return [outputs[:forward.reduced] for outputs, _ in results]

    def _task(self, replica, span):
        part = self.forward.part(self.values, self.row_values, *span, length=self.length)
        return lambda: self.forward.graph.run(replica, part)

    def _advance_streams(self, replica, new_streams):
        """Each replica's random streams go on from piece to piece."""
        context = self.forward.contexts[replica]
        for variable, value in zip(self.forward.graph.updated, new_streams):
            self.transaction.replace(variable.copies[context], value)

    def _average(self, number, results, samples):
        """Fetch one round's reduced outputs and add them, weighted, to their averages."""
        forward, buffers = self.forward, self.forward.buffers
        with forward.timings.span('fetch'):
            tasks = [self._fetch_task(replica, outputs) for replica, outputs in enumerate(results)]
            fetched = run_replicas(forward.executor, tasks, forward.contexts[:len(results)], samples)
        weights = [self._weight(how=forward.reductions[0], span=span) for span in samples]
        alone = len(self.rounds) == 1 and len(samples) == 1
        with forward.timings.span('all_reduce'):
            self.averages = [
                all_reduce(parts, weights, None if alone else buffers.get(('mean', i), parts[0]), number > 0)
                for i, parts in enumerate(zip(*fetched))]

    def _fetch_task(self, replica, outputs):
        buffers = self.forward.buffers

        def task():
            return [output if isinstance(output, np.ndarray)
                    else fetch(output, buffers.get((replica, i), output)) for i, output in enumerate(outputs)]
        return task

    def _weight(self, how, span):
        return 1.0 if how == 'sum' else (span[1] - span[0]) / self.length

    def gathered(self):
        """The outputs that are not reduced into buffers, put together as told; states with a row a sample at the end.
        """
        forward = self.forward
        pieces = sorted(self._pieces, key=lambda piece: piece[1])  # by sample: rounds interleave replicas
        spans = [span for _, span, _ in pieces]
        hows = forward.reductions[forward.reduced:] + ['gather'] * len(forward.rows)
        names = forward.output_names[forward.reduced:] + list(map(str, forward.rows))
        with forward.timings.span('fetch'):
            return [self._combined(parts, spans, how, name)
                    for parts, how, name in zip(zip(*(outputs for _, _, outputs in pieces)), hows, names)]

    def _combined(self, parts, spans, how, name):
        if how == 'gather':
            return gather(parts, [stop - start for start, stop in spans], name)
        return np.array(merged([fetch(part) for part in parts], how, [self._weight('mean', span) for span in spans]))

    def commit(self, updated=()):
        """Make new values current: the streams', and those that are made from the batch. Returns the outputs.

        Parameters
        ----------
        updated : list of ParallelGraph
            Those that have changed replicas in this step, and know of it.
        """
        forward = self.forward
        outputs = self.gathered()
        n_outputs = len(outputs) - len(forward.rows)
        new = list(zip(forward.rows, outputs[n_outputs:]))
        if forward.updates.updates:
            new += zip(forward.updates.updates, forward.updates.new_values(self._statistics()))
        for variable in forward.graph.updated:
            variable.commit(forward.contexts[:len(self.rounds[0])])
        if forward.graph.updated or updated:
            for graph in [forward.graph] + list(updated):
                graph.mark_seen()
        for variable, value in new:
            self._store(getattr(variable.tag, 'stands_for', variable), value)
        return outputs[:n_outputs]

    def _statistics(self):
        """The statistics of the whole batch, from those of its pieces."""
        forward = self.forward
        weights = [self._weight('mean', span) for _, span, _ in self._pieces]
        first = forward.n_results - forward.reduced
        with forward.timings.span('fetch'):
            of_pieces = zip(*(outputs[first:] for _, _, outputs in self._pieces))
            return [merged([fetch(part) for part in parts], how, weights)
                    for parts, how in zip(of_pieces, forward.updates.reductions)]

    def _store(self, variable, value):
        self.transaction.replace(variable, value)
        watcher = watcher_of(variable)
        if watcher is not None:
            watcher.after_write()
