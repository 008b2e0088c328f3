"""A tensor of more than 2^32 elements in several classes, encoded and decoded; `test_packed_wide` runs it."""

import resource

import numpy as np

from deltackpt.codecs.packed import codec
from deltackpt.codecs.packed.jobs import EncodeJob
from deltackpt.format.dtypes import DTYPES

WIDE = 1 << 32

kind, shape = DTYPES["F8_E4M3"], (2, WIDE // 2 + 3)
base = np.zeros(shape[0] * shape[1], "u1")
at = np.sort(np.concatenate([np.arange(0, 3000, 7), len(base) - 1 - np.arange(0, 3000, 11), [WIDE - 1, WIDE]]))
small = at[::3]
base[small] = 0x38
old, before = base[at], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
job = EncodeJob(at, old, old + np.uint8(1), base, kind, shape)
index, payload = codec.encode_many([job], 2)[0]
assert index.scale.classes > 1
codec.decode_into(index, payload, base, kind, "here")
assert (base[at] == old + 1).all()
# Zeros that are only read share one page, and nothing else is as long as the tensor: in KiB.
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20
