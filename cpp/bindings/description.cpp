// Description: what a model is, read from what Python found in the file's header; and what loading it would take.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "bindings/bindings.h"
#include "bindings/interpreter.h"
#include "core/error.h"
#include "hardware/devices.h"
#include "planning/memory_plan.h"
#include "planning/step_work.h"

namespace sharpi {

namespace {

using TensorRow = std::tuple<std::string, uint32_t, std::vector<int64_t>, int32_t, uint64_t, uint64_t>;

Metadata toMetadata(const py::dict& values) {
    std::map<std::string, MetadataValue> result;
    for (const auto& [key, value] : values) {
        const auto name = py::cast<std::string>(key);
        if (py::isinstance<py::bool_>(value)) result[name] = py::cast<bool>(value);
        else if (py::isinstance<py::str>(value)) result[name] = py::cast<std::string>(value);
        else if (py::isinstance<py::float_>(value)) result[name] = py::cast<double>(value);
        else if (py::isinstance<py::int_>(value)) {
            // No size is larger than int64 holds. A larger number becomes a double, which a look-up of a size refuses.
            int overflow = 0;
            const long long whole = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
            if (overflow) result[name] = PyLong_AsDouble(value.ptr());
            else result[name] = static_cast<int64_t>(whole);
        } else if (py::isinstance<py::array>(value)) {
            result[name] = py::cast<std::vector<double>>(
                py::reinterpret_borrow<py::array>(value).attr("astype")("float64").attr("ravel")());
        } else {
            // The core never reads such an array. It still knows the key, so that no default stands in for it.
            result[name] = std::vector<double>();
        }
    }
    return Metadata(std::move(result));
}

Description describe(const py::dict& metadata, const std::vector<TensorRow>& rows, bool predictions) {
    std::vector<TensorInfo> tensors;
    for (const auto& [name, type, shape, file, offset, bytes] : rows) {
        const DTypeInfo* dtype = findDType(type);
        if (!dtype)
            throw Error(ErrorKind::BadModel, "tensor '" + name + "' has the unknown type " + std::to_string(type));
        tensors.push_back({name, dtype->type, shape, file, offset, bytes});
    }
    TensorTable table(std::move(tensors));
    ModelSpec spec = ModelSpec::read(toMetadata(metadata), table);
    if (!predictions) spec.dropPredictions();
    return {std::move(spec), std::move(table)};
}

// Throws for homes of another model.
void requireHomesOf(const Description& d, const EngineOptions& options) {
    if (!options.homes.empty() && options.homes.size() != d.tensors.all().size()) {
        throw Error(ErrorKind::InvalidArgument, "homes for " + std::to_string(options.homes.size()) + " tensors of " +
                                                    std::to_string(d.tensors.all().size()));
    }
}

}  // namespace

void bindDescription(py::module_& m) {
    py::class_<Description>(m, "Description",
                            "What a model is: read from metadata and tensor table, weights untouched.")
        .def(py::init(&describe), py::arg("metadata"), py::arg("tensors"), py::arg("predictions") = true,
             "predictions: whether a prediction layer that the file has is used. Without, it is neither planned nor "
             "loaded.")
        .def_property_readonly("name", [](const Description& d) { return d.spec.name; })
        .def_property_readonly("architecture", [](const Description& d) { return d.spec.architecture; })
        .def_property_readonly("vocab_size", [](const Description& d) { return d.spec.vocabSize; })
        .def_property_readonly("context_length", [](const Description& d) { return d.spec.contextLength; })
        .def_property_readonly("embedding_length", [](const Description& d) { return d.spec.embedding; })
        .def_property_readonly("layer_count", [](const Description& d) { return d.spec.layers.size(); })
        .def_property_readonly("prediction_layers", [](const Description& d) { return d.spec.predictions.size(); })
        .def_property_readonly(
            "state_bytes",
            [](const Description& d) {
                int64_t floats = 0;
                for (const RecurrentShape& shape : recurrentShapes(d.spec))
                    floats += shape.convFloats + shape.matrixFloats;
                return floats * static_cast<int64_t>(sizeof(float));
            },
            "What the recurrent layers keep of one sequence; 0 for a model without.")
        .def_property_readonly(
            "shared_experts", [](const Description& d) { return sharedExperts(d.spec); },
            "Layers with experts and, beside them, products that every token takes.")
        .def_property_readonly(
            "row_kernels", [](const Description& d) { return rowKernels(d.spec); },
            "Small kernels of a step beyond those of plain layers.")
        .def(
            "attention_products",
            [](const Description& d, int64_t tokens) { return attentionProducts(d.spec, tokens); }, py::arg("tokens"),
            "Multiplications of queries with keys for the last of `tokens` tokens.")
        .def_property_readonly(
            "long_attention", [](const Description& d) { return hasLongAttention(d.spec); },
            "Whether the GPU has kernels for long texts for all of the model's attention.")
        .def_property_readonly("parameter_count", [](const Description& d) { return d.spec.parameters(d.tensors); })
        .def(
            "kv_bytes", [](const Description& d, const EngineOptions& options) { return kvBytes(d.spec, options); },
            py::arg("options"), "Bytes of the KV cache, in whole pages.")
        .def(
            "kv_bytes_if_all_seen",
            [](const Description& d, const EngineOptions& options) { return kvBytesIfAllSeen(d.spec, options); },
            py::arg("options"), "What they would be if every layer saw all tokens.")
        .def(
            "kv_bytes_read",
            [](const Description& d, const std::string& type, int64_t tokens) {
                return kvBytesRead(d.spec, toKvType(type), tokens);
            },
            py::arg("kv_dtype"), py::arg("tokens"), "What the last of `tokens` tokens reads of the KV cache.")
        .def(
            "refusal",
            [](const Description& d, const std::string& device) -> std::string {
                try {
                    deviceKind(device).requireCanRun(d.spec);
                } catch (const Error& refused) {
                    return refused.what();
                }
                return "";
            },
            py::arg("device"), "Why this kind of device cannot run the model; empty if it can.")
        .def(
            "memory_lines",
            [](const Description& d, const EngineOptions& options) {
                requireHomesOf(d, options);
                options.device.kind->requireCanRun(d.spec);
                std::vector<std::pair<std::string, int64_t>> lines;
                const ReleasedGil release;
                for (const TraceLine& line : plannedLines(d.spec, d.tensors, options)) {
                    lines.emplace_back(line.name, line.taken);
                }
                return lines;
            },
            py::arg("options"),
            "What loading will take of the device's memory, in bytes, line by line as SHARPI_TRACE_VRAM=1 shows it. "
            "Refuses "
            "a model that this kind of device cannot run.")
        .def(
            "expert_pools",
            [](const Description& d, const EngineOptions& options) {
                requireHomesOf(d, options);
                std::vector<std::tuple<int32_t, int64_t, size_t, int64_t>> pools;
                const ReleasedGil release;
                for (const auto& p : expertPools(d.spec, d.tensors, options))
                    pools.emplace_back(p.layers, p.experts, p.slotBytes, p.capacity);
                return pools;
            },
            py::arg("options"),
            "(layers, experts of all of them, bytes of a slot, slots) for experts of each size, where experts are in "
            "slots.")
        .def(
            "tensor_uses",
            [](const Description& d) {
                std::vector<std::tuple<int32_t, std::string, std::string, int32_t, uint64_t, int64_t, int64_t>> uses;
                for (const TensorUse& use : tensorUses(d.spec, d.tensors)) {
                    const std::string& name = d.tensors.all()[static_cast<size_t>(use.tensor)].name;
                    uses.emplace_back(use.tensor, name, roleName(use.role), use.layer, use.bytesPerToken, use.rows,
                                      use.cols);
                }
                return uses;
            },
            "(tensor, its name, role, layer or -1, bytes a token reads, rows, columns) in the order in which a token "
            "meets them; the "
            "prediction layer has the number layer_count, and is read for a draft; roles: "
            "embedding, vector, attention, router, ffn_gate, ffn_up, ffn_down, experts, head.");
}

}  // namespace sharpi
