// See placement.h.
#include "placement/placement.h"

#include <algorithm>
#include <map>

namespace sharpi {

namespace {

// Tensors are padded to this in a file: what lies between two neighbours is no reason to count them apart.
constexpr uint64_t kPadding = 4096;

}  // namespace

std::vector<TensorUse> tensorUses(const ModelSpec& spec, const TensorTable& tensors) {
    std::vector<TensorUse> uses;
    for (const ModelPart part : {ModelPart::Body, ModelPart::Prediction, ModelPart::Head}) {
        for (const ListedWeight& weight : spec.weights) {
            if (weight.part != part) continue;
            for (const WeightSlice& slice : weight.slices) {
                const DType type = tensors.all().at(static_cast<size_t>(slice.tensor)).type;
                const double bytes = static_cast<double>(rowBytes(type, slice.cols)) *
                                     static_cast<double>(slice.rows * slice.experts) * weight.share;
                uses.push_back(
                    {slice.tensor, weight.role, weight.layer, static_cast<uint64_t>(bytes), slice.rows, slice.cols});
            }
        }
    }
    return uses;
}

// Experts of all layers have one home; matrices of a unit have one home and one number of rows for the CPU.
Homes normalized(const ModelSpec& spec, Homes homes) {
    if (homes.empty()) return homes;
    const auto homeOf = [&homes](const ListedWeight& weight) -> TensorHome& {
        return homes.at(static_cast<size_t>(weight.slice().tensor));
    };
    bool expertsLeave = false;
    for (const ListedWeight& weight : spec.weights) {
        if (weight.role == WeightRole::Experts) expertsLeave |= homeOf(weight).home != Home::Vram;
        else if (homeOf(weight).home == Home::Slots) homeOf(weight).home = Home::Direct;
    }
    const auto firstOf = [&](const ListedWeight& weight) -> TensorHome& {
        return homeOf(spec.weights[static_cast<size_t>(weight.unit)]);
    };
    for (const ListedWeight& weight : spec.weights) {
        if (weight.role != WeightRole::Experts && homeOf(weight).home != Home::Vram)
            firstOf(weight).home = Home::Direct;
    }
    for (const ListedWeight& weight : spec.weights) {
        if (weight.role == WeightRole::Experts) homeOf(weight).home = expertsLeave ? Home::Slots : Home::Vram;
        else homeOf(weight) = firstOf(weight);
    }
    return homes;
}

bool expertsAway(const ModelSpec& spec, const Homes& homes) {
    if (homes.empty()) return false;
    return std::any_of(spec.weights.begin(), spec.weights.end(), [&](const ListedWeight& weight) {
        return weight.role == WeightRole::Experts &&
               homes.at(static_cast<size_t>(weight.slice().tensor)).home == Home::Slots;
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
    const Homes homes = normalized(spec, planned.empty() ? Homes(tensors.all().size()) : planned);
    for (const TensorUse& use : uses) {
        const auto tensor = static_cast<size_t>(use.tensor);
        if (use.role == WeightRole::Vector) continue;
        mayLeave[tensor] = true;
        if (homes.at(tensor).home == Home::Vram) continue;
        where[tensor] = homes[tensor].home;
        const uint64_t row = rowBytes(tensors.all()[tensor].type, use.cols);
        if (sharesRows(use.role))
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
