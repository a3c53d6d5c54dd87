// A layer of experts of which some are in slots of the device's memory and the others in the host's: the way through it
// for few rows. One captured sequence of launches serves every case:
//
//   sendExperts     looks up which of the chosen experts are in a slot, and tells the CPU
//   fetchExperts    brings over what the CPU says the GPU shall compute, straight from the file's pinned pages
//   matvec.h        multiplies; pairs without a slot are passed over
//   combineAnswers  adds up what both processors made, by rank
//
// A pair is a row and a rank: p = row * used + rank. Where nothing is missed no kernel waits for the CPU.
#pragma once

#include <cstdint>

#include "core/matrix.h"
#include "kernels/matmul/matmul.h"
#include "kernels/rows/crossing.h"
#include "kernels/rows/rows.h"

namespace sharpi::cuda {

constexpr int kMaxExpertFetches = 8;

// An expert that the GPU shall bring over: from these addresses, which it can read, in the file's layout.
struct ExpertFetch {
    int32_t expert = -1;
    int32_t slot = -1;
    const uint8_t *gate = nullptr, *up = nullptr, *down = nullptr;
};

// What the CPU says of a layer's misses, in pinned memory. Demanded ones are for this layer; those ahead for the next
// one, which will find them in its table.
struct ExpertOrders {
    int32_t demanded = 0, ahead = 0;
    ExpertFetch fetch[kMaxExpertFetches];       // the first `demanded`
    ExpertFetch aheadFetch[kMaxExpertFetches];  // the first `ahead`
};

// The device's copy, and whether it is there. Where fetchAhead reads it, the next sendExperts comes after that, or has
// another.
struct DeviceOrders {
    ExpertOrders orders;
    uint32_t missed = 0;  // pairs of the layer without a slot; set by sendExperts
    uint32_t ready = 0;  // by sendExperts 0, by fetchExperts 1 once orders is there; it stays 0 where nothing is missed
};

// What the CPU learns of a layer: areas in pinned memory, one for each layer, since the CPU may be behind where nothing
// was missed.
struct HostChoices {
    int32_t* chosen = nullptr;     // [pairs]
    int32_t* slot = nullptr;       // [pairs]: -1 where missed
    int32_t* predicted = nullptr;  // [pairs], or null: what the next layer's router makes of these rows
};

// slot[p] = table[chosen[p]] for all pairs, on the device and for the CPU; chosen and, if not null, predicted (device)
// go along. If any is missed, copies the rows as sendRows does. Then *sent = ticket. One launch of one block.
void sendExperts(Stream& stream, const RowOutputs& from, int64_t rows, int32_t used, const int32_t* chosen,
                 const int32_t* table, const int32_t* predicted, int32_t* slot, DeviceOrders* orders,
                 const HostRows& to, const HostChoices& host, uint32_t* sent, uint32_t ticket);

// If anything was missed: waits until *instructed >= ticket, copies the CPU's orders to `orders`, and brings every
// demanded expert over into its slot of `slots` (slot s: element s of each stack, packed), reading the file's bytes
// across PCIe once, in whole aligned pieces of 16 bytes. The missed pairs that chose it then have that slot in slot[].
// A CPU that has aborted (kCrossingAborted) has ordered nothing.
void fetchExperts(Stream& stream, const ExpertStacks& slots, const ExpertOrders* host, const uint32_t* instructed,
                  uint32_t ticket, DeviceOrders* orders, int64_t pairs, const int32_t* chosen, int32_t* slot);
// The same for what `orders` wants ahead, after fetchExperts of the layer: to `slots` of the next layer, whose table
// then has it. For a stream beside the one that computes, which waits for it before it looks into that table. Nothing
// where the layer missed nothing.
void fetchAhead(Stream& stream, const ExpertStacks& slots, const DeviceOrders* orders, int32_t* table);

// residual[t, :] += sum over ranks k ascending of weight[t, k] * y[p, :], by fma from +0, p = t * used + k; y is of the
// GPU
// ([pairs, cols], device) where slot[p] >= 0, else of the CPU ([pairs, cols], pinned), for whom it waits where a row
// has any of its: until *returned >= ticket. Then the shared answer.
void combineAnswers(Stream& stream, const float* y, const float* hostY, const int32_t* slot, const float* weight,
                    int64_t rows, int32_t used, int64_t cols, const uint32_t* returned, uint32_t ticket,
                    float* residual, const SharedAnswer& shared = {});

// element[p] = which matrix of a stack is that of pair p's expert, -1 if the stack does not hold it. So expertGated and
// expertMatvec find the experts of a stack that holds only some of them, at the places that `which` names.
void lookUpExperts(Stream& stream, const int32_t* chosen, int64_t pairs, const ExpertIndex& which, int32_t* element);

}  // namespace sharpi::cuda
