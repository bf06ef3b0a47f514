"""Flags of Theano before 1.0, and flags that this package had, read as what they mean today."""
from __future__ import annotations

import os
import re
from typing import Any, Callable, Mapping

from ..utils import command_line, flag_text, progress
from .theano_imports import BY_PARENT, IMPORTED

FREE = 'by a flag for one device, if there is one'  # how `theano-mgpu run` chooses contexts without such options
# Flags that name one card. The flag device=cuda0 asks for a GPU, whichever it is, and stands beside contexts.
ONE_CARD = re.compile(r'device=(gpu|cuda(?!0))(\d+)')

# How the contexts of this process are chosen, if they are; `devices.patches` knows of more cases, and replaces this.
contexts_are_chosen: Callable[[], Any] = command_line.own_command

# Patterns of old flags, name=value, with the flags of today; or why there is none. Theano still reads the ones that are
# set to nothing, and refuses a value.
OLD = {
    r'device=gpu(\d*)': r'device=cuda\1',
    r'(init_gpu_device|gpuarray\.init_device)=gpu(\d*)': r'init_gpu_device=cuda\2',
    r'lib\.cnmem=(.*)': r'gpuarray.preallocate=\1',
    r'mode=(PROFILE_MODE|ProfileMode)': 'mode=Mode,profile=True',
    r'dnn\.conv\.workmem=(.+)': r'dnn.conv.algo_fwd=\1,dnn.conv.workmem=',
    r'dnn\.conv\.(workmem_bwd|algo_bwd)=(.+)':
        r'dnn.conv.algo_bwd_data=\2,dnn.conv.algo_bwd_filter=\2,dnn.conv.\1=',
    r'nvcc\..*': 'no code is compiled by nvcc',
    r'((cublas|pycuda|pthreads|ProfileMode)\.|cuda\.enabled|enable_initial_driver_test|experimental\.mrg).*':
        'Theano has no such setting any more',
}


def today(old: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return flags as they are known today, and a note about those that were changed, or the empty string.

    Where the contexts of a process are chosen for it, they are chosen over the flag ``device``, too.

    >>> today({'floatX': 'float32', 'lib.cnmem': '0.8'})[0]
    {'floatX': 'float32', 'gpuarray.preallocate': '0.8'}
    """
    new, said = dict(old), []
    for name, value in old.items():
        flag = '%s=%s' % (name, value.strip())
        if name in flag_text.GONE:
            del new[name]
            counts, reason = flag_text.GONE[name]
            said += ['%s as %s=%s (%s)' % (flag, name, counts, reason)] * (value.strip() != counts)
            continue
        named = ONE_CARD.fullmatch(flag)
        if named and 'contexts' not in old and contexts_are_chosen() == FREE:
            new.update({'contexts': 'dev0->cuda' + named[2], name: 'cpu' if named[1] == 'gpu' else value})
            said.append('%s as contexts=%s, this card alone (--gpus 2 takes two, and device=cuda all)'
                        % (flag, new['contexts']))
            continue
        match = next(filter(None, (re.fullmatch(pattern, flag) for pattern in OLD)), None)
        if match is None:
            continue
        del new[name]
        meaning = OLD[match.re.pattern]
        found = dict(match.expand(each).split('=', 1) for each in meaning.split(',') if '=' in each)
        read_as = flag_text.join_flags({each: found[each] for each in found if found[each]})
        if name == 'device' and contexts_are_chosen():
            found, read_as = {name: 'cpu'}, ''
            meaning = 'contexts choose devices; contexts=dev0->cuda%s is this one' % (match[1] or 0)
        said.append('%s %s' % (flag, 'as ' + read_as if read_as else 'not at all (%s)' % meaning))
        new.update({each: found[each] for each in found if each == name or each not in old})
    return new, said and 'old flags are read as what they mean today: ' + '; '.join(said) or ''


def read_old_flags() -> None:
    """Put flags of today in the place of old ones of THEANO_FLAGS and .theanorc, for this process and its children."""
    own, files = flag_text.environment_flags(), flag_text.read_theanorc()
    new, said = today({**files, **own})
    if said:
        flag_text.set_environment_flags({name: new[name] for name in new
                                         if name in own or new[name] != files.get(name)})
        if os.environ.get(IMPORTED) == BY_PARENT:  # the parent has said what the files have
            said = today(own)[1]
        if said:
            progress.note(said)
