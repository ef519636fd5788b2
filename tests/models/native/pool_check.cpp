// Thousands of random lists of phases: every item runs once, and after all of the phase before.
#include <cstdio>
#include <random>

#include "pool.h"

int main() {
  dn::Pool pool(4);
  std::mt19937 draw(1);
  for (int list = 0; list < 2000; list++) {
    std::vector<std::vector<int>> ran(draw() % 12);
    std::vector<dn::Phase> phases;
    std::atomic<bool> early{false};
    for (size_t p = 0; p < ran.size(); p++) {
      ran[p].assign(draw() % 9, 0);
      phases.push_back({static_cast<int>(ran[p].size()), [&ran, &early, p](int item, int) {
                          ran[p][item]++;
                          if (p)
                            for (int times : ran[p - 1])
                              if (times != 1) early = true;
                        }});
    }
    pool.run(phases);
    for (const auto &phase : ran)
      for (int times : phase)
        if (times != 1) early = true;
    if (early) return 1;
  }
  std::puts("ok");
}
