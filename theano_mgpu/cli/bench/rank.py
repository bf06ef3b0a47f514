"""The script that `theano-mgpu bench` has `theano-mgpu launch` run; see rank_work.py."""
import os
import sys

if __name__ == '__main__':
    # Python put this folder first on sys.path: its modules must not hide others of the same names.
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..', '..'))
    from theano_mgpu.cli.bench.rank_work import work
    work(sys.argv[1])
