/* A dense decoder's ragged step on a CPU: the plain C interface of the native backend.
 *
 * Matrices are row-major float32 [outputs, inputs] when they come in. Rows are tokens. Everything
 * that is passed by pointer without `const` is written. A function that may fail returns NULL or a
 * non-zero number and dn_error() tells why. One caller at a time per model.
 */
#ifndef DSPARK_NATIVE_H
#define DSPARK_NATIVE_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DN_ABI 1

#pragma GCC visibility push(default)

typedef struct dn_model dn_model;
typedef struct dn_matrix dn_matrix;

typedef struct {
  int32_t layers, width, heads, kv_heads, head_dim, inner, vocab;
  int32_t block_size; /* tokens of a KV block */
  int32_t int8;       /* 1: matrices in int8 with group-64 scales, 0: float32 */
  int32_t half_kv;    /* 1: keys and values in float16, 0: float32 */
  int32_t threads;
  float norm_eps, query_scale;
  const char *kernels; /* name of a kernel set, or NULL for the best one that runs here */
} dn_config;

/* Biases and q_norm/k_norm may be NULL. window: 0 for none. Nothing is kept of the pointers. */
typedef struct {
  const float *qkv, *qkv_bias, *out, *out_bias;
  const float *gate_up, *gate_up_bias, *down, *down_bias;
  const float *attention_norm, *mlp_norm, *q_norm, *k_norm;
  int32_t window;
} dn_layer;

/* Context features of one drafter: out[feature_rows, n] = norm(matrix [H^(l1); ...; H^(lm)]). */
typedef struct {
  dn_matrix *matrix; /* NULL: the bare concatenation */
  const float *norm; /* [n] or NULL */
  float eps;
  int32_t layers;
  const int32_t *layer_ids; /* -1: the embeddings */
  float *out;
} dn_projection;

typedef struct {
  int32_t B, R, L, F, table_width, projections;
  const int32_t *token_ids, *positions, *query_start, *context_len, *block_table;
  const int32_t *logit_rows, *feature_rows;
  const float *cos, *sin; /* [positions known, head_dim / 2] */
  float *logits;          /* [L, vocab] */
  const dn_projection *projection;
} dn_batch;

int dn_abi(void);
const char *dn_source(void);       /* hash of the source this was built from */
const char *dn_kernels(int index); /* names of the kernel sets that run here, best first, or NULL */
const char *dn_error(void);        /* of the last call on this thread that failed */

/* `embedding` float32 [vocab, width] stays the caller's and must outlive the model, or until dn_map.
 */
dn_model *dn_create(const dn_config *, const float *embedding);
/* The matrices as the kernels read them, in memory of the model's own or, after dn_map, in a file:
 * then they are NULL in what dn_set_layer and dn_set_head get. */
int dn_set_layer(dn_model *, int index, const dn_layer *);
int dn_set_head(dn_model *, const float *final_norm, const float *head, const float *bias);
void dn_destroy(dn_model *);
/* A file for dn_map is the dn_weights_size bytes at dn_weights of a model with the same tensors,
 * sizes and kernel set, by a library of the same source, and the embedding behind them. It is mapped
 * read-only: one copy serves all processes. It may be closed afterwards, but not cut short. What the
 * model had in memory of its own is freed. */
int64_t dn_weights_size(const dn_model *);
const void *dn_weights(const dn_model *);
int dn_map(dn_model *, int file);
/* Of any bytes, by the model's threads: equal for equal bytes; any change shows, but for those that
 * are made to deceive. */
uint64_t dn_checksum(dn_model *, const void *, int64_t bytes);
const char *dn_model_kernels(const dn_model *);
int64_t dn_weight_bytes(const dn_model *); /* read in a step whose rows all want logits */

int dn_allocate(dn_model *, int64_t blocks);
int64_t dn_kv_bytes(const dn_model *);
void dn_copy(dn_model *, int64_t src_block, int64_t dst_block);

/* float32 [n, k] laid out for the model's kernels. */
dn_matrix *dn_matrix_create(dn_model *, const float *weight, int32_t n, int32_t k, int32_t int8);
void dn_matrix_destroy(dn_matrix *);
/* out[rows, n] = x[rows, k] matrix^T, by the model's threads. For measurements and tests. */
int dn_multiply(dn_model *, const dn_matrix *, const float *x, int32_t rows, float *out);

int dn_step(dn_model *, const dn_batch *);
/* Bytes a second at which the model's threads read its weights by a plain loop, and multiply-adds a
 * second of its precision on registers alone: the best of a few tries of some milliseconds. */
double dn_bandwidth(dn_model *);
double dn_arithmetic(dn_model *);
/* Only the matrix products of a step of B rows, L of them with logits. */
int dn_step_products(dn_model *, int32_t B, int32_t L, float *logits);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
