#include <exception>

#include "check.h"

int main() {
  for (const host_tests::Test& test : host_tests::tests()) {
    const int before = host_tests::failures();
    try {
      test.run();
    } catch (const std::exception& error) {
      host_tests::report(test.name, 0) << "threw " << error.what() << "\n";
    }
    std::cout << (host_tests::failures() == before ? "ok      " : "FAILED  ") << test.name << "\n";
  }
  std::cout << host_tests::tests().size() << " tests, " << host_tests::failures()
            << " failed checks\n";
  return host_tests::tests().empty() || host_tests::failures() > 0 ? 1 : 0;
}
