"""Docstrings and comments read at once: a verb begins a function's docstring, a noun stands before each clause."""
import ast
import io
import re
import tokenize
from pathlib import Path

import theano_mgpu

import pytest

PACKAGE = Path(theano_mgpu.__file__).parent
TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
# Files whose comments are checked.
CHECKED = [ROOT / 'setup.py'] + [path for folder in (PACKAGE, *(ROOT / name for name in (
    'tests', 'benchmarks', 'examples', 'docs', '.ci'))) for path in sorted(folder.rglob('*.py'))]

# A docstring whose first line begins so has to be decoded.
HEADLESS_START = re.compile(r'[\'"(`]*(Of|Those|That|What|As|Whether|In|Which|Who|Where|How|On|To|With|For|By|From)\b')
# Relative clauses without a noun.
HEADLESS = re.compile(r'\b[Ww]hat (?:is|has|each)\b|\b[Tt]hat of\b|\b[Tt]hose of\b|,\s+of which\b')
VERBS = frozenset('''
Abort Act Add Analyse Announce Apply Ask Begin Bring Build Call Carry Cast Check Choose Clear Close Come Compare
Compile Complete Compute Configure Connect Copy Count Cut Derive Describe Discard Divide Do Draw Drop End Enqueue Expand
Fill Find Fit Forget Free Give Go Have Hide Hold Import Install Issue Iterate Join Keep Lay Leave Let Link List
Load Lock Make Map Measure Merge Move Name Normalise Note Open Optimise Parse Pass Patch Pause Pin Place Plan Pool
Predict Prepare Print Propose Provide Put Raise Read Record Refuse Register Remove Replace Replicate Report Restore
Return Run Save Say Seed Send Set Show Slice Sort Split Standardise Start Store Submit Substitute Tag Take Tell
Train Try Turn Unlock Use Wait Walk Warn Watch Wrap Write Yield
'''.split())


def documented(folder):
    """Yield each module, class and function of a folder with its docstring, as (label, node, text)."""
    for path in sorted(folder.rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                line = getattr(node, 'lineno', 1)
                yield '%s:%d' % (path.relative_to(folder.parent), line), node, ast.get_docstring(node)


def is_property(node):
    return any('property' in ast.dump(decorator) for decorator in node.decorator_list)


def faults(node, text, of_test=False):
    """List the faults of a docstring, as texts. A test may be described by a sentence about the checked behaviour."""
    first = text.split('\n')[0]
    wrong = []
    if HEADLESS_START.match(first):
        wrong.append('the first line begins without a noun')
    for clause in HEADLESS.findall(' '.join(text.split())):
        wrong.append('%r has no noun before it' % clause)
    begins_with_verb = first.split()[0].rstrip(',;:.') in VERBS
    if not isinstance(node, ast.FunctionDef) and begins_with_verb:
        wrong.append('the docstring of a class or module begins with a noun phrase, not with a verb')
    if isinstance(node, ast.FunctionDef) and not (of_test or is_property(node) or begins_with_verb):
        wrong.append('the docstring of a function begins with a verb, such as Return; if %r is one, add it to VERBS in '
                     'tests/project/test_prose.py' % first.split()[0])
    return wrong


def test_docstrings_of_the_package():
    wrong = ['%s: %s: %s' % (label, text.split('\n')[0], fault)
             for label, node, text in documented(PACKAGE) for fault in faults(node, text)]
    assert not wrong, '\n'.join(wrong)


def test_docstrings_of_the_tests():
    wrong = ['%s: %s: %s' % (label, text.split('\n')[0], fault)
             for label, node, text in documented(TESTS) for fault in faults(node, text, of_test=True)]
    assert not wrong, '\n'.join(wrong)


def comments(path):
    """Yield each comment of a file with the number of its first line; lines of comments in a row are one comment."""
    lines, first, follows = [], 0, 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding='utf-8')).readline):
        if token.type != tokenize.COMMENT:
            continue
        is_alone = not token.line[:token.start[1]].strip()
        if not is_alone or token.start[0] != follows:
            yield first, ' '.join(lines)
            lines, first = [], token.start[0]
        lines.append(token.string.lstrip('# '))
        follows = token.start[0] + 1 if is_alone else 0
    yield first, ' '.join(lines)


def test_comments():
    """A comment may be a phrase, such as a unit; its clauses have nouns."""
    wrong = ['%s:%d: %r has no noun before it: %s' % (path, line, clause, text)
             for path in CHECKED for line, text in comments(path) for clause in HEADLESS.findall(text)]
    assert CHECKED and not wrong, '\n'.join(wrong)


def test_comments_in_a_row_are_one(tmp_path):
    path = tmp_path / 'code.py'
    path.write_text('a = 1  # seconds\n# The sum\n# of two.\n\n# Another one.\n')
    assert list(comments(path))[1:] == [(1, 'seconds'), (2, 'The sum of two.'), (5, 'Another one.')]


@pytest.mark.parametrize('text, count', [
    ('Return the sums.', 0), ('The sums.', 1), ('Whether a batch is empty.', 2), ('Return what is left.', 1),
    ('Compare a value with that of rank 0.', 1)])
def test_the_rules_find_faults(text, count):
    function = ast.parse('def f():\n    pass').body[0]
    assert len(faults(function, text)) == count


def test_a_class_is_a_noun():
    node = ast.parse('class Sum:\n    pass').body[0]
    assert len(faults(node, 'Add numbers.')) == 1 and not faults(node, 'A sum of numbers.')
