// How pybind11 reads CallArguments and GradientArguments: each field is the instance's attribute of
// its name. What an instance does not have itself has its default, which is the same on both sides.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "torch_binding/arguments.h"

namespace pybind11::detail {

template <class T>
struct is_optional : std::false_type {};
template <class T>
struct is_optional<std::optional<T>> : std::true_type {};

// The names of the fields as Python's strings, which it compares by identity.
template <class Arguments>
const std::vector<PyObject*>& field_names() {
  static const std::vector<PyObject*>* const names = [] {
    auto* made = new std::vector<PyObject*>;  // lives as long as the interpreter
    Arguments().visit([made](const char* name, auto& /*field*/) {
      made->push_back(PyUnicode_InternFromString(name));
    });
    return made;
  }();
  return *names;
}

template <class Field>
void read_field(const char* name, handle given, Field& field) {
  if constexpr (is_optional<Field>::value) {
    if (given.is_none()) return;
    read_field(name, given, field.emplace());
  } else {
    make_caster<Field> caster;
    // Conversions: an int for a float, numpy's numbers.
    if (!caster.load(given, /*convert=*/true) ||
        (std::is_same_v<Field, at::Tensor> && given.is_none())) {
      throw type_error(std::string(name) + ": got " + Py_TYPE(given.ptr())->tp_name);
    }
    field = cast_op<Field>(caster);
  }
}

template <class Arguments>
struct arguments_caster {
  PYBIND11_TYPE_CASTER(Arguments, const_name("object"));

  bool load(handle source, bool /*convert*/) {
    const auto given =
        reinterpret_steal<object>(PyObject_GenericGetDict(source.ptr(), /*context=*/nullptr));
    if (!given) throw error_already_set();
    const std::vector<PyObject*>& names = field_names<Arguments>();
    std::size_t index = 0;
    value.visit([&](const char* name, auto& field) {
      using Field = std::remove_reference_t<decltype(field)>;
      const handle attribute = PyDict_GetItemWithError(given.ptr(), names[index++]);
      if (attribute) {
        read_field(name, attribute, field);
      } else if (PyErr_Occurred()) {
        throw error_already_set();
      } else if (std::is_same_v<Field, at::Tensor>) {
        throw attribute_error(std::string(name) + ": is not described");
      }
    });
    return true;
  }
};

template <>
struct type_caster<flash_attn_cuda::binding::CallArguments>
    : arguments_caster<flash_attn_cuda::binding::CallArguments> {};
template <>
struct type_caster<flash_attn_cuda::binding::GradientArguments>
    : arguments_caster<flash_attn_cuda::binding::GradientArguments> {};

}  // namespace pybind11::detail
