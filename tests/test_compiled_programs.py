"""The instrument of `benchmarks/accelerators.py`, on small parts of real programs."""

import pytest

from benchmarks.compiled.program import collectives, parse, sent_bytes
from benchmarks.compiled.roofline import kernels

GPU = """\
HloModule jit_step, is_scheduled=true

%fused_update (p0: f32[6,8,16], p1: f32[8,16], p2: s32[]) -> f32[6,8,16] {
  %p0 = f32[6,8,16]{2,1,0} parameter(0)
  %p1 = f32[8,16]{1,0} parameter(1)
  %part = f32[1,8,16]{2,1,0} bitcast(%p1)
  %p2 = s32[] parameter(2)
  ROOT %update = f32[6,8,16]{2,1,0} dynamic-update-slice(%p0, %part, %p2, %p2, %p2)
}

%fused_slice (p0.1: f32[6,8,16], p1.1: s32[]) -> f32[8,16] {
  %p0.1 = f32[6,8,16]{2,1,0} parameter(0)
  %p1.1 = s32[] parameter(1)
  %slice = f32[1,8,16]{2,1,0} dynamic-slice(%p0.1, %p1.1, %p1.1, %p1.1), \
dynamic_slice_sizes={1,8,16}
  ROOT %row = f32[8,16]{1,0} bitcast(%slice)
}

%gemm (x: bf16[8,16], y: bf16[16,4]) -> f32[8,4] {
  %x = bf16[8,16]{1,0} parameter(0)
  %y = bf16[16,4]{1,0} parameter(1)
  ROOT %dot = f32[8,4]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(step)/jvp(Transformer)/decoder/layers/feed_forward/hidden/dot_general"}
}

%body (state: (s32[], f32[6,8,16])) -> (s32[], f32[6,8,16]) {
  %state = (s32[], f32[6,8,16]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = f32[6,8,16]{2,1,0} get-tuple-element(%state), index=1
  %row.1 = f32[8,16]{1,0} fusion(%stack, %i), kind=kLoop, calls=%fused_slice
  %stack.1 = f32[6,8,16]{2,1,0} fusion(%stack, %row.1, %i), kind=kLoop, calls=%fused_update, \
metadata={op_name="jit(step)/jvp(Transformer)/decoder/while/body/jit(dynamic_update_index_in_dim)/\
dynamic_update_slice"}
  ROOT %next = (s32[], f32[6,8,16]{2,1,0}) tuple(%i, %stack.1)
}

%condition (state.1: (s32[], f32[6,8,16])) -> pred[] {
  %state.1 = (s32[], f32[6,8,16]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %limit = s32[] constant(6)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (a: bf16[8,16], b: bf16[16,4], s: (s32[], f32[6,8,16])) -> f32[8,4] {
  %a = bf16[8,16]{1,0} parameter(0)
  %b = bf16[16,4]{1,0} parameter(1)
  %s = (s32[], f32[6,8,16]{2,1,0}) parameter(2)
  %loop = (s32[], f32[6,8,16]{2,1,0}) while(%s), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"6"}}
  %gather-start = (bf16[2,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%b), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}, backend_config={"collective_backend_config":\
{"is_sync":false}}
  %gather-done = bf16[16,4]{1,0} all-gather-done(%gather-start)
  %sum = f32[4]{0} all-reduce-start(%a), channel_id=2, replica_groups={{0,1}}, to_apply=%gemm, \
backend_config={"collective_backend_config":{"is_sync":true}}
  ROOT %out = f32[8,4]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm
}
"""


def by_name(text):
    return {kernel.name: kernel for kernel in kernels(parse(text))}


def test_kernels_of_a_gpu():
    found = by_name(GPU)
    assert set(found) == {"row.1", "stack.1", "gather-start", "sum", "out"}
    row = 8 * 16 * 4
    # Only the part of the stack that is read or replaced, and the index.
    assert found["row.1"].bytes == 6 * (row + row + 4)
    assert found["stack.1"].bytes == 6 * (row + row + 4)
    assert found["stack.1"].times == 6
    assert found["out"].flops == 2 * 8 * 4 * 16
    assert found["out"].bytes == 2 * (8 * 16 + 16 * 4) + 4 * 8 * 4
    assert found["out"].kind == "matmul"
    assert found["out"].source.endswith("feed_forward/hidden/dot_general")  # of what is inside


def test_collectives_of_a_gpu():
    gather, total = collectives(parse(GPU))
    assert gather.kind == "all-gather"
    assert gather.is_asynchronous
    assert gather.dtypes == ["bf16", "bf16"]
    assert total.kind == "all-reduce"
    assert not total.is_asynchronous  # It is started and waited for.
    assert total.sent == 2 * 4 * 4 / 2


COLLECTIVES = """\
HloModule jit_step, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %p = (s32[], f32[16]) parameter(0)
  %g = f32[4,8]{1,0} all-gather(%x), replica_groups=[4,2]<=[8], dimensions={0}
  ROOT %r = (f32[16]{0}, bf16[8]{0}) all-reduce(%y, %z), replica_groups={{0,1,2,3},{4,5,6,7}}, \
to_apply=%add
}

%condition (p: (s32[], f32[16])) -> pred[] {
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x: f32[16]) -> f32[16] {
  %x = f32[16] parameter(0)
  %w = (s32[], f32[16]) while(%x), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"6"}}
  %s = f32[2]{0} reduce-scatter(%x), replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add
  %t = (f32[4]{0}, f32[4]{0}) all-to-all(%x, %x), replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}
  ROOT %c = pred[5]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
}
"""


def test_sent_bytes_of_a_program():
    assert sent_bytes(COLLECTIVES) == {
        "all-gather": 6 * 4 * 8 * 4 // 2,  # half of the result comes from the other device
        "all-reduce": 6 * 2 * (16 * 4 + 8 * 2) * 3 // 4,
        "all-to-all": 2 * 4 * 4 // 2,
        "collective-permute": 5,
        "reduce-scatter": 2 * 4 * 3,
    }


def test_groups_that_cannot_be_read_are_an_error():
    with pytest.raises(ValueError, match="unknown notation of device groups"):
        sent_bytes(COLLECTIVES.replace("[4,2]<=[8]", "something"))
