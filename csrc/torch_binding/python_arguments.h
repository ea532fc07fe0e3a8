// How pybind11 reads AttentionCall, Incoming and Tangents: each field is the instance's attribute
// of its name. What an instance does not have itself has its default, which is the same on both
// sides. Results and Gradients become the NamedTuples of these names in
// flash_attn_cuda/call/fields.py.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "torch_binding/call.h"
#include "torch_binding/check.h"

namespace flash_attn_cuda::binding {

// The Python package that this extension is in, by the name that it was imported by.
inline std::string& package() {
  static std::string name;
  return name;
}

}  // namespace flash_attn_cuda::binding

namespace pybind11::detail {

template <class T>
struct is_optional : std::false_type {};
template <class T>
struct is_optional<std::optional<T>> : std::true_type {};

// The names of the fields as Python's strings, which it compares by identity.
template <class Described>
const std::vector<PyObject*>& field_names() {
  static const std::vector<PyObject*>* const names = [] {
    auto* made = new std::vector<PyObject*>;  // lives as long as the interpreter
    Described described;
    visit_fields(described, [made](const char* name, auto& /*field*/, bool /*is_required*/) {
      made->push_back(PyUnicode_InternFromString(name));
    });
    return made;
  }();
  return *names;
}

template <class Field>
void read_field(const char* name, handle given, Field& field, bool is_required) {
  if (given.is_none() && !is_required) {
    if constexpr (is_optional<Field>::value || std::is_same_v<Field, at::Tensor>) return;
  }
  if constexpr (is_optional<Field>::value) {
    read_field(name, given, field.emplace(), is_required);
  } else {
    make_caster<Field> caster;
    // Conversions: an int for a float, numpy's numbers.
    if (!caster.load(given, /*convert=*/true) ||
        (std::is_same_v<Field, at::Tensor> && given.is_none())) {
      throw type_error(std::string(name) + ": got " + Py_TYPE(given.ptr())->tp_name);
    }
    field = cast_op<Field>(caster);
    if constexpr (std::is_same_v<Field, at::Tensor>)
      field = flash_attn_cuda::binding::unwrapped(name, std::move(field));
  }
}

template <class Described>
struct described_caster {
  PYBIND11_TYPE_CASTER(Described, const_name("object"));

  bool load(handle source, bool /*convert*/) {
    const auto given =
        reinterpret_steal<object>(PyObject_GenericGetDict(source.ptr(), /*context=*/nullptr));
    if (!given) throw error_already_set();
    const std::vector<PyObject*>& names = field_names<Described>();
    std::size_t index = 0;
    visit_fields(value, [&](const char* name, auto& field, bool is_required) {
      const handle attribute = PyDict_GetItemWithError(given.ptr(), names[index++]);
      if (attribute) {
        read_field(name, attribute, field, is_required);
      } else if (PyErr_Occurred()) {
        throw error_already_set();
      } else if (is_required) {
        throw attribute_error(std::string(name) + ": is not described");
      }
    });
    return true;
  }
};

template <>
struct type_caster<flash_attn_cuda::binding::AttentionCall>
    : described_caster<flash_attn_cuda::binding::AttentionCall> {};
template <>
struct type_caster<flash_attn_cuda::binding::Incoming>
    : described_caster<flash_attn_cuda::binding::Incoming> {};

template <>
struct type_caster<flash_attn_cuda::binding::Tangents>
    : described_caster<flash_attn_cuda::binding::Tangents> {};

template <class Described>
struct named_tuple_caster {
  static constexpr auto name = const_name("object");

  static handle cast(Described results, return_value_policy /*policy*/, handle /*parent*/) {
    list fields;
    visit_fields(results, [&](const char* /*name*/, const at::Tensor& field, bool /*is_required*/) {
      fields.append(field);  // None for an undefined one
    });
    // This is tuple.__new__(type, fields): the class's own __new__ is Python's, and slower.
    const tuple arguments = make_tuple(fields);
    PyObject* made = PyTuple_Type.tp_new(python_type(), arguments.ptr(), /*kwds=*/nullptr);
    if (made == nullptr) throw error_already_set();
    return made;
  }

 private:
  static PyTypeObject* python_type() {
    // A static of its own would be waited for with the GIL held, which an import may hand on.
    PYBIND11_CONSTINIT static gil_safe_call_once_and_store<object> type;
    type.call_once_and_store_result([] {
      return module_::import((flash_attn_cuda::binding::package() + ".call").c_str())
          .attr(python_name(static_cast<Described*>(nullptr)))
          .template cast<object>();
    });
    return reinterpret_cast<PyTypeObject*>(type.get_stored().ptr());
  }
  static const char* python_name(flash_attn_cuda::binding::Results*) { return "Results"; }
  static const char* python_name(flash_attn_cuda::binding::Gradients*) { return "Gradients"; }
};

template <>
struct type_caster<flash_attn_cuda::binding::Results>
    : named_tuple_caster<flash_attn_cuda::binding::Results> {};
template <>
struct type_caster<flash_attn_cuda::binding::Gradients>
    : named_tuple_caster<flash_attn_cuda::binding::Gradients> {};

}  // namespace pybind11::detail
