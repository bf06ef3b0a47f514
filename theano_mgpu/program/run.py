"""One step of a program: stage after stage with an exchange before each, then what is made of exchanged values."""
import collections
import functools
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ..distributed.process_group import Ranks
from ..profiling.timeline import Timings, on_track
from ..replicas.transfers import DeviceBuffers, fetch, wait
from .compiled import CompiledProgram
from .exchange import Sum, Sums, add_over_ranks, exchanged
from .parallel_graph import HOST, choose_executor, run_replicas
from .partition import SAME, Output
from .shard import Batch, Shard, Values
from .transaction import Transaction


class Runner:
    """Runs the parts of a CompiledProgram.

    Parameters
    ----------
    compiled : CompiledProgram
    ranks : Ranks
    executor : str or None
    timings : Timings

    Attributes
    ----------
    row_outputs : list of Output
        Those of the results with a row a sample, each once.
    """

    def __init__(self, compiled: CompiledProgram, ranks: Ranks, executor: Optional[str], timings: Timings):
        self.compiled, self.contexts, self.ranks, self.timings = compiled, compiled.contexts, ranks, timings
        self._independent = set(compiled.program.streams)
        self.executor = choose_executor(executor, [f for graph in compiled.graphs for f in graph.compiled],
                                        len(self.contexts))
        self.on_devices = any(context.kind != 'cpu' for context in self.contexts)
        distinct = list(dict.fromkeys(compiled.results))
        self.row_outputs = [output for output in distinct if isinstance(output.how, tuple)]
        self._alike_outputs = [output for output in distinct if not isinstance(output.how, tuple)]
        self._buffers = {}
        self._plan_exchanges()

    def _plan_exchanges(self):
        """What is added up after each stage, and what is exchanged before each, and at the end."""
        self._sums, self._boundaries = [[] for _ in self.compiled.stages], []
        for exchanges in [stage.exchanges for stage, _ in self.compiled.stages] + [self.compiled.program.exchanges]:
            additive = [each for each in exchanges if each.how == 'sum' and each.source.dtype.startswith('float')]
            here = []
            for (_, part), sums in zip(self.compiled.stages, self._sums):
                of_stage = [each for each in additive if each.source in part.outputs]
                if of_stage:
                    here.append(Sums([each.source for each in of_stage], [each.variable for each in of_stage],
                                     self.each, self.timings, self.on_devices, self.compiled.kept))
                    sums.append(here[-1])
            self._boundaries.append((here, [each for each in exchanges if each not in additive], exchanges))

    def each(self, name, tasks, shards):
        """Run a task a shard on its context, shown in the timeline under a name."""
        contexts = [shard.context for shard in shards]
        return run_replicas(self.executor, on_track(tasks, name, contexts), contexts, [shard.span for shard in shards])

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
            several stages, not in this step.
        """
        # While one is computed, the next one is sent.
        turns = 2 if len(self.compiled.stages) == 1 else len(rounds) + 1
        return [[Shard(replica, self.contexts[replica], span, known(*span), self._next_buffers(replica, turns))
                 for replica, span in enumerate(spans)] for spans in rounds]

    def _next_buffers(self, replica, turns):
        buffers = self._buffers.setdefault(replica, collections.deque())
        if len(buffers) < turns:
            buffers.append(DeviceBuffers(self.contexts[replica]))
        else:
            buffers.rotate(-1)
        return buffers[-1]

    def send(self, shards: Sequence[Shard], common: Values) -> None:
        """Send the inputs of the first stage to the devices."""
        if self.on_devices and self.compiled.stages:
            _, part = self.compiled.stages[0]
            with self.timings.span('host_to_device'):
                self.each('host_to_device', [functools.partial(self._arguments, part, shard, common)
                                             for shard in shards], shards)

    def _arguments(self, part, shard, common):
        return shard.arguments(part.given, part.graph.takes[shard.replica], common)

    # -------------------------------------------------------------------------------------------------- the stages

    def run_stages(self, batch: Batch, transaction: Transaction, meanwhile: Optional[Callable] = None) -> None:
        """Run every stage on every shard, with the exchanges.

        Parameters
        ----------
        batch : Batch
        transaction : Transaction
            Takes the new states of random streams.
        meanwhile : callable, optional
            Called once the last stage has been launched.
        """
        new = []
        for number, (stage, part) in enumerate(self.compiled.stages):
            self._exchange(number, batch)
            for shard in batch.shards:
                shard.known.update([(place, shard.known[source]) for place, source in stage.carried.items()])
            for i, shards in enumerate(batch.rounds):
                is_last = i == len(batch.rounds) - 1 and number == len(self.compiled.stages) - 1
                results = self._run_round(part, shards, batch, meanwhile if is_last else None)
                if not batch.alone:
                    for sums in self._sums[number]:
                        sums.add(shards, accumulate=i > 0)
                for j, variable in enumerate(part.graph.updated):
                    made = variable, [shard.context for shard in shards], [values[j] for _, values in results]
                    if variable.variable not in self._independent:
                        new += [made] if i == 0 else []  # the same from each slice
                    elif not batch.idle:
                        self._store([made], transaction)  # the next slice goes on there
        self._store(new, transaction)
        self._exchange(-1, batch)

    def _run_round(self, part, shards, batch, meanwhile):
        """One stage on one shard of each context."""
        arguments = self._sent(part, shards, batch.common)
        launch = 'launch' if self.on_devices else 'run'
        with self.timings.span(launch):
            tasks = [functools.partial(part.graph.run, shard.replica, given) for shard, given in zip(shards, arguments)]
            results = self.each(launch, tasks, shards)
        for shard, (outputs, _) in zip(shards, results):
            shard.known.update(zip(part.outputs, outputs))
        if meanwhile is not None:
            meanwhile()
        if self.on_devices and (not batch.alone or self.timings.waits()):
            with self.timings.span('run'):
                self.each('run', [functools.partial(wait, outputs) for outputs, _ in results], shards)
        return results

    def _sent(self, part, shards, common):
        if not self.on_devices:
            return [self._arguments(part, shard, common) for shard in shards]
        with self.timings.span('host_to_device'):
            tasks = [functools.partial(self._arguments, part, shard, common) for shard in shards]
            return self.each('host_to_device', tasks, shards)

    def _exchange(self, boundary, batch):
        """Add to what every shard knows what all of them have."""
        every_sums, others, exchanges = self._boundaries[boundary]
        if batch.alone:  # what one shard has stays on its device
            shard, = batch.shards
            for variable, source, how in exchanges:
                value = shard.known[source]
                batch.common[variable] = value.reshape((1,) + value.shape) if how == 'stack' else value
            return
        if every_sums and self.ranks.size > 1:
            for sums in every_sums if batch.idle else []:
                sums.clear()
            add_over_ranks(self.ranks, every_sums, self.timings)
        for sums in every_sums:
            batch.common.update(sums.by_place)
        if others:
            values = self._together(batch, [each.source for each in others], [each.how for each in others], self.ranks)
            batch.common.update(zip([each.variable for each in others], values))

    def _together(self, batch, variables, hows, ranks):
        with self.timings.span('device_to_host'):
            parts = [[fetch(shard.known[variable]) for shard in (batch.shards[:1] if how == SAME else batch.shards)]
                     for variable, how in zip(variables, hows)]
        with self.timings.span('exchange'):
            return exchanged(parts, hows, batch.lengths, ranks)

    # ------------------------------------------------------------------------------------------ what comes after them

    def run_parts(self, batch: Batch, transaction: Transaction) -> Values:
        """Compute what is made of exchanged values, and store what is new.

        Returns
        -------
        dict of theano.Variable to (ndarray or pygpu.gpuarray.GpuArray)
            The results among them.
        """
        results, new = {}, []
        for part in self.compiled.parts:
            contexts = part.graph.contexts[:1] if batch.alone else part.graph.contexts
            arguments = self._broadcast(part, contexts, batch.common)
            with self.timings.span('update'):
                tasks = [functools.partial(part.graph.run, i, given) for i, given in enumerate(arguments)]
                made = run_replicas(self.executor, on_track(tasks, 'update', contexts), contexts)
                if self.timings.waits():
                    wait(value for _, values in made for value in values)
            results.update(zip(part.outputs, made[0][0]))
            new += [(variable, contexts, each)
                    for variable, each in zip(part.graph.updated, zip(*[values for _, values in made]))]
        with self.timings.span('broadcast'):
            self._store(new, transaction)
        return results

    def _broadcast(self, part, contexts, common):
        """What each context is given of exchanged values."""
        tasks = [functools.partial(Shard(i, context, None, {}, self._of_updates(context)).arguments, part.given,
                                   part.graph.takes[i], common) for i, context in enumerate(contexts)]
        if not any(any(takes) for takes in part.graph.takes):
            return [task() for task in tasks]
        with self.timings.span('broadcast'):
            return run_replicas(self.executor, on_track(tasks, 'broadcast', contexts), contexts)

    def _of_updates(self, context):
        return self._buffers.setdefault(context, DeviceBuffers(context))

    def _store(self, new, transaction):
        """Give copies of variables their new values; those of the host go to every context that has one.

        Parameters
        ----------
        new : list of (Replicated, list of Context, list)
            The last: the new value on each of the contexts.
        transaction : Transaction
        """
        for variable, contexts, values in new:
            for context, value in zip(contexts, values):
                transaction.replace(variable.copies[context], value)
            if contexts == [HOST]:
                contexts = contexts + [context for context in self.contexts if context in variable.copies]
                for context in contexts[1:]:
                    transaction.convert(variable.copies[context], values[0])
            transaction.then(variable.commit, contexts)

    def values(self, batch: Batch, results: Values) -> Dict[Output, np.ndarray]:
        """Outputs that are the same on each replica, on the host, by Output; `results` is what `run_parts` returned."""
        return {output: self._value(output.variable, batch, results) for output in self._alike_outputs}

    def _value(self, variable, batch, results):
        for known in (results, batch.common, batch.shards[0].known):
            if variable in known:
                value = known[variable]
                return np.array(value.on_host if isinstance(value, Sum) else fetch(value))
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
                               Ranks() if sharded else self.ranks)
        if sharded and batch.idle:
            found = [np.moveaxis(np.moveaxis(value, output.how[1], 0)[:0], 0, output.how[1])
                     for output, value in zip(outputs, found)]
        return dict(zip(outputs, found))
