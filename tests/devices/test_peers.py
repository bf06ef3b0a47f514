"""Copies between CUDA devices: without the host where the devices can, and never wrong; on the stand-in."""
import collections

import cuda_on_cpu
import pytest
from support.standin import run

pytest.importorskip('pygpu', reason='CUDA contexts need pygpu')
pytestmark = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                             reason=cuda_on_cpu.unavailable() or '')]

COPIES = '''
import ctypes, types, warnings
from pygpu import gpuarray
from cuda_on_cpu import driver
from theano_mgpu.cli.doctor.device_checks import check_copies
from theano_mgpu.devices import peers
from theano_mgpu.devices.contexts import gpu_context, primary_context
from theano_mgpu.devices.transfers import copy_to
contexts = mgpu.init('a->cuda0;b->cuda1;c->cuda1')
values = np.arange(100000, dtype='float32').reshape(100, 1000)
there = gpuarray.array(values, context=gpu_context(contexts[0]))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    copies = [copy_to(context, there) for context in contexts[1:] for _ in range(2)]
    copies.append(copy_to(contexts[0], copies[0]))
print(all((np.asarray(copy) == values).all() for copy in copies), peers.path(*map(gpu_context, contexts[:2])),
      len({str(each.message) for each in caught if 'IOMMU' in str(each.message)}))
first, second = map(primary_context, contexts[:2])
driver.load('cuda').cuCtxPushCurrent_v2(ctypes.c_void_p(second))
driver.load('cuda').cuCtxEnablePeerAccess(ctypes.c_void_p(first), 0)  # as NCCL may do later
print((np.asarray(copy_to(contexts[1], there)) == values).all())
print(*check_copies(types.SimpleNamespace(contexts=contexts))[:2])
'''


@pytest.mark.slow_with('none*')
@pytest.mark.parametrize('peer, path, kinds, doctor', [
    ('none', 'through the host', {'staged': 6}, 'ok through the host: cuda0 and cuda1'),
    ('broken', 'wrongly', {'direct': 1}, 'warn directly, cuda0 and cuda1 give each other wrong bytes'),
    ('all', 'directly', {'direct': 2 + 6}, 'ok directly: cuda0 and cuda1')])
def test_devices_copy_directly_where_that_is_right(peer, path, kinds, doctor, tmp_path):
    """Two devices are tried once, whatever the names of their contexts."""
    right, later, found = run(COPIES, peer=peer, trace=tmp_path / 'trace', delay_us=300)
    assert (right, later) == ('True %s %d' % (path, peer == 'broken'), 'True')
    assert found.startswith(doctor)
    lines = [line.split() for line in (tmp_path / 'trace').read_text().splitlines()]
    found = collections.Counter(line[-1] for line in lines if line[2] == 'peer')
    assert found == kinds
