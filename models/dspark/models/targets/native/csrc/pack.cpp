// Matrices become panels, and float32 becomes int8 where that is asked for.
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>

#include "model.h"

namespace dn {
namespace {

constexpr size_t kHuge = size_t{1} << 21;

// The bfloat16 at or above a positive number, so that no weight exceeds 127 steps.
uint16_t bfloat16_up(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0xffffu) >> 16);
}

float from_bfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// One output's group into its places of a record: u8 [16][32][4], then the scales.
void pack_group(const float *w, int count, int output, uint8_t *record) {
  float largest = 0.0f;
  for (int i = 0; i < count; i++) {
    const float size = w[i] < 0.0f ? -w[i] : w[i];
    largest = size > largest ? size : largest;
  }
  const uint16_t scale = bfloat16_up(largest / 127.0f);
  const float step = from_bfloat16(scale), up = step > 0.0f ? 1.0f / step : 0.0f;
  for (int i = 0; i < kGroup; i++) {
    const float steps = i < count ? w[i] * up : 0.0f;
    const float whole = (steps + 12582912.0f) - 12582912.0f;  // to the nearest
    const float kept = whole > 127.0f ? 127.0f : whole < -127.0f ? -127.0f : whole;
    record[((i / 4) * kInt8Panel + output) * 4 + i % 4] =
        static_cast<uint8_t>(static_cast<int>(kept) + 128);
  }
  std::memcpy(record + kGroup * kInt8Panel + 2 * output, &scale, 2);
}

void pack_panel(const dn_matrix &matrix, const float *w, int panel) {
  if (!matrix.int8) {
    const size_t first = static_cast<size_t>(panel) * matrix.panel;
    matrix.kernels->pack_f32(w + first * matrix.k, matrix.n - static_cast<int>(first), matrix.k,
                             matrix.packed.as<float>() + first * matrix.k);
    return;
  }
  for (int g = 0; g < matrix.groups; g++) {
    uint8_t *record = matrix.packed.as<uint8_t>() +
                      (static_cast<size_t>(panel) * matrix.groups + g) * kInt8Record;
    for (int i = 0; i < kInt8Panel; i++) {
      const size_t output = static_cast<size_t>(panel) * kInt8Panel + i;
      const int count = std::min(kGroup, matrix.k - g * kGroup);
      const bool real = output < static_cast<size_t>(matrix.n);
      pack_group(w + (real ? output * matrix.k + g * kGroup : 0), real ? count : 0, i, record);
    }
  }
}

}  // namespace

Buffer::Buffer(size_t bytes, bool huge) : bytes_(bytes) {
  if (!bytes) return;
  at_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at_ == MAP_FAILED) {
    at_ = nullptr;
    throw std::bad_alloc();
  }
#ifdef MADV_HUGEPAGE
  if (huge && bytes >= kHuge) madvise(at_, bytes, MADV_HUGEPAGE);
#endif
}

Buffer Buffer::of_file(int file, size_t bytes) {
  struct stat facts;
  if (fstat(file, &facts) || static_cast<size_t>(facts.st_size) < bytes)
    throw std::runtime_error("the file of weights is too short");
  Buffer mapped;
  void *at = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  mapped.at_ = at;
  mapped.bytes_ = bytes;
#ifdef MADV_HUGEPAGE
  madvise(at, bytes, MADV_HUGEPAGE);
#endif
  return mapped;
}

Buffer::~Buffer() {
  if (at_ && own_) munmap(at_, bytes_);
}

Buffer &Buffer::operator=(Buffer &&other) noexcept {
  std::swap(at_, other.at_);
  std::swap(bytes_, other.bytes_);
  std::swap(own_, other.own_);
  return *this;
}

void Buffer::grow(size_t bytes) {
  if (bytes > this->bytes()) *this = Buffer(bytes + bytes / 4, false);
}

bool Buffer::take() const {
#ifdef MADV_POPULATE_WRITE
  return !bytes() || !madvise(at_, bytes_, MADV_POPULATE_WRITE) || errno == EINVAL;
#else
  return true;
#endif
}

std::unique_ptr<dn_matrix> shaped(const Kernels *kernels, bool int8, int n, int k) {
  auto matrix = std::make_unique<dn_matrix>();
  matrix->kernels = kernels;
  matrix->int8 = int8;
  matrix->n = n;
  matrix->k = k;
  matrix->groups = (k + kGroup - 1) / kGroup;
  matrix->panel = int8 ? kInt8Panel : kernels->f32_panel;
  matrix->panels = (n + matrix->panel - 1) / matrix->panel;
  return matrix;
}

size_t packed_bytes(const dn_matrix &matrix) {
  const size_t panel = matrix.int8 ? static_cast<size_t>(matrix.groups) * kInt8Record
                                   : sizeof(float) * matrix.panel * matrix.k;
  return panel * matrix.panels;
}

void fill(Pool &pool, const dn_matrix &matrix, const float *w) {
  pool.run({{matrix.panels, [&](int panel, int) { pack_panel(matrix, w, panel); }}});
}

std::unique_ptr<dn_matrix> pack(Pool &pool, const Kernels *kernels, bool int8, const float *w,
                                int n, int k, const float *bias) {
  auto matrix = shaped(kernels, int8, n, k);
  if (bias) matrix->bias.assign(bias, bias + n);
  matrix->packed = Buffer(packed_bytes(*matrix));
  fill(pool, *matrix, w);
  return matrix;
}

}  // namespace dn
