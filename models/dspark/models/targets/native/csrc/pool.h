// A few threads that run a list of phases in order. A phase is a number of items; any thread takes
// any item, so a thread that the system has put aside holds up nothing but the item it has.
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

  int threads() const { return static_cast<int>(workers_.size()) + 1; }
  // Runs the phases one after the other; the caller works too. One caller at a time.
  void run(const std::vector<Phase> &phases);

 private:
  void work(int thread);
  bool take(int thread);
  void open_next();
  bool sleep_until_work();

  // Which phase is open and what is left of it, in one word, so that nobody takes an item of a
  // phase that has ended: 24 bits of a running number, 20 of items in all, 20 of items taken.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int> done_{0};  // items of the open phase
  std::atomic<bool> running_{false}, stop_{false};
  const Phase *next_ = nullptr, *open_ = nullptr, *end_ = nullptr;
  uint64_t number_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace dn
