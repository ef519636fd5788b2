// The C interface: picks kernels, checks what comes in, and lets no exception out.
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

#include "model.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#ifndef DN_SOURCE
#define DN_SOURCE "unknown"
#endif

extern "C" {
#define DN_DECLARE(set) const dn::Kernels *dn_kernels_##set();
DN_KERNEL_SETS(DN_DECLARE)
}

namespace {

thread_local std::string last_error;

#if defined(__x86_64__)
bool cpu_bit(unsigned leaf, unsigned sub, int output, int bit) {
  unsigned r[4];
  return __get_cpuid_count(leaf, sub, &r[0], &r[1], &r[2], &r[3]) && (r[output] >> bit & 1);
}
// __builtin_cpu_supports asks the system too: it has to keep the wide registers.
bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_bit(1, 0, 2, 29);
}
bool runs_avxvnni() { return runs_avx2() && cpu_bit(7, 1, 0, 4); }
bool runs_avx512vnni() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
#endif


std::vector<const dn::Kernels *> runnable() {
  std::vector<const dn::Kernels *> sets;
#ifdef DN_HAVE_avx512vnni
  if (runs_avx512vnni()) sets.push_back(dn_kernels_avx512vnni());
#endif
#ifdef DN_HAVE_avxvnni
  if (runs_avxvnni()) sets.push_back(dn_kernels_avxvnni());
#endif
#ifdef DN_HAVE_avx2
  if (runs_avx2()) sets.push_back(dn_kernels_avx2());
#endif
#ifdef DN_HAVE_portable
  sets.push_back(dn_kernels_portable());
#endif
  return sets;
}

template <class F>
int guarded(F f) {
  try {
    f();
    return 0;
  } catch (const std::bad_alloc &) {
    last_error = "no memory";
  } catch (const std::exception &error) {
    last_error = error.what();
  }
  return -1;
}

void require(bool good, const char *what, long value, long limit) {
  if (good) return;
  char text[160];
  std::snprintf(text, sizeof text, "%s: %ld, the limit is %ld", what, value, limit);
  throw std::runtime_error(text);
}

void check_rows(const int32_t *rows, int count, int B, const char *what) {
  for (int i = 0; i < count; i++) require(rows[i] >= 0 && rows[i] < B, what, rows[i], B - 1);
}

// Numbers that would lead outside of the memory there is.
void check_batch(const dn_model &m, const dn_batch &b) {
  const int bs = m.config.block_size;
  require(b.query_start[0] == 0, "query_start[0]", b.query_start[0], 0);
  require(b.query_start[b.R] == b.B, "query_start[R]", b.query_start[b.R], b.B);
  for (int i = 0; i < b.B; i++)
    require(b.token_ids[i] >= 0 && b.token_ids[i] < m.config.vocab, "token id", b.token_ids[i],
            m.config.vocab - 1);
  check_rows(b.logit_rows, b.L, b.B, "logit row");
  check_rows(b.feature_rows, b.F, b.B, "feature row");
  for (int r = 0; r < b.R; r++) {
    const int count = b.query_start[r + 1] - b.query_start[r];
    require(count >= 0 && b.context_len[r] >= 0, "rows of a sequence", count, b.B);
    const int blocks = (b.context_len[r] + count + bs - 1) / bs;
    require(blocks <= b.table_width, "blocks of a sequence", blocks, b.table_width);
    for (int i = 0; i < blocks; i++) {
      const int block = b.block_table[static_cast<int64_t>(r) * b.table_width + i];
      require(block >= 0 && block < m.blocks, "block", block, static_cast<long>(m.blocks) - 1);
    }
  }
}

std::vector<float> copied(const float *from, int n) {
  return from ? std::vector<float>(from, from + n) : std::vector<float>();
}

}  // namespace

extern "C" {

int dn_abi(void) { return DN_ABI; }
const char *dn_source(void) { return DN_SOURCE; }
const char *dn_error(void) { return last_error.c_str(); }

const char *dn_kernels(int index) {
  const auto sets = runnable();
  return index >= 0 && index < static_cast<int>(sets.size()) ? sets[index]->name : nullptr;
}

dn_model *dn_create(const dn_config *config, const float *embedding) {
  std::unique_ptr<dn_model> model;
  const int failed = guarded([&] {
    require(config->head_dim % 16 == 0 && config->head_dim <= 512, "head_dim", config->head_dim,
            512);
    require(config->threads >= 1 && config->threads <= 1024, "threads", config->threads, 1024);
    require(config->block_size >= 1, "block_size", config->block_size, 1);
    require(config->heads % config->kv_heads == 0, "heads", config->heads, config->kv_heads);
    model = std::make_unique<dn_model>();
    model->config = *config;
    model->config.kernels = nullptr;
    model->embedding = embedding;
    for (const dn::Kernels *one : runnable())
      if (!model->kernels && (!config->kernels || !std::strcmp(config->kernels, one->name)))
        model->kernels = one;
    if (!model->kernels) throw std::runtime_error("kernels: this processor runs none of those");
    model->layers.resize(config->layers);
    model->pool = std::make_unique<dn::Pool>(config->threads);
  });
  return failed ? nullptr : model.release();
}

int dn_set_layer(dn_model *model, int index, const dn_layer *from) {
  return guarded([&] {
    const dn_config &c = model->config;
    require(index >= 0 && index < c.layers, "layer", index, c.layers - 1);
    const int q = c.heads * c.head_dim, qkv = q + 2 * c.kv_heads * c.head_dim;
    const auto pack = [&](const float *w, int n, int k, const float *bias) {
      return dn::pack(*model->pool, model->kernels, c.int8 != 0, w, n, k, bias);
    };
    dn::Layer &layer = model->layers[index];
    layer.qkv = pack(from->qkv, qkv, c.width, from->qkv_bias);
    layer.out = pack(from->out, c.width, q, from->out_bias);
    layer.gate_up = pack(from->gate_up, 2 * c.inner, c.width, from->gate_up_bias);
    layer.down = pack(from->down, c.width, c.inner, from->down_bias);
    layer.attention_norm = copied(from->attention_norm, c.width);
    layer.mlp_norm = copied(from->mlp_norm, c.width);
    layer.q_norm = copied(from->q_norm, c.head_dim);
    layer.k_norm = copied(from->k_norm, c.head_dim);
    layer.window = from->window;
  });
}

int dn_set_head(dn_model *model, const float *final_norm, const float *head, const float *bias) {
  return guarded([&] {
    const dn_config &c = model->config;
    model->final_norm = copied(final_norm, c.width);
    model->head = dn::pack(*model->pool, model->kernels, c.int8 != 0, head, c.vocab, c.width, bias);
  });
}

void dn_destroy(dn_model *model) { delete model; }

const char *dn_model_kernels(const dn_model *model) { return model->kernels->name; }

int64_t dn_weight_bytes(const dn_model *model) {
  int64_t bytes = model->head ? static_cast<int64_t>(model->head->packed.bytes()) : 0;
  for (const auto &layer : model->layers)
    for (const auto *one : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down})
      if (*one) bytes += static_cast<int64_t>((*one)->packed.bytes());
  return bytes;
}

int dn_allocate(dn_model *model, int64_t blocks) {
  return guarded([&] {
    model->keys.clear();
    model->values.clear();
    model->blocks = 0;
    const size_t bytes = model->block_numbers() * model->kv_size() * blocks;
    for (int i = 0; i < model->config.layers; i++) {
      model->keys.emplace_back(bytes);
      model->values.emplace_back(bytes);
    }
    model->blocks = blocks;
  });
}

int64_t dn_kv_bytes(const dn_model *model) {
  int64_t bytes = 0;
  for (const auto &pool : model->keys) bytes += 2 * static_cast<int64_t>(pool.bytes());
  return bytes;
}

void dn_copy(dn_model *model, int64_t src, int64_t dst) {
  const size_t bytes = model->block_numbers() * model->kv_size();
  for (auto *pools : {&model->keys, &model->values})
    for (auto &pool : *pools)
      std::memcpy(pool.as<char>() + dst * bytes, pool.as<char>() + src * bytes, bytes);
}

dn_matrix *dn_matrix_create(dn_model *model, const float *weight, int32_t n, int32_t k,
                            int32_t int8) {
  std::unique_ptr<dn_matrix> matrix;
  const int failed = guarded([&] {
    matrix = dn::pack(*model->pool, model->kernels, int8 != 0, weight, n, k, nullptr);
  });
  return failed ? nullptr : matrix.release();
}

void dn_matrix_destroy(dn_matrix *matrix) { delete matrix; }

int dn_multiply(dn_model *model, const dn_matrix *matrix, const float *x, int32_t rows,
                float *out) {
  return guarded([&] { dn::multiply(*model, *matrix, x, rows, out); });
}

int dn_step(dn_model *model, const dn_batch *batch) {
  return guarded([&] {
    check_batch(*model, *batch);
    dn::run_step(*model, *batch);
  });
}

int dn_step_products(dn_model *model, int32_t B, int32_t L, float *logits) {
  return guarded([&] { dn::run_products(*model, B, L, logits); });
}

double dn_bandwidth(dn_model *model) { return dn::bandwidth(*model); }
double dn_arithmetic(dn_model *model) { return dn::arithmetic(*model); }
}
