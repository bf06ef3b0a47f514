"""Modes of Theano in which tests are quick."""
import theano

# Interpreted: compiling, which constant folding does even so, would take most of the time.
PYTHON = theano.Mode('py', 'fast_compile').excluding('constant_folding', 'topo_constant_folding')
# The same for `change_flags(mode=LAZY)`, with the linker of FAST_COMPILE. The name of a mode has no effect on this flag
# once Theano has made its default mode; and if it has an effect, the mode stays the default one of all later tests.
LAZY = theano.compile.get_mode('FAST_COMPILE').excluding('constant_folding', 'topo_constant_folding')
