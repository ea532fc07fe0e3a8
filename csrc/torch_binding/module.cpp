// flash_attn_cuda._C: the table of its functions.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "host/build_record.h"
#include "torch_binding/aten_operators.h"
#include "torch_binding/errors.h"
#include "torch_binding/explain.h"
#include "torch_binding/flash_attn_2.h"
#include "torch_binding/functions.h"
#include "torch_binding/python_arguments.h"

namespace py = pybind11;
namespace binding = flash_attn_cuda::binding;

// Read out of the file by installed/build_info.py when the module cannot be loaded.
[[gnu::used]] static const char built_with[] = "flash_attn_cuda built with torch " TORCH_VERSION;

namespace {

void define_calls(py::module& module) {
  module.def(
      "attention", torch::wrap_pybind_function_no_gil(&binding::attention),
      "Plain attention of sequences of one length -> (out, softmax_lse).\n\n"
      "forward(call) with no option but a causal mask, for the host's time. softmax_scale None is\n"
      "head_dim ** -0.5. softmax_lse (batch, heads_q, seqlen_q), fp32, natural logarithm. A row\n"
      "without a visible key has out 0 and softmax_lse -inf. Without returns_lse softmax_lse is\n"
      "None.",
      py::arg("q"), py::arg("k"), py::arg("v"), py::arg("softmax_scale"), py::arg("causal"),
      py::arg("returns_lse") = true);

  module.def(
      "forward", torch::wrap_pybind_function_no_gil(&binding::forward),
      "Any call -> a flash_attn_cuda.call.Results, S_dmask and rng_state None without dropout,\n"
      "softmax_lse None without returns_lse.\n\n"
      "call: a flash_attn_cuda.call.AttentionCall, whose docstring says what each field is.\n"
      "Differentiable, through out and softmax_lse, in what AttentionCall says has a gradient.",
      py::arg("call"), py::arg("returns_lse") = true);

  module.def(
      "backward", torch::wrap_pybind_function_no_gil(&binding::backward),
      "Gradients of forward -> a flash_attn_cuda.call.Gradients, None for what is not wanted,\n"
      "outside autograd.\n\n"
      "call: as the forward's; incoming: a flash_attn_cuda.call.Incoming. An input that only its\n"
      "own gradient needs is to be None where nobody wants that.",
      py::arg("call"), py::arg("incoming"));

  module.def(
      "jvp", torch::wrap_pybind_function_no_gil(&binding::jvp),
      "Derivatives of out and softmax_lse in a direction -> (tout, tlse), outside autograd.\n\n"
      "call: as the forward's, with its results in incoming; tangents: a\n"
      "flash_attn_cuda.call.Tangents without tout and tlse.",
      py::arg("call"), py::arg("incoming"), py::arg("tangents"));

  module.def("hvp", torch::wrap_pybind_function_no_gil(&binding::hvp),
             "Gradients of <dout, tout> + <dlse, tlse> -> a flash_attn_cuda.call.Gradients, as "
             "backward's.\n"
             "\n"
             "call, incoming: as the backward's; tangents: a flash_attn_cuda.call.Tangents with "
             "jvp's tout\n"
             "and tlse.",
             py::arg("call"), py::arg("incoming"), py::arg("tangents"));
}

void define_others(py::module& module) {
  module.def(
      "combine", torch::wrap_pybind_function_no_gil(&binding::combine),
      "One result of attention from those over parts of the keys: out_partial (splits, batch,\n"
      "seqlen, heads, head_dim) and lse_partial (splits, batch, seqlen, heads), fp32. A part\n"
      "with lse_partial -inf is not read. softmax_lse (batch, seqlen, heads), as in\n"
      "FlashAttention-3. out_dtype None is that of out, without out fp32.",
      py::arg("out_partial"), py::arg("lse_partial"), py::arg("out") = py::none(),
      py::arg("out_dtype") = py::none());

  module.def(
      "merge", torch::wrap_pybind_function_no_gil(&binding::merge),
      "Attention over some keys, out (rows, heads, head_dim) and softmax_lse (heads, rows), takes "
      "in\n"
      "attention over others, part and part_lse, all fp32 and in place; result (rows, heads,\n"
      "head_dim), fp16 or bf16, is written instead of out where it is given, and with it "
      "rounding,\n"
      "int8, what that takes from it.",
      py::arg("out"), py::arg("softmax_lse"), py::arg("part"), py::arg("part_lse"),
      py::arg("result") = py::none(), py::arg("rounding") = py::none());

  module.def(
      "rotary", torch::wrap_pybind_function_no_gil(&binding::rotary),
      "Rotary embedding, outside autograd: x (batch, seqlen, heads, head_dim), or packed with\n"
      "cu_seqlens, fp16, bf16 or fp32; cos and sin (positions, rotary_dim / 2), each of one of\n"
      "those dtypes. Sequence b begins at position seqlen_offsets[b], or seqlen_offset. Tokens\n"
      "whose position is in no row of cos, or that are in no sequence, are not rotated.\n"
      "conjugate: by the negative angles, which is the gradient of the rotation. inplace: into x,\n"
      "which is returned. cu_seqlens and seqlen_offsets may be int32 or int64.",
      py::arg("x"), py::arg("cos"), py::arg("sin"), py::arg("seqlen_offset"),
      py::arg("seqlen_offsets"), py::arg("cu_seqlens"), py::arg("interleaved"), py::arg("inplace"),
      py::arg("conjugate"));
}

void define_aten(py::module& module) {
  module.def("take_aten_operators",
             torch::wrap_pybind_function_no_gil(&binding::take_aten_operators),
             "Has these kernels run torch's own operators of flash attention, for CUDA tensors.");
  module.def("give_back_aten_operators",
             torch::wrap_pybind_function_no_gil(&binding::give_back_aten_operators),
             "Has torch run them again.");
}

void define_information(py::module& module) {
  module.def("device_errors", torch::wrap_pybind_function_no_gil(&binding::device_errors),
             "device_errors(device=None) -> (check, index, value, limit) or None\n\n"
             "The first bad length or index that kernels met on a device since the last call, by\n"
             "the names of csrc/flash_attn/device_errors.h. Waits for the device.",
             py::arg("device") = py::none());
  module.def("note_key_lists", torch::wrap_pybind_function_no_gil(&binding::note_key_lists),
             "note_key_lists(found)\n\n"
             "Has device_errors find an entry of key_lists. found: int32 (4) on a CUDA device:\n"
             "whether there is one, its sequence, itself and the limit that it breaks.",
             py::arg("found"));
  module.def(
      "explain_forward", torch::wrap_pybind_function(&binding::explain_forward),
      "What a forward of this call would run: a dict of instance, smem_bytes, grid,\n"
      "schedule, sequence_table, workspace_bytes, num_splits and keys_per_split. call: as in\n"
      "forward, of tensors on any device, without memory too. device: an index, None for the\n"
      "current one. tangents: of its derivative in a direction, a jvp. RuntimeError where no\n"
      "compiled kernel serves the call.",
      py::arg("call"), py::arg("device") = py::none(), py::arg("tangents") = false);
  module.def("explain_backward", torch::wrap_pybind_function(&binding::explain_backward),
             "As explain_forward, for the backward's main kernel, with dkdv_splits, dq_path,\n"
             "sweeps, tile_parts, q_tiles and seqlen_q_rounded. tangents: of an hvp.",
             py::arg("call"), py::arg("device") = py::none(), py::arg("tangents") = false);
  module.def("explain_settings", torch::wrap_pybind_function(&binding::explain_settings),
             "What the backward of a call is told -> [by an operator, by what autograd keeps of\n"
             "forward], dicts of an AttentionCall's fields. call: as in forward, on any device.",
             py::arg("call"));
  module.def("explain_aten_operator", torch::wrap_pybind_function(&binding::explain_aten_operator),
             "The call that torch's operator of this name runs here, a dict of an AttentionCall's\n"
             "fields; None where it is left to torch. arguments: all of the operator's, on any\n"
             "device.",
             py::arg("name"), py::arg("arguments"));
  module.def(
      "listed_queries", torch::wrap_pybind_function(&binding::queries_of_lists),
      "The key_lists of a call without qv the other way round, as its backward makes them:\n"
      "(places, rows, begins, ranks), int32, of csrc/flash_attn/params.h; ranks None where the\n"
      "call is not deterministic. call: as in forward, on any device.",
      py::arg("call"));
  module.def("forward_instances", torch::wrap_pybind_function(&binding::forward_instance_names),
             "Names of the compiled forward kernels, in selection order.");
  module.def("backward_instances", torch::wrap_pybind_function(&binding::backward_instance_names),
             "Names of the compiled backward kernels, in selection order.");
  module.def(
      "build_record", torch::wrap_pybind_function(&flash_attn_cuda::build_record_json),
      "What the kernels were built from, as JSON: archs, tool versions, row filter, instances.");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() =
      "CUDA attention. Tensors are fp16 or bf16, (batch, seqlen, heads, head_dim), head_dim a "
      "multiple\n"
      "of 8 up to 512, of v, out and their gradients maybe another one; lengths and indices are\n"
      "int32. forward takes k and v of float8_e4m3fn, too, in multiples of 16. TypeError: a "
      "dtype;\n"
      "ValueError: a shape, a device, a number; NotImplementedError: what is refused; "
      "RuntimeError:\n"
      "no kernel for the call, or CUDA's own errors. No function\n"
      "but device_errors synchronises, unless FLASH_ATTN_CUDA_CHECK=1 asks that each call waits\n"
      "for the contents of lengths and indices to be checked (ValueError).";
  const auto name = module.attr("__name__").cast<std::string>();
  binding::package() = name.substr(0, name.rfind('.'));
  define_calls(module);
  binding::define_flash_attn_2(module);
  define_others(module);
  define_aten(module);
  define_information(module);
}
