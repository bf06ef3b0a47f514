"""Each way to exchange sums: any order or the tree, for all contexts or one, through the host or by NCCL.

Plain Theano on one device gives the same weights and state, to rounding. In the order of the tree, their bits depend on
the number of logical shards alone: NumPy adds the same parts in the order that the guide describes.
"""
import cuda_on_cpu
import numpy as np
import pytest
import theano
from support.exchange_cells import Cell, in_the_order_of_the_tree, load, on_one_device, over_contexts, table
from support.launch import INTERPRETED, launch
from support.modes import PYTHON
from support.standin import launched, run

pytestmark = pytest.mark.slow  # test_channels and test_combinations have the same sums
ON_STANDIN = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                             reason=cuda_on_cpu.unavailable() or '')]


@pytest.fixture(scope='module')
def plain():
    """Return the results of plain Theano, and the sums of NumPy in the order of the tree."""
    with theano.configparser.change_flags(floatX='float32'):
        return on_one_device(PYTHON), in_the_order_of_the_tree()


def check(cells, found, plain):
    """Compare the results of each cell, and of cells in the order of the tree with each other.

    Parameters
    ----------
    cells : list of Cell
    found : dict of str to list of ndarray
        By the name of a cell: the losses, then the variables, `exact` first.
    plain : (list of ndarray, list of ndarray)
        As the fixture returns.

    Returns
    -------
    list of ndarray or None
        What the cells of the tree have in common, but for those whose update the host computes by other functions.
    """
    wrong, (whole, exact), same = [], plain, None
    assert sorted(found) == sorted(map(str, cells))
    for cell in cells:
        losses, *values = found[str(cell)]
        for i, (ours, theirs) in enumerate(zip([losses, *values], whole)):
            if not np.allclose(ours, theirs, rtol=1e-4, atol=1e-5):
                wrong.append('%s: value %d differs from plain Theano by %g' % (cell, i, abs(ours - theirs).max()))
        if cell.order == 'tree':
            if not all((ours == theirs).all() for ours, theirs in zip(values, exact)):
                wrong.append('%s: sums are not added in the order of the tree' % (cell,))
            if cell.owner != 'host':
                same = same or [cell, losses, *values]
                if not all((ours == theirs).all() for ours, theirs in zip([losses, *values], same[1:])):
                    wrong.append('%s: other bits than %s' % (cell, same[0]))
        elif cell.contexts > 2 and all((ours == theirs).all() for ours, theirs in zip(values, exact)):
            wrong.append('%s: has the bits of the tree, so these bits do not show the order' % (cell,))
    assert not wrong, '\n'.join(wrong)
    return same


def test_contexts_of_the_cpu(contexts, plain):
    """Some batches have fewer samples than there are contexts."""
    cells = table(['host'], [2, 3, 5], ['all', 'one', 'host'])
    cells += [cell._replace(executor='threads') for cell in cells if cell.contexts == 3 and cell.owner == 'all']
    found = {}
    for cell in cells:
        contexts('cpu', cell.contexts)
        found[str(cell)] = over_contexts(cell, PYTHON)
    check(cells, found, plain)


@pytest.mark.parametrize('gpu, n', [('gpu', 2), pytest.param('gpu', 3, marks=pytest.mark.slow)])
def test_opencl_devices(gpu, n, contexts):
    """The dense layers are left out, since OpenCL on the CPU takes long for them."""
    cells, found = table(['host'], [n]), {}
    for cell in cells:
        contexts(gpu, cell.contexts, of_one_type=True)
        found[str(cell)] = over_contexts(cell, dense=False)
    check(cells, found, (on_one_device(PYTHON, dense=False), in_the_order_of_the_tree(dense=False)))


ON_DEVICES = '''
from support.exchange_cells import save, table
save(%r, table(['host', 'nccl'], %r, %r))
'''


LARGE = '''
from support.exchange_cells import Cell, check_large_sums
cells = [Cell(*each) for each in %r]
mgpu.init(cells[0].contexts)
check_large_sums(cells)
'''
MANY = {n: [cell for cell in table(['host', 'nccl'], [n]) if cell.channel != 'none'] for n in (2, 3)}


class TestCudaDevices:
    pytestmark = ON_STANDIN

    @pytest.mark.parametrize('owners, settings', [
        (['all', 'one'], {}), pytest.param(['all', 'one', 'host'], {'delay_us': 200, 'nccl_delay_us': 200},
                                           marks=pytest.mark.slow)], ids=['in order', 'delayed at random'])
    def test_host_and_nccl(self, owners, settings, plain, tmp_path):
        """Two, three and four devices compute; operations that nothing orders may be delayed at random."""
        path, numbers = str(tmp_path / 'found.npz'), [2, 3, 4]
        run(ON_DEVICES % (path, numbers, owners), 4, **settings)
        check(table(['host', 'nccl'], numbers, owners), load(path), plain)

    @pytest.mark.parametrize('cells', [
        [Cell('any', 'all', 'host', 2), Cell('tree', 'all', 'nccl', 2)],
        *(pytest.param(cells, marks=pytest.mark.slow) for cells in MANY.values())], ids=['some', 'two', 'three'])
    def test_large_sums(self, cells):
        """Sums of 28 MB in four arrays are fetched in several messages, and sent by NCCL in several pieces."""
        run(LARGE % list(map(tuple, cells)), cells[0].contexts)


@pytest.mark.mpi
@pytest.mark.parametrize('ranks, numbers', [(2, [1, 2]), pytest.param(3, [1, 2], marks=pytest.mark.slow)])
def test_ranks(ranks, numbers, plain, tmp_path):
    """One process gives the same bits; a batch of one sample leaves ranks without any."""
    launch(ranks, 'of_ranks', tmp_path / 'found.npz', *numbers, flags=INTERPRETED)
    cells = [cell for cell in table(['host'], numbers) if cell.channel != 'none']
    same = check(cells, load(tmp_path / 'found.npz'), plain)
    alone = over_contexts(table([], [])[1], PYTHON)
    assert all((ours == theirs).all() for ours, theirs in zip(same[1:], alone))


@pytest.mark.mpi
class TestRanksWithDevices:
    pytestmark = ON_STANDIN

    @pytest.mark.parametrize('owners', [['one'], pytest.param(['all'], marks=pytest.mark.slow)])
    def test_two_ranks_with_two_devices_each(self, owners, plain, tmp_path):
        path = str(tmp_path / 'found.npz')
        cells = [cell for cell in table(['host', 'nccl'], [2], owners) if cell.channel != 'none']
        code = '''
from support.exchange_cells import Cell, save
save(%r, [Cell(*each) for each in %r], lambda n: mgpu.init())
''' % (path, [tuple(cell) for cell in cells])
        launched(2, code, tmp_path, 4)
        check(cells, load(path), plain)
