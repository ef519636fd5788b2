#include "pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dn {
namespace {

constexpr uint64_t kItems = (1u << 20) - 1;
// Turns of a waiting loop before it lets others have the core, and how long a thread without work
// stays awake: much longer costs others a core, shorter a wake-up every step.
constexpr int kSpins = 2000;
constexpr auto kAwake = std::chrono::microseconds(300);

uint64_t end_of(uint64_t ticket) { return ticket >> 20 & kItems; }
uint64_t next_of(uint64_t ticket) { return ticket & kItems; }

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Denormal numbers cost tens of times a normal operation. Every thread of a step flushes them, or
// results would depend on who computed what; afterwards the caller has its own mode again.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | (uint64_t{1} << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#endif
};

}  // namespace

Pool::Pool(int threads) : shares_(threads) {
  for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto &worker : workers_) worker.join();
}

void Pool::run(const std::vector<Phase> &phases) {
  std::lock_guard<std::mutex> alone(callers_);
  FlushDenormals flushed;
  next_ = phases.data();
  end_ = next_ + phases.size();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    running_ = true;
  }
  wake_.notify_all();
  open_next();
  for (int idle = 0; running_.load(std::memory_order_acquire);) {
    if (take(0)) idle = 0;
    else if (++idle < kSpins) relax();
    else std::this_thread::yield();
  }
}

// By whoever finished the phase before. What it writes is published by the ticket.
void Pool::open_next() {
  while (next_ != end_ && next_->items == 0) next_++;
  if (next_ == end_) {
    running_.store(false, std::memory_order_release);
    return;
  }
  open_ = next_++;
  done_.store(0, std::memory_order_relaxed);
  number_++;
  for (int t = 0; t < threads(); t++) {
    const auto begin = static_cast<uint64_t>(share_begin(t, open_->items));
    const auto end = static_cast<uint64_t>(share_begin(t + 1, open_->items));
    shares_[t].ticket.store(number_ << 40 | end << 20 | begin, std::memory_order_release);
  }
}

// Takes and runs one item, of its own share if there is one left; false if there is none at all.
bool Pool::take(int thread) {
  for (int i = 0; i < threads(); i++)
    if (take_of((thread + i) % threads(), thread)) return true;
  return false;
}

bool Pool::take_of(int share, int thread) {
  std::atomic<uint64_t> &shared = shares_[share].ticket;
  uint64_t ticket = shared.load(std::memory_order_acquire);
  do {
    if (next_of(ticket) >= end_of(ticket)) return false;
  } while (!shared.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel,
                                         std::memory_order_acquire));
  // The phase cannot end before this item is done, so open_ is the phase of the ticket; once it is
  // counted the phase may be gone, and what is needed of it has been read.
  const Phase *phase = open_;
  const int items = phase->items;
  phase->run(static_cast<int>(next_of(ticket)), thread);
  if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == items) open_next();
  return true;
}

void Pool::work(int thread) {
  FlushDenormals flushed;
  while (sleep_until_work()) {
    auto since = std::chrono::steady_clock::now();
    for (int idle = 0;;) {
      if (take(thread)) {
        idle = 0;
        continue;
      }
      if (++idle < kSpins) {
        relax();
        continue;
      }
      if (running_.load(std::memory_order_acquire)) {
        std::this_thread::yield();
        since = std::chrono::steady_clock::now();
      } else if (stop_ || std::chrono::steady_clock::now() - since > kAwake) {
        break;
      }
    }
  }
}

bool Pool::sleep_until_work() {
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait(lock, [this] { return running_ || stop_; });
  return !stop_;
}

}  // namespace dn
