#include "auxiliary/auxiliary.h"
#include "flash_attn/instance.h"

namespace flash_attn_cuda {

// Each step launches nothing where its grid is empty, and the others still write their zeros:
// without queries the main kernel writes dk = dv = 0; without keys the conversion writes dq = 0 or,
// where the main kernel may write dq, the preprocess kernel. Without queries there is no dsink.
void run_backward(const BackwardPlan& plan, const BackwardParams& given, Stream stream) {
  BackwardParams params = given;
  params.window = plan.window;
  make_sequence_table(plan.table,
                      {.sequences = params.sequences,
                       .shape = params.shape,
                       .is_paged = false,
                       .tiles_of_keys = true,
                       .drops = params.dropout.threshold > 0,
                       .most_queries = 0,
                       .errors = params.errors,
                       .workspace = params.workspace},
                      stream);
  backward_preprocess(plan, params, stream);
  plan.instance->launch(plan, params, stream);
  if (plan.leaves_sums()) plan.instance->convert_dq(plan, params, stream);
  if (plan.leaves_key_sums()) reduce_dkv(plan, params, stream);
}

}  // namespace flash_attn_cuda
