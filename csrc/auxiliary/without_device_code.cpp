// In place of this folder's kernels in a library that is built without device code, to import and
// test the extension on a machine without a GPU: calls are planned as ever, and launching one
// raises.
#include "auxiliary/auxiliary.h"
#include "flash_attn/merge.h"
#include "host/error.h"

namespace flash_attn_cuda {
namespace {

[[noreturn]] void refuse(const char* what) {
  throw_error(
      what, ": this build of flash_attn_cuda has no device code (FLASH_ATTN_CUDA_BACKEND=binding)");
}

}  // namespace

void make_sequence_table(const SequenceTablePlan& plan, const SequenceTableRequest& /*request*/,
                         Stream /*stream*/) {
  if (plan.used()) refuse("sequence table");
}

void backward_preprocess(const BackwardPlan& /*plan*/, const BackwardParams& /*params*/,
                         Stream /*stream*/) {
  refuse("backward_preprocess");
}

void reduce_dkv(const BackwardPlan& /*plan*/, const BackwardParams& /*params*/, Stream /*stream*/) {
  refuse("reduce_dkv");
}

void run_append(const AppendParams& /*params*/, Stream /*stream*/) { refuse("run_append"); }

void run_rotary(const RotaryParams& /*params*/, Stream /*stream*/) { refuse("run_rotary"); }

void run_combine(const CombineParams& /*params*/, Stream /*stream*/) { refuse("run_combine"); }

void run_merge(const MergeParams& /*params*/, Stream /*stream*/) { refuse("run_merge"); }

void run_debug_probabilities(const DebugProbabilitiesParams& /*params*/, Stream /*stream*/) {
  refuse("run_debug_probabilities");
}

}  // namespace flash_attn_cuda
