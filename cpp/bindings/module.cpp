// The Python module sharpi._core: converts arguments, lets go of the GIL, and turns Error into Python's exceptions.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>

#include "core/error.h"
#include "cpu/kernels.h"
#include "engine/session.h"
#include "hardware/gpu.h"
#include "hardware/hardware_probe.h"

namespace py = pybind11;
using namespace sharpi;

namespace {

using TensorRow = std::tuple<std::string, uint32_t, std::vector<int64_t>, int32_t, uint64_t, uint64_t>;

// Destroys what may wait for a lock or for threads, and gives much memory back: other Python threads go on meanwhile.
// The GIL may be let go of already: an engine goes with its last session.
struct DeleteUnlocked {
    template <typename T> void operator()(T* object) const {
        if (!PyGILState_Check()) {
            delete object;
            return;
        }
        py::gil_scoped_release release;
        delete object;
    }
};

// What Python read from a file's header: the spec, and the table that it was read from.
struct Description {
    ModelSpec spec;
    TensorTable tensors;
};

Metadata toMetadata(const py::dict& values) {
    std::map<std::string, MetadataValue> result;
    for (const auto& [key, value] : values) {
        const auto name = py::cast<std::string>(key);
        if (py::isinstance<py::bool_>(value)) result[name] = py::cast<bool>(value);
        else if (py::isinstance<py::str>(value)) result[name] = py::cast<std::string>(value);
        else if (py::isinstance<py::float_>(value)) result[name] = py::cast<double>(value);
        else if (py::isinstance<py::int_>(value)) {
            // uint64 values past int64 are no sizes of anything; kept as numbers so that a look-up can refuse them.
            int overflow = 0;
            const long long whole = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
            if (overflow) result[name] = PyLong_AsDouble(value.ptr());
            else result[name] = static_cast<int64_t>(whole);
        } else if (py::isinstance<py::array>(value)) {
            result[name] = py::cast<std::vector<double>>(
                py::reinterpret_borrow<py::array>(value).attr("astype")("float64").attr("ravel")());
        } else {
            // An array that the core never reads. It still knows the key, so that no default stands in for it.
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

KvType toKvType(const std::string& name) {
    if (name == "fp32") return KvType::F32;
    if (name == "bf16") return KvType::BF16;
    if (name == "fp16") return KvType::F16;
    throw Error(ErrorKind::InvalidArgument, "unknown KV type '" + name + "': known are fp32, bf16 and fp16");
}

DraftOptions toDraftOptions(const std::string& source, int32_t tokens) {
    DraftOptions options;
    options.tokens = tokens;
    if (source == "ngram") options.source = DraftOptions::Source::NGram;
    else if (source == "mtp") options.source = DraftOptions::Source::Prediction;
    else if (source != "off")
        throw Error(ErrorKind::InvalidArgument, "unknown drafts '" + source + "': known are off, ngram and mtp");
    return options;
}

const char* kvTypeName(KvType type) { return type == KvType::F32 ? "fp32" : type == KvType::BF16 ? "bf16" : "fp16"; }

PromptMode toPromptMode(const std::string& name) {
    if (name == "exact") return PromptMode::Exact;
    if (name == "fast") return PromptMode::Fast;
    throw Error(ErrorKind::InvalidArgument, "unknown prompt mode '" + name + "': known are exact and fast");
}

const char* promptModeName(PromptMode mode) { return mode == PromptMode::Exact ? "exact" : "fast"; }

// Whether it is the GPU.
bool toCuda(const std::string& device) {
    if (device != "cpu" && device != "cuda")
        throw Error(ErrorKind::InvalidArgument, "unknown device '" + device + "': known are cpu and cuda");
    return device == "cuda";
}

const char* deviceName(bool cuda) { return cuda ? "cuda" : "cpu"; }

// (home, rows of the CPU, rank) of each tensor; none: all in VRAM.
using HomeRows = std::vector<std::tuple<std::string, int64_t, int32_t>>;

constexpr std::array<Home, 3> kHomes{Home::Vram, Home::Direct, Home::Slots};

Homes toHomes(const HomeRows& rows) {
    Homes homes;
    for (const auto& [home, cpuRows, rank] : rows) {
        const auto known =
            std::find_if(kHomes.begin(), kHomes.end(), [&home = home](Home h) { return home == homeName(h); });
        if (known == kHomes.end())
            throw Error(ErrorKind::InvalidArgument, "unknown home '" + home + "': known are vram, direct and slots");
        if (cpuRows < 0 || cpuRows > int64_t{1} << 40 || rank < 0)
            throw Error(ErrorKind::InvalidArgument, "a plan with impossible rows or ranks");
        homes.push_back({*known, cpuRows, rank});
    }
    return homes;
}

HomeRows homeRows(const Homes& homes) {
    HomeRows rows;
    for (const TensorHome& home : homes) rows.emplace_back(homeName(home.home), home.cpuRows, home.rank);
    return rows;
}

RowKind toRowKind(const std::string& kind) {
    if (kind == "prompt") return RowKind::Prompt;
    if (kind == "decode") return RowKind::Decode;
    throw Error(ErrorKind::InvalidArgument, "unknown kind of rows '" + kind + "': known are prompt and decode");
}

Interrupted interruptCheck() {
    return [] {
        py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        return false;
    };
}

// The exception class of sharpi.errors for each kind.
void translate(std::exception_ptr p) {
    const char* name = nullptr;
    std::string what;
    try {
        if (p) std::rethrow_exception(p);
        return;
    } catch (const Error& e) {
        what = e.what();
        switch (e.kind()) {
        case ErrorKind::InvalidArgument: name = "InvalidRequestError"; break;
        case ErrorKind::BadModel: name = "ModelFileError"; break;
        case ErrorKind::OutOfMemory: name = "OutOfMemoryError"; break;
        case ErrorKind::Internal: name = "InternalError"; break;
        }
    } catch (const std::bad_alloc&) {
        name = "OutOfMemoryError";
        what = "out of memory: a smaller context or batch needs less";
    }
    const py::object type = py::module_::import("sharpi.errors").attr(name);
    PyErr_SetString(type.ptr(), what.c_str());
}

py::array_t<float> dequantize(uint32_t type, const py::bytes& data, int64_t cols) {
    const DTypeInfo* dtype = findDType(type);
    if (!dtype) throw Error(ErrorKind::InvalidArgument, "unknown type " + std::to_string(type));
    const auto bytes = static_cast<std::string_view>(data);
    if (cols <= 0 || cols % dtype->blockElements)
        throw Error(ErrorKind::InvalidArgument, "columns must be whole blocks");
    const size_t stride = rowBytes(dtype->type, cols);
    if (bytes.size() % stride) throw Error(ErrorKind::InvalidArgument, "data is not whole rows");
    const auto rows = static_cast<py::ssize_t>(bytes.size() / stride);
    py::array_t<float> out({rows, static_cast<py::ssize_t>(cols)});
    float* const to = out.mutable_data();
    py::gil_scoped_release release;
    for (py::ssize_t r = 0; r < rows; ++r) {
        cpu::kernels().dequantizeRow(dtype->type, bytes.data() + r * stride, cols, to + r * cols);
    }
    return out;
}

py::dict measure(int threads, size_t most) {
    HardwareRates rates;
    {
        py::gil_scoped_release release;
        rates = measureHardware(threads, most);
    }
    py::dict values;
    values["ram_bytes_per_second"] = rates.ramBytesPerSecond;
    values["cpu_flops"] = rates.cpuFlops;
    if (rates.gpu) {
        values["pcie_bytes_per_second"] = rates.gpu->pcieBytesPerSecond;
        values["ram_bytes_per_second_shared"] = rates.gpu->ramBytesPerSecondShared;
        values["pcie_bytes_per_second_shared"] = rates.gpu->pcieBytesPerSecondShared;
        values["vram_bytes_per_second"] = rates.gpu->vramBytesPerSecond;
        values["gpu_kernel_seconds"] = rates.gpu->kernelSeconds;
        values["gpu_flops"] = rates.gpu->flops;
    } else {
        values["gpu_missing"] = rates.gpuMissing;
    }
    return values;
}

// Options by name, with the struct's defaults. The context has to be given. Read-only, so they are read without the
// GIL.
void bindOptions(py::module_& m) {
    using Warm = std::vector<std::pair<int32_t, int32_t>>;
    using Rates = std::pair<double, double>;
    const EngineOptions usual;
    py::class_<EngineOptions>(m, "EngineOptions",
                              "How a model runs: what an Engine is built with, and what its memory is planned with.")
        .def(py::init([](int64_t context, int64_t batch, int threads, const std::string& kvType,
                         const std::string& prompt, int32_t sequences, const std::string& device, size_t vram,
                         const HomeRows& homes, size_t expertSlotBytes, const Rates& expertRates, Warm warm) {
                 EngineOptions options;
                 options.context = context;
                 options.batch = batch;
                 options.threads = threads;
                 options.kvType = toKvType(kvType);
                 options.prompt = toPromptMode(prompt);
                 options.sequences = sequences;
                 options.cuda = toCuda(device);
                 options.vram = vram;
                 options.homes = toHomes(homes);
                 options.expertSlotBytes = expertSlotBytes;
                 options.expertUse = {expertRates.first, expertRates.second, std::move(warm)};
                 return options;
             }),
             py::kw_only(), py::arg("context"), py::arg("batch") = usual.batch, py::arg("threads") = usual.threads,
             py::arg("kv_dtype") = kvTypeName(usual.kvType), py::arg("prompt") = promptModeName(usual.prompt),
             py::arg("sequences") = usual.sequences, py::arg("device") = deviceName(usual.cuda),
             py::arg("vram") = usual.vram, py::arg("homes") = homeRows(usual.homes),
             py::arg("expert_slot_bytes") = usual.expertSlotBytes,
             py::arg("expert_rates") = Rates(usual.expertUse.cpuRate, usual.expertUse.busRate),
             py::arg("warm") = usual.expertUse.warm,
             "prompt: how prompts are computed on the GPU, \"exact\" or \"fast\". vram: the most to take of the GPU's "
             "memory; 0: all that "
             "is free. homes: (home, rows of the CPU, rank) of each tensor; none: all in VRAM. expert_rates: bytes per "
             "second at which the "
             "CPU computes experts and the GPU fetches them. warm: (layer, expert) that slots hold from the beginning.")
        .def_readonly("context", &EngineOptions::context)
        .def_readonly("batch", &EngineOptions::batch)
        .def_readonly("threads", &EngineOptions::threads)
        .def_property_readonly("kv_dtype", [](const EngineOptions& o) { return kvTypeName(o.kvType); })
        .def_property_readonly("prompt", [](const EngineOptions& o) { return promptModeName(o.prompt); })
        .def_readonly("sequences", &EngineOptions::sequences)
        .def_property_readonly("device", [](const EngineOptions& o) { return deviceName(o.cuda); })
        .def_readonly("vram", &EngineOptions::vram)
        .def_property_readonly("homes", [](const EngineOptions& o) { return homeRows(o.homes); })
        .def_readonly("expert_slot_bytes", &EngineOptions::expertSlotBytes)
        .def_property_readonly("expert_rates",
                               [](const EngineOptions& o) { return Rates(o.expertUse.cpuRate, o.expertUse.busRate); })
        .def_property_readonly("warm", [](const EngineOptions& o) { return o.expertUse.warm; });
}

// Throws for homes of another model.
void requireHomesOf(const Description& d, const EngineOptions& options) {
    if (!options.homes.empty() && options.homes.size() != d.tensors.all().size()) {
        throw Error(ErrorKind::InvalidArgument, "homes for " + std::to_string(options.homes.size()) + " tensors of " +
                                                    std::to_string(d.tensors.all().size()));
    }
}

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
            "shared_experts",
            [](const Description& d) {
                return std::count_if(d.spec.layers.begin(), d.spec.layers.end(),
                                     [](const LayerSpec& l) { return l.experts && l.experts->shared; });
            },
            "Layers with an expert that every token goes through.")
        .def_property_readonly("parameter_count", [](const Description& d) { return d.spec.parameters(d.tensors); })
        .def(
            "kv_bytes",
            [](const Description& d, const std::string& type, int64_t context) {
                return Engine::kvBytesFor(d.spec, toKvType(type), context);
            },
            py::arg("kv_dtype"), py::arg("context"), "Bytes of the KV cache for `context` tokens, in whole pages.")
        .def(
            "memory_lines",
            [](const Description& d, const EngineOptions& options) {
                requireHomesOf(d, options);
                std::vector<std::pair<std::string, int64_t>> lines;
                py::gil_scoped_release release;
                for (const TraceLine& line : plannedLines(d.spec, d.tensors, options)) {
                    lines.emplace_back(line.name, line.taken);
                }
                return lines;
            },
            py::arg("options"),
            "What loading will take of the device's memory, in bytes, line by line as SHARPI_TRACE_VRAM=1 shows it.")
        .def(
            "expert_pools",
            [](const Description& d, const EngineOptions& options) {
                requireHomesOf(d, options);
                std::vector<std::tuple<int32_t, int64_t, size_t, int64_t>> pools;
                py::gil_scoped_release release;
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

py::object expertStats(Engine& engine) {
    ExpertCounts counts;
    {
        py::gil_scoped_release release;  // a step may be running
        counts = engine.expertCounts();
    }
    if (counts.layers == 0) return py::none();
    const auto table = [&counts](const std::vector<uint64_t>& values) {
        py::array_t<uint64_t> out({static_cast<py::ssize_t>(counts.layers), static_cast<py::ssize_t>(counts.experts)});
        std::copy(values.begin(), values.end(), out.mutable_data());
        return out;
    };
    std::vector<std::tuple<std::string, uint64_t, uint64_t, uint64_t>> predictors;
    for (const PredictorCounts& p : counts.predictors) predictors.emplace_back(p.name, p.named, p.used, p.wanted);
    py::dict d;
    d["layers"] = counts.layer;
    d["experts"] = counts.experts;
    d["present"] = counts.present;
    d["uses"] = table(counts.uses);
    d["hits"] = table(counts.hits);
    d["computed"] = table(counts.computed);
    d["fetched"] = table(counts.fetched);
    d["loads"] = table(counts.loads);
    d["evictions"] = table(counts.evictions);
    d["predictors"] = predictors;
    d["capacity"] = counts.capacity;
    d["resident"] = counts.resident;
    return d;
}

py::dict holdings(const Engine& engine) {
    std::vector<Holding> held;
    {
        py::gil_scoped_release release;  // memory may be just coming or going, which takes a while on a GPU
        held = engine.holdings();
    }
    py::dict d;
    for (const Holding& holding : held) d[py::str(holding.name)] = holding.bytes;
    return d;
}

void bindEngine(py::module_& m) {
    py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
        .def(py::init([](const Description& d, const std::vector<std::string>& paths, const EngineOptions& options) {
                 py::gil_scoped_release release;
                 return std::shared_ptr<Engine>(
                     new Engine(d.spec, std::make_unique<Weights>(paths, d.tensors), options), DeleteUnlocked());
             }),
             py::arg("description"), py::arg("paths"), py::arg("options"))
        .def("expert_stats", &expertStats, "What has become of each expert so far; None for a model without any.")
        .def_property_readonly("notes", &Engine::notes, "Lines for people: what was not as planned.")
        .def(
            "placement",
            [](const Engine& e) {
                const Placement p = e.placement();
                std::vector<std::tuple<int32_t, uint64_t, uint64_t, std::string>> ranges;
                for (const Placement::Range& r : p.ranges)
                    ranges.emplace_back(r.file, r.begin, r.end, homeName(r.home));
                py::dict d;
                d["vram"] = p.vram;
                d["ram"] = p.ram;
                d["direct"] = p.direct;
                d["slots"] = p.slots;
                d["cpu"] = p.cpu;
                d["ranges"] = ranges;
                py::dict cache;
                cache["kept"] = p.kept;
                cache["candidates"] = p.candidates;
                cache["bytes"] = p.keptBytes;
                cache["candidate_bytes"] = p.candidateBytes;
                cache["seconds"] = e.uploadSeconds();
                d["cache"] = cache;
                return d;
            },
            "Bytes of the file by where they are read: vram or ram; of ram: direct and slots, and what the CPU "
            "computes with; (file, begin, end, "
            "home) of its parts; and of the tensors that may be kept in VRAM or not, how many are.")
        .def_property_readonly("device", [](Engine& e) { return e.backend().device(); })
        .def_property_readonly("device_name", [](Engine& e) { return e.backend().name(); })
        .def_property_readonly(
            "trace",
            [](const Engine& e) {
                std::vector<std::tuple<std::string, size_t, int64_t, size_t>> lines;
                for (const TraceLine& line : e.trace())
                    lines.emplace_back(line.name, line.asked, line.taken, line.free);
                return lines;
            },
            "What loading took: (name, bytes asked for, bytes the device's free memory fell by, bytes free then).")
        .def_property(
            "graphs", [](Engine& e) { return e.backend().replays(); },
            [](Engine& e, bool on) { e.backend().setReplays(on); }, "Whether decode steps are captured and replayed.")
        .def_property_readonly("kernels_per_step", [](Engine& e) { return e.backend().kernelsPerStep(); })
        .def_property_readonly("weight_bytes", &Engine::weightBytes)
        .def_property_readonly("kv_bytes", &Engine::kvBytes)
        .def_property_readonly("state_bytes", &Engine::stateBytes, "Of the recurrent states; 0 for a model without.")
        .def_property_readonly("scratch_bytes", &Engine::scratchBytes)
        .def("holdings", &holdings,
             "Bytes of the device's memory by what holds them, largest first; on the CPU without the mapped file.")
        .def("warm", [](const Engine& e, const std::function<bool(uint64_t, uint64_t)>& progress) {
            py::gil_scoped_release release;
            e.warm([&](uint64_t done, uint64_t total) {
                py::gil_scoped_acquire gil;
                return progress(done, total);
            });
        });

    py::class_<Session, std::unique_ptr<Session, DeleteUnlocked>>(m, "Session")
        .def(py::init<std::shared_ptr<Engine>>(), py::arg("engine").none(false),
             py::call_guard<py::gil_scoped_release>())
        .def_property_readonly(
            "tokens",
            [](const Session& s) {
                py::gil_scoped_release release;  // the session may be locked by a thread that waits for the GIL
                return s.tokens();
            })
        .def_property_readonly("reused_tokens", &Session::reusedTokens)
        .def("reset", &Session::reset, py::call_guard<py::gil_scoped_release>())
        .def(
            "evaluate",
            [](Session& s, const std::vector<int32_t>& tokens, const std::vector<int64_t>& chunks,
               const std::string& kind) {
                const RowKind rows = toRowKind(kind);
                py::gil_scoped_release release;
                s.evaluate(tokens, rows, nullptr, chunks, interruptCheck());
            },
            py::arg("tokens"), py::arg("chunks") = std::vector<int64_t>{}, py::arg("kind") = "prompt",
            "Appends tokens, computed as rows of this kind: \"prompt\" or \"decode\". chunks: the sizes of pieces.")
        .def(
            "logits",
            [](Session& s, const std::vector<int32_t>& tokens, const std::vector<int64_t>& chunks,
               const std::string& kind) {
                const RowKind rows = toRowKind(kind);
                {
                    py::gil_scoped_release release;
                    s.requireRoom(static_cast<int64_t>(tokens.size()));  // before memory is taken for the answer
                }
                py::array_t<float> out(
                    {static_cast<py::ssize_t>(tokens.size()), static_cast<py::ssize_t>(s.vocabSize())});
                float* data = out.mutable_data();
                {
                    py::gil_scoped_release release;
                    s.evaluate(tokens, rows, data, chunks, interruptCheck());
                }
                return out;
            },
            py::arg("tokens"), py::arg("chunks") = std::vector<int64_t>{}, py::arg("kind") = "prompt",
            "As evaluate(): float32 [tokens, vocab], row i behind token i.")
        .def(
            "start",
            [](Session& s, const std::vector<int32_t>& prompt, const SamplingParams& params, const std::string& draft,
               int32_t draftTokens) {
                const DraftOptions drafts = toDraftOptions(draft, draftTokens);
                py::gil_scoped_release release;
                s.start(prompt, params, interruptCheck(), drafts);
            },
            py::arg("prompt"), py::arg("params"), py::arg("draft") = "off", py::arg("draft_tokens") = 1,
            "draft: where guesses at coming tokens are from: \"off\", \"ngram\" (the text) or \"mtp\" (the model's "
            "prediction layer). The "
            "text does not depend on it.")
        .def_property_readonly(
            "draft_counts",
            [](const Session& s) {
                py::gil_scoped_release release;
                const DraftCounts counts = s.draftCounts();
                return std::tuple(counts.steps, counts.drafted, counts.accepted);
            },
            "Since start(): steps of the model, tokens drafted for them, and those of these that were right.")
        .def("next", &Session::next, py::call_guard<py::gil_scoped_release>());
}

}  // namespace

PYBIND11_MODULE(_core, m) {
    m.doc() = "The native core of Sharpi.";
    py::register_exception_translator(translate);
    bindOptions(m);
    bindDescription(m);
    py::class_<SamplingParams>(m, "SamplingParams")
        .def(py::init([](float temperature, int32_t topK, float topP, float minP, float repetition, float presence,
                         float frequency, std::map<int32_t, float> bias, uint64_t seed) {
                 SamplingParams p;
                 p.temperature = temperature;
                 p.topK = topK;
                 p.topP = topP;
                 p.minP = minP;
                 p.repetitionPenalty = repetition;
                 p.presencePenalty = presence;
                 p.frequencyPenalty = frequency;
                 p.logitBias = std::move(bias);
                 p.seed = seed;
                 return p;
             }),
             py::kw_only(), py::arg("temperature"), py::arg("top_k"), py::arg("top_p"), py::arg("min_p"),
             py::arg("repetition_penalty"), py::arg("presence_penalty"), py::arg("frequency_penalty"),
             py::arg("logit_bias"), py::arg("seed"))
        .def("validate", &SamplingParams::validate, py::arg("vocab_size"));
    bindEngine(m);
    m.def("known_architectures", &knownArchitectures);
    m.def("dequantize", &dequantize, py::arg("ggml_type"), py::arg("data"), py::arg("cols"),
          "Rows of a quantized format as float32 [rows, cols].");
    m.def("cpu_isa", [] { return cpu::kernels().name; }, "The instruction set that kernels run with here.");
    m.def(
        "find_cuda_device",
        [] {
            const cuda::DeviceInfo gpu = [] {
                py::gil_scoped_release release;  // the first use of a GPU takes its time
                return findGpu();
            }();
            py::dict info;
            info["name"] = gpu.name;
            info["index"] = gpu.index;
            info["compute_capability"] = std::to_string(gpu.major) + "." + std::to_string(gpu.minor);
            info["multiprocessors"] = gpu.multiprocessors;
            info["total_bytes"] = gpu.totalBytes;
            info["free_bytes"] = gpu.freeBytes;
            return info;
        },
        "The GPU that device 'cuda' means. Raises InvalidRequestError with the reason where there is none.");
    m.def("measure_hardware", &measure, py::arg("threads"), py::arg("most_bytes") = kProbeBytes,
          "How fast the CPU, the GPU and the way between them are, measured in a few seconds: for each rate a list of "
          "samples. Samples "
          "of the two \"_shared\" rates with the same index are of one moment. \"gpu_missing\" says why there are no "
          "rates of a GPU. "
          "most_bytes: the most to take of each memory. Raises OutOfMemoryError if too little can be had.");
    m.attr("backends") = SHARPI_BACKENDS;
    m.attr("cuda_state") = SHARPI_CUDA_STATE;
    m.attr("version") = SHARPI_VERSION;
}
