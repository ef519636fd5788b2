// A model: its matrices laid out for the kernels, its paged keys and values, its threads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "dspark_native.h"
#include "kernels.h"
#include "pool.h"

namespace dn {

// Memory on its own pages, huge ones where it is asked for and the system has them; zeros when it
// comes.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes, bool huge = true);
  // A part of another buffer, which outlives it.
  Buffer(void *at, size_t bytes) : at_(at), bytes_(bytes), own_(false) {}
  // The beginning of a file, read-only, one copy for all processes that map it.
  static Buffer of_file(int file, size_t bytes);
  ~Buffer();
  Buffer(Buffer &&other) noexcept : at_(other.at_), bytes_(other.bytes_), own_(other.own_) {
    other.at_ = nullptr;
  }
  Buffer &operator=(Buffer &&other) noexcept;

  template <class T>
  T *as() const { return static_cast<T *>(at_); }
  size_t bytes() const { return at_ ? bytes_ : 0; }
  // At least so large; what it held is lost if it grows. Not on huge pages: it grows while
  // something is served, and the system may take 70 ms to make room for those.
  void grow(size_t bytes);
  // Has the system give all of it now, not where it is first written; false where there is not so
  // much. Systems that cannot (Linux before 5.14) give it later.
  bool take() const;

 private:
  void *at_ = nullptr;
  size_t bytes_ = 0;
  bool own_ = true;
};

// Rows as int8 products read them, kept between steps.
struct Int8Room {
  Buffer q, scale, minus128;
};

struct Layer {
  std::unique_ptr<dn_matrix> qkv, out, gate_up, down;
  std::vector<float> attention_norm, mlp_norm, q_norm, k_norm;
  int window = 0;
};

}  // namespace dn

struct dn_matrix {
  const dn::Kernels *kernels;
  bool int8;
  int n, k, groups, panels, panel;
  std::vector<float> bias;
  dn::Buffer packed;
};

struct dn_model {
  dn_config config;
  const dn::Kernels *kernels;
  const float *embedding;
  dn::Buffer weights;  // all that follows lies here, and behind it the embedding if it is of a file
  bool of_file = false;
  std::vector<dn::Layer> layers;
  std::vector<float> final_norm;
  std::unique_ptr<dn_matrix> head;
  std::unique_ptr<dn::Pool> pool;
  int64_t blocks = 0;
  std::vector<dn::Buffer> keys, values;  // by layer
  // Of a step, kept between steps.
  dn::Buffer hidden, normed, qkv, attended, gate_up, gated, wide, partials, scratch;
  dn::Int8Room rows8;

  size_t kv_size() const { return config.half_kv ? 2 : 4; }
  size_t block_numbers() const {
    return static_cast<size_t>(config.kv_heads) * config.head_dim * config.block_size;
  }
};

namespace dn {

// A set that runs here by its name, or for NULL the best one. Throws.
const Kernels *find_kernels(const char *name);
// A matrix that says how large it will be, and has nothing yet.
std::unique_ptr<dn_matrix> shaped(const Kernels *, bool int8, int n, int k);
size_t packed_bytes(const dn_matrix &);
// Lays out w [n, k] in `packed`.
void fill(Pool &, const dn_matrix &, const float *w);
std::unique_ptr<dn_matrix> pack(Pool &, const Kernels *, bool int8, const float *w, int n, int k,
                                const float *bias);
// The bytes of a model's matrices one behind the other, each on a page of its own.
size_t weights_size(const dn_model &);
void place(dn_model &, Buffer weights);
uint64_t checksum(Pool &, const void *, size_t bytes);
void run_step(dn_model &, const dn_batch &);
void run_products(dn_model &, int B, int L, float *logits);
double bandwidth(dn_model &);
double arithmetic(dn_model &);
void multiply(dn_model &, const dn_matrix &, const float *x, int rows, float *out);

}  // namespace dn
