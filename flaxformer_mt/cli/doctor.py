"""The command `doctor`: whether several processes could train together, before they do."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from flaxformer_mt.cli import output


def doctor(
    workdir: Path,
    coordinator: str = "",
    num_processes: int = 0,
    process_id: int = -1,
    cluster: Literal["none", "auto", "slurm", "ompi", "mpi4py"] = "none",
    megabytes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
) -> int:
    r"""Checks whether several processes could train together.

    It is started like `train`, once for each process, and takes less than a minute: it compares the
    versions, devices and clocks of all processes, adds up an array over all devices, and writes,
    renames and locks files in the run folder, which all must see. Nothing is left there. The exit
    code is 1 if a check fails; the first process prints the report.

    Examples:
      flaxformer-mt doctor --workdir runs/mine
      srun flaxformer-mt doctor --workdir /shared/runs/mine --cluster slurm
      flaxformer-mt doctor --workdir /shared/runs/mine \
          --coordinator node0:12345 --num-processes 2 --process-id 0

    Args:
      workdir: Where the run folder is going to be; created for the checks if it is missing.
      coordinator: HOST:PORT of the first of the processes, as of train.
      num_processes: Number of processes.
      process_id: Number of this process, from 0.
      cluster: Instead of the three above: the launcher that numbers the processes.
      megabytes: Size of the array that is added up. Default: 256, and 4 on CPUs.
    """
    from flaxformer_mt import cluster_checks, distributed
    from flaxformer_mt.urls import require_local

    require_local(workdir)
    distributed.initialize(coordinator, num_processes, process_id, cluster)
    checks = cluster_checks.check_all(workdir, megabytes)
    if distributed.is_main():
        output.print_lines(
            f"{'ok  ' if check.passed else 'FAIL'}  {check.subject:<10}  {check.text}"
            for check in checks
        )
    return int(not all(check.passed for check in checks))
