// See placement.h.
#include "engine/placement.h"

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
Mixer mixerOf(const GatedDeltaSpec& d) { return {{d.conv, d.stepBias, d.decay, d.norm}, {d.qkv, d.gate, d.alpha, d.beta, d.output}}; }

}  // namespace

std::vector<TensorUse> tensorUses(const ModelSpec& spec, const TensorTable& tensors) {
    std::vector<TensorUse> uses;
    const auto add = [&](const WeightSlice& slice, const char* role, int32_t layer, double share = 1.0) {
        if (!slice) return;
        const DType type = tensors.all().at(static_cast<size_t>(slice.tensor)).type;
        const double bytes = static_cast<double>(rowBytes(type, slice.cols)) * static_cast<double>(slice.rows * slice.experts) * share;
        uses.push_back({slice.tensor, role, layer, static_cast<uint64_t>(bytes), slice.rows, slice.cols});
    };
    add(spec.tokenEmbedding, "embedding", -1, 1.0 / static_cast<double>(spec.tokenEmbedding.rows));
    for (size_t i = 0; i < spec.layers.size(); ++i) {
        const LayerSpec& l = spec.layers[i];
        const auto layer = static_cast<int32_t>(i);
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
        } else {
            const ExpertFfnSpec& f = *l.experts;
            add(f.router, "router", layer);
            for (const WeightSlice& m : {f.gate, f.up, f.down}) add(m, "experts", layer, static_cast<double>(f.used) / f.count);
            // Used in full by every token, as attention is.
            if (shared) for (const WeightSlice& m : {f.shared->gate, f.shared->up, f.shared->down}) add(m, "attention", layer);
        }
    }
    add(spec.outputNorm, "vector", -1);
    add(spec.output, "head", -1);
    return uses;
}

namespace {

// What homes come to where they differ for matrices that go together, a layer's gate and up or its stacks of experts: all are
// in the file if one is, and gate's rows count.
Homes together(const std::vector<TensorUse>& uses, Homes homes) {
    const auto unit = [](const TensorUse& use) -> std::string {
        const std::string role = use.role;
        return role == "ffn_gate" || role == "ffn_up" ? "gated" : role == "experts" ? role : "";
    };
    std::map<std::pair<int32_t, std::string>, TensorHome> units;
    for (const TensorUse& use : uses) {
        const TensorHome& home = homes[static_cast<size_t>(use.tensor)];
        if (unit(use).empty()) continue;
        TensorHome& common = units.emplace(std::pair(use.layer, unit(use)), home).first->second;
        if (home.home == Home::Direct) common.home = Home::Direct;
    }
    for (const TensorUse& use : uses) {
        if (!unit(use).empty()) homes[static_cast<size_t>(use.tensor)] = units.at({use.layer, unit(use)});
    }
    return homes;
}

}  // namespace

Placement placementOf(const ModelSpec& spec, const TensorTable& tensors, const Homes& planned) {
    Placement placement;
    std::vector<int32_t> order;
    std::vector<bool> resident(tensors.all().size(), true), used(tensors.all().size(), false);
    const std::vector<TensorUse> uses = tensorUses(spec, tensors);
    for (const TensorUse& use : uses) used[static_cast<size_t>(use.tensor)] = true;
    const Homes homes = together(uses, planned.empty() ? Homes(tensors.all().size()) : planned);
    for (const TensorUse& use : uses) {
        const auto tensor = static_cast<size_t>(use.tensor);
        const std::string role = use.role;
        if (role == "vector" || homes.at(tensor).home == Home::Vram) continue;
        const bool known = !resident[tensor];  // by another of its uses
        resident[tensor] = false;
        const uint64_t row = rowBytes(tensors.all()[tensor].type, use.cols);
        if (role == "experts" && !known) placement.cpu += tensors.all()[tensor].bytes;
        if (role.rfind("ffn_", 0) == 0 || role == "head") placement.cpu += row * static_cast<uint64_t>(std::min(homes[tensor].cpuRows, use.rows));
    }
    for (size_t i = 0; i < tensors.all().size(); ++i) {
        if (!used[i]) continue;  // a prediction layer's stays in the file
        (resident[i] ? placement.vram : placement.direct) += tensors.all()[i].bytes;
        order.push_back(static_cast<int32_t>(i));
    }
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        const TensorInfo &x = tensors.all()[a], &y = tensors.all()[b];
        return x.file != y.file ? x.file < y.file : x.offset < y.offset;
    });
    for (const int32_t i : order) {
        const TensorInfo& t = tensors.all()[i];
        const Home home = resident[i] ? Home::Vram : Home::Direct;
        std::vector<Placement::Range>& ranges = placement.ranges;
        const bool joins = !ranges.empty() && ranges.back().file == t.file && ranges.back().home == home && t.offset - ranges.back().end <= kPadding;
        if (joins) ranges.back().end = t.offset + t.bytes;
        else ranges.push_back({t.file, t.offset, t.offset + t.bytes, home});
    }
    return placement;
}

}  // namespace sharpi
