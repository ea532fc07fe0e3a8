#include "flash_attn/instance.h"
#include "host/normalize_window.h"

namespace flash_attn_cuda {

void run_forward(const ForwardPlan& plan, const ForwardParams& params, Stream stream) {
  ForwardParams normalized = params;
  normalized.window = normalize_window(params.window, params.shape);
  plan.instance->launch(plan, normalized, stream);
}

}  // namespace flash_attn_cuda
