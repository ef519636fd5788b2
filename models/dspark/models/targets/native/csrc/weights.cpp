// Where a model's weights lie: one stretch of memory, so that a file of it serves many processes.
#include <cstring>

#include "model.h"

namespace dn {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kPiece = size_t{1} << 20;  // of a checksum, so that threads share it
constexpr int kLanes = 8;                   // multiplications under way at a time
constexpr uint64_t kOdd = 0x9e3779b97f4a7c15u;

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

template <class F>
void each_matrix(const dn_model &model, F f) {
  for (const Layer &layer : model.layers)
    for (const auto *one : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) f(**one);
  f(*model.head);
}

// No two numbers of 64 bits give the same.
uint64_t stir(uint64_t sum, uint64_t word) {
  sum = (sum ^ word) * kOdd;
  return sum << 31 | sum >> 33;
}

uint64_t piece_sum(const char *at, size_t bytes) {
  uint64_t lanes[kLanes], words[kLanes] = {};
  for (int i = 0; i < kLanes; i++) lanes[i] = kOdd + i;
  for (size_t done = 0; done < bytes; done += sizeof words) {
    const size_t left = bytes - done < sizeof words ? bytes - done : sizeof words;
    if (left < sizeof words) std::memset(words, 0, sizeof words);
    std::memcpy(words, at + done, left);
    for (int i = 0; i < kLanes; i++) lanes[i] = stir(lanes[i], words[i]);
  }
  uint64_t sum = bytes;
  for (const uint64_t lane : lanes) sum = stir(sum, lane);
  return sum;
}

}  // namespace

size_t weights_size(const dn_model &model) {
  size_t bytes = 0;
  each_matrix(model, [&](const dn_matrix &one) { bytes += whole_pages(packed_bytes(one)); });
  return bytes;
}

void place(dn_model &model, Buffer weights) {
  char *at = weights.as<char>();
  each_matrix(model, [&](dn_matrix &one) {
    one.packed = Buffer(at, packed_bytes(one));
    at += whole_pages(packed_bytes(one));
  });
  model.weights = std::move(weights);
}

uint64_t checksum(Pool &pool, const void *from, size_t bytes) {
  const char *at = static_cast<const char *>(from);
  std::vector<uint64_t> sums((bytes + kPiece - 1) / kPiece);
  constexpr size_t most = size_t{1} << 19;  // items of a phase
  std::vector<Phase> phases;
  for (size_t first = 0; first < sums.size(); first += most) {
    const size_t count = sums.size() - first < most ? sums.size() - first : most;
    phases.push_back({static_cast<int>(count), [=, &sums](int item, int) {
                        const size_t begin = (first + item) * kPiece;
                        sums[first + item] =
                            piece_sum(at + begin, bytes - begin < kPiece ? bytes - begin : kPiece);
                      }});
  }
  pool.run(phases);
  uint64_t sum = bytes;
  for (const uint64_t one : sums) sum = stir(sum, one);
  return sum;
}

}  // namespace dn
