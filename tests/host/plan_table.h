// Tables of plans: a line a call, with what is planned of it.
#pragma once

#include <map>
#include <sstream>
#include <string>

#include "fixtures.h"
#include "host/plan.h"

namespace host_tests {

// call: "B Sq Sk Hq Hk D" and words of `give`; expected: "name=value" of `planned`, those of which
// the line is about.
struct PlannedCall {
  const char* call;
  const char* expected;
};

// What a call comes with, or its device. value: behind an equals sign.
template <class Params>
bool give(Params& params, DeviceInfo& device, const std::string& word, int value) {
  SequenceParams& sequences = params.sequences;
  if (word == "causal") return params.window = causal, true;
  if (word == "left") return params.window.left = value, true;
  if (word == "right") return params.window.right = value, true;
  if (word == "packed") return sequences.cu_seqlens_q = sequences.cu_seqlens_k = &some_int, true;
  if (word == "longest_q") return sequences.max_seqlen_q = value, true;
  if (word == "longest_k") return sequences.max_seqlen_k = value, true;
  if (word == "used_q") return sequences.seqused_q = &some_int, true;
  if (word == "used_k") return sequences.seqused_k = &some_int, true;
  if (word == "leftpad") return sequences.leftpad_k = &some_int, true;
  if (word == "softcap") return params.score.softcap = 20.0f, true;
  if (word == "alibi") return params.score.alibi_slopes = &some_float, true;
  if (word == "negative_scale") return params.score.softmax_scale = -1.0f, true;
  if (word == "dropout") return params.dropout.threshold = 1, true;
  if (word == "lists") return params.sparsity.lists.data = &some_int, true;
  if (word == "bias") return params.score.bias = contiguous_bias(params.shape), true;
  if (word == "tangents") return params = with_tangents(params), true;
  if (word == "sms") return device.num_sms = value, true;
  if (word == "smem_kib") return device.smem_per_block = value * 1024, true;
  if (word == "a100") return device = a100, true;
  if constexpr (std::is_same_v<Params, BackwardParams>) {
    if (word == "ordered") return params.deterministic = true, true;
  } else {
    if (word == "pages") return params.paged.block_table = &some_int, true;
    if (word == "splits") return params.split.num_splits = value, true;
    if (word == "batch_invariant") return params.split.batch_invariant = true, true;
  }
  return false;
}

inline const char* yes_or_no(bool is_so) { return is_so ? "yes" : "no"; }

inline std::map<std::string, std::string> planned(const ForwardPlan& plan) {
  return {{"row", plan.instance->name},
          {"ctas", std::to_string(plan.num_ctas)},
          {"grid", std::to_string(plan.grid)},
          {"q_tiles", std::to_string(plan.schedule.num_tiles)},
          {"heads", std::to_string(plan.schedule.num_heads)},
          {"batch_heads", std::to_string(plan.schedule.num_batch_heads)},
          {"splits", std::to_string(plan.num_splits)},
          {"keys_per_split", std::to_string(plan.keys_per_split)},
          {"lengths_decide", yes_or_no(plan.lengths_decide)},
          {"order", plan.schedule.longest_first ? "longest" : "grid"},
          {"workspace", std::to_string(plan.workspace_bytes)}};
}

inline std::map<std::string, std::string> planned(const BackwardPlan& plan) {
  constexpr const char* paths[] = {"direct", "converted", "finished", "ordered"};
  const auto path = plan.dq_path == DqPath::direct      ? 0
                    : plan.dq_path == DqPath::converted ? 1
                    : plan.dq_path == DqPath::finished  ? 2
                                                        : 3;
  return {
      {"row", plan.instance->name},
      {"ctas", std::to_string(plan.num_ctas)},
      {"grid", std::to_string(plan.grid)},
      {"tiles", std::to_string(plan.schedule.grid_size())},
      {"key_tiles", std::to_string(plan.schedule.num_tiles)},
      {"q_tiles", std::to_string(plan.q_tiles)},
      {"heads", std::to_string(plan.schedule.num_heads)},
      {"section", std::to_string(plan.schedule.heads_per_section)},
      {"splits", std::to_string(plan.dkdv_splits)},
      {"descends", plan.tiles_descend == plan.schedule.longest_first ? yes_or_no(plan.tiles_descend)
                                                                     : "partly"},
      {"dq", paths[path]},
      {"convert", std::to_string(plan.convert_grid)},
      {"turns", yes_or_no(plan.takes_turns)},
      {"additions", yes_or_no(plan.additions.exists())},
      {"sweeps", yes_or_no(plan.sweeps)},
      {"swept_rows", std::to_string(plan.table.swept_rows)},
      {"parts", std::to_string(plan.shared_tiles.parts)},
      {"first_shared", std::to_string(plan.shared_tiles.first)},
      {"shared", std::to_string(plan.shared_tiles.count)}};
}

// `plan` of the call on its device and on tensors of its own, unless they are not to be there.
template <class Params, class Plan>
void check_plans(std::span<const PlannedCall> table, Plan plan, bool has_tensors = true) {
  for (const PlannedCall& row : table) {
    std::istringstream words(row.call);
    int n[6];
    for (int& number : n) words >> number;
    auto params = call<Params>(sizes(n[0], n[1], n[2], n[3], n[4], n[5]));
    if (has_tensors) params = with_tensors(params);
    DeviceInfo device = h200;
    for (std::string word; words >> word;) {
      const std::size_t equals = word.find('=');
      const int value = equals == word.npos ? 0 : std::stoi(word.substr(equals + 1));
      if (!give(params, device, word.substr(0, equals), value))
        report(row.call, 0) << "nothing is called " << word << "\n";
    }
    auto found = planned(plan(params, device));
    std::istringstream wanted(row.expected);
    for (std::string word; wanted >> word;) {
      const std::string name = word.substr(0, word.find('='));
      if (name + "=" + found[name] != word)
        report(row.call, 0) << name << " is " << found[name] << ", expected " << word << "\n";
    }
  }
}

}  // namespace host_tests
