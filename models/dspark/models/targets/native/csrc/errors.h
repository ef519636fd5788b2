// How the C interface fails: no exception leaves it, and dn_error() says why.
#pragma once
#include <new>
#include <string>

namespace dn {

std::string &last_error();  // of this thread

template <class F>
int guarded(F f) {
  try {
    f();
    return 0;
  } catch (const std::bad_alloc &) {
    last_error() = "no memory";
  } catch (const std::exception &error) {
    last_error() = error.what();
  }
  return -1;
}

// Throws a line that names what, its value and its limit.
void require(bool good, const char *what, long value, long limit);

}  // namespace dn
