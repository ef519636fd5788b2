// A drafter: its matrices laid out for the kernels, what it keeps between calls, its threads.
#pragma once
#include "dspark_draft.h"
#include "model.h"

namespace dn {

struct DraftLayer {
  std::unique_ptr<dn_matrix> query, kv, out, gate_up, down;
  std::vector<float> attention_norm, mlp_norm, q_norm, k_norm;
};

}  // namespace dn

struct dn_drafter {
  dn_draft_config config;
  const dn::Kernels *kernels;
  const float *embedding;
  bool shares = false;  // the embedding is that of a model
  std::unique_ptr<dn::Pool> own_pool;
  dn::Pool *pool;
  std::vector<dn::DraftLayer> layers;
  std::vector<float> norm, wavelengths, step, confidence_hidden, confidence_previous;
  std::unique_ptr<dn_matrix> lm_head, prepare;
  const float *w1 = nullptr, *w2 = nullptr;
  const int32_t *index = nullptr;
  float confidence_bias = 0, query_scale = 1;
  std::vector<int32_t> in_order;  // blocks of the longest ring
  // Of a call, kept between calls.
  dn::Buffer hidden, normed, qkv, attended, gate_up, gated, logits, turns, scratch;
  dn::Int8Room rows8;
  // Of the last block, for what is drawn of it: h is `normed`, [R * steps, width].
  int R = 0, steps = 0;
  dn::Buffer prepared, columns, base;  // [R * steps, n or candidates]
  std::vector<int32_t> previous;       // [R]: rows of W1
  std::vector<float> states;           // [R, rank]

  int query_width() const { return config.heads * config.head_dim; }
  int kv_width() const { return config.kv_heads * config.head_dim; }
  // Numbers that a head reads of h.
  int prepared_width() const { return prepare ? prepare->n : 0; }
  size_t block_numbers() const {
    return static_cast<size_t>(kv_width()) * config.block_size;
  }
};

namespace dn {

void inject(dn_drafter &, const dn_draft_context &);
void draft_block(dn_drafter &, const dn_draft_block &);
void draft_next(dn_drafter &, int k, const int32_t *chosen, float *logits, float *confidences);
void draft_products(dn_drafter &, int R, int context);
// Columns of the `count` largest of x[n] and their values, in no order; the first ones where there
// are not so many numbers. Space: `select_space(n, count)` floats and as many integers.
void select_largest(const float *x, int n, int count, float *space, int32_t *places,
                    int32_t *columns, float *values);
int select_space(int n, int count);
// Position k of session r of the last block.
void draft_position(dn_drafter &, int r, int k, float *logits, float *confidence);
int largest(const float *x, int n);  // the first of equal ones
// The logit of the largest probability, of at most kMaxLogit.
constexpr float kMaxLogit = 30.0f;
float top_logit(const float *x, int n, int largest);

}  // namespace dn
