"""Modes of Theano in which tests are quick."""
import theano

# Interpreted: compiling, which constant folding does even so, would take most of the time.
PYTHON = theano.Mode('py', 'fast_compile').excluding('constant_folding', 'topo_constant_folding')
