"""A custom family: with a weight map, it has the features of the built-in ones."""

import numpy as np
import pytest
import seq2seq_tutorial
import torch
from seq2seq_tutorial import FAMILY

from flaxformer_mt import interop
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop import checkpoint_files
from flaxformer_mt.parity import references
from flaxformer_mt.parity.families.compare import compare

CONFIG = FAMILY.configuration(
    source_vocab_size=13, target_vocab_size=11, d_model=16, num_heads=4, d_ff=24,
    num_encoder_layers=3, num_decoder_layers=2, max_length=9,
)  # fmt: skip
BATCH = {
    "encoder_input_tokens": np.array([[2, 5, 8, 4, 7, 3], [2, 12, 6, 3, 1, 1]]),
    "decoder_input_tokens": np.array([[2, 9, 4, 10], [2, 6, 1, 1]]),
    "decoder_target_tokens": np.array([[9, 4, 10, 3], [6, 3, 1, 1]]),
}


def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return references.perturb(seq2seq_tutorial.Seq2Seq(CONFIG).double())


def compared(fork: torch.nn.Module):
    return compare(FAMILY, fork, BATCH, taps=seq2seq_tutorial.taps(CONFIG), num_heads=4)


def test_the_configuration_is_read_off_the_tensors():
    config, _ = interop.load(FAMILY, module().float().state_dict(), num_heads=4)
    assert config == CONFIG


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_there_and_back_every_byte_is_the_same(suffix, tmp_path):
    state = checkpoint_files.read(module().state_dict()).tensors
    path = tmp_path / f"model{suffix}"
    config, params = interop.load(FAMILY, state, num_heads=4)
    interop.save(FAMILY, config, params, path)
    found = checkpoint_files.read(path).tensors
    assert found.keys() == state.keys()
    assert all(checkpoint_files.identical(found[name], state[name]) for name in state)


@pytest.mark.slow
def test_every_value_and_gradient_equals_ours():
    report = compared(module())
    assert report.passed, report.first_divergence
    assert len(report.select("decoder/layers/1/cross_attention")) == 7
    assert len(report.select("gradient")) == len(list(module().parameters()))


@pytest.mark.slow
def test_the_site_and_cause_of_a_fork_are_found():
    fork = module()
    fork.decoder.layers[1].enc_attn_layer_norm.eps = 1e-3
    report = compared(fork)
    assert report.first_divergence is not None
    assert report.first_divergence.site == "decoder/layers/1/cross_attention_norm"
    assert report.diagnosis is not None
    assert report.diagnosis.cause == "norm epsilon"


def test_another_arrangement_of_the_mathematics_is_refused():
    with pytest.raises(UserError, match=r"seq2seq_tutorial has norm_position=post, not pre"):
        interop.load(FAMILY, module().state_dict(), num_heads=4, norm_position="pre")


def test_an_unknown_option_is_refused():
    with pytest.raises(UserError, match="unknown model option 'heads'"):
        interop.load(FAMILY, module().state_dict(), num_heads=4, heads=4)
