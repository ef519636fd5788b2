// The C interface: picks kernels, checks what comes in, and lets no exception out.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "errors.h"
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

using dn::guarded;
using dn::require;

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

// w NULL: it is in the file that the weights are of.
void set_matrix(dn_model &model, dn_matrix &matrix, const float *w, const float *bias) {
  matrix.bias = copied(bias, matrix.n);
  if (!w && model.of_file) return;
  if (!w || model.of_file) throw std::runtime_error("a matrix is in a file and given, or neither");
  if (!model.weights.bytes()) dn::place(model, dn::Buffer(dn::weights_size(model)));
  dn::fill(*model.pool, matrix, w);
}

}  // namespace

namespace dn {

std::string &last_error() {
  thread_local std::string text;
  return text;
}

void require(bool good, const char *what, long value, long limit) {
  if (good) return;
  char text[160];
  std::snprintf(text, sizeof text, "%s: %ld, the limit is %ld", what, value, limit);
  throw std::runtime_error(text);
}

const Kernels *find_kernels(const char *name) {
  for (const Kernels *one : runnable())
    if (!name || !std::strcmp(name, one->name)) return one;
  throw std::runtime_error("kernels: this processor runs none of those");
}

}  // namespace dn

extern "C" {

int dn_abi(void) { return DN_ABI; }
const char *dn_source(void) { return DN_SOURCE; }
const char *dn_error(void) { return dn::last_error().c_str(); }

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
    model->kernels = dn::find_kernels(config->kernels);
    const int q = config->heads * config->head_dim;
    const auto shaped = [&](int n, int k) {
      return dn::shaped(model->kernels, config->int8 != 0, n, k);
    };
    model->layers.resize(config->layers);
    for (dn::Layer &layer : model->layers) {
      layer.qkv = shaped(q + 2 * config->kv_heads * config->head_dim, config->width);
      layer.out = shaped(config->width, q);
      layer.gate_up = shaped(2 * config->inner, config->width);
      layer.down = shaped(config->width, config->inner);
    }
    model->head = shaped(config->vocab, config->width);
    model->pool = std::make_unique<dn::Pool>(config->threads);
  });
  return failed ? nullptr : model.release();
}

int dn_set_layer(dn_model *model, int index, const dn_layer *from) {
  return guarded([&] {
    const dn_config &c = model->config;
    require(index >= 0 && index < c.layers, "layer", index, c.layers - 1);
    dn::Layer &layer = model->layers[index];
    set_matrix(*model, *layer.qkv, from->qkv, from->qkv_bias);
    set_matrix(*model, *layer.out, from->out, from->out_bias);
    set_matrix(*model, *layer.gate_up, from->gate_up, from->gate_up_bias);
    set_matrix(*model, *layer.down, from->down, from->down_bias);
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
    set_matrix(*model, *model->head, head, bias);
  });
}

int64_t dn_weights_size(const dn_model *model) {
  return static_cast<int64_t>(dn::weights_size(*model));
}

const void *dn_weights(const dn_model *model) { return model->weights.as<void>(); }

int dn_map(dn_model *model, int file) {
  return guarded([&] {
    const size_t matrices = dn::weights_size(*model);
    const size_t embedding = sizeof(float) * model->config.vocab * model->config.width;
    dn::place(*model, dn::Buffer::of_file(file, matrices + embedding));
    model->embedding = reinterpret_cast<const float *>(model->weights.as<char>() + matrices);
    model->of_file = true;
  });
}

uint64_t dn_checksum(dn_model *model, const void *from, int64_t bytes) {
  return dn::checksum(*model->pool, from, static_cast<size_t>(bytes));
}

void dn_destroy(dn_model *model) { delete model; }

const char *dn_model_kernels(const dn_model *model) { return model->kernels->name; }

int64_t dn_weight_bytes(const dn_model *model) {
  int64_t bytes = static_cast<int64_t>(model->head->packed.bytes());
  for (const auto &layer : model->layers)
    for (const auto *one : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down})
      bytes += static_cast<int64_t>((*one)->packed.bytes());
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
    // A step that writes a block for the first time would wait for its pages, for huge ones on a
    // machine whose memory is full of files 2 ms a MB.
    std::atomic<bool> there{true};
    model->pool->run({{2 * model->config.layers, [&](int item, int) {
                         const auto &pools = item % 2 ? model->values : model->keys;
                         if (!pools[item / 2].take()) there = false;
                       }}});
    if (!there) {
      model->keys.clear();
      model->values.clear();
      throw std::bad_alloc();
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
