"""Theano's folder of compiled code, which all processes share: its lock, the versions of its code, g++'s flags."""
from __future__ import annotations

import contextlib
import logging
import os
import random
import zlib

from ..utils import files, processor, progress
from .wrapping import wrap

FALLBACKS = {'-march=corei7-avx', '-march=corei7', '-march=core2'}  # Theano's, where its trial of g++ fails


def wait_briefly_for_compile_lock() -> None:
    """Try to take Theano's lock on its compiled code several times a second while another process holds it.

    Theano 1.0.5 sleeps for 5 to 10 seconds between attempts, and draws the time from Python's own generator. Without
    this, the ranks of a job on one host take minutes for code that one of them compiles in seconds, and a script's
    random numbers depend on the code that other processes compile.

    Theano also logs two lines each time that the lock changes hands, which is several times a second while two
    processes compile. With this, a long wait prints one note.
    """
    from theano.gof import compilelock
    compilelock.random = random.Random()
    if compilelock._logger.level == logging.INFO:  # Theano's own choice: it logs waits and refreshes there
        compilelock._logger.setLevel(logging.WARNING)

    @wrap(compilelock)
    def lock(original, folder, *args, **kwargs):
        # Without the folder, no process holds the lock, most likely.
        with progress.note_if_long(lambda: _about_lock(folder)) if os.path.isdir(folder) else contextlib.nullcontext():
            return original(folder, *args, **{'min_wait': 0.05, 'max_wait': 0.2, **kwargs})


def _about_lock(folder):
    """Return the note of a process that waits for Theano's lock."""
    try:
        with open(os.path.join(folder, 'lock')) as f:
            pid, _, host = f.read().strip().split('_', 2)
        owner = 'process %s on %s' % (pid, host)
    except (OSError, ValueError):  # it is changing hands
        owner = 'another process'
    return ('waiting for %s, which compiles for Theano, too. This goes on by itself once that is done, or has ended. '
            'Only if that process hangs: end it, and remove the folder %s' % (owner, folder))


def keep_code_of_ops_without_props() -> None:
    """Keep the compiled code of ops whose ``__props__`` is an empty tuple: to Theano 1.0.5 it has no version."""
    from theano.gof.cc import CLinker

    @wrap(CLinker)
    def cmodule_key_(original, self, fgraph, *args, **kwargs):
        key = original(self, fgraph, *args, **kwargs)
        if key is None or key[0]:
            return key
        version = []
        for node in self.schedule(fgraph):
            if hasattr(node.op, 'c_code_cache_version_apply'):
                version.append(node.op.c_code_cache_version_apply(node))
            version += [props for props in [getattr(node.op, '__props__', ())] if props]
            version += [variable.type.c_code_cache_version() for variable in node.inputs + node.outputs]
        return (tuple(version) if all(version) else ()), key[1]


def give_source_a_lasting_version() -> None:
    """Derive the version of an op's source from its text by CRC-32.

    Theano 1.0.5 takes Python's hash of the text, which differs from process to process.
    """
    from theano.gof.op import COp

    def c_code_cache_version(self):
        version = (zlib.crc32('\n'.join(self.func_codes).encode()),)
        return version + (self.params_type.c_code_cache_version(),) if hasattr(self, 'params_type') else version
    COp.c_code_cache_version = c_code_cache_version


def keep_flags_of_the_processor() -> None:
    """Keep g++'s flags for this processor in the folder of compiled code, for the next process."""
    from theano import config
    from theano.gof.cmodule import GCC_compiler, gcc_version_str

    @wrap(GCC_compiler)
    def compile_args(original, march_flags=True):
        description = processor.description()
        if not march_flags or GCC_compiler.march_flags is not None or not description:
            return original(march_flags)
        machine = '\n'.join([config.cxx, gcc_version_str, config.gcc.cxxflags, description])
        path = os.path.join(config.compiledir, 'processor_%08x.flags' % zlib.crc32(machine.encode()))
        GCC_compiler.march_flags = known = _read_flags(path)
        arguments = original(march_flags)
        flags = GCC_compiler.march_flags
        if known is None and flags and not FALLBACKS.intersection(flags):
            # On a full disk, say, each process finds them.
            with contextlib.suppress(OSError), files.whole_file(path) as unfinished, open(unfinished, 'w') as file:
                file.write('\n'.join(flags))
        return arguments


def _read_flags(path):
    """Return the flags that a file has; None without one, or where it cannot be read: then g++ finds them."""
    with contextlib.suppress(OSError), open(path) as file:
        flags = file.read().split('\n')
        return flags if all(flags) else None
