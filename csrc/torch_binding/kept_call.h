// What autograd keeps of a call for its backward: all that the backward is told where it goes
// through an operator instead (explain_settings shows both).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <type_traits>
#include <vector>

#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

// Tensors that are not there are not kept, as each costs host time: a bit of the last number says
// of each whether it is. Numbers are exact in a double, which autograd keeps lists of.
struct KeptCall {
  std::vector<at::Tensor> tensors;
  std::vector<double> numbers;
};

// `call` is checked; `results` are kept with it.
inline KeptCall keep(const AttentionCall& call, std::initializer_list<at::Tensor> results) {
  KeptCall kept;
  std::uint64_t present = 0;
  int place = 0;
  const auto keep_field = [&]<class Field>(const Field& field) {
    if constexpr (std::is_same_v<Field, at::Tensor>) {
      present |= std::uint64_t{field.defined()} << place++;
      if (field.defined()) kept.tensors.push_back(field);
    } else if constexpr (std::is_same_v<Field, std::optional<double>>) {
      kept.numbers.push_back(*field);
    } else {
      kept.numbers.push_back(static_cast<double>(field));
    }
  };
  visit_kept(call, keep_field);
  for (const at::Tensor& result : results) keep_field(result);
  kept.numbers.push_back(static_cast<double>(present));
  return kept;
}

inline void restore(const KeptCall& kept, AttentionCall& call,
                    std::initializer_list<at::Tensor*> results) {
  const auto present = static_cast<std::uint64_t>(kept.numbers.back());
  int place = 0;
  std::size_t next_tensor = 0, next_number = 0;
  const auto restore_field = [&]<class Field>(Field& field) {
    if constexpr (std::is_same_v<Field, at::Tensor>) {
      if ((present >> place++ & 1) != 0) field = kept.tensors.at(next_tensor++);
    } else {
      field = static_cast<Field>(kept.numbers.at(next_number++));
    }
  };
  visit_kept(call, restore_field);
  for (at::Tensor* result : results) restore_field(*result);
}

}  // namespace flash_attn_cuda::binding
