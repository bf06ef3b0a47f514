"""Copies and allocations of one step that exchanges 7.4 MB through the host, counted by the CUDA stand-in."""
from collections import Counter, namedtuple

import cuda_on_cpu
import pytest
from support.parameters import slow_but
from support.standin import run

pytestmark = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                             reason=cuda_on_cpu.unavailable() or '')]

GRADIENTS = 4 * (784 * 1024 + 1024 + 1024 * 1000 + 1000 + 1000 * 10 + 10)  # bytes of 6 sums; the loss is one more

STEP = '''
import time
import exchange
mgpu.init(2)
step, batch = exchange.step_over(2, '7.4', %r, %r, %r)
for _ in range(3):
    step(batch)
start = time.clock_gettime(time.CLOCK_MONOTONIC)
step(batch)
print(start, time.clock_gettime(time.CLOCK_MONOTONIC))
'''

Traffic = namedtuple('Traffic', 'copies_to bytes_to copies_from bytes_from copies_within bytes_within allocations '
                                'bytes_allocated launches')


def traffic(folder, order='any', owner='all', collectives='host', flags='gpuarray.preallocate=-1'):
    """Return what two devices do in one step of the model of benchmarks/exchange.py, after three others.

    The step also sends the batch, of 8 kB, and fetches the loss. Without libgpuarray's cache of memory, as by default
    here, each array is an allocation.

    Parameters
    ----------
    folder : pathlib.Path
        For the file of the trace.
    order, owner, collectives
        As for `exchange.step_over`.
    flags : str

    Returns
    -------
    Traffic
        Of both devices together: copies from the host and their bytes, copies to it, copies within a device,
        allocations, and launches of kernels.
    """
    flags += ',mgpu.cuda_graphs=off'  # copies within a graph are not in the trace
    start, stop = map(float, run(STEP % (order, owner, collectives), 2, flags, trace=folder / 'trace')[-1].split())
    counts, sizes = Counter(), Counter()
    for line in (folder / 'trace').read_text().splitlines():
        when, _, what, _, *words = line.split()
        if start < float(when) < stop:
            counts[what] += 1
            sizes[what] += int(words[0]) if what in ('HtoD', 'DtoH', 'DtoD', 'alloc') else 0
    return Traffic(counts['HtoD'], sizes['HtoD'], counts['DtoH'], sizes['DtoH'], counts['DtoD'], sizes['DtoD'],
                   counts['alloc'], sizes['alloc'], counts['launch'])


# No step may have more of anything. A change that has less should lower the number.
BOUNDS = {
    ('any', 'all', 'host'): Traffic(6, 14719104, 10, 14710992, 8, 16280, 38, 44148808, 44),
    ('any', 'one', 'host'): Traffic(7, 7363624, 10, 14710992, 8, 16280, 40, 36793328, 38),
    ('any', 'host', 'host'): Traffic(14, 14718992, 10, 14710992, 8, 16280, 36, 29437896, 32),
    ('tree', 'all', 'host'): Traffic(6, 14719104, 10, 14710992, 8, 16280, 38, 44148808, 44),
    ('tree', 'one', 'host'): Traffic(7, 7363624, 10, 14710992, 8, 16280, 40, 36793328, 38),
    ('any', 'all', 'nccl'): Traffic(2, 8192, 1, 4, 8, 16280, 44, 44148888, 44),
}


@pytest.mark.parametrize('way', slow_but([('any', 'all', 'host')], BOUNDS), ids='-'.join)
def test_no_more_than_today(way, tmp_path):
    found, most, (_, owner, collectives) = traffic(tmp_path, *way), BOUNDS[way], way
    more = {name: (ours, bound) for name, ours, bound in zip(Traffic._fields, found, most) if ours > bound}
    assert not more, 'more than before, and the bound: %s' % more
    if collectives == 'host':  # what any implementation has to move: the trace has the whole step
        assert found.bytes_from >= 2 * GRADIENTS and found.bytes_to >= GRADIENTS * (1 if owner == 'one' else 2)


@pytest.mark.slow
def test_memory_is_used_again(tmp_path):
    """A step allocates nothing with libgpuarray's cache."""
    assert traffic(tmp_path, flags='').allocations == 0
