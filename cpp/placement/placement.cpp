// See placement.h.
#include "placement/placement.h"

#include <algorithm>
#include <map>

namespace sharpi {

namespace {

// Tensors are padded to this in a file: what lies between two neighbours is no reason to count them apart.
constexpr uint64_t kPadding = 4096;

// What a layer's mixer uses, in order.
struct Mixer {
    std::vector<WeightSlice> vectors, matrices;
};
Mixer mixerOf(const AttentionSpec& a) {
    return {{a.qBias, a.kBias, a.vBias, a.outputBias, a.qNorm, a.kNorm, a.rope.factors}, {a.q, a.k, a.v, a.output}};
}
Mixer mixerOf(const GatedDeltaSpec& d) {
    return {{d.conv, d.stepBias, d.decay, d.norm}, {d.qkv, d.gate, d.alpha, d.beta, d.output}};
}

}  // namespace

std::vector<TensorUse> tensorUses(const ModelSpec& spec, const TensorTable& tensors) {
    std::vector<TensorUse> uses;
    const auto add = [&](const WeightSlice& slice, const char* role, int32_t layer, double share = 1.0) {
        if (!slice) return;
        const DType type = tensors.all().at(static_cast<size_t>(slice.tensor)).type;
        const double bytes =
            static_cast<double>(rowBytes(type, slice.cols)) * static_cast<double>(slice.rows * slice.experts) * share;
        uses.push_back({slice.tensor, role, layer, static_cast<uint64_t>(bytes), slice.rows, slice.cols});
    };
    const auto addTable = [&](const WeightSlice& table, int32_t layer) {
        add(table, "embedding", layer, 1.0 / static_cast<double>(table.rows));
    };
    const auto addLayer = [&](const LayerSpec& l, int32_t layer) {
        const Mixer mixer = l.attention ? mixerOf(*l.attention) : mixerOf(*l.delta);
        const bool shared = l.experts && l.experts->shared;
        add(l.mixerNorm, "vector", layer);
        for (const WeightSlice& v : mixer.vectors) add(v, "vector", layer);
        add(l.ffnNorm, "vector", layer);
        if (shared) add(l.experts->shared->scale, "vector", layer);
        for (const WeightSlice& m : mixer.matrices) add(m, "attention", layer);
        if (l.dense) {
            add(l.dense->gate, "ffn_gate", layer);
            add(l.dense->up, "ffn_up", layer);
            add(l.dense->down, "ffn_down", layer);
            return;
        }
        const ExpertFfnSpec& f = *l.experts;
        add(f.router, "router", layer);
        for (const WeightSlice& m : {f.gate, f.up, f.down})
            add(m, "experts", layer, static_cast<double>(f.used) / f.count);
        // Used in full by every token, as attention is.
        if (shared)
            for (const WeightSlice& m : {f.shared->gate, f.shared->up, f.shared->down}) add(m, "attention", layer);
    };
    addTable(spec.tokenEmbedding, -1);
    int32_t number = 0;
    for (const LayerSpec& layer : spec.layers) addLayer(layer, number++);
    for (const PredictionSpec& p : spec.predictions) {
        if (p.embedding) addTable(p.embedding, number);
        for (const WeightSlice& v : {p.embeddingNorm, p.hiddenNorm, p.headNorm}) add(v, "vector", number);
        add(p.projection, "attention", number);
        addLayer(p.layer, number++);
    }
    add(spec.outputNorm, "vector", -1);
    add(spec.output, "head", -1);
    return uses;
}

Homes normalized(const ModelSpec& spec, const TensorTable& tensors, Homes homes) {
    if (homes.empty()) return homes;
    const std::vector<TensorUse> uses = tensorUses(spec, tensors);
    const auto unit = [](const TensorUse& use) -> std::pair<std::string, int32_t> {
        const std::string role = use.role;
        if (role == "experts") return {role, -1};
        return role == "ffn_gate" || role == "ffn_up" ? std::pair(std::string("gated"), use.layer)
                                                      : std::pair(std::string(), -1);
    };
    std::map<std::pair<std::string, int32_t>, TensorHome> units;
    for (const TensorUse& use : uses) {
        TensorHome& home = homes.at(static_cast<size_t>(use.tensor));
        if (home.home == Home::Slots && std::string(use.role) != "experts") home.home = Home::Direct;
        if (unit(use).first.empty()) continue;
        TensorHome& common = units.emplace(unit(use), home).first->second;
        if (home.home != Home::Vram) common.home = unit(use).first == "experts" ? Home::Slots : Home::Direct;
    }
    for (const TensorUse& use : uses) {
        if (unit(use).first.empty()) continue;
        TensorHome& home = homes[static_cast<size_t>(use.tensor)];
        const TensorHome& common = units.at(unit(use));
        home.home = common.home;
        if (unit(use).first == "gated") home = common;
    }
    return homes;
}

bool expertsAway(const ModelSpec& spec, const Homes& homes) {
    if (homes.empty()) return false;
    const std::vector<const LayerSpec*> layers = spec.loadedLayers();
    return std::any_of(layers.begin(), layers.end(), [&](const LayerSpec* layer) {
        return layer->experts && homes.at(static_cast<size_t>(layer->experts->gate.tensor)).home == Home::Slots;
    });
}

namespace {

// Adds the ranges of tensors that are used, in the order of the files.
void addRanges(Placement& placement, const TensorTable& tensors, const std::vector<bool>& used,
               const std::vector<Home>& where) {
    std::vector<int32_t> order;
    for (size_t i = 0; i < used.size(); ++i) {
        if (used[i])
            order.push_back(static_cast<int32_t>(i));  // a prediction layer's that is not loaded stays in the file
    }
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        const TensorInfo &x = tensors.all()[a], &y = tensors.all()[b];
        return x.file != y.file ? x.file < y.file : x.offset < y.offset;
    });
    for (const int32_t i : order) {
        const TensorInfo& t = tensors.all()[i];
        const Home home = where[i];
        std::vector<Placement::Range>& ranges = placement.ranges;
        const bool joins = !ranges.empty() && ranges.back().file == t.file && ranges.back().home == home &&
                           t.offset - ranges.back().end <= kPadding;
        if (joins) ranges.back().end = t.offset + t.bytes;
        else ranges.push_back({t.file, t.offset, t.offset + t.bytes, home});
    }
}

std::vector<bool> usedTensors(const TensorTable& tensors, const std::vector<TensorUse>& uses) {
    std::vector<bool> used(tensors.all().size(), false);
    for (const TensorUse& use : uses) used[static_cast<size_t>(use.tensor)] = true;
    return used;
}

}  // namespace

Placement placementOnCpu(const ModelSpec& spec, const TensorTable& tensors) {
    Placement placement;
    const std::vector<bool> used = usedTensors(tensors, tensorUses(spec, tensors));
    for (size_t i = 0; i < used.size(); ++i) placement.ram += used[i] ? tensors.all()[i].bytes : 0;
    placement.cpu = placement.ram;
    addRanges(placement, tensors, used, std::vector<Home>(used.size(), Home::Ram));
    return placement;
}

Placement placementOf(const ModelSpec& spec, const TensorTable& tensors, const Homes& planned) {
    Placement placement;
    std::vector<Home> where(tensors.all().size(), Home::Vram);
    const std::vector<TensorUse> uses = tensorUses(spec, tensors);
    const std::vector<bool> used = usedTensors(tensors, uses);
    std::vector<bool> mayLeave(used.size(), false);
    const Homes homes = normalized(spec, tensors, planned.empty() ? Homes(tensors.all().size()) : planned);
    for (const TensorUse& use : uses) {
        const auto tensor = static_cast<size_t>(use.tensor);
        const std::string role = use.role;
        if (role != "vector") mayLeave[tensor] = true;
        if (role == "vector" || homes.at(tensor).home == Home::Vram) continue;
        where[tensor] = homes[tensor].home;
        const uint64_t row = rowBytes(tensors.all()[tensor].type, use.cols);
        if (role.rfind("ffn_", 0) == 0 || role == "head")
            placement.cpu += row * static_cast<uint64_t>(std::min(homes[tensor].cpuRows, use.rows));
    }
    for (size_t i = 0; i < tensors.all().size(); ++i) {
        if (!used[i]) continue;
        const uint64_t bytes = tensors.all()[i].bytes;
        const bool resident = where[i] == Home::Vram;
        (resident ? placement.vram : where[i] == Home::Direct ? placement.direct : placement.slots) += bytes;
        if (!mayLeave[i]) continue;
        ++placement.candidates;
        placement.candidateBytes += bytes;
        placement.kept += resident;
        placement.keptBytes += resident ? bytes : 0;
    }
    placement.ram = placement.direct + placement.slots;
    addRanges(placement, tensors, used, where);
    return placement;
}

}  // namespace sharpi
