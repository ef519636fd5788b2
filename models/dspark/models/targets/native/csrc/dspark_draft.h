/* A block drafter on the kernels of dspark_native.h: context in, blocks out, for ragged sessions.
 *
 * A session's keys and values lie in a ring of the caller's: float32 or float16
 * [layers][2][blocks][kv_heads * head_dim * block_size], slots in the order of their blocks; which
 * positions they hold is the caller's to know. One caller at a time per drafter.
 */
#ifndef DSPARK_DRAFT_H
#define DSPARK_DRAFT_H
#include "dspark_native.h"

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

typedef struct dn_drafter dn_drafter;

enum { DN_HEAD_NONE, DN_HEAD_VANILLA, DN_HEAD_GATED, DN_HEAD_RNN };
enum { DN_CONFIDENCE_NONE, DN_CONFIDENCE_HIDDEN, DN_CONFIDENCE_PREVIOUS };

typedef struct {
  int32_t layers, width, heads, kv_heads, head_dim, inner;
  int32_t vocab;       /* ids of the embedding */
  int32_t gamma, mask; /* a block is its anchor and gamma - 1 mask ids */
  int32_t draft_vocab; /* outputs of the LM head */
  int32_t candidates;  /* kept of them at each position; draft_vocab: all, in order */
  int32_t head, rank, head_rows; /* the sequential head; rows of W1 */
  int32_t confidence;  /* DN_CONFIDENCE_NONE: the logit of the largest probability, greedy */
  int32_t block_size, int8, half_kv, threads;
  float norm_eps, embed_scale, softcap; /* softcap 0: none */
  const char *kernels;
} dn_draft_config;

/* Biases may be NULL. kv: keys, then values. Nothing is kept of the pointers. */
typedef struct {
  const float *query, *query_bias, *kv, *kv_bias, *out, *out_bias, *gate_up, *down;
  const float *attention_norm, *mlp_norm, *q_norm, *k_norm;
} dn_draft_layer;

/* What a position adds to the base logits is W2 latent. Of the gated head's map (n = r) and the RNN
 * head's (n = 3r), `prepare` [n, width] and its bias read h, and `step` reads [W1[previous]] or
 * [state; W1[previous]]. wavelengths [head_dim / 2]: positions over them are the rotary angles. w1
 * [head_rows, r], w2 [draft_vocab, r] and index [vocab], the row of W1 of
 * each id, stay the caller's. */
typedef struct {
  const float *norm, *lm_head, *wavelengths, *w1, *w2, *prepare, *prepare_bias, *step;
  const float *confidence_hidden, *confidence_previous;
  float confidence_bias;
  const int32_t *index;
} dn_draft_head;

/* New context of R sessions: features [counts[0] + ..., width], rows of a session at positions
 * first[r].. that go to slots (slot[r] + i) % window of its ring. */
typedef struct {
  int32_t R, window;
  const int32_t *first, *counts, *slots, *blocks; /* blocks: of each ring */
  const float *features;
  void *const *rings;
} dn_draft_context;

/* Blocks of R sessions, whose rings hold `held` slots of context; the block goes behind them.
 * Of each the first `steps` positions are drawn. columns, confidences: [R, steps]. With `greedy`
 * columns are those of the largest logits and all is done; else draw with dn_drafter_next. */
typedef struct {
  int32_t R, steps, greedy;
  const int32_t *anchors, *starts, *held, *blocks;
  void *const *rings;
  int32_t *columns;
  float *confidences;
  int32_t *candidates; /* [R, steps, candidates]: columns of the draft vocabulary, not if greedy */
} dn_draft_block;

/* beside: a model whose threads work for the drafter too and which outlives it, or NULL. embedding
 * [vocab, width] stays the caller's, and is not needed afterwards if it is that of the model, which
 * is then read: dn_drafter_shares. */
dn_drafter *dn_drafter_create(const dn_draft_config *, dn_model *beside, const float *embedding);
int dn_drafter_shares(const dn_drafter *);
int dn_drafter_set_layer(dn_drafter *, int index, const dn_draft_layer *);
int dn_drafter_set_head(dn_drafter *, const dn_draft_head *);
void dn_drafter_destroy(dn_drafter *);
const char *dn_drafter_kernels(const dn_drafter *);

int dn_drafter_inject(dn_drafter *, const dn_draft_context *);
int dn_drafter_block(dn_drafter *, const dn_draft_block *);
/* The logits [R, candidates] of position k of the last block, given which candidate [R] was chosen
 * at k - 1 (NULL at k = 0), and its confidences [R]. */
int dn_drafter_next(dn_drafter *, int k, const int32_t *chosen, float *logits, float *confidences);
/* Only the matrix products of a block of R sessions and of `context` new positions. */
int dn_drafter_products(dn_drafter *, int32_t R, int32_t context);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
