"""The devices of a run, by its configuration."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from flaxformer_mt.config import ExperimentConfig, ParallelConfig
from flaxformer_mt.data.stream.batches import Batch, Shard
from flaxformer_mt.data.stream.placement import own_shard, place_batch, row_sharding, row_shards
from flaxformer_mt.errors import UserError
from flaxformer_mt.training import devices
from flaxformer_mt.training.devices import CompiledStep, Rules
from flaxformer_mt.training.sharding import parse_rules

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class RunDevices:
    """The mesh and the rules of a run, for the functions of `training/devices.py`.

    All processes call the same methods in the same order.
    """

    mesh: Mesh
    rules: Rules = ()
    by_pmap: bool = False

    @property
    def devices(self) -> list[jax.Device]:
        """The devices of all processes; those of a process are neighbors."""
        return list(self.mesh.devices.flat)

    @property
    def row_shards(self) -> int:
        """The number of shards of the rows of a batch."""
        return row_shards(self.mesh)

    @property
    def shard(self) -> Shard:
        """The part of every batch that this process reads."""
        return own_shard(self.mesh)

    def create(self, make_state: Callable[[jax.Array], Tree], seed: int) -> Tree:
        """Creates a sharded state."""
        return devices.create(make_state, self.mesh, seed=seed, rules=self.rules)

    def abstract(self, tree: Tree) -> Tree:
        """Returns the shapes, dtypes and shardings of a tree."""
        return devices.abstract(tree, self.mesh, self.rules)

    def place(self, tree: Tree) -> Tree:
        """Copies a tree to the devices, sharded."""
        return devices.place(tree, self.mesh, self.rules)

    def place_batch(self, batch: Batch) -> Batch:
        """Transfers each device's rows of `shard` to it."""
        place = devices.place_pmap_batch if self.by_pmap else place_batch
        return place(batch, self.mesh)

    def abstract_batch(self, batch: Batch) -> Batch:
        """Returns the shapes, dtypes and shardings of a placed batch, from those of a whole one."""

        def placed(rows: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            parts, shape = self.mesh.size, rows.shape
            if self.by_pmap:
                shape = (parts, shape[0] // parts, *shape[1:])
            return jax.ShapeDtypeStruct(shape, rows.dtype, sharding=row_sharding(self.mesh))

        return jax.tree.map(placed, batch)

    def compile_train_step(
        self, update: Callable, *, frozen: Any = None, max_shapes: int = 1
    ) -> CompiledStep:
        """Compiles update(state, batch, key, frozen) -> (state, metrics); donates the state."""
        if self.by_pmap:
            return devices.pmap_step(update, self.mesh, frozen=frozen, max_shapes=max_shapes)
        return devices.compile_step(
            update, self.mesh, frozen=frozen, rules=self.rules, max_shapes=max_shapes
        )

    def compile_eval_step(self, evaluate: Callable, max_shapes: int = 1) -> CompiledStep:
        """Compiles evaluate(params, batch) -> metrics."""
        if self.by_pmap:
            return devices.pmap_evaluation(evaluate, self.mesh, max_shapes=max_shapes)
        return devices.compile_evaluation(
            evaluate, self.mesh, rules=self.rules, max_shapes=max_shapes
        )


def make_devices(config: ExperimentConfig) -> RunDevices:
    """Arranges the devices of `config.parallel`.

    Raises:
      UserError: there are too few devices, the mesh axes do not divide their number, the rows of a
        batch or the attention heads, or the strategy does not support several processes.
    """
    parallel, available = config.parallel, jax.devices()
    processes, local, tensor = jax.process_count(), jax.local_device_count(), parallel.tensor
    wanted = parallel.num_devices or len(available)
    if wanted > len(available):
        raise UserError(
            f"parallel.num_devices={wanted}, but there are only {len(available)} "
            f"({available[0].platform}): ask for fewer, or for 0, which means all"
        )
    if processes > 1 and wanted < len(available):
        raise UserError(
            f"parallel.num_devices={wanted}, but {processes} processes have "
            f"{len(available)} devices, all of which have to be used: set it to 0"
        )
    if processes > 1 and parallel.strategy == "pmap":
        raise UserError(
            f"parallel.strategy=pmap is for one process, and there are {processes}: set "
            "parallel.strategy=mesh"
        )
    if processes > 1 and local % tensor and tensor % local:
        raise UserError(
            f"parallel.tensor={tensor} does not fit processes of {local} devices: one has to be a "
            "multiple of the other"
        )
    if wanted % (parallel.fsdp * parallel.tensor):
        raise UserError(
            f"{wanted} devices (parallel.num_devices) are not a multiple of parallel.fsdp="
            f"{parallel.fsdp} times parallel.tensor={parallel.tensor}"
        )
    model = config.model
    for option, heads in (("num_heads", model.num_heads), ("num_kv_heads", model.kv_heads)):
        if heads % tensor:
            raise UserError(
                f"parallel.tensor={tensor} does not divide model.{option}={heads}: each device "
                "computes whole attention heads"
            )
    run_devices = arrange(parallel, available[:wanted])
    check_rows(run_devices, config)
    return run_devices


def arrange(config: ParallelConfig, given: Sequence[jax.Device]) -> RunDevices:
    """Arranges devices, which need not exist: programs can be compiled for others."""
    if config.strategy == "pmap":
        return RunDevices(devices.pmap_mesh(given), by_pmap=True)
    mesh = devices.make_mesh(fsdp=config.fsdp, tensor=config.tensor, devices=given)
    return RunDevices(mesh, parse_rules(config.sharding_rules))


def check_rows(run_devices: RunDevices, config: ExperimentConfig) -> None:
    """Checks that the devices can divide the rows of a batch (short buckets have a multiple)."""
    rows, row_length = config.rows_per_batch, config.data.row_lengths[1]
    shards, parts = run_devices.row_shards, config.train.accumulation_steps
    if rows % (shards * parts):
        raise UserError(
            f"the {rows} rows of a batch (train.batch_tokens={config.train.batch_tokens} / "
            f"{row_length} tokens of a target row) cannot be divided evenly among {shards} devices "
            f"(parallel.num_devices / parallel.tensor) times {parts} parts "
            f"(train.accumulation_steps): make train.batch_tokens a multiple of "
            f"{shards * parts * row_length}"
        )
