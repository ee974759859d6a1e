"""Where compiled code finds what it works on: byte offsets into tables of 8-byte fields.

The *frame* describes one pass, a *layer* record one decoder layer, or one of its two parts where it attends to a source
too, an *expert* record one expert of a mixture or the MLP beside them, a *rope* record one kind of rotary embedding.
Pointers and counts are int64; a float32 takes the first half of its field.
"""

from __future__ import annotations

FIELD = 8

(
    THREAD, TEAM, BARRIER,  # addresses of omp_get_thread_num, omp_get_num_threads, GOMP_barrier; THREAD 0: no team
    KIND, NARROW,  # how attention multiplies (models.cpu.tiles); 1 where embedding, cache and results are bfloat16
    ROWS, HIDDEN, LAYERS, PROGRAM,  # rows of this pass; width; layers to run and address of the first of their records
    SOURCE, SCALE,  # (rows,) addresses of embeddings or hidden states, and the factor on them
    ADDED_QKV, ADDED_QKV_PITCH,  # (rows, projected) float32 that is added to what is projected before attention, or 0
    X, X_PITCH,  # (rows, hidden) float32 residual stream
    NORMED, NORMED_PITCH,  # (rows, hidden) activations of a product, which all threads share
    OWN_NORMED, OWN_SIZE,  # the same of one thread for itself, a float32 row at SPARE and rows of one expert behind it
    # float32 projections, attention's output, the MLP's inner activations
    QKV, QKV_PITCH, MIXED, MIXED_PITCH, INNER, INNER_PITCH,
    SUMS, SUMS_SIZE,  # (rows, 64) float32 sums of a strip, one copy a thread
    SCORES, SCORES_PITCH, SCORES_SIZE, QUERY, QUERY_SIZE,  # scores and queries of a block, one copy a thread
    HEADS, KV_HEADS, HEAD_DIM, ATTENTION_SCALE, SLOT_PITCH,
    VALUES,  # bytes from a slot's keys to its values; 0 where these are the same
    # where the projection before attention goes, and its outputs; where the one behind takes its inputs, and how many
    PROJECTED, PROJECTED_PITCH, PROJECTED_SIZE, ATTENDED, ATTENDED_PITCH, ATTENDED_SIZE,
    LATENT,  # address of what latent attention adds (models.cpu.latent), or 0
    # its sizes, and bytes before the rotated key and the queries in what is projected
    RANK, QUERY_RANK, ROPE_DIM, NOPE_DIM, VALUE_DIM, LATENT_EPSILON, LATENT_KEY, LATENT_QUERIES,
    PACKED,  # keys for which there is room behind a thread's scores
    EPSILON, HEAD_EPSILON, NORM_BIAS,  # NORM_BIAS: bytes from the weights of a layer norm to its bias, 0 for RMS norms
    RESIDUAL, PARALLEL, INTERMEDIATE,  # PARALLEL: 1 where attention and MLP read the same normed state
    ACTIVATE, GATED, ALPHA, LIMIT,  # models.cpu.sublayers; ALPHA and LIMIT of the clamped activation
    ATTENTION_CAP, LOGIT_CAP,  # soft caps, 0 for none
    # (rows,) positions, and distances in a layer's BIASES: numbers of positions 0 .. p end each head's row of them
    POSITIONS, BIAS_COUNT, BIAS_PITCH,
    QK_NORM,  # what is normed of queries and keys, and when (models.cpu.attention)
    # mixtures: how many experts, of a row, groups and best of them (0: none); 1 where shares sum to 1; factor on shares
    EXPERTS, TOP_K, GROUPS, BEST_GROUPS, NORM_SHARES, SHARE_SCALE,
    SIGMOID, RANKED,  # 1 where scores are sigmoids; where the bias of a router ranks experts without weighing them
    SHARED_MLP, SHARED_GATE,  # 1 where an MLP stands beside the experts, and where the router's last output is its gate
    # (rows, outputs) float32 of the router; each thread's lists of who goes where (models.cpu.experts)
    ROUTE, ROUTE_PITCH, CHOICE, CHOICE_SIZE,
    RESULT,  # (rows, hidden) hidden states behind the last layer, or 0
    FINAL_NORM, FINAL_TAP,  # weights, and where the normed states go, or 0
    # the head's strips and their kind of product, count and (rows,) indices of its rows, result
    HEAD, HEAD_KIND, HEAD_BIAS, HEAD_ROWS, PICKED, VOCAB, LOGITS, LOGIT_SCALE,  # HEAD_BIAS: 0 for none
    SPARE,  # see OWN_NORMED
    # (rows,) best token ids, and (threads, PARTS_ROWS) of what each thread finds; BEST 0: nobody asks
    BEST, PARTS, PARTS_ROWS,
    ATTENTION_GATE,  # bytes before the gates in what is projected, 0 where attention has none
    # mixers (models.cpu.mixers), else 0: their address; (rows, ..) float32 of what is projected, convolved, of small
    # maps, of what further maps make of these and what is read; what each thread has for a row; sequences of the pass
    # and their records
    MIXERS, MIX, MIX_PITCH, CONVOLVED, CONVOLVED_PITCH, GATES, GATES_PITCH, MADE, MADE_PITCH, READ, READ_PITCH,
    MIX_SPARE, MIX_SPARE_SIZE, SEQUENCES, SEQUENCE_ROWS,
    SETTLED, SETTLED_COUNT, PATH, PATH_COUNT,  # states that are committed, and the (nodes,) path that they take
    # where attention reads a part (models.cpu.selected_attention): its address, or 0; (rows,) records of labels; slots
    # that a query attends to, the first and the last of which it always does; channels of a label
    SELECTION, SELECTED, SELECTED_MOST, SELECTED_SINKS, SELECTED_RECENT, LABEL_CHANNELS,
    FRAME_FIELDS,
) = range(0, 126 * FIELD, FIELD)  # fmt: skip

(
    ATTENTION, MLP,  # 1 where the sub-layer runs
    # a norm is 0 where there is none
    ATTENTION_NORM, QKV_WEIGHT, QKV_BIAS, Q_NORM, K_NORM, O_WEIGHT, O_BIAS, POST_ATTENTION_NORM,
    MLP_NORM, GATE_UP_WEIGHT, GATE_UP_BIAS, DOWN_WEIGHT, DOWN_BIAS, POST_MLP_NORM,
    QKV_KIND, O_KIND, GATE_UP_KIND, DOWN_KIND,  # kinds of product
    # (inputs,) bytes before the float32 that each number of a row belongs to, or 0: in order
    QKV_ORDER, O_ORDER, GATE_UP_ORDER, DOWN_ORDER,
    # latent attention, else 0: norms, the second map to queries and its kind, and what each head has
    LATENT_NORM, QUERY_NORM, QUERY_WEIGHT, QUERY_KIND, TO_LATENT, TO_VALUES,
    SINKS,  # (heads,) float32 over the attention's scale, or 0
    ROUTER, ROUTER_BIAS, EXPERT_RECORDS,  # mixtures, else 0: the router's strips and bias, address of the records
    IN_STRIPS,  # 1 where a layer attends by strips of keys and values
    CACHE,  # address of the layer's slot 0
    SLOT,  # (rows,) slots that keys and values go to
    SEEN,  # address of the layer's kind of window: rows of the four fields below
    ROPE,  # address of the layer's rope record, or 0
    TAP,  # where the states behind this layer go, or 0
    # 1 where the record attends to a source: it projects queries alone, which go to QUERIES_TAP, too, unless that is 0
    SOURCE_ATTENTION, QUERIES_TAP,
    BIASES,  # (heads, BIAS_PITCH) float32 over the attention's scale by falling distance, or 0
    SUM_NORM, MLP_SUM_NORM,  # norms of the residual stream behind attention and behind the MLP, or 0
    MIXER, STATES,  # address of the mixer's record, or 0, and of what it keeps of each sequence of the pass
    XIELU,  # (3,) float32 of the activation of that name, or 0
    CHANNELS, LABEL_LAYER,  # (kv heads, LABEL_CHANNELS) of a layer that chooses, or 0; which of these layers it is
    LAYER_FIELDS,
) = range(0, 51 * FIELD, FIELD)  # fmt: skip

(
    MIX_KIND, MIX_DELTA,  # models.cpu.mixers; 1 where states are written by the delta rule
    # maps: strips, kind of product, bias or 0, outputs of those before and inputs of that behind
    MIX_IN, MIX_IN_KIND, MIX_IN_BIAS, MIX_IN_SIZE, MIX_GATES, MIX_GATES_KIND, MIX_GATES_BIAS, MIX_GATES_SIZE,
    MIX_OUT, MIX_OUT_KIND, MIX_OUT_BIAS, MIX_OUT_SIZE,
    # one or two further maps, of MIX_RANK numbers each: strips or 0, kind, outputs of each; numbers of a row of MADE
    MIX_FURTHER, MIX_OTHER_FURTHER, MIX_FURTHER_KIND, MIX_FURTHER_SIZE, MIX_RANK, MIX_MADE_SIZE,
    # convolution: channels, taps, numbers before its inputs in what is projected, (taps, channels) float32, bias or 0
    MIX_CHANNELS, MIX_TAPS, MIX_FIRST, CONV_WEIGHT, CONV_BIAS,
    # recurrence: heads (0: there is none), keys and queries that heads share, 1 where heads take these in turn, sizes,
    # 1 where decays are by channel; (heads,), (heads, key dim) or (heads * key dim,) float32 of each
    MIX_HEADS, MIX_GROUPS, MIX_IN_TURN, MIX_KEY_DIM, MIX_VALUE_DIM, MIX_BY_CHANNEL, MIX_RATE, MIX_STEP_BIAS, MIX_SKIP,
    MIX_LEAST, MIX_MOST,  # of a step, float32
    MIX_NORM, MIX_NORM_ORDER, MIX_NORM_SIZE,  # weights, or 0; where the gate stands to it; numbers that are normed
    MIX_PART_NORM, MIX_PART_EPSILON,  # weights of norms of a row of GATES in three parts, or 0
    MIXER_FIELDS,
) = range(0, 42 * FIELD, FIELD)  # fmt: skip

(
    # of a sequence: its first row in the pass, rows, inputs that were scored before; 1 where its tokens are known;
    # (inputs,) the input before each; 1 where its text begins with the first input
    SEQUENCE_FIRST, SEQUENCE_COUNT, SEQUENCE_DONE, SEQUENCE_KNOWN, SEQUENCE_PARENTS, SEQUENCE_BEGINS,
    SEQUENCE_FIELDS,
) = range(0, 7 * FIELD, FIELD)  # fmt: skip

(
    # what a layer keeps of a sequence (models.state.recurrent): committed, of scored inputs, behind known tokens
    COLUMNS, MATRICES, NODE_COLUMNS, NODE_KEYS, NODE_UPDATES, NODE_SUMS, NEXT_COLUMNS, NEXT_MATRICES,
    STATE_FIELDS,
) = range(0, 9 * FIELD, FIELD)  # fmt: skip

NODE_STATES = NODE_KEYS
"""Of mixers that keep a state behind every scored input (StateShape.by_state): these."""

(
    # strips and biases, inner width, kinds of product
    EXPERT_GATE_UP, EXPERT_DOWN, EXPERT_GATE_UP_BIAS, EXPERT_DOWN_BIAS,
    EXPERT_INNER, EXPERT_GATE_UP_KIND, EXPERT_DOWN_KIND,
    EXPERT_FIELDS,
) = range(0, 8 * FIELD, FIELD)  # fmt: skip

(
    COSINE, SINE, TURNED, PLACE,  # float32 tables (positions, dims), dims, and (rows,) their rows
    GROWTH,  # (positions,) float32 that queries are multiplied by, or 0
    ROPE_FIELDS,
) = range(0, 6 * FIELD, FIELD)  # fmt: skip

(
    # lists of visible slots: those of the sequence, and the row's own behind them
    SHARED, SHARED_COUNT, OWN, OWN_COUNT,
    SEEN_FIELDS,
) = range(0, 5 * FIELD, FIELD)  # fmt: skip

(
    # a layer's state that is committed: its mixer's record, matrices before and after, records of scored inputs
    SETTLED_MIXER, SETTLED_FROM, SETTLED_KEYS, SETTLED_UPDATES, SETTLED_SUMS, SETTLED_TO,
    SETTLED_FIELDS,
) = range(0, 7 * FIELD, FIELD)  # fmt: skip
