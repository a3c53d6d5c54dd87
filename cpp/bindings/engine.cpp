// Engine: a loaded model.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "bindings/bindings.h"
#include "bindings/delete_unlocked.h"
#include "bindings/interpreter.h"

namespace sharpi {

namespace {

py::object expertStats(Engine& engine) {
    ExpertCounts counts;
    {
        const ReleasedGil release;  // a step may be running
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
    py::dict disk;
    disk["hits"] = counts.disk.hits;
    disk["reads"] = counts.disk.reads;
    disk["bytes"] = counts.disk.bytes;
    disk["waited"] = counts.disk.waited;
    disk["ram_capacity"] = counts.disk.ramCapacity;
    disk["ram_resident"] = counts.disk.ramResident;
    d["disk"] = disk;
    return d;
}

py::dict holdings(const Engine& engine) {
    std::vector<Holding> held;
    {
        // Waits if memory is just being taken or given back, which takes a while on a GPU.
        const ReleasedGil release;
        held = engine.holdings();
    }
    py::dict d;
    for (const Holding& holding : held) d[py::str(holding.name)] = holding.bytes;
    return d;
}

}  // namespace

void bindEngine(py::module_& m) {
    py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
        .def(py::init([](const Description& d, const std::vector<std::string>& paths, const EngineOptions& options) {
                 const ReleasedGil release;
                 return std::shared_ptr<Engine>(
                     new Engine(d.spec, std::make_unique<Weights>(paths, d.tensors), options), DeleteUnlocked());
             }),
             py::arg("description"), py::arg("paths"), py::arg("options"))
        .def("expert_stats", &expertStats, "What became of each expert so far; None for a model without experts.")
        .def_property_readonly("notes", &Engine::notes, "Lines for people: what differs from the plan.")
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
            "vram and ram: bytes of the file by where they are read. direct, slots and cpu: parts of ram; the CPU "
            "computes with those in cpu. ranges: (file, begin, end, home) of each part of the file. cache: the "
            "tensors that VRAM may or may not keep, and how many it keeps.")
        .def_property_readonly("device", [](Engine& e) { return e.options().device.kind->name(); })
        .def_property_readonly("device_name", [](Engine& e) { return e.backend().name(); })
        .def_property_readonly(
            "trace",
            [](const Engine& e) {
                std::vector<std::tuple<std::string, size_t, int64_t, size_t>> lines;
                for (const TraceLine& line : e.trace())
                    lines.emplace_back(line.name, line.asked, line.taken, line.free);
                return lines;
            },
            "What loading took: (name, bytes asked for, bytes by which free memory shrank, bytes then free).")
        .def_property(
            "graphs",
            [](Engine& e) {
                const ReleasedGil release;  // a step may be running
                const LockedModel model = e.runner().lock();
                Recording* const recording = model.backend().recording();
                return recording && recording->replays();
            },
            [](Engine& e, bool on) {
                const ReleasedGil release;
                const LockedModel model = e.runner().lock();
                if (Recording* const recording = model.backend().recording()) recording->setReplays(on);
            },
            "Whether decode steps are captured and replayed.")
        .def_property_readonly("kernels_per_step",
                               [](Engine& e) {
                                   const ReleasedGil release;
                                   const LockedModel model = e.runner().lock();
                                   Recording* const recording = model.backend().recording();
                                   return recording ? recording->kernelsPerStep() : int64_t{0};
                               })
        .def_property_readonly(
            "pinned_bytes",
            [](Engine& e) {
                const ReleasedGil release;  // a pass may unpin
                return e.runner().lock().backend().bus().pinnedBytes;
            },
            "Bytes of RAM that are pinned so that the GPU reads weights there.")
        .def_property_readonly("weight_bytes", &Engine::weightBytes)
        .def_property_readonly("kv_bytes", &Engine::kvBytes)
        .def_property_readonly("state_bytes", &Engine::stateBytes,
                               "Bytes of the recurrent states; 0 for a model without recurrent layers.")
        .def_property_readonly("scratch_bytes", &Engine::scratchBytes)
        .def("holdings", &holdings,
             "Bytes of the device's memory by what holds them, largest first. On the CPU the mapped file is left out.")
        .def("warm", [](const Engine& e, const std::function<bool(uint64_t, uint64_t)>& progress) {
            const ReleasedGil release;
            e.warm([&](uint64_t done, uint64_t total) {
                py::gil_scoped_acquire gil;
                return progress(done, total);
            });
        });
}

}  // namespace sharpi
