"""The instrument of `benchmarks/accelerators.py`, on small parts of real programs."""

import pytest

from benchmarks.compiled.program import sent_bytes

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
