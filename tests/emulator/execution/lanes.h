// Loops over the lanes of a warp, in a form that compilers make vector instructions of.
#pragma once

#include <cstring>
#include <type_traits>

#include "execution/warp.h"

namespace sharpi::emulator {

template <typename T> using LaneWord = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <typename T> inline T fromWord(LaneWord<T> word) {
    if constexpr (std::is_floating_point_v<T>) {
        T value;
        std::memcpy(&value, &word, sizeof(value));
        return value;
    } else {
        return static_cast<T>(word);
    }
}

// Smaller types fill their register with zeros, or with their sign.
template <typename T> inline LaneWord<T> toWord(T value) {
    LaneWord<T> word;
    if constexpr (std::is_floating_point_v<T>) {
        std::memcpy(&word, &value, sizeof(word));
    } else {
        word = static_cast<LaneWord<T>>(value);
    }
    return word;
}

// o[0] = F(o[1], ...) in all lanes that execute it.
template <typename F, typename D, typename... S, size_t... I>
inline void inLanesOf(Warp& warp, const Instruction& in, std::index_sequence<I...>) {
    auto* const out = warp.at<LaneWord<D>>(in.o[0]);
    const uint32_t exec = warp.exec;
    const auto compute = [&](auto*... sources) {
        if (exec == kAllLanes) {
            for (int l = 0; l < kLanes; ++l) out[l] = toWord<D>(F::of(fromWord<S>(sources[l])...));
        } else {
            for (int l = 0; l < kLanes; ++l) {
                const LaneWord<D> value = toWord<D>(F::of(fromWord<S>(sources[l])...));
                out[l] = (exec >> l & 1) ? value : out[l];
            }
        }
    };
    compute(warp.at<const LaneWord<S>>(in.o[1 + I])...);
}
template <typename F, typename D, typename... S> void inLanes(Warp& warp, const Instruction& in) {
    inLanesOf<F, D, S...>(warp, in, std::index_sequence_for<S...>{});
}

template <typename Body> inline void forLanes(uint32_t lanes, Body body) {
    for (; lanes; lanes &= lanes - 1) body(__builtin_ctz(lanes));
}

}  // namespace sharpi::emulator
