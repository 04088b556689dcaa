// What the worker extension fills tables with. Each operator that the model calls stands, with its registration, in a
// header of its own.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "activation.h"
#include "attention.h"
#include "linear.h"
#include "moe.h"
#include "norm.h"
#include "rotary.h"
#include "profile.h"
#include "sampling.h"

namespace polymorph {
namespace {

bool packs(const std::string &path) { return library(path).pack != nullptr; }

at::Tensor pack(const std::string &path, const std::string &artifact, const at::Tensor &weight) {
  const Library &code = library(path);
  TORCH_CHECK_VALUE(code.pack != nullptr, path, " packs no weight");
  const pm_tensor view = view_of(weight);
  const InFlight call(artifact, current().load()->epoch, now_ns());
  const int64_t bytes = code.pack_bytes(&view);
  TORCH_CHECK_VALUE(bytes > 0, "pm_pack_bytes refused a weight of ", weight.sizes(), " with ", bytes);
  at::Tensor packed = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
  const int32_t status = code.pack(context(), &view, packed.data_ptr());
  TORCH_CHECK_VALUE(status == 0, "pm_pack refused a weight of ", weight.sizes(), " with ", status);
  return packed;
}

void table_begin() {
  staged() = std::make_unique<Table>();
  staged()->rows.resize(sites().size());
}

void table_set(int64_t site, int64_t bucket, const std::string &path, const std::string &artifact,
               const std::vector<at::Tensor> &packed, int64_t least, int64_t most) {
  Table &table = staged_or_raise();
  TORCH_CHECK_VALUE(packed.size() <= kMostPacked, packed.size(), " packed weights: a cell holds ", kMostPacked);
  Cell made;
  made.run = library(path).run;
  made.artifact = interned(artifacts(), &ArtifactCounts::digest, artifact);
  made.least = least;
  made.most = most;
  for (size_t i = 0; i < packed.size(); ++i) {
    made.packed[i] = view_of(packed[i]);
    table.keep.push_back(packed[i]);
  }
  table.paths.insert(path);
  table.rows.at(static_cast<size_t>(site)).at(static_cast<size_t>(bucket)).push_back(made);
}

// Called between two steps by the thread that runs the model, so that nothing reads the table that is freed here.
// Nothing in it can fail: where several ranks engage a table, all that can fail lies before.
int64_t table_commit() {
  staged_or_raise();
  Table *next = staged().release();
  next->epoch = current().load()->epoch + 1;
  const Table *last = current().exchange(next, std::memory_order_acq_rel);
  history().push_back(last->paths);
  delete last;
  unload_unreachable();
  return next->epoch;
}

void table_abandon() {
  staged().reset();
  unload_unreachable();
}

void keep_epochs(int64_t count) {
  TORCH_CHECK_VALUE(count >= 0, count, " epochs to keep: 0 or more");
  kept_epochs() = count;
}

std::vector<std::string> loaded_libraries() {
  std::vector<std::string> paths;
  for (const auto &entry : libraries()) paths.push_back(entry.first);
  return paths;
}

std::string read_counters(bool reset) {
  std::string text = counters_json();
  if (reset) reset_counters();
  return text;
}

std::vector<int64_t> sites_of(const std::string &definition) {
  std::vector<int64_t> found;
  for (size_t i = 0; i < sites().size(); ++i) {
    if (definitions()[static_cast<size_t>(sites()[i].definition)].name == definition) {
      found.push_back(static_cast<int64_t>(i));
    }
  }
  return found;
}

void capture_start(const std::string &definition, int64_t calls, int64_t every, int64_t max_bytes, int64_t min_m,
                   int64_t max_m, bool ring) {
  TORCH_CHECK_VALUE(!sites_of(definition).empty(), "no slot has the definition ", definition);
  Capture &state = capture();
  state.calls.clear();
  state.most_calls = calls;
  state.every = std::max<int64_t>(every, 1);
  state.seen = 0;
  state.most_bytes = max_bytes;
  state.bytes = 0;
  state.ring = ring;
  state.min_m = min_m;
  state.max_m = max_m;
  state.definition.store(interned(definitions(), &DefinitionCounts::name, definition));
}

// Ends the capture: sites, numbers of inputs, and then names and inputs of all calls, one after the other.
std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<std::string>, std::vector<at::Tensor>>
capture_finish() {
  Capture &state = capture();
  state.definition.store(-1);
  std::vector<int64_t> sites_by_call, sizes;
  std::vector<std::string> names;
  std::vector<at::Tensor> inputs;
  for (auto &call : state.calls) {
    sites_by_call.push_back(call.site);
    sizes.push_back(static_cast<int64_t>(call.inputs.size()));
    for (auto &input : call.inputs) {
      names.emplace_back(input.first);
      inputs.push_back(std::move(input.second));
    }
  }
  state.calls.clear();
  return {sites_by_call, sizes, names, inputs};
}

int64_t threads() { return context()->threads; }

}  // namespace

TORCH_LIBRARY(polymorph, library) {
  library.def("sites_of(str definition) -> int[]", sites_of);
  library.def("packs(str path) -> bool", packs);
  library.def("pack(str path, str artifact, Tensor weight) -> Tensor", pack);
  library.def("table_begin() -> ()", table_begin);
  library.def(
      "table_set(int site, int bucket, str path, str artifact, Tensor[] packed, int least, int most) -> ()",
      table_set);
  library.def("table_commit() -> int", table_commit);
  library.def("table_abandon() -> ()", table_abandon);
  library.def("keep_epochs(int count) -> ()", keep_epochs);
  library.def("loaded_libraries() -> str[]", loaded_libraries);
  library.def("open_flight(str path) -> ()", open_flight);
  library.def("read_counters(bool reset) -> str", read_counters);
  library.def(
      "capture_start(str definition, int calls, int every, int max_bytes, int min_m, int max_m, bool ring=False) -> ()",
      capture_start);
  library.def("capture_finish() -> (int[], int[], str[], Tensor[])", capture_finish);
  library.def("threads() -> int", threads);
}

}  // namespace polymorph
