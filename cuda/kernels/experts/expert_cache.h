// The steps through a layer of experts for few rows, if some of the experts are in slots in VRAM and the others in the
// host's memory. One captured sequence of launches serves every case:
//
//   sendExperts     looks up which of the chosen experts are in a slot, and tells the CPU
//   fetchExperts    fetches the experts that the CPU orders, straight from the file's pinned pages
//   matvec.h        multiplies, and skips pairs without a slot
//   combineAnswers  adds up the answers of both processors, by rank
//
// A pair is a row and a rank: p = row * used + rank. If no expert is missed, no kernel waits for the CPU.
#pragma once

#include <cstdint>

#include "core/expert_orders.h"
#include "core/matrix.h"
#include "kernels/matmul/matmul.h"
#include "kernels/rows/crossing.h"
#include "kernels/rows/rows.h"

namespace sharpi::cuda {

// The device's copy of the orders, and whether it is complete. If fetchAhead reads it, the next sendExperts must come
// after that or use another one.
struct DeviceOrders {
    ExpertOrders orders;
    uint32_t missed = 0;  // pairs of the layer without a slot; set by sendExperts
    // sendExperts sets it to 0, and fetchExperts to 1 once `orders` is complete. If nothing is missed, it stays 0.
    uint32_t ready = 0;
};

// slot[p] = table[chosen[p]] for all pairs, on the device and for the CPU. The CPU also gets `chosen` and, if it is not
// null, `predicted`, and likewise `weight` (all in device memory). If any expert is missed, it copies the rows as
// sendRows does. Then it sets *sent = ticket. One launch of one block.
void sendExperts(Stream& stream, const RowOutputs& from, int64_t rows, int32_t used, const int32_t* chosen,
                 const int32_t* table, const int32_t* predicted, int32_t* slot, DeviceOrders* orders,
                 const HostRows& to, const HostChoices& host, uint32_t* sent, uint32_t ticket,
                 const float* weight = nullptr);

// If anything was missed, waits until *instructed >= ticket, copies the CPU's orders to `orders`, and fetches every
// demanded expert into its slot of `slots` (slot s is element s of each stack, packed). It reads the file's bytes
// across PCIe once, in whole aligned pieces of 16 bytes. Afterwards slot[] names that slot for the missed pairs that
// chose the expert. After an abort (kCrossingAborted) it fetches nothing.
void fetchExperts(Stream& stream, const ExpertStacks& slots, const ExpertOrders* host, const uint32_t* instructed,
                  uint32_t ticket, DeviceOrders* orders, int64_t pairs, const int32_t* chosen, int32_t* slot);
// After fetchExperts, fetches what the layer's `orders` want ahead into `slots` of the next layer and enters it in that
// layer's table. It is for a stream beside the computing one, which waits for it before it reads that table. If the
// layer missed nothing, it does nothing.
void fetchAhead(Stream& stream, const ExpertStacks& slots, const DeviceOrders* orders, int32_t* table);

// to[t, :] += sum over ascending ranks k of weight[t, k] * (answer[p, :] + bias), by fma from +0, with p = t * used +
// k. The answer is y (the GPU's, [pairs, cols], in device memory) if slot[p] >= 0, else hostY (the CPU's, [pairs,
// cols], in pinned memory). For a row with an answer of the CPU's it waits until *returned >= ticket. Then it adds the
// shared answer. If weight is null, weights are 1.
void combineAnswers(Stream& stream, const float* y, const float* hostY, const int32_t* slot, const float* weight,
                    int64_t rows, int32_t used, int64_t cols, const uint32_t* returned, uint32_t ticket, float* to,
                    const SharedAnswer& shared = {}, const AnswerTerms& terms = {});

// element[p] = the matrix of a stack that belongs to pair p's expert, or -1 if the stack does not hold it. With it,
// expertGated and expertMatvec find experts in a stack that holds only some of them, at the places that `which` names.
void lookUpExperts(Stream& stream, const int32_t* chosen, int64_t pairs, const ExpertIndex& which, int32_t* element);

}  // namespace sharpi::cuda
