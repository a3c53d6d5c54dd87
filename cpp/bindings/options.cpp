// EngineOptions, by field name.
#include <pybind11/stl.h>

#include <algorithm>
#include <array>

#include "bindings/bindings.h"
#include "core/error.h"
#include "cpu/cpu_kind.h"
#include "hardware/devices.h"

namespace sharpi {

KvType toKvType(const std::string& name) {
    if (name == "fp32") return KvType::F32;
    if (name == "bf16") return KvType::BF16;
    if (name == "fp16") return KvType::F16;
    throw Error(ErrorKind::InvalidArgument, "unknown KV type '" + name + "': known are fp32, bf16 and fp16");
}

namespace {

const char* kvTypeName(KvType type) { return type == KvType::F32 ? "fp32" : type == KvType::BF16 ? "bf16" : "fp16"; }

PromptMode toPromptMode(const std::string& name) {
    if (name == "exact") return PromptMode::Exact;
    if (name == "fast") return PromptMode::Fast;
    throw Error(ErrorKind::InvalidArgument, "unknown prompt mode '" + name + "': known are exact and fast");
}

const char* promptModeName(PromptMode mode) { return mode == PromptMode::Exact ? "exact" : "fast"; }

// (home, rows of the CPU) of each tensor; none: all in VRAM.
using HomeRows = std::vector<std::tuple<std::string, int64_t>>;

constexpr std::array<Home, 3> kHomes{Home::Vram, Home::Direct, Home::Slots};

Homes toHomes(const HomeRows& rows) {
    Homes homes;
    for (const auto& [home, cpuRows] : rows) {
        const auto known =
            std::find_if(kHomes.begin(), kHomes.end(), [&home = home](Home h) { return home == homeName(h); });
        if (known == kHomes.end())
            throw Error(ErrorKind::InvalidArgument, "unknown home '" + home + "': known are vram, direct and slots");
        if (cpuRows < 0 || cpuRows > int64_t{1} << 40)
            throw Error(ErrorKind::InvalidArgument, "a plan with an impossible number of rows for the CPU");
        homes.push_back({*known, cpuRows});
    }
    return homes;
}

HomeRows homeRows(const Homes& homes) {
    HomeRows rows;
    for (const TensorHome& home : homes) rows.emplace_back(homeName(home.home), home.cpuRows);
    return rows;
}

}  // namespace

// Options by name, with the struct's defaults. The context has to be given. Read-only, so they are read without the
// GIL.
void bindOptions(py::module_& m) {
    using Warm = std::vector<std::pair<int32_t, int32_t>>;
    using Rates = std::pair<double, double>;
    const EngineOptions usual(cpuKind());
    py::class_<EngineOptions>(m, "EngineOptions",
                              "How a model runs: what an Engine is built with, and what its memory is planned with.")
        .def(py::init([](int64_t context, int64_t cacheTokens, int64_t batch, int threads, const std::string& kvType,
                         const std::string& prompt, int32_t sequences, const std::string& device, int ordinal,
                         size_t vram, const HomeRows& homes, size_t expertSlotBytes, size_t expertRamBytes,
                         const Rates& expertRates, Warm warm, bool tight) {
                 EngineOptions options(deviceKind(device));
                 options.context = context;
                 options.cacheTokens = cacheTokens;
                 options.batch = batch;
                 options.threads = threads;
                 options.kvType = toKvType(kvType);
                 options.prompt = toPromptMode(prompt);
                 options.sequences = sequences;
                 options.device.ordinal = ordinal;
                 options.vram = vram;
                 options.homes = toHomes(homes);
                 options.expertSlotBytes = expertSlotBytes;
                 options.expertRamBytes = expertRamBytes;
                 options.expertUse = {expertRates.first, expertRates.second, std::move(warm)};
                 options.tight = tight;
                 return options;
             }),
             py::kw_only(), py::arg("context"), py::arg("cache_tokens") = usual.cacheTokens,
             py::arg("batch") = usual.batch, py::arg("threads") = usual.threads,
             py::arg("kv_dtype") = kvTypeName(usual.kvType), py::arg("prompt") = promptModeName(usual.prompt),
             py::arg("sequences") = usual.sequences, py::arg("device") = usual.device.kind->name(),
             py::arg("ordinal") = usual.device.ordinal, py::arg("vram") = usual.vram,
             py::arg("homes") = homeRows(usual.homes), py::arg("expert_slot_bytes") = usual.expertSlotBytes,
             py::arg("expert_ram_bytes") = usual.expertRamBytes,
             py::arg("expert_rates") = Rates(usual.expertUse.cpuRate, usual.expertUse.busRate),
             py::arg("warm") = usual.expertUse.warm, py::arg("tight") = usual.tight,
             "cache_tokens: that the KV cache has room for; 0: as many as the context. prompt: how prompts are "
             "computed on the GPU, \"exact\" or \"fast\". ordinal: the GPU's number, "
             "as the driver counts. vram: the most to take of its memory; 0: all that is free. homes: (home, rows of "
             "the CPU) of each tensor; none: all in VRAM. expert_ram_bytes: for slots in RAM, on the GPU, of a model "
             "that is larger. expert_rates: bytes per second at which the "
             "CPU computes experts and the GPU fetches them. warm: (layer, expert) that slots hold from the "
             "beginning. tight: loads even if the plan counts more memory than there is.")
        .def_readonly("context", &EngineOptions::context)
        .def_readonly("cache_tokens", &EngineOptions::cacheTokens)
        .def_readonly("batch", &EngineOptions::batch)
        .def_readonly("threads", &EngineOptions::threads)
        .def_property_readonly("kv_dtype", [](const EngineOptions& o) { return kvTypeName(o.kvType); })
        .def_property_readonly("prompt", [](const EngineOptions& o) { return promptModeName(o.prompt); })
        .def_readonly("sequences", &EngineOptions::sequences)
        .def_property_readonly("device", [](const EngineOptions& o) { return o.device.kind->name(); })
        .def_property_readonly("ordinal", [](const EngineOptions& o) { return o.device.ordinal; })
        .def_readonly("vram", &EngineOptions::vram)
        .def_property_readonly("homes", [](const EngineOptions& o) { return homeRows(o.homes); })
        .def_readonly("expert_slot_bytes", &EngineOptions::expertSlotBytes)
        .def_readonly("expert_ram_bytes", &EngineOptions::expertRamBytes)
        .def_readonly("tight", &EngineOptions::tight)
        .def_property_readonly("expert_rates",
                               [](const EngineOptions& o) { return Rates(o.expertUse.cpuRate, o.expertUse.busRate); })
        .def_property_readonly("warm", [](const EngineOptions& o) { return o.expertUse.warm; });
}

}  // namespace sharpi
