"""Tasks on a Ray cluster: the bits of the serial run, whatever dies.

The tests share one cluster and one connection to it: a worker takes half a minute to import torch.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import torchglb as glb
from torchglb.simulate import Record, Watch, simulate

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here"),
    # Ray leaves sockets and files to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SETTINGS = dict(horizon=150, replicates=2, S=[3.0, 5.0], arms=5, chunk=2, seed=7)
LABELS = ["ofuglb-e", "gloc"]
RAY = dict(executor="ray", workers=2, save_every=0.1)


def files(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.npz"))}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    return files(simulate(LABELS, **SETTINGS, out=out).directory)


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one core each, and a connection."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    # workers give way to every other process, by default: beside other tests they would hardly run
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    # a lost node is noticed after a second and a half, not fifteen
    os.environ["RAY_health_check_period_ms"] = "500"  # noqa: SIM112
    os.environ["RAY_health_check_failure_threshold"] = "3"  # noqa: SIM112
    # no processes ahead of time, which would import what no task of theirs needs
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    found.second = found.add_node(num_cpus=1)
    ray.init(address=found.address, logging_level="warning")
    yield found
    ray.shutdown()
    found.shutdown()


class Told(Watch):
    """Keeps what it is told, and acts once in the middle of a task."""

    def __init__(self, act=None):
        self.notices, self.states, self.rounds = [], {}, []
        self._act = act

    def progress(self, task, rounds):
        self.rounds.append(rounds)
        if self._act is not None and 0 < rounds < task.horizon:
            act, self._act = self._act, None
            act()

    def state(self, task, state):
        self.states.setdefault((task.label, task.chunk), []).append(state)

    def notice(self, text):
        self.notices.append(text)


def parent_of(pid):
    """By /proc; 0 if the process has gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def is_mine(pid):
    """Whether a process descends from this one: other clusters on the machine are not ours."""
    while pid > 1 and pid != os.getpid():
        pid = parent_of(pid)
    return pid == os.getpid()


def processes(title):
    """The processes of this cluster whose command line begins with a title, by /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_text().startswith(title) and is_mine(int(entry.name)):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def kill(title):
    victims = processes(title)
    assert victims, title
    os.kill(victims[0], signal.SIGKILL)


def test_the_bits_of_the_serial_run(undisturbed, cluster, tmp_path):
    watch = Told()
    simulate(LABELS, **SETTINGS, **RAY, out=tmp_path / "run", watch=watch)
    assert files(tmp_path / "run") == undisturbed
    assert not watch.notices
    assert len(watch.states) == 4
    assert all(states == ["running", "finished"] for states in watch.states.values())
    # progress, not only the end; the mailbox keeps the latest, so the first may be past 0
    assert any(rounds < 150 for rounds in watch.rounds)
    assert max(watch.rounds) == 150


def test_a_worker_that_dies_is_replaced(undisturbed, cluster, tmp_path):
    watch = Told(lambda: kill("ray::_play"))
    simulate(LABELS, **SETTINGS, **RAY, out=tmp_path / "run", watch=watch)
    assert files(tmp_path / "run") == undisturbed
    assert any("its Ray worker was lost" in text for text in watch.notices)
    assert any("waiting" in states for states in watch.states.values())


def test_a_mailbox_that_dies_is_started_again(undisturbed, cluster, tmp_path):
    """Its process is killed: Ray itself brings it back, and nobody loses anything."""
    watch = Told(lambda: kill("ray::Mailbox"))
    simulate(LABELS, **SETTINGS, **RAY, out=tmp_path / "run", watch=watch)
    assert files(tmp_path / "run") == undisturbed


def test_a_mailbox_that_is_gone_for_good_is_replaced(undisturbed, cluster, tmp_path, monkeypatch):
    """On the node of this process, where nothing else can take it away."""
    from torchglb.simulate import ray_executor

    made, new = [], ray_executor._new_mailbox

    def remembered():
        made.append(new())
        return made[-1]

    monkeypatch.setattr(ray_executor, "_new_mailbox", remembered)
    watch = Told(lambda: ray.kill(made[0]))
    simulate(LABELS, **SETTINGS, **RAY, out=tmp_path / "run", watch=watch)
    assert files(tmp_path / "run") == undisturbed
    assert len(made) == 2
    assert any("the mailbox of the Ray tasks was lost" in text for text in watch.notices)


def test_a_node_that_is_lost(undisturbed, cluster, tmp_path):
    """The tasks that ran there go on elsewhere, from their checkpoints."""
    lost = Told(lambda: cluster.remove_node(cluster.second, allow_graceful=False))
    simulate(LABELS, **SETTINGS, **RAY, out=tmp_path / "run", watch=lost)
    assert files(tmp_path / "run") == undisturbed


def test_it_stops_and_continues(cluster, tmp_path):
    # so that no task ends before it is stopped
    long = SETTINGS | {"horizon": 800, "S": [3.0], "chunk": 1}
    watch = Told(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        simulate(["ofuglb-e"], **long, **RAY, out=tmp_path / "run", watch=watch)
    assert not Record.open(tmp_path / "run").complete
    assert list((tmp_path / "run" / "unfinished").glob("*.pt"))
    assert simulate(["ofuglb-e"], **long, out=tmp_path / "run").complete
    simulate(["ofuglb-e"], **long, out=tmp_path / "straight")
    assert files(tmp_path / "run") == files(tmp_path / "straight")


NOISY = """
import sys
from torchglb import policies

@policies.register
class Noisy(policies.Policy):
    "Says something."
    name = "noisy"
    def _scores(self, arms):
        return arms.new_ones(arms.shape[:-1])
    def _update(self, x, r):
        if self.rounds == 3:
            print("a word from the task", file=sys.stderr, flush=True)
    def _state(self):
        return {}
    def _load(self, state):
        pass
"""


def test_the_command_with_an_address(cluster, tmp_path):
    """Another process joins the cluster; progress and the words of tasks reach its terminal."""
    (tmp_path / "noisy.py").write_text(NOISY)
    (tmp_path / "small.toml").write_text(
        'title = "small"\nhorizon = 30\nreplicates = 2\nS = [3]\narms = 5\npolicies = ["noisy"]'
    )
    command = [sys.executable, "-m", "torchglb.cli", "run", "small.toml", "--import", "noisy"]
    command += ["--executor", "ray", "--address", cluster.address, "--out", "there"]
    paths = os.pathsep.join([str(tmp_path), str(Path(glb.__file__).parents[1])])
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Record.open(tmp_path / "there").complete
    assert "100%" in done.stderr
    assert "a word from the task" in done.stderr + done.stdout


def test_a_cluster_of_its_own(undisturbed, tmp_path, cluster):
    """Without an address Ray is started for the run, and stopped after it."""
    ray.shutdown()
    simulate(LABELS, **SETTINGS, **RAY | {"workers": 1}, out=tmp_path / "run")
    assert files(tmp_path / "run") == undisturbed
    assert not ray.is_initialized()


def test_a_wrong_address_is_refused(tmp_path):
    ray.shutdown()
    begin = time.monotonic()
    with pytest.raises(glb.InputError, match="address: expected that of a running Ray cluster"):
        simulate(LABELS, **SETTINGS, out=tmp_path, executor="ray", address="127.0.0.1:1")
    assert time.monotonic() - begin < 20
