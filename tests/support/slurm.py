"""A Slurm of two nodes on this machine: munged, slurmctld and two slurmd, in the foreground, below one folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ray_apart import end_all, free_port
from waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo", "squeue")
START_S = 60.0
END_S = 120.0
CREDENTIAL_S = 30  # a job that is queued again does not start before its last credential has expired: 120 s by default
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def reason_against() -> str | None:
    """Why no Slurm can be started here."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} here (Debian: slurmctld, slurmd, slurm-client, munge)"
    return None if os.geteuid() == 0 else "slurmd needs root"


@dataclass(frozen=True)
class Slurm:
    """The running controller, seen through the commands of a user."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def submit(self, script: Path, *words: str, options: tuple[str, ...] = (), **env: str) -> int:
        done = self.run("sbatch", "--parsable", *options, str(script), *words, **env)
        return int(done.split(";")[0])

    def state(self, job: int) -> str:
        """The state of a job, such as RUNNING."""
        found = self.run("scontrol", "show", "job", str(job), "--oneliner")
        return found.partition("JobState=")[2].split()[0]

    def is_over(self, job: int) -> bool:
        return self.state(job) in OVER

    def run(self, *words: str, **env: str) -> str:
        done = subprocess.run(
            words, env={**self.env, **env}, cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in sorted(self.folder.glob("*.log")))


@contextmanager
def two_node_slurm(folder: Path) -> Iterator[Slurm]:
    """Both nodes are this machine, with a port each; it takes jobs while the body runs."""
    found = Slurm(folder)
    (folder / "slurm.conf").write_text(_configuration(folder))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    processes = []
    munge = ["munged", "-F", "--force", f"--key-file={key}", f"--socket={folder / 'munge.socket'}"]
    munge += [f"--log-file={folder / 'munged.log'}", f"--pid-file={folder / 'munged.pid'}"]
    munge += [f"--seed-file={folder / 'munge.seed'}"]
    try:
        for command in (munge, ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            with (folder / f"{command[0]}-{len(processes)}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(command, env=found.env, stdout=log, stderr=log, start_new_session=True)
                )
            time.sleep(1.0)  # munged and slurmctld listen soon; what comes too early tries again
        wait_until(lambda: found.run("sinfo", "-h", "-o", "%T %D") == "idle 2", START_S, found.logs)
        try:
            yield found
        finally:  # what a job runs would outlive slurmd
            found.run("scancel", "--user=root")
            wait_until(lambda: found.run("squeue", "-h") == "", END_S, found.logs)
    finally:
        end_all(processes)


def _configuration(folder: Path) -> str:
    host = socket.gethostname()
    ports = [free_port() for _ in range(3)]
    lines = [
        "ClusterName=mobula",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        "SlurmUser=root",
        "SlurmdUser=root",
        f"AuthInfo=socket={folder / 'munge.socket'},cred_expire={CREDENTIAL_S}",
        f"StateSaveLocation={folder / 'state'}",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/linear",
        "ReturnToService=2",
        "KillWait=60",
        "MpiDefault=none",
        *(
            f"NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[n]} CPUs={os.cpu_count()} State=UNKNOWN"
            for n in (1, 2)
        ),
        "PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE",
    ]
    return "\n".join(lines) + "\n"
