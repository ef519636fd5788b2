#include "phases.h"

namespace dn {
namespace {

// Bytes of weights that an item of a product reads at least, and items a thread gets at most.
constexpr size_t kItemBytes = 32 << 10;
constexpr int kItemsPerThread = 8;

}  // namespace

void Phases::make_room(int k, size_t rows) {
  const size_t groups = ceil_div(k, kGroup);
  room_.q.grow(rows * groups * kGroup);
  room_.scale.grow(sizeof(float) * rows * groups);
  room_.minus128.grow(sizeof(int32_t) * rows * groups);
}

void Phases::product(const dn_matrix &w, const float *x, int rows, float *out, long ld, bool add,
                     int first) {
  const size_t before = static_cast<size_t>(first) * w.groups;
  Product p{};
  p.weight = w.packed.as<void>();
  p.bias = w.bias.empty() ? nullptr : w.bias.data();
  p.n = w.n;
  p.k = w.k;
  p.add = add;
  p.x = x;
  p.rows8 = {room_.q.as<int8_t>() + before * kGroup, room_.scale.as<float>() + before,
             room_.minus128.as<int32_t>() + before, w.groups};
  p.rows = rows;
  p.out = out;
  p.ld_out = ld;
  // As many items as keep the threads even, but none so small that taking it costs more.
  const size_t panel_bytes = w.packed.bytes() / w.panels;
  const int threads = pool_.threads();
  const int at_least = threads == 1 ? w.panels
                                    : static_cast<int>((kItemBytes + panel_bytes - 1) /
                                                       panel_bytes);
  const int items = std::clamp(w.panels / std::max(at_least, 1), 1, kItemsPerThread * threads);
  const auto run = w.int8 ? w.kernels->multiply_i8 : w.kernels->multiply_f32;
  const auto panel = [panels = w.panels, items](int item) {
    return static_cast<int>(int64_t{panels} * item / items);
  };
  const Pool *pool = &pool_;
  phases_.push_back({items, [=](int item, int) {
                       int last = 0;  // item of whose share it is
                       for (int t = 0; last <= item; t++) last = pool->share_begin(t + 1, items);
                       run(p, panel(item), panel(item + 1), panel(last));
                     }});
}

void Phases::quantise(int row, const float *x, int k) const {
  const size_t groups = ceil_div(k, kGroup);
  k_.quantise(x, k, room_.q.as<int8_t>() + row * groups * kGroup,
              room_.scale.as<float>() + row * groups, room_.minus128.as<int32_t>() + row * groups);
}

void Phases::quantise_rows(int count, const float *x, const dn_matrix &for_matrix, int first) {
  if (!for_matrix.int8) return;
  const int k = for_matrix.k;
  rows(count, [=, this](int row) { quantise(first + row, x + static_cast<size_t>(row) * k, k); });
}

void Phases::norm_row(int row, const float *x, const float *weight, int n, float eps, float *out,
                      bool int8) const {
  float *to = out + static_cast<size_t>(row) * n;
  k_.norm(x, weight, eps, n, to);
  if (int8) quantise(row, to, n);
}

void Phases::norm_rows(int count, const int32_t *which, const float *x,
                       const std::vector<float> &weight, float eps, float *out, bool int8) {
  const float *w = weight.data();
  const int n = static_cast<int>(weight.size());
  rows(count, [=, this](int row) {
    norm_row(row, x + static_cast<size_t>(which ? which[row] : row) * n, w, n, eps, out, int8);
  });
}

void Phases::gate_rows(int count, const float *both, int n, float *out, bool int8) {
  rows(count, [=, this](int row) {
    const float *gate = both + static_cast<size_t>(row) * 2 * n;
    float *to = out + static_cast<size_t>(row) * n;
    k_.gate(gate, gate + n, n, to);
    if (int8) quantise(row, to, n);
  });
}

}  // namespace dn
