"""Two hosts on one machine: network namespaces joined by a veth pair, for mpirun to start ranks on both.

The hosts share files and process ids, but neither network nor host name, so that MPI has no way but TCP.
"""
import contextlib
import glob
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time

import pytest

INTERFACE = 'veth0'  # the same name in both namespaces
ADDRESSES = '10.77.0.1', '10.77.0.2'

# A program that mpirun calls in place of ssh. Like ssh it runs a shell in the home directory, without the
# caller's environment: mpirun has to pass on all that a rank needs, as it has to between real hosts.
AGENT = '''#!/bin/sh
address=$1
shift
cd "$HOME" || exit 1
case $address in
{cases}
*) echo "no such host: $address" >&2; exit 255;;
esac
'''
CASE = '{address}) exec {enter} env -i HOME="$HOME" PATH="$PATH" sh -c "$*";;'

ENVIRONMENT = {
    'OMPI_ALLOW_RUN_AS_ROOT': '1',
    'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1',
    # Neither host knows that the other one's ranks are on the same cores: each would bind its ranks to the first of
    # them, and a rank that waits would not leave its core to the one that it waits for (four times slower on 2 cores).
    'OMPI_MCA_hwloc_base_binding_policy': 'none',
    'OMPI_MCA_mpi_yield_when_idle': '1',
}


def command_output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True).stdout


def text_file():
    return tempfile.TemporaryFile('w+', errors='replace')


def content(f):
    f.seek(0)
    return f.read()


class Host:
    """A network namespace with an address and a host name, which is made anew for each command that enters."""

    def __init__(self, name, address):
        self.name, self.address = name, address

    def enter(self):
        """Return a command's prefix; the command replaces it, and so keeps the process id."""
        return ['ip', 'netns', 'exec', self.name,
                'unshare', '--uts', 'sh', '-c', 'hostname "$0" && exec "$@"', self.name]

    def output(self, *command):
        return command_output(*self.enter(), *command)

    def bring_up(self):
        self.output('ip', 'address', 'add', self.address + '/24', 'dev', INTERFACE)
        self.output('ip', 'link', 'set', 'lo', 'up')  # without it mpirun hangs
        self.output('ip', 'link', 'set', INTERFACE, 'up')

    def sent_bytes(self):
        """Return the number of bytes that left by the veth so far."""
        return int(self.output('cat', '/sys/class/net/%s/statistics/tx_bytes' % INTERFACE))

    def pids(self):
        """Return the processes of this host; none if it does not exist."""
        found = subprocess.run(['ip', 'netns', 'pids', self.name],
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def remove(self):
        """Remove the namespace, and so its end of the veth, the other end, and the leftovers of a killed MPI."""
        subprocess.run(['ip', 'netns', 'delete', self.name], stderr=subprocess.DEVNULL)
        for folder in {'/tmp', tempfile.gettempdir()}:
            shutil.rmtree(os.path.join(folder, 'ompi.%s.%d' % (self.name, os.getuid())), ignore_errors=True)
        for segment in glob.glob('/dev/shm/vader_segment.%s.*' % self.name):
            os.remove(segment)


class TwoHosts:
    """Two hosts; commands, such as mpirun, run on `first`."""

    def __init__(self, folder):
        self.first, self.second = (Host('host%d-%d' % (i, os.getpid()), a) for i, a in enumerate(ADDRESSES, 1))
        self.hosts = list(ADDRESSES)
        self.agent = os.path.join(str(folder), 'agent')

    def set_up(self):
        for host in (self.first, self.second):
            command_output('ip', 'netns', 'add', host.name)
        # Made inside of the namespaces, so that the machine itself never has interfaces of these names.
        command_output('ip', 'link', 'add', INTERFACE, 'netns', self.first.name,
                       'type', 'veth', 'peer', 'name', INTERFACE, 'netns', self.second.name)
        for host in (self.first, self.second):
            host.bring_up()
        self.write_agent()

    def write_agent(self):
        cases = [CASE.format(address=host.address, enter=shlex.join(host.enter()))
                 for host in (self.first, self.second)]
        with open(self.agent, 'w') as f:
            f.write(AGENT.format(cases='\n'.join(cases)))
        os.chmod(self.agent, 0o755)

    def run(self, command, env=None, timeout=120, meanwhile=None):
        """Run a command on the first host, with `env` added to the environment; return a CompletedProcess.

        `meanwhile` is a function to call while it runs. Processes that outlive the command stay: see `Host.pids`.
        """
        # No pipes: processes cut off from an mpirun that has ended would hold them open, and reading would not end.
        with text_file() as output, text_file() as errors:
            try:
                returncode = self.wait(self.start(command, env, output, errors), timeout, meanwhile)
            except subprocess.TimeoutExpired as e:
                e.output, e.stderr = content(output), content(errors)
                raise
            return subprocess.CompletedProcess(command, returncode, content(output), content(errors))

    def start(self, command, env, output, errors):
        env = {**os.environ, **ENVIRONMENT, 'OMPI_MCA_plm_rsh_agent': self.agent,
               'PRTE_MCA_plm_ssh_agent': self.agent, **(env or {})}  # Open MPI 5's
        return subprocess.Popen(
            self.first.enter() + list(command), env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)

    def wait(self, process, timeout, meanwhile):
        try:
            if meanwhile:
                meanwhile()
            return process.wait(timeout)
        finally:
            if process.returncode is None:
                process.kill()  # it may not have entered the namespace yet, where `kill` would find it
                self.kill()
                process.wait()

    def connect(self, on):
        """Plug the cable in, or pull it."""
        self.first.output('ip', 'link', 'set', INTERFACE, 'up' if on else 'down')

    def kill(self, timeout=10):
        """Kill all processes of both hosts: a namespace lives as long as any of its processes."""
        end = time.monotonic() + timeout
        pids = self.first.pids() + self.second.pids()
        while pids and time.monotonic() < end:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.05)
            pids = self.first.pids() + self.second.pids()

    def tear_down(self):
        self.kill()
        for host in (self.first, self.second):
            host.remove()


@contextlib.contextmanager
def two_hosts_or_skip(folder):
    """Yield two hosts that mpirun can start ranks on; skip the test if no namespaces can be made."""
    missing = [program for program in ('ip', 'unshare', 'hostname', 'mpirun') if not shutil.which(program)]
    if missing:
        pytest.skip('no %s for two hosts' % ', '.join(missing))
    hosts = TwoHosts(folder)
    try:
        try:
            hosts.set_up()
        except subprocess.CalledProcessError as e:
            pytest.skip('cannot make two hosts: %s: %s' % (shlex.join(e.cmd), e.stderr.strip()))
        yield hosts
    finally:
        hosts.tear_down()
