"""Names and behaviour of Theano and NumPy that PyMC3 3.11 needs.

PyMC3 3.11 is written for Theano-PyMC 1.1.2, a fork of Theano 1.0.5 that moved modules and renamed a few things.
"""
from __future__ import annotations

import collections
import functools
import inspect
import sys
from typing import Any

from .import_hooks import new_module
from .wrapping import wrap


def spell_flags_as_theano_pymc() -> None:
    """Add Theano-PyMC's names of flags: ``theano.config.gcc__cxxflags`` for ``theano.config.gcc.cxxflags``."""
    from theano import configparser

    def change_flags(args=(), **kwargs):
        flags = dict(args, **kwargs)
        return configparser.change_flags({name.replace('__', '.'): value for name, value in flags.items()})

    for flag in configparser._config_var_list:
        if '.' in flag.fullname:  # a flag is a descriptor that looks at no instance: it may have two places
            setattr(configparser.TheanoConfigParser, flag.fullname.replace('.', '__'), flag)
    configparser.TheanoConfigParser.change_flags = staticmethod(change_flags)
    # A model has such an object, and goes to the processes of ``pm.sample(cores=4, mp_ctx='spawn')``.
    configparser.change_flags.__reduce__ = lambda self: (configparser.change_flags, (dict(self.new_vals),))


def add_modules_of_theano_pymc() -> None:
    """Add Theano-PyMC's modules: ``theano.graph`` for ``theano.gof``, ``theano.scan`` for ``theano.scan_module``.

    They are added only for PyMC3: other programs recognise Theano-PyMC by these modules.
    """
    import theano
    from theano import scan_module
    from theano.gof import fg, graph, op, utils
    from theano.sandbox import rng_mrg

    def walk(nodes, expand, bfs=True):
        """Walk as `stack_search`, which takes no list; Theano-PyMC has this name."""
        return iter(graph.stack_search(collections.deque(nodes), expand, 'bfs' if bfs else 'dfs'))

    package: Any = _alias('theano.graph', {'__path__': []})
    package.basic = _alias('theano.graph.basic', dict(vars(graph), graph_inputs=graph.inputs, walk=walk))
    package.fg = _alias('theano.graph.fg', vars(fg))
    package.op = _alias('theano.graph.op', dict(vars(op), Op=_make_op_of_theano_pymc(op.Op)))
    utils.TestValueError = AttributeError  # get_test_value raises it; PyMC3 3.10
    package.utils = _alias('theano.graph.utils', {'TestValueError': AttributeError})
    theano.graph = package
    _alias('theano.scan', vars(scan_module))  # the attribute `scan` of Theano stays the function
    rng_mrg.MRG_RandomStream = rng_mrg.MRG_RandomStreams


def index_by_tuples(data: Any) -> None:
    """Take a tuple of slices in ``pm.Minibatch`` of PyMC3 3.1 and later: NumPy 1.23 takes a list for indices."""
    if not hasattr(data, 'Minibatch'):  # PyMC3 3.0
        return

    @wrap(data.Minibatch)
    def make_static_slices(original, user_size):
        slices = original(user_size)
        return tuple(slices) if isinstance(slices, list) else slices


def _alias(name, names):
    """Add a module with these names to `sys.modules`, without the attributes that every module has of its own."""
    own = {key: value for key, value in names.items() if not key.startswith('__') or key == '__path__'}
    module = sys.modules[name] = new_module(name, **own)
    return module


def _make_op_of_theano_pymc(op_class):
    """Make an op class whose subclasses may have Theano-PyMC's ``infer_shape``, which takes the graph, too."""
    class Op(op_class):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            own = vars(cls).get('infer_shape')
            if own is not None and len(inspect.signature(own).parameters) == 4:
                @functools.wraps(own)
                def infer_shape(self, node, shapes):
                    return own(self, getattr(node, 'fgraph', None), node, shapes)
                cls.infer_shape = infer_shape
    return Op
