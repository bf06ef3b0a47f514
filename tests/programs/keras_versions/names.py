"""Public names of each Keras of Theano's time, and a table of the names that some of them do not have.

    python names.py             the names of the installed Keras, as pairs of an owner and a name, as JSON
    python names.py --write     the table theano_mgpu/compat/keras_names.txt, by the Kerases that `make setup` installs

A name that can be set, until it is a read-only property, has an equals sign after it.
The owner of a module, class or function is its module, the owner of an attribute is its class, and the owner of an
argument is its function, method or class. Each line of the table has a version, owners, and the names that this version
is the last to have, where another version has the owner without them.
"""
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

from theano_mgpu.compat.keras_names import TABLE, VERSIONS

KERASES = Path(sys.prefix) / 'kerases'
# Parts that are not for users, or not for Theano.
HIDDEN = re.compile(r'\._|keras\.(applications|engine|legacy|old_models|wrappers)|_backend|backend\.|callbacks\.|'
                    r'layers\.(timedistributed|custom|xtreme)|utils\.(conv|generic|layer|losses|metrics|multi|test)')
MODELS = 'Graph', 'Model', 'Sequential'
READ_ONLY = '!'  # after the name of a property; `=` is after a name that can be set
BASES = 'Layer', 'Optimizer', 'Callback'


def public_names():
    """Return the names of the installed Keras, as a set of pairs of an owner and a name."""
    import keras
    names = set()
    modules = {'keras': keras}
    for info in pkgutil.walk_packages(keras.__path__, 'keras.', onerror=lambda name: None):
        if not HIDDEN.search(info.name):
            parent, _, name = info.name.rpartition('.')
            names.add((parent, name))
            try:
                modules[info.name] = importlib.import_module(info.name)
            except ImportError:  # of pydot
                pass
    for module_name, module in modules.items():
        for name, value in vars(module).items():
            if not name.startswith('_') and is_for_users(value, module_name):
                names.add((module_name, name))
                names.update((name, each) for each in arguments(value))
                if inspect.isclass(value):
                    names.update(names_of_class(value) if not value.__module__.startswith('keras.legacy') else ())
                elif module_name == 'keras.layers':
                    names.add(('callable', name))  # where another version has a module of this name
    return names


def is_for_users(value, module):
    """Return whether a value is a class or function that a module has for users, and not for itself."""
    if not inspect.isclass(value) and not inspect.isfunction(value) or not value.__module__.startswith('keras'):
        return False
    return module.startswith('keras.utils') or not value.__module__.startswith('keras.utils')


def names_of_class(kind):
    """Yield the attributes of a class, with its base as the owner for a layer, optimizer or callback, and arguments."""
    bases = [base.__name__ for base in kind.__mro__]
    owner = kind.__name__ if kind.__name__ in MODELS else next((base for base in BASES if base in bases), kind.__name__)
    names = set(dir(kind))
    own = {name for each in kind.__mro__[:-1] for name in re.findall(r'\bself\.(\w+) = ', inspect.getsource(each))}
    if owner == 'Layer':  # such as its weights
        names.update(own)
    for name in own | names:
        if not name.startswith('_') and hasattr(getattr(kind, name, None), 'fget') or name in own:
            yield owner, name + ('=' if getattr(getattr(kind, name, None), 'fset', True) else READ_ONLY)
    for name in names:
        if not name.startswith('_'):
            yield owner, name
            if kind.__name__ in MODELS or kind.__module__.startswith('keras_'):
                for argument in arguments(getattr(kind, name, None)):
                    yield name, argument
                    if name == 'compile':  # Keras 1 and 2 pass unknown arguments on to K.function
                        yield 'K.function', argument


def arguments(function):
    """Return the names of the arguments of a function or class."""
    if not callable(function):
        return []
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.name != 'self' and
            each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]


def names_of(version):
    """Return the public names of a version that is installed for tests."""
    folder = [str(KERASES / version)] if version != VERSIONS[-1] else []
    done = subprocess.run([sys.executable, __file__], stdout=subprocess.PIPE, check=True, universal_newlines=True,
                          env=dict(os.environ, KERAS_BACKEND='theano', PYTHONPATH=os.pathsep.join(folder)))
    return set(map(tuple, json.loads(done.stdout.splitlines()[-1])))


def table():
    """Return the text of the table."""
    names = {version: names_of(version) for version in VERSIONS}
    owners = {version: {owner for owner, _ in names[version]} for version in VERSIONS}
    last = {name: version for version in VERSIONS for name in names[version] if not name[1].endswith(READ_ONLY)}
    rows = {}
    for owner, name in sorted(last):
        later = VERSIONS[VERSIONS.index(last[owner, name]) + 1:]
        if name.endswith('=') and not any((owner, name[:-1] + READ_ONLY) in names[version] for version in later):
            continue
        if any(owner in owners[version] and (owner, name) not in names[version] for version in VERSIONS):
            rows.setdefault((VERSIONS.index(last[owner, name]), owner), []).append(name)
    grouped = {}
    for (i, owner), found in sorted(rows.items()):
        grouped.setdefault((i, ' '.join(found)), []).append(owner)
    return ''.join('%s %s %s\n' % (VERSIONS[i], ','.join(same), found) for (i, found), same in sorted(grouped.items()))


if __name__ == '__main__':
    if sys.argv[1:] == ['--write']:
        Path(TABLE).write_text(table())
    else:
        print(json.dumps(sorted(public_names())))
