"""Run a program over contexts: scatter, stage after stage with an exchange before each, commit, gather."""
import functools

import numpy as np
from theano.gof.graph import ancestors

from ..exchange import lengths_of_ranks
from ..parallel_graph import ParallelGraph, Transaction, choose_executor, run_replicas
from ..scatter_gather import micro_batch_rounds
from ..transfers import fetch
from .exchange import exchanged


class Shard:
    """A replica's part of a batch in one step.

    Attributes
    ----------
    replica : int
    span : (int, int)
        Its samples.
    known : dict of theano.Variable to (ndarray or pygpu.gpuarray.GpuArray)
        What it has by now: inputs, exchanged values, and what its stages have computed.
    """

    def __init__(self, replica, span, known):
        self.replica, self.span, self.known = replica, span, known


class CompiledProgram:
    """A program compiled for contexts.

    Parameters
    ----------
    program : Program
    inputs : list of theano.Variable
        Of a call: those of the program, and others that every replica gets whole.
    updated : list of SharedVariable
        What the last of the program's outputs are new values of; the same on every replica.
    contexts : list of Context
    ranks : Ranks
    executor : str, optional
    micro_batches : int
        Slices of each sub-batch. A stage runs over all of them before the next one, so that what is carried from stage
        to stage is kept for all.
    mode, name
        As for `theano.function`.
    """

    def __init__(self, program, inputs, updated, contexts, ranks, executor=None, micro_batches=1, mode=None, name=None):
        self.program, self.inputs, self.contexts, self.ranks = program, list(inputs), contexts, ranks
        self.micro_batches = micro_batches
        self.stages = []
        for stage in program.stages:
            reads = set(ancestors(stage.outputs))
            given = self.inputs + program.numbers + [each.variable for each in stage.exchanges] + list(stage.carried)
            given = [variable for variable in given if variable in reads]
            # Every replica draws the numbers of the whole batch.
            graph = ParallelGraph(given, stage.outputs, {}, contexts, ranks, same_on_all=True, mode=mode, name=name)
            self.stages.append((stage, given, graph))
        replicas = {r.variable: r for _, _, graph in self.stages for r in graph.variables}
        n_outputs = len(program.outputs) - len(updated)
        self.outputs = program.outputs[:n_outputs]
        self.updates = [(replicas[variable], output) for variable, output in zip(updated, program.outputs[n_outputs:])]
        self.executor = choose_executor(executor, [f for _, _, graph in self.stages for f in graph.compiled])

    def __call__(self, *values):
        """Run every stage on the shards of a batch; returns the outputs, arrays."""
        rounds = self._scatter(values)
        shards = sorted((shard for round_ in rounds for shard in round_), key=lambda shard: shard.span)
        transaction = Transaction()
        try:
            for stage, given, graph in self.stages:
                self._exchange(stage.exchanges, shards)
                self._carry(stage.carried, shards)
                for round_ in rounds:
                    self._run(stage, given, graph, round_)
            self._update(shards, transaction)
            self.ranks.agree()
            transaction.commit()
        except BaseException as error:
            transaction.roll_back()
            self.ranks.give_up(error)
            raise
        return self._gather(shards)

    def _scatter(self, values):
        """The shards of each round, with their inputs."""
        given = dict(zip(self.inputs, values))
        length = len(given[self.program.inputs[0]])
        replicas = self.stages[0][2].replicas
        self._lengths = lengths_of_ranks(length, replicas, 1)
        for _, _, graph in self.stages:
            graph.refresh()
        first = sum(replicas[:self.ranks.rank])
        rounds = [spans[first:first + len(self.contexts)]
                  for spans in micro_batch_rounds(length, sum(replicas), self.micro_batches)]
        # A rank without samples takes part with one, which does not count.
        rounds = [spans for spans in rounds if spans] or [[(0, 1)]]
        return [[self._shard(replica, span, given, length) for replica, span in enumerate(spans)] for spans in rounds]

    def _shard(self, replica, span, given, length):
        start, stop = span
        known = {variable: value[start:stop] if variable in self.program.inputs else value
                 for variable, value in given.items()}
        known.update(zip(self.program.numbers, (np.array(n, 'int64') for n in (length, stop - start, start))))
        return Shard(replica, span, known)

    def _exchange(self, exchanges, shards):
        """Give every shard what all of them have come to."""
        if len(shards) == self.ranks.size == 1:  # what one has come to stays on its device
            self._carry({exchange.variable: exchange.source for exchange in exchanges}, shards)
            return
        parts = [[fetch(shard.known[exchange.source]) for shard in shards] for exchange in exchanges]
        whole = exchanged(parts, [exchange.how for exchange in exchanges], self._lengths, self.ranks)
        for shard in shards:
            shard.known.update((exchange.variable, value) for exchange, value in zip(exchanges, whole))

    def _carry(self, carried, shards):
        for shard in shards:
            shard.known.update([(place, shard.known[source]) for place, source in carried.items()])

    def _run(self, stage, given, graph, shards):
        """One stage on one shard of each context."""
        tasks = [functools.partial(graph.run, shard.replica, graph.senders[shard.replica].send(
            [shard.known[variable] for variable in given])) for shard in shards]
        results = run_replicas(self.executor, tasks, [self.contexts[shard.replica] for shard in shards],
                               [shard.span for shard in shards])
        for shard, (outputs, _) in zip(shards, results):
            shard.known.update(zip(stage.outputs, outputs))

    def _update(self, shards, transaction):
        """Store the new values, of which each replica has its own copy."""
        first = {shard.replica: shard for shard in reversed(shards)}
        holders = [self.contexts[replica] for replica in first]
        for variable, output in self.updates:
            for replica, shard in first.items():
                copy = variable.copies[self.contexts[replica]]
                value = shard.known[output.variable]
                if isinstance(value, np.ndarray):
                    transaction.convert(copy, value)
                else:
                    transaction.replace(copy, value)
            transaction.then(variable.commit, holders)

    def _gather(self, shards):
        """The outputs, put together."""
        together = [output for output in self.outputs if output.how is not None]
        parts = [[fetch(shard.known[output.variable]) for shard in shards] for output in together]
        whole = dict(zip(together, exchanged(parts, [output.how for output in together], self._lengths, self.ranks)))
        return [np.array(whole[output] if output in whole else fetch(shards[0].known[output.variable]))
                for output in self.outputs]
