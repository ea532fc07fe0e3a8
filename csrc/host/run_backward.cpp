#include "auxiliary/auxiliary.h"
#include "flash_attn/instance.h"
#include "host/normalize_window.h"

namespace flash_attn_cuda {

// Each step launches nothing where its grid is empty, and the others still write their zeros:
// without queries the main kernel writes dk = dv = 0; without keys the conversion writes dq = 0 or,
// where the main kernel may write dq, the preprocess kernel; dsink is 0 where there are no numbers
// to sum.
void run_backward(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  BackwardParams normalized = params;
  normalized.window = normalize_window(params.window, params.shape, params.sequences);
  make_sequence_table(plan.table,
                      {.sequences = params.sequences,
                       .shape = params.shape,
                       .is_paged = false,
                       .tiles_of_keys = true,
                       .drops = params.dropout.threshold > 0,
                       .errors = params.errors,
                       .workspace = params.workspace},
                      stream);
  backward_preprocess(plan, normalized, stream);
  // The main kernels of the sm90 family do it themselves, if they are launched.
  const BackwardConfig& config = plan.instance->config;
  const bool is_sm90 = config.family == KernelFamily::sm90 && !config.is_wide;
  if (!is_sm90 || plan.schedule.grid_size() == 0) sum_sink_gradient(plan, normalized, stream);
  plan.instance->launch(plan, normalized, stream);
  const bool leaves_sums = plan.dq_path == DqPath::converted || plan.dq_path == DqPath::finished;
  if (leaves_sums) plan.instance->convert_dq(plan, normalized, stream);
  if (plan.dkdv_splits > 1) reduce_dkv(plan, normalized, stream);
}

}  // namespace flash_attn_cuda
