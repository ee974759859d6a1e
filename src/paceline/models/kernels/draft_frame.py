"""Where the compiled draft of a one-layer model finds what it works on: byte offsets into tables of 8-byte fields.

In: nothing. Out: offsets. Not here: who fills the tables (models.one_layer_tables, models.one_layer_chain, models.one_layer_tree),
who reads them (models.kernels.draft and what it calls). The tables of the layer itself are those of models.kernels.frame.
"""

from __future__ import annotations

from paceline.models.kernels.frame import FIELD

CHAINS, ROWS_ONLY, TREES, GO_ON = range(4)
"""What a call does: drafts chains; gives logits of rows that were laid out; grows trees from their roots; grows them on."""

(
    MODE, FRAME, LAYER,  # one of the above; tables of models.kernels.frame
    STEPS, PAUSE, DONE,  # most tokens; stop where no row's chance so far is above this; tokens drafted
    SEQUENCES,  # records of the sequences; of chains, row i is sequence i
    EMBEDDING, TABLE, TABLE_PITCH, TURNED, TURNED_PITCH,  # float32 rows by token; pitches in bytes
    COSINE, SINE,  # float32 rows by position, as long as TURNED's
    IOTA,  # 0, 1, 2 ... int64
    TOKENS, CHANCES, OUT_PITCH,  # (rows, steps) int64 tokens and float32 chances in fields of 8 bytes
    PARTS, PARTS_SIZE,  # per thread (rows, 3) lanes: largest logit, its place, sum of exponentials
    FINE, FINE_SIZE,  # per thread float32 normed states of a row
    BYTES, BYTES_SIZE, BYTES_PITCH,  # per thread (rows, widest input) 8-bit activations
    STRIPS, SCALES,  # the head in 8 bits, or 0; the layer's matrices then are in 8 bits too:
    O_STRIPS, O_SCALES, GATE_UP_STRIPS, GATE_UP_SCALES, DOWN_STRIPS, DOWN_SCALES,
    LOGITS, LOGITS_PITCH,  # (rows, v + ...) float32
    COUNT_OF, LAID,  # sequences; records of rows that were laid out
    OWN, OWN_PITCH,  # (rows, ...) int64 slots that a row sees behind those of its text
    MAXIMA, MAXIMA_PITCH,  # (rows, strips) float32 largest logit of each strip; filled up to whole lanes with the least number
    GROWTHS,  # records of growing trees, one a sequence
    CHAIN_FIELDS,
) = range(0, 43 * FIELD, FIELD)  # fmt: skip

(
    KEYS, VALUES, HEAD_PITCH, LENGTH,  # float32 (kv heads, capacity, dim); bytes of a head; tokens in the cache
    FEED, COUNT,  # int64 tokens that come before the first draft
    CAPACITY, FIRST_ROW, ROW_COUNT,  # of trees and laid rows: slots of the cache; the sequence's rows
    SEQUENCE_FIELDS,
) = range(0, 10 * FIELD, FIELD)  # fmt: skip

(
    ROW_TOKEN, ROW_POSITION, ROW_SLOT, ROW_OWN,  # own slots of a row, itself included; 0 for one that is the text's last token
    ROW_FIELDS,
) = range(0, 5 * FIELD, FIELD)  # fmt: skip

BEST_PATHS, THRESHOLD, STATIC = range(3)
"""Kinds of trees; see models.tree_plan."""
GROWING, ASKING, FULL, FINISHED, BROKEN = range(5)
"""What a tree waits for: its rows, an answer whether to go one level deeper, slots of its cache; nothing; nothing, for a NaN."""

(
    KIND, NODES, DEPTH, CHILDREN, FRONT_ROWS, LEVELWISE, LEAST,  # as in models.tree_plan; LEAST is float64
    SHAPE_PARENTS, SHAPE_RANKS, SHAPE_COUNT,  # (n,) int32 each
    ASKS,  # 1 where somebody wants to be asked before each level but the first
    STATE, LEVEL, QUESTION, QUESTION_REACH, ANSWER,  # levels allowed; level asked about, chance so far (float64), 0 for no
    NODE_COUNT, FIRST_NEW, FED_COUNT, FRONT_COUNT,  # so far; first node of the last expansion
    ROOM,  # most nodes
    NODE_TOKENS, NODE_PARENTS, NODE_DEPTHS, NODE_PLACES, NODE_FED, WAITING,  # (room,) int64; place in the shape; order of feeding
    NODE_CHANCES, NODE_REACHES,  # (room,) float64
    FRONT, LARGEST, LARGEST_COUNT,  # nodes to feed; the largest reaches so far, falling, NODES of them at most
    RANK_TOKENS, RANK_CHANCES,  # scratch: (64,) int64, float64
    OUT_COUNT, OUT_COLUMNS, OUT_CHANCES,  # the tree: (3, NODES) int32 tokens, parents, depths; (NODES,) float32
    FED_TOKENS, FED_PARENTS,  # (room,) int64 inputs behind the root, and the places of their parents; 0 is the root
    GROWTH_FIELDS,
) = range(0, 40 * FIELD, FIELD)  # fmt: skip
