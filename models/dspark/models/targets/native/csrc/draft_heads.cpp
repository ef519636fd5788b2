// What is drawn of a block: the largest base logits, and the sequential head on those.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "drafter.h"

namespace dn {
namespace {

typedef float V4 __attribute__((vector_size(16), may_alias));

V4 load(const float *p) {
  V4 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

float dot(const float *a, const float *b, int n) {
  V4 sum[4] = {};
  int i = 0;
  for (; i + 16 <= n; i += 16)
    for (int v = 0; v < 4; v++) sum[v] += load(a + i + 4 * v) * load(b + i + 4 * v);
  for (; i + 4 <= n; i += 4) sum[0] += load(a + i) * load(b + i);
  const V4 all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  float total = (all[0] + all[2]) + (all[1] + all[3]);
  for (; i < n; i++) total += a[i] * b[i];
  return total;
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Outputs that are looked at together: a bound on the last value taken is the `count`-th largest
// of the blocks' largest, if there are clearly more blocks than values to take.
int block_of(int n, int count) {
  int block = 1;
  while (block < 64 && 2 * block * 4 <= n / count) block *= 2;
  return block;
}

// latent of eq. 5, the gated form or eq. 6, of the row before and what h prepared.
void latent(const dn_drafter &d, const float *before, const float *prepared, float *state,
            float *out) {
  const int r = d.config.rank;
  if (d.config.head == DN_HEAD_VANILLA) {
    std::memcpy(out, before, sizeof(float) * r);
  } else if (d.config.head == DN_HEAD_GATED) {
    for (int i = 0; i < r; i++)
      out[i] = sigmoid(prepared[i] + dot(d.step.data() + static_cast<size_t>(i) * r, before, r)) *
               before[i];
  } else {
    float joint[3];
    std::vector<float> next(r);
    for (int i = 0; i < r; i++) {
      for (int third = 0; third < 3; third++) {
        const int row = third * r + i;
        const float *w = d.step.data() + static_cast<size_t>(row) * 2 * r;
        joint[third] = prepared[row] + (dot(w, state, r) + dot(w + r, before, r));
      }
      const float gate = sigmoid(joint[0]);
      next[i] = gate * state[i] + (1.0f - gate) * std::tanh(joint[1]);
      out[i] = std::tanh(joint[2]);
    }
    std::copy(next.begin(), next.end(), state);
  }
}

}  // namespace

int select_space(int n, int count) {
  const int block = block_of(n, count);
  return 2 * ((n + block - 1) / block) + n;
}

void select_largest(const float *x, int n, int count, float *space, int32_t *places,
                    int32_t *columns, float *values) {
  const auto first_ones = [&] {
    for (int i = 0; i < count; i++) columns[i] = i, values[i] = x[i];
  };
  if (count == n) return first_ones();
  const int block = block_of(n, count), blocks = (n + block - 1) / block;
  float *largest = space, *sorted = space + blocks;
  for (int b = 0; b < blocks; b++) {
    const int end = std::min((b + 1) * block, n);
    float most = -INFINITY;  // of numbers; NaN is below all
    for (int i = b * block; i < end; i++) most = x[i] > most ? x[i] : most;
    largest[b] = sorted[b] = most;
  }
  std::nth_element(sorted, sorted + count - 1, sorted + blocks, std::greater<float>());
  const float bound = sorted[count - 1];
  int found = 0;
  for (int b = 0; b < blocks; b++) {
    if (!(largest[b] >= bound)) continue;
    const int end = std::min((b + 1) * block, n);
    for (int i = b * block; i < end; i++)
      if (x[i] >= bound) places[found++] = i;
  }
  if (found < count) return first_ones();
  // Of equal values the lower columns, so that a row is the same whatever was in `space`.
  const auto before = [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  if (found > count) std::nth_element(places, places + count, places + found, before);
  for (int i = 0; i < count; i++) columns[i] = places[i], values[i] = x[places[i]];
}

void draft_position(dn_drafter &d, int r, int k, float *logits, float *confidence) {
  const dn_draft_config &c = d.config;
  const size_t row = static_cast<size_t>(r) * d.steps + k;
  const int M = c.candidates, rank = c.rank;
  const float *base = d.base.as<float>() + row * M;
  const int32_t *columns = d.columns.as<int32_t>() + row * M;
  const float *before = d.w1 ? d.w1 + static_cast<size_t>(d.previous[r]) * rank : nullptr;
  if (c.confidence != DN_CONFIDENCE_NONE) {
    const float *h = d.normed.as<float>() + row * c.width;
    *confidence = dot(h, d.confidence_hidden.data(), c.width) + d.confidence_bias;
    if (c.confidence == DN_CONFIDENCE_PREVIOUS)
      *confidence += dot(before, d.confidence_previous.data(), rank);
  }
  if (c.head == DN_HEAD_NONE) {
    std::memcpy(logits, base, sizeof(float) * M);
    return;
  }
  std::vector<float> moved(rank);
  latent(d, before, d.prepared.as<float>() + row * d.prepared_width(),
         d.states.data() + static_cast<size_t>(r) * rank, moved.data());
  for (int i = 0; i < M; i++)
    logits[i] = base[i] + dot(moved.data(), d.w2 + static_cast<size_t>(columns[i]) * rank, rank);
}

int largest(const float *x, int n) {
  int best = 0;
  for (int i = 1; i < n; i++)
    if (x[i] > x[best]) best = i;
  return best;
}

float top_logit(const float *x, int n, int best) {
  float rest = 0.0f;
  for (int i = 0; i < n; i++)
    if (i != best) rest += std::exp(x[i] - x[best]);
  return -std::log(std::max(rest, std::exp(-kMaxLogit)));
}

}  // namespace dn
