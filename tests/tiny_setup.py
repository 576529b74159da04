"""A tiny experiment with real parts: model, packed rows, optimizer, steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from flaxformer_mt.config import (
    DataConfig,
    ExperimentConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    TransformerConfig,
)
from flaxformer_mt.data.stream.batches import Batch
from flaxformer_mt.model.linear import Dense
from flaxformer_mt.model.transformer import OutputFactors, Transformer
from flaxformer_mt.objectives.losses import token_losses
from flaxformer_mt.training.devices import create, make_devices, place, seed_key, step_key
from flaxformer_mt.training.objective import make_objective
from flaxformer_mt.training.optimizer import make_optimizer, make_schedule
from flaxformer_mt.training.state import create_state
from flaxformer_mt.training.step import eval_step, gradients, train_step

ROWS, LENGTH, VOCABULARY = 32, 8, 20
DROPOUT = {"dropout_rate": 0.1, "attention_dropout_rate": 0.1, "activation_dropout_rate": 0.1}
EXPERIMENT = ExperimentConfig(
    model=TransformerConfig(
        source_vocab_size=VOCABULARY,
        target_vocab_size=VOCABULARY,
        d_model=8,
        num_heads=2,
        d_ff=16,
        num_encoder_layers=1,
        num_decoder_layers=1,
        dropout_rate=0.0,
        scan_layers=False,
    ),
    data=DataConfig(source_row_length=LENGTH, target_row_length=LENGTH),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=4),
    train=TrainConfig(
        num_steps=6,
        batch_tokens=ROWS * LENGTH,
        log_every=2,
        eval_every=3,
        checkpoint_every=3,
        keep_last=10,
    ),
)


class Bigram(nn.Module):
    """Predicts a token from the one before: compiles in no time."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, source, target_input, *, deterministic=True, project=True, **options):
        x = nn.Embed(self.config.target_vocab_size, self.config.d_model)(target_input)
        x = nn.Dropout(self.config.dropout_rate)(x, deterministic=deterministic)
        output = Dense(self.config.d_model, self.config.target_vocab_size)
        logits = output(x)
        if project:
            return logits
        return OutputFactors(x, output.kernel.T, output.bias, 1.0)


@dataclasses.dataclass(frozen=True)
class Setup:
    """All that a step needs, made when first asked for, and once for all tests."""

    model_class: type[nn.Module] = Transformer
    experiment: ExperimentConfig = EXPERIMENT

    @staticmethod
    def of(
        strategy="mesh",
        num_devices=1,
        model=None,
        optimizer=None,
        bigram=False,
        parallel=None,
        **train,
    ):
        """The tiny experiment on other devices, or with other values of some fields."""
        return _cached_setup(
            Bigram if bigram else Transformer,
            dataclasses.replace(
                EXPERIMENT,
                parallel=ParallelConfig(strategy, num_devices, **(parallel or {})),
                model=dataclasses.replace(EXPERIMENT.model, **(model or {})),
                optimizer=dataclasses.replace(EXPERIMENT.optimizer, **(optimizer or {})),
                train=dataclasses.replace(EXPERIMENT.train, **train),
            ),
        )

    @functools.cached_property
    def devices(self):
        return make_devices(self.experiment.parallel)

    @functools.cached_property
    def model(self):
        return self.model_class(self.experiment.model)

    @functools.cached_property
    def schedule(self):
        return make_schedule(self.experiment.optimizer, self.experiment.model.d_model, 100)

    @functools.cached_property
    def optimizer(self):
        return make_optimizer(self.experiment.optimizer, self.schedule)

    @property
    def create_state(self):
        return functools.partial(
            create_state,
            model=self.model,
            optimizer=self.optimizer,
            config=self.experiment.train,
        )

    @property
    def state_shapes(self):
        return jax.eval_shape(self.create_state, seed_key(0))

    @property
    def objective(self):
        return make_objective(self.model, self.experiment.train)

    def created_state(self):
        """The initial state, created on the devices."""
        devices, seed = self.devices, self.experiment.train.seed
        return create(self.create_state, devices.mesh, seed=seed, rules=devices.rules)

    @property
    def pure_train_step(self):
        """(state, batch, key, frozen) -> (state, metrics)."""
        return functools.partial(
            train_step,
            objective=self.objective,
            optimizer=self.optimizer,
            config=self.experiment.train,
        )

    @functools.cached_property
    def gradients(self):
        """(state, batch) -> (gradient, sums), compiled for one device."""
        options = {"objective": self.objective, "config": self.experiment.train}
        return jax.jit(
            lambda state, batch: gradients(state.params, batch, self.key(state), **options)
        )

    def key(self, state):
        """The key of the next step."""
        return step_key(state, self.experiment.train.seed)

    @property
    def pure_eval_step(self):
        return functools.partial(eval_step, model=self.model, config=self.experiment.train)

    @functools.cached_property
    def train_step(self):
        """Compiled for the devices; donates the state."""
        return self.devices.compile_train_step(
            self.pure_train_step, seed=self.experiment.train.seed
        )

    @functools.cached_property
    def eval_step(self):
        """Compiled for the devices."""
        return self.devices.compile_eval_step(self.pure_eval_step)

    def state(self):
        """The initial state, placed."""
        train = self.experiment.train
        return place(
            _initial_state(
                self.model_class,
                self.experiment.model,
                self.experiment.optimizer,
                TrainConfig(ema_decay=train.ema_decay, freeze=train.freeze),
            ),
            self.devices.mesh,
            self.devices.rules,
        )

    def batch(self, step):
        """Rows of none, one or two pairs of random lengths; the last rows are all empty."""
        random = np.random.default_rng(step)
        pairs = [*random.integers(0, 3, size=ROWS - 6), *[0] * 6]
        source, source_ids, source_positions = _packed_side(random, pairs)
        target, target_ids, target_positions = _packed_side(random, pairs)
        shifted = np.where(target_positions == 0, self.experiment.model.bos_id, np.roll(target, 1))
        has_inputs = self.experiment.model.has_inputs
        return Batch(
            encoder_input_tokens=source if has_inputs else None,
            decoder_input_tokens=np.where(target_ids > 0, shifted, 0).astype(np.int32),
            decoder_target_tokens=target,
            decoder_loss_weights=(target_ids > 0).astype(np.float32),
            encoder_segment_ids=source_ids if has_inputs else None,
            decoder_segment_ids=target_ids,
            encoder_positions=source_positions if has_inputs else None,
            decoder_positions=target_positions,
        )

    def placed_batch(self, step):
        """The same, on the devices."""
        return self.devices.place_batch(self.batch(step))


def _packed_side(random, pairs):
    """Tokens, segment ids and positions [ROWS, LENGTH] of rows that hold so many sentences."""
    tokens, segment_ids, positions = np.zeros((3, ROWS, LENGTH), np.int32)
    for row, count in enumerate(pairs):
        start = 0
        for segment_id in range(1, count + 1):
            length = random.integers(1, LENGTH // 2 + 1)
            place = row, slice(start, start + length)
            tokens[place] = random.integers(3, VOCABULARY, size=length)
            segment_ids[place] = segment_id
            positions[place] = np.arange(length)
            start += length
    return tokens, segment_ids, positions


_cached_setup = functools.lru_cache(Setup)


@functools.lru_cache
def _initial_state(model_class, model, optimizer, train):
    experiment = dataclasses.replace(EXPERIMENT, model=model, optimizer=optimizer)
    tiny = Setup(model_class, experiment)
    return create_state(seed_key(train.seed), tiny.model, tiny.optimizer, train)


def results(tiny, num_steps):
    """Returns the loss of each step, the first gradient's first moment, and the last parameters."""
    state, losses, first_moment = tiny.state(), [], None
    for number in range(num_steps):
        state, metrics = tiny.train_step(state, tiny.placed_batch(number))
        losses.append(metrics["loss"][0] / metrics["loss"][1])
        if number == 0:
            first_moment = jax.device_get(optax.tree.get(state.opt_state, "mu"))
    assert len(tiny.train_step.batch_shapes) == 1
    return jax.device_get((losses, first_moment, state.params))


@functools.partial(jax.jit, static_argnums=0)
def mean_loss(model, params, batch):
    """Computes the loss as one would write it for a single device."""
    logits = model.apply(
        {"params": params},
        batch.encoder_input_tokens,
        batch.decoder_input_tokens,
        encoder_segment_ids=batch.encoder_segment_ids,
        decoder_segment_ids=batch.decoder_segment_ids,
        encoder_positions=batch.encoder_positions,
        decoder_positions=batch.decoder_positions,
    )
    losses = token_losses(logits, batch.decoder_target_tokens, 0.1)
    weights = jnp.asarray(batch.decoder_loss_weights, losses.dtype)
    return jnp.sum(losses * weights) / jnp.sum(weights)
