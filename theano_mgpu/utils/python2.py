"""Files that are written for Python 2."""
from __future__ import annotations

import os
import re
import shlex
import tokenize
import traceback

_LITERALS_AND_COMMENTS = re.compile(r'''"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|#.*''')
# Syntax of which Python 3 says no more than that it is invalid.
_CODE = re.compile(r'''`|<>|\b[uU][rR]""|\b(0[xX][\da-fA-F]+|\d+)[lL]\b|\braise\s+[\w.]+\s*,
                   |\bexcept\s+(\(.*?\)|[\w.]+)\s*,\s*\w+\s*:|(\bdef\s+\w+\s*\(|\blambda\s)\s*(\w+\s*,\s*)*\(''',
                   re.VERBOSE)
_NAMES = re.compile(r'''name.'(xrange|unicode|raw_input|basestring|unichr|execfile)'.is.not.defined
    |No.module.named.'(cPickle|c?StringIO|urllib2|urlparse|httplib|ConfigParser|Queue|Tkinter|__builtin__)'
    |cannot.import.name.'(izip|imap|ifilter|urlopen|urlretrieve|urlencode)'
    |'dict'.object.has.no.attribute.'(iteritems|itervalues|iterkeys|has_key)'|[Dd]id.you.mean."print\(''', re.VERBOSE)


def hint(error: BaseException) -> str:
    """Return how to convert the file that an error arose in, if it is written for Python 2; '' if it is not."""
    frames = traceback.extract_tb(error.__traceback__)
    file = error.filename if isinstance(error, SyntaxError) else frames[-1].filename if frames else None
    if not file or not os.path.isfile(file) or not _is_python_2(error, file):
        return ''
    file = shlex.quote(file)
    tabs = 'its tabs by "expand -i", then the rest by ' * isinstance(error, TabError)
    return ('%s is written for Python 2. Convert it: %s"python3 -m lib2to3 -w %s", which is part of Python up to 3.12, '
            'or "pip install modernize; python-modernize -w %s"' % (file, tabs, file, file))


def _is_python_2(error, file):
    if isinstance(error, TabError):
        with tokenize.open(file) as source:
            try:
                compile(source.read().expandtabs(8), file, 'exec', dont_inherit=True)  # as Python 2 reads it
            except SyntaxError as other:
                return not isinstance(other, IndentationError) and _is_python_2(other, file)
        return True
    if not isinstance(error, SyntaxError):
        return bool(_NAMES.search(str(error)))
    code = _LITERALS_AND_COMMENTS.sub('""', error.text or '')
    if error.msg.startswith('leading zeros'):
        return not re.search(r'\b0\d*[89]', code)
    has_open_literal = bool(re.search('[\'"]', code.replace('""', '')))
    return error.msg.startswith('Missing parentheses in call') or not has_open_literal and bool(_CODE.search(code))
