"""Names that only some Kerases of Theano's time have: hints for scripts that were written for another one."""
from __future__ import annotations

import os
import re
import sys
import traceback
import types
from typing import Any

from ..errors import warn
from ..utils.installed import installed
from .wrapping import wrap

VERSIONS = '0.3.3', '1.0.8', '1.2.2', '2.0.9', '2.1.6', '2.2.4', '2.3.1'  # those that are tested
TESTED = 'tested are ' + ', '.join(VERSIONS)
COMMAND = "pip install 'Keras==%s'"
# Each line has a version, owners, and the names that this version is the last to have, or to have set (`name=`);
# tests/programs/keras_versions/names.py compares the packages.
TABLE = os.path.join(os.path.dirname(__file__), 'keras_names.txt')
_MISSING = re.compile(r"(?:import name|module named|no attribute|keyword argument (?=')|not understood:|to optimizer:|"
                      r"keyword arguments:|Invalid argument|property (?='\w+' of)|can't set attribute)\W+([\w.]+)")
BACK_END = ("this script uses %s, of another back end: Keras runs on Theano here, and needs nothing of it. Leave out "
            "what uses it, or put that under: if keras.backend.backend() == '%s'")
FOR_COPIES = ('. Where it is for multi_gpu_model, delete the import and "with tf.device(...):" (or write "if True:" in '
              'its place): weights have a copy on each device')
_metrics: set[str] = set()  # of all models that this process has trained


def about() -> str:
    """Return the installed Keras and the tested ones, as the last lines of a command's help."""
    return '\nKeras: %s is installed; %s\n' % (installed('keras') or 'none', TESTED)


def hint(error: BaseException) -> str:
    """Return what to do if an error names a thing that only another Keras has, or another back end of it; else ''."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError) and error.name in ('tensorflow', 'cntk'):
        line = traceback.extract_tb(error.__traceback__)[-1].line or ''
        if re.search(r'tensorflow(\.| import )(python\.)?keras', line):
            return 'tf.keras is not Keras: write "from keras ..." in place of "from tensorflow.keras ..."'
        return BACK_END % (error.name, error.name) + FOR_COPIES * (error.name == 'tensorflow')
    if isinstance(error, KeyError) or 'keras' not in sys.modules:
        return _other_name(text.strip('\'"'), _metrics)
    missing = [word.rpartition('.') for word in _MISSING.findall(text)]  # a module has its package before the dot
    owners = {*re.findall(r'K\.function|keras[\w.]*|\w+', text), *(package for package, _, _ in missing)}
    names = {name for _, _, name in missing}
    subject: Any = getattr(error, 'obj', None)  # of an AttributeError, from Python 3.10 on
    is_set = 'no setter' in text or "can't set" in text
    if names and subject is sys.modules.get('keras.backend'):
        with open(os.path.join(os.path.dirname(subject.__file__), 'tensorflow_backend.py')) as file:
            if re.search(r'^(def|import .* as) (%s)\b' % '|'.join(names), file.read(), re.M):
                return BACK_END % (' and '.join(names), 'tensorflow')
    if not (is_set or isinstance(subject, (types.ModuleType, type(None))) or _is_of_keras(type(subject).__module__)):
        return ''  # an attribute of a class of another package, or of the script
    if is_set:
        names = {name + '=' for name in names}
    for frame, _ in [*traceback.walk_tb(error.__traceback__)][-1:]:
        if "'module' object is not callable" in text:  # such as `merge`, which was a function before
            values = {**frame.f_globals, **frame.f_locals}.values()
            names = {each.__name__.rpartition('.')[2] for each in values if isinstance(each, types.ModuleType)}
        if is_set or _is_of_keras(frame.f_globals.get('__name__', '')) and not isinstance(error, AttributeError):
            owners.add(frame.f_code.co_name)  # Keras's own messages do not name it
            subject = frame.f_locals.get('self')
    if is_set or _is_of_keras(type(subject).__module__):
        owners.update(kind.__name__ for kind in type(subject).__mro__)
    with open(TABLE) as file:
        rows = [line.split() for line in file]
    found = {name: version for version, of, *last in rows if owners.intersection(of.split(','))
             for name in names.intersection(last)}
    for name, version in found.items():
        if version != sys.modules['keras'].__version__:
            return 'this script is written for Keras %s, which has %s; Keras %s, which is installed, has not: %s' % (
                version, ("'%s'" % name).replace("='", "' that can be set"), sys.modules['keras'].__version__,
                COMMAND % version)
    return ''


def _is_of_keras(module):
    return module.partition('.')[0] == 'keras'  # not keras_contrib


def name_renamed_metrics(callbacks: Any) -> None:
    """Warn where a callback monitors a metric by its name in another Keras."""
    @wrap(callbacks.Callback, 'set_params' if hasattr(callbacks.Callback, 'set_params') else '_set_params')
    def set_params(original, self, params):
        original(self, params)
        metrics = params.get('metrics') or ()
        _metrics.update(metrics)
        text = _other_name(str(getattr(self, 'monitor', '')), metrics)
        if text:
            warn('%s(monitor=%r): %s' % (type(self).__name__, self.monitor, text))


def _other_name(metric, metrics):
    """Return the name of a metric in the installed Keras, if there is one and it differs, and what to do; else ''."""
    is_old = metric.endswith('acc')
    other = metric + 'uracy' if is_old else re.sub('accuracy$', 'acc', metric)
    if metric in metrics or other not in metrics:
        return ''
    return "Keras %s calls the metric '%s': write that, or install the Keras that this script is written for: %s" % (
        sys.modules['keras'].__version__, other, COMMAND % ('2.2.4' if is_old else '2.3.1'))
