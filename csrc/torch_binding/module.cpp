// flash_attn_cuda._C: the table of its functions.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "host/build_record.h"
#include "torch_binding/explain.h"
#include "torch_binding/functions.h"

namespace py = pybind11;
namespace binding = flash_attn_cuda::binding;

// Read out of the file by build_info.py when the module cannot be loaded.
[[gnu::used]] static const char built_with[] = "flash_attn_cuda built with torch " TORCH_VERSION;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() =
      "CUDA attention. Tensors are fp16 or bf16, (batch, seqlen, heads, head_dim), head_dim a "
      "multiple\n"
      "of 8 up to 256. TypeError: a dtype; ValueError: a shape, a device, a number;\n"
      "NotImplementedError: an argument of FlashAttention-2 that this version refuses; "
      "RuntimeError:\n"
      "no kernel for the call, or CUDA's own errors. No function synchronises.";

  module.def(
      "attention", torch::wrap_pybind_function_no_gil(&binding::attention),
      "attention(q, k, v, softmax_scale, causal) -> (out, softmax_lse)\n\n"
      "The eager path, differentiable in q, k and v through both results. softmax_scale None is\n"
      "head_dim ** -0.5. softmax_lse (batch, heads_q, seqlen_q), fp32, natural logarithm. A row\n"
      "without a visible key has out 0 and softmax_lse -inf.",
      py::arg("q"), py::arg("k"), py::arg("v"), py::arg("softmax_scale"), py::arg("causal"));

  module.def(
      "fwd", torch::wrap_pybind_function_no_gil(&binding::fwd),
      "fwd(q, k, v, out, alibi_slopes, p_dropout, softmax_scale, is_causal, window_left,\n"
      "    window_right, softcap, return_softmax, unused_generator)\n"
      "    -> [out, softmax_lse, S_dmask, rng_state]\n\n"
      "FlashAttention-2's forward, outside autograd. Writes out where given. S_dmask and "
      "rng_state\n"
      "are empty without dropout. Refused: p_dropout, softcap, alibi_slopes, return_softmax,\n"
      "unused_generator, and windows other than (-1, -1) and (-1, 0).",
      py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("alibi_slopes"),
      py::arg("p_dropout"), py::arg("softmax_scale"), py::arg("is_causal"), py::arg("window_left"),
      py::arg("window_right"), py::arg("softcap"), py::arg("return_softmax"),
      py::arg("unused_generator"));

  module.def(
      "bwd", torch::wrap_pybind_function_no_gil(&binding::bwd),
      "bwd(dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, p_dropout, softmax_scale,\n"
      "    is_causal, window_left, window_right, softcap, deterministic, unused_generator,\n"
      "    rng_state, dlse=None) -> [dq, dk, dv, softmax_d]\n\n"
      "FlashAttention-2's backward. Writes dq, dk, dv where given. dlse (batch, heads_q, "
      "seqlen_q),\n"
      "fp32, is the gradient of softmax_lse. softmax_d (batch, heads_q, seqlen_q rounded up to "
      "128)\n"
      "is rowsum(dout * out) - dlse. rng_state is not read. Refused: as fwd, and deterministic.",
      py::arg("dout"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"),
      py::arg("softmax_lse"), py::arg("dq"), py::arg("dk"), py::arg("dv"), py::arg("alibi_slopes"),
      py::arg("p_dropout"), py::arg("softmax_scale"), py::arg("is_causal"), py::arg("window_left"),
      py::arg("window_right"), py::arg("softcap"), py::arg("deterministic"),
      py::arg("unused_generator"), py::arg("rng_state"), py::arg("dlse") = py::none());

  const auto define_explain = [&module](const char* name, auto function, const char* doc) {
    module.def(name, torch::wrap_pybind_function(function), doc, py::arg("dtype"),
               py::arg("head_dim"), py::arg("batch_size"), py::arg("seqlen_q"), py::arg("seqlen_k"),
               py::arg("num_heads_q"), py::arg("num_heads_k"), py::arg("causal"),
               py::arg("device") = py::none());
  };
  define_explain(
      "explain_forward", &binding::explain_forward,
      "What a forward of these shapes would run: a dict of instance, config, smem_bytes, grid,\n"
      "schedule and workspace_bytes. dtype is 'fp16' or 'bf16', device an index or None for\n"
      "the current one. RuntimeError where no compiled kernel serves the call.");
  define_explain("explain_backward", &binding::explain_backward,
                 "As explain_forward, for the backward's main kernel, with dkdv_splits and\n"
                 "seqlen_q_rounded.");
  module.def("forward_instances", torch::wrap_pybind_function(&binding::forward_instance_names),
             "Names of the compiled forward kernels, in selection order.");
  module.def("backward_instances", torch::wrap_pybind_function(&binding::backward_instance_names),
             "Names of the compiled backward kernels, in selection order.");
  module.def(
      "build_record", torch::wrap_pybind_function(&flash_attn_cuda::build_record_json),
      "What the kernels were built from, as JSON: archs, tool versions, row filter, instances.");
}
