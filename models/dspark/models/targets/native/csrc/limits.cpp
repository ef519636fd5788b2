// What the machine gives at best, by the threads and instructions that a model has.
#include <algorithm>
#include <chrono>

#include "model.h"

namespace dn {
namespace {

constexpr int kTries = 5;
constexpr int kPieces = 16;  // of a matrix, so that threads share it

template <class F>
double best_seconds(F run) {
  double best = 1e9;
  for (int i = 0; i < kTries; i++) {
    const auto begin = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    best = std::min(best, took.count());
  }
  return best;
}

}  // namespace

double bandwidth(dn_model &model) {
  std::vector<const Buffer *> buffers;
  buffers.push_back(&model.head->packed);
  for (const Layer &layer : model.layers)
    for (const auto *one : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down})
      buffers.push_back(&(*one)->packed);
  double bytes = 0;
  for (const Buffer *one : buffers) bytes += static_cast<double>(one->bytes() / kPieces * kPieces);
  std::atomic<float> sink{0};
  const int items = static_cast<int>(buffers.size()) * kPieces;
  const std::vector<Phase> phases = {{items, [&](int item, int) {
                                        const Buffer &one = *buffers[item / kPieces];
                                        const size_t piece = one.bytes() / kPieces;
                                        sink = model.kernels->read(
                                            one.as<char>() + item % kPieces * piece,
                                            static_cast<long>(piece));
                                      }}};
  return bytes / best_seconds([&] { model.pool->run(phases); });
}

double arithmetic(dn_model &model) {
  constexpr long turns = 20000;
  const int items = 8 * model.pool->threads();
  std::atomic<long> done{0};
  const std::vector<Phase> phases = {{items, [&](int, int) {
                                        float sink = 0;
                                        done = model.kernels->churn(model.config.int8 != 0, turns,
                                                                    &sink);
                                      }}};
  const double seconds = best_seconds([&] { model.pool->run(phases); });
  return static_cast<double>(done) * items / seconds;
}

}  // namespace dn
