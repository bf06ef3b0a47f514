"""One step of a program: stage after stage with an exchange before each, then what is made of exchanged values."""
import collections
import functools
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ..distributed.alone import Alone
from ..distributed.communicator import Communicator
from ..profiling.timeline import Timings, on_track
from ..replicas.transfers import DeviceBuffers, copy_to, fetch, own_copy, wait
from .advice import memory_explained
from .compiled import CompiledProgram
from .exchange import Sum, exchanged, plan_exchanges
from .over_ranks import OverRanks
from .parallel_graph import choose_executor, run_replicas
from .partition import SAME, Output
from .schedule import Launched, schedule
from .shard import Batch, Shard, Values
from .transaction import Transaction


class Runner:
    """Runs the parts of a CompiledProgram.

    Parameters
    ----------
    compiled : CompiledProgram
    ranks : Communicator
    executor : str or None
    timings : Timings

    Attributes
    ----------
    row_outputs : list of Output
        Those of the results with a row a sample, each once.
    """

    def __init__(self, compiled: CompiledProgram, ranks: Communicator, executor: Optional[str], timings: Timings):
        self.compiled, self.mesh, self.ranks, self.timings = compiled, compiled.mesh, ranks, timings
        self._independent = set(compiled.program.streams)
        self.executor = choose_executor(executor, [f for graph in compiled.graphs for f in graph.compiled],
                                        len(self.mesh.contexts))
        self.on_devices = any(context.kind != 'cpu' for context in self.mesh.contexts)
        distinct = list(dict.fromkeys(compiled.results))
        self.row_outputs = [output for output in distinct if isinstance(output.how, tuple)]
        self._alike_outputs = [output for output in distinct if not isinstance(output.how, tuple)]
        self._buffers = {}
        self._over_ranks = OverRanks(ranks, timings, compiled.overlaps)
        self._sums, self._boundaries = plan_exchanges(compiled, ranks, self.each, timings, self.on_devices)

    def each(self, name, tasks, shards, contexts):
        """Run tasks on contexts, each for a shard, shown in the timeline under a name."""
        return run_replicas(self.executor, on_track(tasks, name, contexts), contexts, shards)

    # ------------------------------------------------------------------------------------------------- the inputs

    def shards(self, rounds: Sequence[Sequence[Tuple[int, int]]],
               known: Callable[[int, int], Values]) -> List[List[Shard]]:
        """Shards for rounds of sample ranges.

        Parameters
        ----------
        rounds : list of list of (int, int)
        known : callable
            ``known(start, stop)`` gives the inputs of a shard, by variable.

        Returns
        -------
        list of list of Shard
            The inputs of one have memory of their own, which is used again for the one after the next; where there are
            several parts, not in this step.
        """
        # While one is computed, the next one is sent.
        turns = 2 if sum(len(parts) for _, parts in self.compiled.stages) == 1 else len(rounds) + 1
        return [[Shard(replica, span, known(*span), self._next_buffers(replica, turns))
                 for replica, span in enumerate(spans)] for spans in rounds]

    def _next_buffers(self, replica, turns):
        buffers = self._buffers.setdefault(replica, collections.deque())
        if len(buffers) < turns:
            buffers.append({context: DeviceBuffers(context) for context in self.mesh.replicas[replica]})
        else:
            buffers.rotate(-1)
        return buffers[-1]

    def send(self, shards: Sequence[Shard], common: Values) -> None:
        """Send the inputs of the first stage to the devices."""
        if self.on_devices and self.compiled.stages:
            _, parts = self.compiled.stages[0]
            self._arguments([(part, shard) for part in parts if part.level == 0 for shard in shards], common)

    def _arguments(self, work, common):
        """What each part is given for its shard, on its device."""
        tasks = [functools.partial(shard.arguments, part.given, part.graph.takes[shard.replica], common,
                                   part.graph.contexts[shard.replica]) for part, shard in work]
        if not self.on_devices:
            return [task() for task in tasks]
        with self.timings.span('host_to_device'):
            return self._each('host_to_device', tasks, work)

    def _each(self, name, tasks, work):
        return self.each(name, tasks, [shard for _, shard in work],
                         [part.graph.contexts[shard.replica] for part, shard in work])

    # -------------------------------------------------------------------------------------------------- the stages

    def run_stages(self, batch: Batch, transaction: Transaction, meanwhile: Optional[Callable] = None) -> None:
        """Run every stage on every shard, with the exchanges.

        Parameters
        ----------
        batch : Batch
        transaction : Transaction
            Takes the new states of random streams of which each context has its own. Other new values are left in
            ``batch.new``: what comes after the stages reads the old ones.
        meanwhile : callable, optional
            Called once the last stage has been launched.
        """
        with self._over_ranks:
            self._run_stages(batch, transaction, meanwhile)
            self._exchange(-1, batch)

    def _run_stages(self, batch, transaction, meanwhile):
        new = []
        for number, (stage, parts) in enumerate(self.compiled.stages):
            self._exchange(number, batch)
            for shard in batch.shards:
                shard.known.update([(place, shard.known[source]) for place, source in stage.carried.items()])
            launched = []
            for cycle in schedule(parts, len(batch.rounds)):
                # The values of a micro-batch are released before the next one starts. The CPU computes at once.
                if len(parts) == 1 or not self.on_devices:
                    new, launched = new + self._finish(launched, batch, transaction), []
                before = launched  # not in one line with the next: that would keep the results of the cycle before
                launched = self._launch(cycle, batch)
                new += self._finish(before, batch, transaction)
            if meanwhile is not None and number == len(self.compiled.stages) - 1:
                meanwhile()
            new += self._finish(launched, batch, transaction)
        batch.new = new

    def _launch(self, cycle, batch):
        """Start the parts of a clock cycle, each on the shards of its round."""
        work = [(part, shard) for part, number in cycle for shard in batch.rounds[number]]
        arguments = self._arguments(work, batch.common)
        launch = 'launch' if self.on_devices else 'run'
        with self.timings.span(launch):
            tasks = [functools.partial(part.graph.run, shard.replica, given)
                     for (part, shard), given in zip(work, arguments)]
            results = self._each(launch, tasks, work)
        for (part, shard), (outputs, _) in zip(work, results):
            shard.keep(part, outputs)
        results = iter(results)
        return [Launched(part, number, batch.rounds[number], [next(results) for _ in batch.rounds[number]])
                for part, number in cycle]

    def _finish(self, launched, batch, transaction):
        """Wait for what was launched, and add it up; returns new values that are the same from each round."""
        if self.on_devices and launched and (not batch.alone or self.timings.waits()):
            with self.timings.span('run'):
                work = [(each.part, shard) for each in launched for shard in each.shards]
                self._each('run', [functools.partial(wait, outputs) for each in launched
                                   for outputs, _ in each.results], work)
        new = []
        for part, number, shards, results in launched:
            contexts = [part.graph.contexts[shard.replica] for shard in shards]
            if not batch.alone:
                for sums in self._sums.get(part.graph, ()):
                    sums.add(shards, contexts, number, len(batch.rounds))
                    if number == len(batch.rounds) - 1:
                        self._over_ranks.start(sums, batch.idle)
            for j, variable in enumerate(part.graph.updated):
                made = variable, contexts, [values[j] for _, values in results], ()
                if variable.variable not in self._independent:
                    new += [made] if number == 0 else []
                elif not batch.idle:
                    self._store([made], transaction)  # the next slice goes on there
        return new

    def _exchange(self, boundary, batch):
        """Add to what every shard knows what all of them have."""
        every_sums, others, exchanges = self._boundaries[boundary]
        if batch.alone:  # what one shard has stays on its device
            shard, = batch.shards
            for variable, source, how in exchanges:
                value = shard.known[source]
                batch.common[variable] = value.reshape((1,) + value.shape) if how == 'stack' else value
            return
        self._over_ranks.finish(every_sums, batch.idle)
        for sums in every_sums:
            batch.common.update(sums.taken())
        if others:
            places, sources, hows = zip(*others)
            batch.common.update(zip(places, self._together(batch, sources, hows, self.ranks)))

    def _together(self, batch, variables, hows, ranks):
        with self.timings.span('device_to_host'):
            parts = [[fetch(shard.known[variable]) for shard in (batch.shards[:1] if how == SAME else batch.shards)]
                     for variable, how in zip(variables, hows)]
        with self.timings.span('exchange'):
            return exchanged(parts, hows, batch.lengths, ranks)

    def run_parts(self, batch: Batch, transaction: Transaction) -> Values:
        """Compute what is made of exchanged values, and store what is new.

        Returns
        -------
        dict of theano.Variable to (ndarray or pygpu.gpuarray.GpuArray)
            The results among them.
        """
        results, new = {}, list(batch.new)
        for part in self.compiled.parts:
            contexts = part.graph.contexts[:1] if batch.alone else part.graph.contexts
            arguments = self._broadcast(part, contexts, batch.common)
            with self.timings.span('update'):
                tasks = [functools.partial(part.graph.run, i, given) for i, given in enumerate(arguments)]
                made = run_replicas(self.executor, on_track(tasks, 'update', contexts), contexts)
                if self.timings.waits():
                    wait(value for _, values in made for value in values)
            results.update(zip(part.outputs, made[0][0]))
            new += [(variable, contexts, each, part.copied_to)
                    for variable, each in zip(part.graph.updated, zip(*[values for _, values in made]))]
        divided = self.compiled.divided
        with self.timings.span('broadcast'):
            if divided:
                made = {variable: each[0] for variable, _, each, _ in new}
                new += [(variable, [], [value], self.mesh.contexts)
                        for variable, value in divided.exchange(made).items()]
            self._store(new, transaction)
            if divided:
                transaction.then(divided.leave)
        return results

    def _broadcast(self, part, contexts, common):
        """What each context is given of exchanged values."""
        tasks = [functools.partial(Shard(i, None, {}, {context: self._of_updates(context)}).arguments, part.given,
                                   part.graph.takes[i], common, context) for i, context in enumerate(contexts)]
        if not any(any(takes) for takes in part.graph.takes):
            return [task() for task in tasks]
        with self.timings.span('broadcast'):
            return run_replicas(self.executor, on_track(tasks, 'broadcast', contexts), contexts)

    def _of_updates(self, context):
        return self._buffers.setdefault(context, DeviceBuffers(context))

    def _store(self, new, transaction):
        """Give copies of variables their new values.

        Parameters
        ----------
        new : list of (Replicated, list of Context, list, list of Context)
            For a variable the contexts that have computed its new value, the value on each of them, and further
            contexts, whose copies get the first of these values.
        transaction : Transaction
        """
        for variable, contexts, values, copied_to in new:
            for context, value in zip(contexts, values):
                transaction.replace(variable.copies[context], value)
            others = [each for each in copied_to if each in variable.copies and each not in contexts]
            for i, context in enumerate(others):
                with memory_explained(i, context, 'update'):
                    transaction.convert(variable.copies[context], copy_to(context, values[0]))
            transaction.then(variable.commit, contexts + others)

    def values(self, batch: Batch, results: Values) -> Dict[Output, np.ndarray]:
        """Outputs that are the same on each replica, on the host, by Output; `results` is what `run_parts` returned."""
        return {output: self._value(output.variable, batch, results) for output in self._alike_outputs}

    def _value(self, variable, batch, results):
        for known in (results, batch.common, batch.shards[0].known):
            if variable in known:
                value = known[variable]
                return own_copy(variable, value.on_host if isinstance(value, Sum) else value)
        raise AssertionError('nothing has computed %s' % variable)

    def gather(self, outputs: Sequence[Output], batch: Batch, sharded: bool) -> Dict[Output, np.ndarray]:
        """Outputs with rows of samples, put together on the host.

        Parameters
        ----------
        outputs : list of Output
        batch : Batch
        sharded : bool
            Whether each rank has its own samples, and is given their rows alone.

        Returns
        -------
        dict of Output to ndarray
        """
        if not outputs:
            return {}
        found = self._together(batch, [output.variable for output in outputs], [output.how for output in outputs],
                               Alone() if sharded else self.ranks)
        if sharded and batch.idle:
            found = [np.moveaxis(np.moveaxis(value, output.how[1], 0)[:0], 0, output.how[1])
                     for output, value in zip(outputs, found)]
        return dict(zip(outputs, found))
