"""Runs a Program shard after shard in one process, by plain Theano: for tests of how graphs are cut."""
import numpy as np
import theano

REDUCE = {'sum': np.add, 'max': np.maximum, 'min': np.minimum, 'prod': np.multiply}


def combined(parts, how):
    if how is None:
        for part in parts[1:]:
            np.testing.assert_allclose(part, parts[0], rtol=1e-9, atol=1e-12)
        return parts[0]
    if isinstance(how, tuple):
        return np.concatenate(parts, how[1])
    return np.asarray(REDUCE[how].reduce(parts), parts[0].dtype)


def given(stage):
    """What a stage needs of earlier ones."""
    return [exchange.variable for exchange in stage.exchanges] + list(stage.carried)


def compiled(program, mode=None):
    """The functions of a program's stages."""
    return [theano.function(program.inputs + program.numbers + given(stage), stage.outputs, on_unused_input='ignore',
                            no_default_updates=True, mode=mode) for stage in program.stages]


def run(program, shards, mode=None, functions=None):
    """The outputs of a program on shards, each a list of arrays; shared variables stay as they are."""
    functions = functions or compiled(program, mode)
    lengths = [len(shard[0]) for shard in shards]
    firsts = np.cumsum([0] + lengths)
    known = [{} for _ in shards]
    for stage, f in zip(program.stages, functions):
        for exchange in stage.exchanges:
            value = combined([env[exchange.source] for env in known], exchange.how)
            for env in known:
                env[exchange.variable] = value
        for place, source in stage.carried.items():
            for env in known:
                env[place] = env[source]
        for shard, length, first, env in zip(shards, lengths, firsts, known):
            results = f(*shard, sum(lengths), length, first, *[env[variable] for variable in given(stage)])
            env.update((variable, np.array(result)) for variable, result in zip(stage.outputs, results))
    return [combined([env[output.variable] for env in known], output.how) for output in program.outputs]


def split(arrays, sizes):
    """Arrays cut along axis 0, as a list of arrays a shard."""
    return list(zip(*[np.split(array, np.cumsum(sizes)[:-1]) for array in arrays]))
