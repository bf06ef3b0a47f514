"""Choosing contexts and opening their devices."""
import platform

import theano_mgpu as mgpu
from theano_mgpu.devices import contexts as registry
from theano_mgpu.errors import ContextError

import numpy as np
import pytest
import theano
from support.devices import context_map
from support.processes import python


def run_python(code, **environment):
    """Return the output of a fresh interpreter."""
    return python('-c', code, **{'THEANO_FLAGS': '', **environment}).stdout.strip()


def test_an_explicit_call_wins_over_the_flags(monkeypatch):
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=a->cpu;b->cpu;c->cpu')
    assert [c.name for c in mgpu.init()] == ['a', 'b', 'c']
    assert [c.name for c in mgpu.init(2)] == ['a', 'b']
    assert [c.name for c in mgpu.init(['c', 'a'])] == ['c', 'a']
    assert [c.name for c in mgpu.init('z->cpu')] == ['z']
    assert mgpu.contexts() == [mgpu.Context('z', 'cpu', 'cpu')]


def test_a_failed_init_changes_nothing(monkeypatch):
    before = mgpu.init('host0->cpu;host1->cpu')
    for wrong in ('host0->cpu;x', 'host0->opencl0:99', 3.5):
        with pytest.raises((ContextError, TypeError)):
            mgpu.init(wrong)
    assert mgpu.contexts() == before


@pytest.mark.parametrize('asked,message', [
    (0, '0 contexts were asked for; there are 2: a->cpu;b->cpu, by THEANO_FLAGS. Ask for 1 to 2'),
    (3, '3 contexts were asked for'),
    ([], 'empty list'),
    (['a', 'a'], 'named twice'),
    (['dev2'], "context 'dev2' is not mapped; known contexts: a, b. Add it to THEANO_FLAGS, e.g. "
               'contexts=a->cpu;b->cpu;dev2->cpu'),
])
def test_what_is_not_there(monkeypatch, asked, message):
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=a->cpu;b->cpu')
    with pytest.raises(ContextError) as caught:
        mgpu.init(asked)
    assert message in str(caught.value)


def test_more_contexts_than_a_map_has(monkeypatch, capsys):
    """`init(2)` failed under the map of one context that `config --kind cpu` had written, and advised flags."""
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=a->cpu')
    assert [context.name for context in mgpu.init(2)] == ['a', 'dev1']
    assert 'THEANO_FLAGS maps the CPU alone: the 2 contexts are on the CPU' in capsys.readouterr().err
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=dev0->cuda1')
    monkeypatch.setattr(registry.discovery, 'discover', lambda kind: ([], ''))
    for way, start in (registry.FUNCTION, 'call theano_mgpu.init('), (registry.OPTION, 'give --contexts '):
        with pytest.raises(ContextError) as caught:
            registry.choose_contexts(2, way)
        assert 'by THEANO_FLAGS. Ask for 1, or map more: %s\'dev0->cuda1;dev1->cuda1\'' % start in str(caught.value)


def test_an_option_asks_for_more_contexts_than_cores(monkeypatch, capsys):
    """It ran, on 99 contexts; a call in a script still does."""
    monkeypatch.setattr(registry.discovery, 'discover_best', lambda: ['cpu'])
    monkeypatch.setattr(registry.processor, 'usable', lambda: {0, 1})
    monkeypatch.setenv('THEANO_FLAGS', '')
    with pytest.raises(ContextError) as caught:
        registry.choose_contexts(99, registry.OPTION)
    assert str(caught.value) == ("--gpus 99: no usable GPU here, and 2 cores. Ask for at most 2, or map more: "
                                 "give --contexts 'dev0->cpu;...;dev98->cpu'")
    assert len(registry.choose_contexts(99)) == 99
    assert 'share its cores: dev0->cpu;...;dev98->cpu. "theano' in capsys.readouterr().err
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=a->cpu;b->cpu')
    for asked, text in (['zero'], 'zero'), ([0, 5], '0,5'):
        with pytest.raises(ContextError, match='--gpus %s: give a number, or names of a, b' % text):
            registry.choose_contexts(asked, registry.OPTION)


def test_two_names_on_one_device_both_work(contexts):
    device = contexts('gpu', 1)[0].device
    mgpu.init('one->%s;two->%s' % (device, device))
    for name in ('one', 'two'):
        variable = theano.shared(np.arange(3, dtype='float32'), target=name)
        assert variable.type.context_name == name
        np.testing.assert_array_equal(variable.get_value(), [0, 1, 2])


def test_a_device_that_cannot_be_opened(contexts):
    """The error has pygpu's own reason and the devices that exist; nothing runs on the CPU instead."""
    platform = contexts('gpu', 1)[0].kind
    missing = {'cuda': 'cuda99', 'opencl': 'opencl0:99'}[platform]
    with pytest.raises(ContextError) as caught:
        mgpu.init('lost->%s' % missing)
    text = str(caught.value)
    assert 'context lost->%s could not be opened: ' % missing in text and 'There is: ' in text
    if platform == 'opencl':
        assert 'Device ID out of range' in text and 'opencl0:0' in text
    with pytest.raises(ValueError):
        theano.shared(np.zeros(2, 'float32'), target='lost')


def test_a_name_keeps_its_device(contexts):
    first, second = contexts('gpu', 2)
    if first.device == second.device:
        pytest.skip('one device only')
    with pytest.raises(ContextError, match='is open on .* already'):
        mgpu.init('%s->%s' % (first.name, second.device))


@pytest.mark.slow_with('theano_mgpu, theano')
@pytest.mark.parametrize('order', ['theano_mgpu, theano', 'theano, theano_mgpu'])
def test_works_before_and_after_theano(contexts, order):
    """Theano, if imported first, opens each device once; a second name of a device is left to this package."""
    device = contexts('gpu', 1)[0].device
    code = '''
import sys, warnings
if %r.startswith('theano,'):  # Theano needs what theano_mgpu restores in NumPy
    import numpy
    for name in 'bool int float complex object str'.split():
        vars(numpy).setdefault(name, getattr(__import__('builtins'), name))
import %s
import theano_mgpu as mgpu, theano, numpy as np
names = [c.name for c in mgpu.contexts()]
values = [theano.shared(np.ones(2, 'float32'), target=name).get_value().sum() for name in names]
print(names, values)
''' % (order, order)
    flags = 'floatX=float32,blas.ldflags=,contexts=dev0->%s;dev1->%s' % (device, device)
    assert run_python(code, THEANO_FLAGS=flags) == "['dev0', 'dev1'] [2.0, 2.0]"


def test_pocl_shows_two_devices_without_a_word(contexts):
    if contexts('gpu', 1)[0].kind != 'opencl':
        pytest.skip('no OpenCL here')
    code = ('import os; os.environ.pop("POCL_DEVICES", None); from theano_mgpu.devices import discovery; '
            'print(len(discovery.discover("opencl")[0]))')
    assert int(run_python(code)) >= 2


def test_a_plain_function_beside_named_contexts_is_quiet(gpu2, caplog):
    """Theano otherwise logs "Could not infer context from inputs" for each function."""
    x = theano.tensor.fmatrix()
    f = theano.function([x], theano.tensor.tanh(x).sum(axis=0), mode='FAST_RUN')
    np.testing.assert_allclose(f(np.ones((2, 3), 'float32')), 2 * np.tanh(np.ones(3)), rtol=1e-6)
    assert not caplog.records


def test_a_plain_function_that_draws_is_quiet(gpu2, caplog):
    """Keras draws each initial weight so: the draw must not log that a context could not be inferred."""
    from theano.sandbox.rng_mrg import MRG_RandomStreams
    f = theano.function([], MRG_RandomStreams(1).uniform((3, 4)))
    assert f().shape == (3, 4) and not caplog.records


def test_theanos_own_way_to_place_a_variable_computes_there(gpu2):
    w = theano.shared(np.ones((2, 2), 'float32'), target=gpu2[1].name)
    f = theano.function([], theano.tensor.dot(w, w))
    assert any(type(node.op).__name__ == 'GpuDot22' for node in f.maker.fgraph.toposort())


def test_context_map_of_the_tests_is_real():
    assert mgpu.init(context_map('cpu', 2))[1].kind == 'cpu'


KEPT = '''
import ctypes, sys
import theano_mgpu as mgpu
from theano_mgpu.devices import contexts as registry
import numpy as np
if sys.argv[1] == 'open':
    mgpu.init('a->cpu')
class MallInfo(ctypes.Structure):  # glibc's malloc.h
    _fields_ = [(name, ctypes.c_int) for name in ('arena', 'ordblks', 'smblks', 'hblks', 'hblkhd', 'usmblks', 'fsmblks',
                                                  'uordblks', 'fordblks', 'keepcost')]
mallinfo = ctypes.CDLL(None).mallinfo
mallinfo.restype = MallInfo
for _ in range(3):
    np.ones(5000000)
print(mallinfo().fordblks)
'''


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason="the setting is glibc's")
def test_freed_memory_is_used_again():
    """A freed array of 40 MB stays with a CPU context's process, for the next array."""
    def bytes_kept(how, **environment):
        return int(python('-c', KEPT, how, **environment).stdout)
    assert bytes_kept('open') >= 40000000 > bytes_kept('do not')
    assert bytes_kept('open', MALLOC_TOP_PAD_='4096') < 40000000  # the user's own settings stay
