// The few macros the C++ tests need. A failed check prints file, line and values and the test goes
// on; main.cpp runs every TEST of the program and returns how many checks failed.
#pragma once

#include <iostream>
#include <string>
#include <type_traits>
#include <vector>

#include "flash_attn/api.h"

namespace host_tests {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

// Enumerators and bytes print as numbers.
template <class Value>
auto printable(const Value& value) {
  if constexpr (std::is_enum_v<Value>)
    return static_cast<int>(value);
  else
    return value;
}

inline std::ostream& report(const char* file, int line) {
  ++failures();
  return std::cerr << file << ":" << line << ": ";
}

}  // namespace host_tests

#define TEST(name)                                                               \
  static void test_##name();                                                     \
  static const host_tests::Registration registration_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition) \
  ((condition) ? (void)0 \
               : (void)(host_tests::report(__FILE__, __LINE__) << #condition << " is false\n"))

#define CHECK_EQ(actual, expected)                                                     \
  do {                                                                                 \
    const auto actual_value = (actual);                                                \
    const decltype(actual_value) expected_value = (expected);                          \
    if (!(actual_value == expected_value)) {                                           \
      host_tests::report(__FILE__, __LINE__)                                           \
          << #actual << " is " << host_tests::printable(actual_value) << ", expected " \
          << host_tests::printable(expected_value) << "\n";                            \
    }                                                                                  \
  } while (false)

// The expression throws Error, and its text contains `part`.
#define CHECK_ERROR(expression, part)                                              \
  do {                                                                             \
    try {                                                                          \
      (void)(expression);                                                          \
      host_tests::report(__FILE__, __LINE__) << #expression << " threw nothing\n"; \
    } catch (const flash_attn_cuda::Error& error) {                                \
      if (std::string(error.what()).find(part) == std::string::npos) {             \
        host_tests::report(__FILE__, __LINE__)                                     \
            << "'" << error.what() << "' lacks '" << (part) << "'\n";              \
      }                                                                            \
    }                                                                              \
  } while (false)
