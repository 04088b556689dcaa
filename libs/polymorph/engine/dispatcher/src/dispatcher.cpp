// The torch operators: what the model calls, and what the worker extension fills tables with.
#include <torch/library.h>

#include <ATen/ops/empty.h>

#include "linear.h"
#include "norm.h"

namespace polymorph {
namespace {

int64_t add_linear(const std::string &definition, int64_t n, int64_t k, int64_t native, const at::Tensor &state) {
  const int64_t site = add_site(definition);
  linear_layers().push_back({site, n, k, native, state});
  return static_cast<int64_t>(linear_layers().size()) - 1;
}

// The layer's weight was loaded anew: its native code has a new state, and its site stays.
void update_linear(int64_t layer_id, int64_t native, const at::Tensor &state) {
  LinearLayer &layer = linear_layers().at(static_cast<size_t>(layer_id));
  layer.native = native;
  layer.state = state;
}

int64_t linear_site(int64_t layer_id) { return linear_layers().at(static_cast<size_t>(layer_id)).site; }

bool packs(const std::string &path) { return library(path).pack != nullptr; }

at::Tensor pack(const std::string &path, const at::Tensor &weight) {
  const Library &code = library(path);
  TORCH_CHECK_VALUE(code.pack != nullptr, path, " packs no weight");
  const pm_tensor view = view_of(weight);
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
               const std::optional<at::Tensor> &weight) {
  Table &table = staged_or_raise();
  Cell &cell = table.rows.at(static_cast<size_t>(site)).at(static_cast<size_t>(bucket));
  cell.run = library(path).run;
  cell.artifact = interned(artifacts(), &ArtifactCounts::digest, artifact);
  if (weight.has_value()) {
    cell.weight = view_of(*weight);
    table.keep.push_back(*weight);
  }
}

// Called between two steps by the thread that runs the model, so that nothing reads the table that is freed here.
int64_t table_commit() {
  staged_or_raise();
  Table *next = staged().release();
  next->epoch = current().load()->epoch + 1;
  delete current().exchange(next, std::memory_order_acq_rel);
  return next->epoch;
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
                   int64_t max_m) {
  TORCH_CHECK_VALUE(!sites_of(definition).empty(), "no slot has the definition ", definition);
  Capture &state = capture();
  state.calls.clear();
  state.remaining = calls;
  state.every = std::max<int64_t>(every, 1);
  state.seen = 0;
  state.bytes_left = max_bytes;
  state.min_m = min_m;
  state.max_m = max_m;
  state.definition.store(interned(definitions(), &DefinitionCounts::name, definition));
}

// Ends the capture. Sites by call, and the inputs of all calls, one after the other.
std::tuple<std::vector<int64_t>, std::vector<at::Tensor>> capture_finish() {
  Capture &state = capture();
  state.definition.store(-1);
  std::vector<int64_t> sites_by_call;
  std::vector<at::Tensor> inputs;
  for (auto &call : state.calls) {
    sites_by_call.push_back(call.site);
    inputs.insert(inputs.end(), call.inputs.begin(), call.inputs.end());
  }
  state.calls.clear();
  return {sites_by_call, inputs};
}

int64_t threads() { return context()->threads; }

}  // namespace

TORCH_LIBRARY(polymorph, library) {
  library.def("linear(Tensor x, Tensor? bias, int layer_id, int n) -> Tensor");
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
  library.def("add_linear(str definition, int n, int k, int native, Tensor state) -> int", add_linear);
  library.def("update_linear(int layer_id, int native, Tensor state) -> ()", update_linear);
  library.def("linear_site(int layer_id) -> int", linear_site);
  library.def("sites_of(str definition) -> int[]", sites_of);
  library.def("packs(str path) -> bool", packs);
  library.def("pack(str path, Tensor weight) -> Tensor", pack);
  library.def("table_begin() -> ()", table_begin);
  library.def("table_set(int site, int bucket, str path, str artifact, Tensor? weight) -> ()", table_set);
  library.def("table_commit() -> int", table_commit);
  library.def("read_counters(bool reset) -> str", read_counters);
  library.def("capture_start(str definition, int calls, int every, int max_bytes, int min_m, int max_m) -> ()",
              capture_start);
  library.def("capture_finish() -> (int[], Tensor[])", capture_finish);
  library.def("threads() -> int", threads);
}

TORCH_LIBRARY_IMPL(polymorph, CPU, library) {
  library.impl("linear", linear);
  library.impl("rms_norm", rms_norm);
  library.impl("fused_add_rms_norm", fused_add_rms_norm);
}

}  // namespace polymorph
