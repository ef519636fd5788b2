// What a kernel set offers. kernels.cpp is compiled once for each instruction set and fills one.
//
// Rows are independent: each output element is one chain of operations whose order depends on
// nothing but the shapes of weights and the absolute positions of keys. Blocking of rows, threads
// and items never enter it.
#pragma once
#include <stdint.h>

namespace dn {

#ifndef DN_GROUP  // other sizes are for experiments (benchmarks/native_quality.py)
#define DN_GROUP 64
#endif
constexpr int kGroup = DN_GROUP;  // inputs that share an int8 scale
constexpr int kInt8Panel = 32;    // outputs of an int8 panel
constexpr int kPartition = 128;   // keys that are summed before they are merged
constexpr int kInt8Record = kGroup * kInt8Panel + 2 * kInt8Panel;  // bytes of a panel's group

// An int8 panel is a record for each group: u8 [16][32][4] (weight + 128, four inputs of an output
// side by side) and bfloat16 scales [32].
struct Int8Rows {  // activations: K padded to whole groups with zeros
  const int8_t *q;         // [rows, groups * 64]
  const float *scale;      // [rows, groups]
  const int32_t *minus128; // [rows, groups]: -128 * sum of q, undoes the weights' offset
  int groups;
};

struct Product {  // out[rows, n] = x W^T (+ bias) (+ out)
  const void *weight;
  const float *bias;
  int n, k;
  bool add;
  const float *x;  // float32 [rows, k]
  Int8Rows rows8;
  int rows;
  float *out;
  long ld_out;
};

struct Attention {  // keys of one KV head of one sequence
  const void *keys;    // pool: [block][kv head][head_dim][block_size]
  const void *values;  // pool: [block][kv head][block_size][head_dim]
  const int32_t *table;
  int block_size, kv_heads, kv_head, head_dim;
  int window;
  float scale;
  // Where the caller goes after this partition: its keys are asked for while this one is summed.
  struct Next {
    const int32_t *table;  // NULL: nowhere
    int kv_head, partition;
    int length;  // keys of the sequence
  } next;
};

struct Query {
  const float *q;  // [head_dim]
  int index;       // position in its sequence; it sees keys up to this one
};

struct Kernels {
  const char *name;
  int f32_panel;
  void (*pack_f32)(const float *w, int n, int k, float *out);  // one panel of the n rows left
  // Panels [begin, end); the caller goes on up to `last`, so the next ones are asked for.
  void (*multiply_f32)(const Product &, int begin, int end, int last);
  void (*multiply_i8)(const Product &, int begin, int end, int last);
  void (*norm)(const float *x, const float *weight, float eps, int n, float *out);
  void (*quantise)(const float *x, int k, int8_t *q, float *scale, int32_t *minus128);
  void (*gate)(const float *gate, const float *up, int n, float *out);  // silu(gate) * up
  void (*rotate)(float *head, const float *cos, const float *sin, int head_dim);
  void (*store_kv)(const float *key, const float *value, int head_dim, int block_size, int slot,
                   bool half, void *keys, void *values);
  // partial: [queries][head_dim + 2]: the sum over keys of partition p, its maximum, its weight.
  void (*attend)(const Attention &, const Query *, int queries, int partition, bool half,
                 float *scratch, float *partial);
  void (*merge)(float *into, const float *partial, int head_dim);  // into starts as start_merge
  void (*finish)(const float *merged, int head_dim, float *out);
  // What the machine gives at best: a sum over memory, and multiply-adds on registers alone.
  float (*read)(const void *from, long bytes);
  long (*churn)(bool int8, long turns, float *sink);  // how many multiply-adds that were
};

// Floats that `attend` needs of scratch.
constexpr int attend_scratch(int head_dim) { return 8 * kPartition + 16 * head_dim; }

inline void start_merge(float *into, int head_dim) {
  for (int i = 0; i < head_dim; i++) into[i] = 0.0f;
  into[head_dim] = -__builtin_inff();
  into[head_dim + 1] = 0.0f;
}

#define DN_KERNEL_SETS(one) one(avx512vnni) one(avxvnni) one(avx2) one(portable)

}  // namespace dn
