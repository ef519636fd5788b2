// What steps are made of: phases over rows, and products cut into items for the threads.
#pragma once
#include <algorithm>
#include <vector>

#include "model.h"

namespace dn {

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

class Phases {
 public:
  Phases(Pool &pool, const Kernels &kernels, Int8Room &room)
      : pool_(pool), k_(kernels), room_(room) {}

  // For `rows` rows of k inputs in int8.
  void make_room(int k, size_t rows);
  void run() { pool_.run(phases_); }

  // out[rows, w.n] = x w^T (+ bias) (+ out). Rows of an int8 matrix were quantised in a phase
  // before, from row `first` of what was quantised on.
  void product(const dn_matrix &w, const float *x, int rows, float *out, long ld, bool add,
               int first = 0);
  void quantise_rows(int count, const float *x, const dn_matrix &for_matrix, int first = 0);

 protected:
  // A phase over rows, several a turn where there are many.
  template <class F>
  void rows(int count, F f) {
    const int items = std::min(count, 4 * pool_.threads());
    phases_.push_back({items, [=](int item, int) {
                         const int end = static_cast<int>(int64_t{count} * (item + 1) / items);
                         for (int row = static_cast<int>(int64_t{count} * item / items); row < end;
                              row++)
                           f(row);
                       }});
  }

  // A row of n numbers, normed and made ready for a product.
  void norm_row(int row, const float *x, const float *weight, int n, float eps, float *out,
                bool int8) const;
  // Rows `which` (or all) of x [.., n], likewise.
  void norm_rows(int count, const int32_t *which, const float *x, const std::vector<float> &weight,
                 float eps, float *out, bool int8);
  // silu(gate) * up of both [.., 2n], made ready for a product.
  void gate_rows(int count, const float *both, int n, float *out, bool int8);
  void quantise(int row, const float *x, int k) const;

  Pool &pool_;
  const Kernels &k_;
  Int8Room &room_;
  std::vector<Phase> phases_;
};

}  // namespace dn
