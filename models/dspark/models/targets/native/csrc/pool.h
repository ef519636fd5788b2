// A few threads that run a list of phases in order. A phase is a number of items; each thread has a
// share that lies together, in memory too, and takes of others when it is done: a thread that the
// system has put aside holds up nothing but the item it has.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace dn {

struct Phase {
  int items;  // below 2^20; none: skipped
  std::function<void(int item, int thread)> run;
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  int threads() const { return static_cast<int>(shares_.size()); }
  // The first item of a thread's share, of so many.
  int share_begin(int thread, int items) const {
    return static_cast<int>(int64_t{items} * thread / threads());
  }
  // Runs the phases one after the other; the caller works too. A second caller
  // waits for the first.
  void run(const std::vector<Phase> &phases);

 private:
  void work(int thread);
  bool take(int thread);
  bool take_of(int share, int thread);
  void open_next();
  bool sleep_until_work();

  // What is left of the open phase for each thread: items [next, end) of its own share, of which
  // others take when theirs is done. One word, so that nobody takes an item of a phase that has
  // ended: 24 bits of a running number, 20 of end, 20 of next.
  struct alignas(64) Share {
    std::atomic<uint64_t> ticket{0};
  };
  std::vector<Share> shares_;
  std::atomic<int> done_{0};  // items of the open phase
  std::atomic<bool> running_{false}, stop_{false};
  const Phase *next_ = nullptr, *open_ = nullptr, *end_ = nullptr;
  uint64_t number_ = 0;
  std::mutex callers_, mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace dn
