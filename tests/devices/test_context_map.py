"""The context map: strict parsing, errors that name the remedy."""
from theano_mgpu.devices.context_map import describe, parse_context_map
from theano_mgpu.errors import ContextError

import pytest


def test_blanks_are_allowed_around_names_and_devices():
    contexts = parse_context_map(' dev0 -> cuda0 ; dev1->opencl1:2;host->cpu')
    assert [tuple(c) for c in contexts] == [('dev0', 'cuda0', 'cuda'), ('dev1', 'opencl1:2', 'opencl'),
                                            ('host', 'cpu', 'cpu')]
    assert parse_context_map(describe(contexts)) == contexts


def test_two_names_on_one_device():
    assert [c.device for c in parse_context_map('dev0->cuda0;dev1->cuda0')] == ['cuda0', 'cuda0']


@pytest.mark.parametrize('text,message', [
    ('', 'malformed entry'),
    ('dev0', 'malformed entry'),
    ('dev0->', 'malformed entry'),
    ('->cuda0', 'malformed entry'),
    ('dev0->cuda0;', 'malformed entry'),
    ('dev0->cuda0->cuda1', 'is no device'),
    (' cuda0->cuda0', 'looks like a device'),
    ('cpu->cuda0', 'looks like a device'),
    ('opencl->opencl0:0', 'looks like a device'),
    ('dev0->cuda0;dev0->cuda1', 'mapped twice'),
    ('dev0->gpu0', "'gpu0' in the context map .* is no device: use cuda0"),
    ('dev0->opencl0', 'is no device'),
    ('dev0->cpu,dev1->cpu', "'cpu,dev1->cpu' in .* is no device: separate entries by ';', e.g. dev0->cuda0;dev1"),
    ('dev0-', "e.g. dev0->cuda0;dev1->cuda1; quote the map: the shell took > as a redirection"),
    ('dev0->cudax', 'is no device'),
    ('a b->cuda0', 'cannot name a context'),
])
def test_malformed_maps(text, message):
    with pytest.raises(ContextError, match=message):
        parse_context_map(text)
