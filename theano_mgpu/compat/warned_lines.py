"""The line that a warning names: the line of the script, as without the frames that this package adds to the stack."""
from __future__ import annotations

import sys
import warnings
from typing import Any

from ..errors import MgpuWarning
from .wrapping import wrap


def leave_out_own_frames() -> None:
    """Have `stacklevel` count no frame of this package nor, for warnings of its own, of Keras."""
    @wrap(warnings)
    def warn(original, message, category=None, stacklevel=1, *args, **kwargs):
        left_out = ('theano_mgpu', 'keras') if category is MgpuWarning else ('theano_mgpu',)
        frame: Any = sys._getframe(2)  # the first one after this function and its replacement
        level, left = 2, max(stacklevel, 1)
        while frame is not None and left:
            if 'importlib._bootstrap' not in frame.f_code.co_filename:  # which Python does not count
                level += 1
                left -= frame.f_globals.get('__name__', '').partition('.')[0] not in left_out
            frame = frame.f_back
        original(message, category, level, *args, **kwargs)
