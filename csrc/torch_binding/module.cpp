// flash_attn_cuda._C: the table of its functions.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "host/build_record.h"
#include "torch_binding/errors.h"
#include "torch_binding/explain.h"
#include "torch_binding/functions.h"

namespace py = pybind11;
namespace binding = flash_attn_cuda::binding;

// Read out of the file by build_info.py when the module cannot be loaded.
[[gnu::used]] static const char built_with[] = "flash_attn_cuda built with torch " TORCH_VERSION;

namespace {

void define_eager(py::module& module) {
  module.def(
      "attention", torch::wrap_pybind_function_no_gil(&binding::attention),
      "attention(q, k, v, softmax_scale, causal) -> (out, softmax_lse)\n\n"
      "The eager path, differentiable in q, k and v through both results. softmax_scale None is\n"
      "head_dim ** -0.5. softmax_lse (batch, heads_q, seqlen_q), fp32, natural logarithm. A row\n"
      "without a visible key has out 0 and softmax_lse -inf.",
      py::arg("q"), py::arg("k"), py::arg("v"), py::arg("softmax_scale"), py::arg("causal"));

  module.def(
      "attention_full", torch::wrap_pybind_function_no_gil(&binding::attention_full),
      "attention_full(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k,\n"
      "    max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_left,\n"
      "    window_right, softcap, alibi_slopes, deterministic) -> (out, softmax_lse, rng_state)\n\n"
      "attention with every feature of training. With cu_seqlens_q and cu_seqlens_k q is\n"
      "(total_q, heads_q, head_dim), k and v (total_k, heads_k, head_dim) and softmax_lse\n"
      "(heads_q, total_q). A max_seqlen is an upper bound of lengths or None. rng_state is int64\n"
      "(2), the seed and the offset of the dropout mask, or empty without dropout.",
      py::arg("q"), py::arg("k"), py::arg("v"), py::arg("cu_seqlens_q"), py::arg("cu_seqlens_k"),
      py::arg("seqused_q"), py::arg("seqused_k"), py::arg("leftpad_k"), py::arg("max_seqlen_q"),
      py::arg("max_seqlen_k"), py::arg("dropout_p"), py::arg("softmax_scale"), py::arg("causal"),
      py::arg("window_left"), py::arg("window_right"), py::arg("softcap"), py::arg("alibi_slopes"),
      py::arg("deterministic"));
}

void define_forward(py::module& module) {
  module.def(
      "fwd", torch::wrap_pybind_function_no_gil(&binding::fwd),
      "fwd(q, k, v, out, alibi_slopes, p_dropout, softmax_scale, is_causal, window_left,\n"
      "    window_right, softcap, return_softmax, unused_generator)\n"
      "    -> [out, softmax_lse, S_dmask, rng_state]\n\n"
      "FlashAttention-2's forward, outside autograd. Writes out where given. A negative window\n"
      "bound is none; softcap <= 0 is off. S_dmask and rng_state are empty without dropout;\n"
      "S_dmask (batch, heads_q, seqlen_q, seqlen_k), with return_softmax alone, has the\n"
      "probabilities, negative where dropped.",
      py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("alibi_slopes"),
      py::arg("p_dropout"), py::arg("softmax_scale"), py::arg("is_causal"), py::arg("window_left"),
      py::arg("window_right"), py::arg("softcap"), py::arg("return_softmax"),
      py::arg("unused_generator"));

  module.def(
      "varlen_fwd", torch::wrap_pybind_function_no_gil(&binding::varlen_fwd),
      "varlen_fwd(q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table,\n"
      "    alibi_slopes, max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors,\n"
      "    is_causal, window_left, window_right, softcap, return_softmax, unused_generator,\n"
      "    num_splits=0, seqused_q=None, batch_invariant=False, sink=None)\n"
      "    -> [out, softmax_lse, S_dmask, rng_state]\n\n"
      "fwd of packed sequences: q (total_q, heads_q, head_dim), k and v (total_k, heads_k,\n"
      "head_dim), or with block_table (num_pages, page_size, heads_k, head_dim), where\n"
      "cu_seqlens_k, or seqused_k, gives lengths. softmax_lse (heads_q, total_q), S_dmask (batch,\n"
      "heads_q, max_seqlen_q, max_seqlen_k). max_seqlen_* are upper bounds. num_splits 0 splits\n"
      "the keys of paged calls alone. sink: as masked_fwd.",
      py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("cu_seqlens_q"),
      py::arg("cu_seqlens_k"), py::arg("seqused_k"), py::arg("leftpad_k"), py::arg("block_table"),
      py::arg("alibi_slopes"), py::arg("max_seqlen_q"), py::arg("max_seqlen_k"),
      py::arg("p_dropout"), py::arg("softmax_scale"), py::arg("zero_tensors"), py::arg("is_causal"),
      py::arg("window_left"), py::arg("window_right"), py::arg("softcap"),
      py::arg("return_softmax"), py::arg("unused_generator"), py::arg("num_splits") = 0,
      py::arg("seqused_q") = py::none(), py::arg("batch_invariant") = false,
      py::arg("sink") = py::none());
}

void define_backward(py::module& module) {
  module.def(
      "bwd", torch::wrap_pybind_function_no_gil(&binding::bwd),
      "bwd(dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, p_dropout, softmax_scale,\n"
      "    is_causal, window_left, window_right, softcap, deterministic, unused_generator,\n"
      "    rng_state, dlse=None) -> [dq, dk, dv, softmax_d]\n\n"
      "FlashAttention-2's backward. Writes dq, dk, dv where given. dlse (batch, heads_q, "
      "seqlen_q),\n"
      "fp32, is the gradient of softmax_lse. softmax_d (batch, heads_q, seqlen_q rounded up to "
      "128)\n"
      "is rowsum(dout * out) - dlse. rng_state is the forward's, needed with dropout.",
      py::arg("dout"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"),
      py::arg("softmax_lse"), py::arg("dq"), py::arg("dk"), py::arg("dv"), py::arg("alibi_slopes"),
      py::arg("p_dropout"), py::arg("softmax_scale"), py::arg("is_causal"), py::arg("window_left"),
      py::arg("window_right"), py::arg("softcap"), py::arg("deterministic"),
      py::arg("unused_generator"), py::arg("rng_state"), py::arg("dlse") = py::none());

  module.def(
      "varlen_bwd", torch::wrap_pybind_function_no_gil(&binding::varlen_bwd),
      "varlen_bwd(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,\n"
      "    alibi_slopes, max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors,\n"
      "    is_causal, window_left, window_right, softcap, deterministic, unused_generator,\n"
      "    rng_state, dlse=None, seqused_q=None, seqused_k=None, leftpad_k=None)\n"
      "    -> [dq, dk, dv, softmax_d]\n\n"
      "bwd of packed sequences; softmax_lse, dlse and softmax_d are (heads_q, total_q).",
      py::arg("dout"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"),
      py::arg("softmax_lse"), py::arg("dq"), py::arg("dk"), py::arg("dv"), py::arg("cu_seqlens_q"),
      py::arg("cu_seqlens_k"), py::arg("alibi_slopes"), py::arg("max_seqlen_q"),
      py::arg("max_seqlen_k"), py::arg("p_dropout"), py::arg("softmax_scale"),
      py::arg("zero_tensors"), py::arg("is_causal"), py::arg("window_left"),
      py::arg("window_right"), py::arg("softcap"), py::arg("deterministic"),
      py::arg("unused_generator"), py::arg("rng_state"), py::arg("dlse") = py::none(),
      py::arg("seqused_q") = py::none(), py::arg("seqused_k") = py::none(),
      py::arg("leftpad_k") = py::none());
}

void define_masked(py::module& module) {
  module.def(
      "masked_fwd", torch::wrap_pybind_function_no_gil(&binding::masked_fwd),
      "masked_fwd(q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k,\n"
      "    max_seqlen_q, max_seqlen_k, alibi_slopes, p_dropout, softmax_scale, is_causal,\n"
      "    window_left, window_right, softcap, block_rows, mask_bits, bias, sink)\n"
      "    -> [out, softmax_lse, rng_state]\n\n"
      "fwd, or with cu_seqlens_q and cu_seqlens_k varlen_fwd, of some pairs alone, with a bias or\n"
      "with a sink. B, H: batch and heads_q, or 1. block_rows: int32 (B, H, Tq, 2 + Tk) of Tq =\n"
      "ceil(seqlen_q / 128) and Tk = ceil(seqlen_k / 128), which tiles of keys a tile of queries\n"
      "visits (BlockLists of csrc/flash_attn/params.h). mask_bits: int32 (B, H, seqlen_q,\n"
      "4 * Tk), for lists that ask for pairs. bias: (B, H, seqlen_q or 1, seqlen_k), of the dtype\n"
      "of q or fp32, added to the scores. sink: fp32 (heads_q), whose exp joins the denominator\n"
      "of the softmax, and so softmax_lse. Of packed sequences the max_seqlens, None for not\n"
      "known, stand for the lengths, and these tensors may be made for longer ones.",
      py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("cu_seqlens_q"),
      py::arg("cu_seqlens_k"), py::arg("seqused_q"), py::arg("seqused_k"), py::arg("leftpad_k"),
      py::arg("max_seqlen_q"), py::arg("max_seqlen_k"), py::arg("alibi_slopes"),
      py::arg("p_dropout"), py::arg("softmax_scale"), py::arg("is_causal"), py::arg("window_left"),
      py::arg("window_right"), py::arg("softcap"), py::arg("block_rows"), py::arg("mask_bits"),
      py::arg("bias"), py::arg("sink"));

  module.def(
      "masked_bwd", torch::wrap_pybind_function_no_gil(&binding::masked_bwd),
      "masked_bwd(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, seqused_q,\n"
      "    seqused_k, leftpad_k, max_seqlen_q, max_seqlen_k, alibi_slopes, p_dropout,\n"
      "    softmax_scale, is_causal, window_left, window_right, softcap, deterministic,\n"
      "    rng_state, dlse, block_columns, mask_bits, bias, wants_dbias, sink=None,\n"
      "    wants_softmax_d=True)\n"
      "    -> [dq, dk, dv, softmax_d, dbias, dsink]\n\n"
      "The backward of masked_fwd, whose softmax_lse has the sink already. block_columns: int32\n"
      "(B, H, Tk, 2 + Tq), which tiles of queries visit a tile of keys; not with deterministic.\n"
      "dbias: in the shape of bias, summed over what that is shared by, and then fp32, else of\n"
      "the bias's dtype; empty without wants_dbias; not with softcap. dsink: fp32 (heads_q), the\n"
      "gradient of `sink`; empty without. softmax_d: empty where it is not wanted.",
      py::arg("dout"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"),
      py::arg("softmax_lse"), py::arg("cu_seqlens_q"), py::arg("cu_seqlens_k"),
      py::arg("seqused_q"), py::arg("seqused_k"), py::arg("leftpad_k"), py::arg("max_seqlen_q"),
      py::arg("max_seqlen_k"), py::arg("alibi_slopes"), py::arg("p_dropout"),
      py::arg("softmax_scale"), py::arg("is_causal"), py::arg("window_left"),
      py::arg("window_right"), py::arg("softcap"), py::arg("deterministic"), py::arg("rng_state"),
      py::arg("dlse"), py::arg("block_columns"), py::arg("mask_bits"), py::arg("bias"),
      py::arg("wants_dbias"), py::arg("sink") = py::none(), py::arg("wants_softmax_d") = true);
}

void define_inference(py::module& module) {
  module.def(
      "fwd_kvcache", torch::wrap_pybind_function_no_gil(&binding::fwd_kvcache),
      "fwd_kvcache(q, kcache, vcache, k, v, seqlens_k, rotary_cos, rotary_sin, cache_batch_idx,\n"
      "    leftpad_k, block_table, alibi_slopes, out, softmax_scale, is_causal, window_left,\n"
      "    window_right, softcap, is_rotary_interleaved, num_splits, cu_seqlens_q=None,\n"
      "    max_seqlen_q=None, cu_seqlens_k_new=None, batch_invariant=False, seqlen_k=None,\n"
      "    sink=None)\n"
      "    -> [out, softmax_lse]\n\n"
      "Attention over a cache (batch, capacity, heads_k, head_dim), or with block_table "
      "(num_pages,\n"
      "page_size, heads_k, head_dim), of any head_dim and never copied. First k and v go into it\n"
      "behind the seqlens_k keys of each sequence, or the seqlen_k of every one, and k and q are\n"
      "rotated. With cu_seqlens_q q is (total_q, heads_q, head_dim), softmax_lse (heads_q,\n"
      "total_q); k and v may be packed likewise. num_splits 0 is as many as serve the device.\n"
      "sink: as masked_fwd.",
      py::arg("q"), py::arg("kcache"), py::arg("vcache"), py::arg("k"), py::arg("v"),
      py::arg("seqlens_k"), py::arg("rotary_cos"), py::arg("rotary_sin"),
      py::arg("cache_batch_idx"), py::arg("leftpad_k"), py::arg("block_table"),
      py::arg("alibi_slopes"), py::arg("out"), py::arg("softmax_scale"), py::arg("is_causal"),
      py::arg("window_left"), py::arg("window_right"), py::arg("softcap"),
      py::arg("is_rotary_interleaved"), py::arg("num_splits"), py::arg("cu_seqlens_q") = py::none(),
      py::arg("max_seqlen_q") = py::none(), py::arg("cu_seqlens_k_new") = py::none(),
      py::arg("batch_invariant") = false, py::arg("seqlen_k") = py::none(),
      py::arg("sink") = py::none());

  module.def(
      "combine", torch::wrap_pybind_function_no_gil(&binding::combine),
      "combine(out_partial, lse_partial, out=None, out_dtype=None) -> [out, softmax_lse]\n\n"
      "One result of attention from those over parts of the keys: out_partial (splits, batch,\n"
      "seqlen, heads, head_dim) and lse_partial (splits, batch, seqlen, heads), fp32. A part\n"
      "with lse_partial -inf is not read. softmax_lse (batch, seqlen, heads), as in\n"
      "FlashAttention-3. out_dtype None is that of out, without out fp32.",
      py::arg("out_partial"), py::arg("lse_partial"), py::arg("out") = py::none(),
      py::arg("out_dtype") = py::none());
}

void define_information(py::module& module) {
  module.def("device_errors", torch::wrap_pybind_function_no_gil(&binding::device_errors),
             "device_errors(device=None) -> (check, index, value, limit) or None\n\n"
             "The first bad length or index that kernels met on a device since the last call, by\n"
             "the names of csrc/flash_attn/device_errors.h. Waits for the device.",
             py::arg("device") = py::none());
  module.def(
      "explain_forward", torch::wrap_pybind_function(&binding::explain_forward),
      "What a forward of these shapes would run: a dict of instance, config, smem_bytes, grid,\n"
      "schedule, sequence_table, workspace_bytes, num_splits and keys_per_split. dtype is 'fp16'\n"
      "or 'bf16', device an index or None for the current one. packed: seqlen_q and seqlen_k are\n"
      "totals. page_size 0: not paged. block_sparse and bias: with lists of blocks, with a bias.\n"
      "head_dim_v: of values, None for head_dim.\n"
      "RuntimeError where no compiled kernel serves the call.",
      py::arg("dtype"), py::arg("head_dim"), py::arg("batch_size"), py::arg("seqlen_q"),
      py::arg("seqlen_k"), py::arg("num_heads_q"), py::arg("num_heads_k"), py::arg("causal"),
      py::arg("device") = py::none(), py::arg("window_left") = -1, py::arg("window_right") = -1,
      py::arg("packed") = false, py::arg("softcap") = 0.0, py::arg("alibi") = false,
      py::arg("p_dropout") = 0.0, py::arg("page_size") = 0, py::arg("lengths_on_device") = false,
      py::arg("num_splits") = 1, py::arg("batch_invariant") = false, py::arg("max_seqlen_q") = 0,
      py::arg("block_sparse") = false, py::arg("bias") = false, py::arg("head_dim_v") = py::none());
  module.def("explain_backward", torch::wrap_pybind_function(&binding::explain_backward),
             "As explain_forward, for the backward's main kernel, with dkdv_splits, sweeps,\n"
             "tile_parts, q_tiles and seqlen_q_rounded.",
             py::arg("dtype"), py::arg("head_dim"), py::arg("batch_size"), py::arg("seqlen_q"),
             py::arg("seqlen_k"), py::arg("num_heads_q"), py::arg("num_heads_k"), py::arg("causal"),
             py::arg("device") = py::none(), py::arg("window_left") = -1,
             py::arg("window_right") = -1, py::arg("packed") = false, py::arg("softcap") = 0.0,
             py::arg("alibi") = false, py::arg("p_dropout") = 0.0, py::arg("deterministic") = false,
             py::arg("block_sparse") = false, py::arg("bias") = false,
             py::arg("head_dim_v") = py::none());
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
      "of 8 up to 256, of v, out and their gradients maybe another one; lengths and indices are\n"
      "int32. TypeError: a dtype; ValueError: a shape, a device, a number; NotImplementedError:\n"
      "what is refused; RuntimeError: no kernel for the call, or CUDA's own errors. No function\n"
      "but device_errors synchronises, unless FLASH_ATTN_CUDA_CHECK=1 asks that each call waits\n"
      "for the contents of lengths and indices to be checked (ValueError).";
  define_eager(module);
  define_forward(module);
  define_backward(module);
  define_masked(module);
  define_inference(module);
  define_information(module);
}
