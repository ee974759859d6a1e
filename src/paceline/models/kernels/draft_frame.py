"""Where the compiled draft of a one-layer model finds what it works on: byte offsets into tables of 8-byte fields.

In: nothing. Out: offsets. Not here: who fills the tables (models.one_layer_chain), who reads them (models.kernels.draft,
models.kernels.draft_head). The tables of the layer itself are those of models.kernels.frame.
"""

from __future__ import annotations

from paceline.models.kernels.frame import FIELD

(
    FRAME, LAYER,  # tables of models.kernels.frame
    STEPS, PAUSE, DONE,  # most tokens; stop where no row's chance so far is above this; tokens drafted
    SEQUENCES,  # records of the rows
    EMBEDDING, TABLE, TABLE_PITCH, TURNED, TURNED_PITCH,  # float32 rows by token; pitches in bytes
    COSINE, SINE,  # float32 rows by position, as long as TURNED's
    IOTA,  # 0, 1, 2 ... int64
    TOKENS, CHANCES, OUT_PITCH,  # (rows, steps) int64 tokens and float32 chances in fields of 8 bytes
    PARTS, PARTS_SIZE,  # per thread (rows, 3) lanes: largest logit, its place, sum of exponentials
    FINE, FINE_SIZE, FINE_PITCH,  # per thread (rows, hidden) float32 normed states
    BYTES, BYTES_SIZE, BYTES_PITCH,  # per thread (rows, hidden) 8-bit activations
    STRIPS, SCALES,  # the 8-bit head, or 0
    LOGITS, LOGITS_PITCH,  # (rows, v + ...) float32
    CHAIN_FIELDS,
) = range(0, 30 * FIELD, FIELD)  # fmt: skip

(
    KEYS, VALUES, HEAD_PITCH, LENGTH,  # float32 (kv heads, capacity, dim); bytes of a head; tokens in the cache
    FEED, COUNT,  # int64 tokens that come before the first draft
    SEQUENCE_FIELDS,
) = range(0, 7 * FIELD, FIELD)  # fmt: skip
